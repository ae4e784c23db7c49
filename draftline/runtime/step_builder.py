"""From scheduled sequences to the arrays of one forward, and back. No work here grows with the length of a context."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
from numpy.typing import NDArray

from draftline.acceptance import Accepted
from draftline.draft_trees import DraftTrees, node_depths, packed_masks
from draftline.logit_edits import LogitEdits
from draftline.logit_rules import build_edits
from draftline.runtime.limits import EngineLimits
from draftline.runtime.sequence import Sequence
from draftline.sampling import draw, stream
from draftline.sessions.protocol import StepBatch
from draftline.tree import causal_mask


@dataclass(frozen=True)
class Step:
    """One forward: who takes part, and where everything stands in it.

    Shapes: the first D of the B sequences decode, each with its tree; the others are in prefill. All rows of decoding
    sequences are sampled, in order; then the last row of every prompt that is done.
    """

    sequences: list[Sequence]
    trees: DraftTrees
    batch: StepBatch
    seats: NDArray[np.int64]

    @property
    def decoding(self) -> list[Sequence]:
        return self.sequences[: len(self.trees.num_nodes)]

    @property
    def prefilling(self) -> list[Sequence]:
        return self.sequences[len(self.trees.num_nodes) :]

    def by_node(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        """Spread ``[R]`` values of sampled rows over the padded trees: ``[D, N]``, 0 in padding."""
        return self.trees.spread(values[: self.trees.num_rows])


@dataclass(frozen=True)
class CommittedRows:
    """The rows of a step that are committed: those of accepted nodes, and all of prefill.

    Shapes: C rows, packed by sequence as ``starts [B + 1]`` says: ``rows [C]`` in the step, ``positions [C]`` in their
    sequences, ``slots [C]``, all int64. ``sample_rows [B]``: the sampled row (index into ``StepBatch.sample_rows``)
    that drew the sequence's newest token, -1 in the middle of a prompt.
    """

    starts: NDArray[np.int64]
    rows: NDArray[np.int64]
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    sample_rows: NDArray[np.int64]

    def of(self, is_kept: NDArray[np.bool_]) -> CommittedRows:
        """Return those of some sequences, ``is_kept [B]``."""
        counts = np.diff(self.starts)
        of_rows = is_kept.repeat(counts)
        starts = np.zeros(np.count_nonzero(is_kept) + 1, dtype=np.int64)
        counts[is_kept].cumsum(out=starts[1:])
        rows = (self.rows[of_rows], self.positions[of_rows], self.slots[of_rows])
        return CommittedRows(starts, *rows, self.sample_rows[is_kept])


class StepBuilder:
    """Hold what does not change from step to step, one row ("seat") per running sequence, and gather it per step."""

    def __init__(self, limits: EngineLimits) -> None:
        num_seats = limits.max_batch_size
        self.block_size = limits.block_size
        self._free_seats = list(range(num_seats - 1, -1, -1))
        self._block_tables = np.full((num_seats, limits.max_blocks_per_sequence), -1, dtype=np.int32)
        self._temperature = np.zeros(num_seats, dtype=np.float32)
        self._top_k = np.zeros(num_seats, dtype=np.int32)
        self._top_p = np.ones(num_seats, dtype=np.float32)
        self._streams = np.zeros(num_seats, dtype=np.uint64)

    def take_seat(self, sequence: Sequence) -> None:
        """Give a sequence a row for its block table and sampling parameters."""
        sequence.seat = seat = self._free_seats.pop()
        sampling = sequence.request.sampling
        self._temperature[seat] = sampling.temperature
        self._top_k[seat] = sampling.top_k
        self._top_p[seat] = sampling.top_p
        self._streams[seat : seat + 1] = stream(np.array([sampling.seed], dtype=np.uint64))

    def leave_seat(self, sequence: Sequence) -> None:
        self._block_tables[sequence.seat] = -1
        self._free_seats.append(sequence.seat)
        sequence.seat = -1

    def append_blocks(self, sequence: Sequence, block_ids: list[int]) -> None:
        first = len(sequence.block_ids)
        self._block_tables[sequence.seat, first : first + len(block_ids)] = block_ids
        sequence.block_ids.extend(block_ids)

    def replace_block(self, sequence: Sequence, index: int, block_id: int) -> None:
        self._block_tables[sequence.seat, index] = block_id
        sequence.block_ids[index] = block_id

    def block_table(self, seats: NDArray[np.int64], num_tokens: int) -> NDArray[np.int32]:
        """Return ``[B, columns]``, as wide as ``num_tokens`` tokens ask (at least one column), padded with -1."""
        return self._block_tables[seats, : max(1, -(-num_tokens // self.block_size))]

    def slots(self, seats: NDArray[np.int64], positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return the slot of each position ``[n]`` of the sequences in ``seats [n]``."""
        blocks, offsets = np.divmod(positions, self.block_size)
        slots: NDArray[np.int64] = self._block_tables[seats, blocks].astype(np.int64)
        slots *= self.block_size
        slots += offsets
        return slots

    def sampling(
        self, seats: NDArray[np.int64], positions: NDArray[np.int64]
    ) -> tuple[NDArray[np.float32], NDArray[np.int32], NDArray[np.float32], NDArray[np.float32]]:
        """Return temperature, top_k, top_p and the random number of the token drawn for each position, ``[n]`` each.

        Where all are greedy nobody asks for the numbers, and they are 0.
        """
        temperature = self._temperature[seats]
        numbers = draw(self._streams[seats], positions) if temperature.any() else np.zeros(len(seats), np.float32)
        return temperature, self._top_k[seats], self._top_p[seats], numbers

    def temperatures(self, seats: NDArray[np.int64]) -> NDArray[np.float32]:
        return self._temperature[seats]

    def build(
        self,
        decoding: list[Sequence],
        trees: DraftTrees,
        prefilling: list[Sequence],
        *,
        wants_logits: bool = False,
    ) -> Step:
        """Build the forward of the trees of decoding sequences (row b is sequence b's) and of scheduled prompt tokens.

        In the batch, ``block_table`` is cut to the widest context of this step, and R may be 0 when every sequence is
        in the middle of its prompt.
        """
        sequences = decoding + prefilling
        num_decoding, num_tree_rows = len(decoding), trees.num_rows
        seats = seats_of(sequences)
        contexts = [sequence.num_committed for sequence in sequences]
        context_lengths = np.array(contexts, dtype=np.int32)
        counts = [*trees.num_nodes.tolist(), *(sequence.num_scheduled for sequence in prefilling)]
        starts = np.array([0, *accumulate(counts)], dtype=np.int32)

        positions = np.add(
            context_lengths[:num_decoding, None], node_depths(trees), dtype=np.int32, casting="same_kind"
        )
        prompts = [(s.num_committed, s.num_committed + s.num_scheduled) for s in prefilling]
        input_ids = np.concatenate(
            [
                trees.pack(trees.token_ids),
                *(s.token_ids[first:end] for s, (first, end) in zip(prefilling, prompts, strict=True)),
            ]
        )
        position_ids = np.concatenate(
            [trees.pack(positions), *(np.arange(first, end, dtype=np.int32) for first, end in prompts)]
        )

        is_done = [sequence.is_sampled for sequence in prefilling]
        last_rows = starts[num_decoding + 1 :][np.array(is_done, dtype=np.bool_)] - 1
        sample_rows = np.concatenate([np.arange(num_tree_rows, dtype=np.int32), last_rows])
        sampled_seats = seats.repeat([*counts[:num_decoding], *is_done])
        temperature, top_k, top_p, numbers = self.sampling(sampled_seats, position_ids[sample_rows] + 1)
        batch = StepBatch(
            input_ids=input_ids,
            position_ids=position_ids,
            sequence_starts=starts,
            context_lengths=context_lengths,
            block_table=self.block_table(seats, max(contexts)),
            sample_rows=sample_rows,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            uniform=numbers,
            packed_mask=_packed_mask(trees, counts),
            edits=_edits(decoding, trees, [s for s, done in zip(prefilling, is_done, strict=True) if done]),
            wants_logits=wants_logits,
        )
        return Step(sequences, trees, batch, seats)

    def committed_rows(self, step: Step, accepted: Accepted) -> CommittedRows:
        """Say which rows of the step are kept, and where."""
        starts, num_decoding = step.batch.sequence_starts, len(step.trees.num_nodes)
        tree_rows = (starts[:num_decoding, None] + accepted.paths)[accepted.paths >= 0]
        rows = np.concatenate([tree_rows, np.arange(step.trees.num_rows, len(step.batch.input_ids))])
        counts = starts[1:] - starts[:-1]
        counts[:num_decoding] = accepted.num_accepted_tokens + 1
        new_starts = np.zeros(len(starts), dtype=np.int64)
        counts.cumsum(out=new_starts[1:])
        positions = step.batch.position_ids[rows].astype(np.int64)
        slots = self.slots(step.seats.repeat(counts), positions)
        sample_rows = rows[new_starts[1:] - 1]  # every row of a tree is sampled, in order
        next_sample = step.trees.num_rows
        for index, sequence in enumerate(step.prefilling, num_decoding):
            sample_rows[index] = next_sample if sequence.is_sampled else -1
            next_sample += sequence.is_sampled
        return CommittedRows(new_starts, rows, positions, slots, sample_rows)


def _packed_mask(trees: DraftTrees, counts: list[int]) -> NDArray[np.int32] | None:
    """Return the mask of a step in which some tree branches; chains and prompts are causal without one."""
    # A tree has a node on each level at least, and no more where it is a chain.
    if int(trees.tree_depths.sum()) + len(trees.num_nodes) == trees.num_rows:
        return None
    num_words = -(-max(counts) // 32)
    of_trees = trees.pack(packed_masks(trees))[:, :num_words]
    prompts = counts[len(trees.num_nodes) :]
    if not prompts:
        return of_trees
    mask = np.zeros((len(of_trees) + sum(prompts), num_words), dtype=np.int32)
    mask[: len(of_trees), : of_trees.shape[1]] = of_trees
    of_prompts = causal_mask(np.array([0, *accumulate(prompts)], dtype=np.int32))
    mask[len(of_trees) :, : of_prompts.shape[1]] = of_prompts
    return mask


def _edits(decoding: list[Sequence], trees: DraftTrees, drawing: list[Sequence]) -> LogitEdits | None:
    """Build the edits of all sampled rows: every node's, then those at the ends of prompts."""
    rules = [sequence.logit_rules for sequence in decoding]
    rules_at_ends = [sequence.logit_rules for sequence in drawing]
    parts = []
    if any(rule is not None for rule in rules):
        parts.append((build_edits(rules, trees), 0))
    if any(rule is not None for rule in rules_at_ends):
        parts.append((build_edits(rules_at_ends), int(trees.num_nodes.sum())))
    edits = [(part, first_row) for part, first_row in parts if part is not None]
    if not edits:
        return None
    return LogitEdits(
        rows=np.concatenate([part.rows + np.int32(first_row) for part, first_row in edits]),
        token_ids=np.concatenate([part.token_ids for part, _ in edits]),
        bias=np.concatenate([part.bias for part, _ in edits]),
        divisor=np.concatenate([part.divisor for part, _ in edits]),
        offset=np.concatenate([part.offset for part, _ in edits]),
    )


def seats_of(sequences: Many[Sequence]) -> NDArray[np.int64]:
    return np.fromiter((sequence.seat for sequence in sequences), np.int64, len(sequences))
