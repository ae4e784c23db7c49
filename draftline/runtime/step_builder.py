"""From scheduled sequences to the arrays of one forward, and back. No work here grows with the length of a context."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from draftline.acceptance import Accepted
from draftline.draft_trees import DraftTrees, node_depths, packed_masks
from draftline.logit_edits import LogitEdits
from draftline.logit_rules import build_edits
from draftline.runtime.limits import EngineLimits
from draftline.runtime.sequence import Sequence
from draftline.sampling import uniform
from draftline.sessions.protocol import StepBatch
from draftline.tree import pack_mask


@dataclass(frozen=True)
class Step:
    """One forward: who takes part, and where everything stands in it.

    Shapes: the first D of the B sequences decode, each with its tree; the others are in prefill. All rows of decoding
    sequences are sampled, in order; then the last row of every prompt that is done. ``is_node [D, N]`` tells nodes from
    the padding of the trees.
    """

    sequences: list[Sequence]
    trees: DraftTrees
    batch: StepBatch
    seats: NDArray[np.int64]
    is_node: NDArray[np.bool_]

    @property
    def decoding(self) -> list[Sequence]:
        return self.sequences[: len(self.trees.num_nodes)]

    @property
    def prefilling(self) -> list[Sequence]:
        return self.sequences[len(self.trees.num_nodes) :]

    def by_node(self, values: NDArray[np.int32]) -> NDArray[np.int32]:
        """Spread ``[R]`` values of sampled rows over the padded trees: ``[D, N]``, 0 in padding."""
        spread = np.zeros(self.is_node.shape, dtype=values.dtype)
        spread[self.is_node] = values[: int(self.trees.num_nodes.sum())]
        return spread


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
        self._seeds = np.zeros(num_seats, dtype=np.uint64)
        self._causal_mask = pack_mask(np.tri(limits.max_num_tokens, dtype=np.bool_))

    def take_seat(self, sequence: Sequence) -> None:
        """Give a sequence a row for its block table and sampling parameters."""
        sequence.seat = seat = self._free_seats.pop()
        sampling = sequence.request.sampling
        self._temperature[seat] = sampling.temperature
        self._top_k[seat] = sampling.top_k
        self._top_p[seat] = sampling.top_p
        self._seeds[seat] = sampling.seed

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
        """Return temperature, top_k, top_p and the random number of the token drawn for each position, ``[n]`` each."""
        numbers = uniform(self._seeds[seats], positions)
        return self._temperature[seats], self._top_k[seats], self._top_p[seats], numbers

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
        num_sequences, num_decoding = len(sequences), len(decoding)
        seats = np.fromiter((sequence.seat for sequence in sequences), np.int64, num_sequences)
        contexts = np.fromiter((sequence.num_committed for sequence in sequences), np.int64, num_sequences)
        counts = np.empty(num_sequences, dtype=np.int64)
        counts[:num_decoding] = trees.num_nodes
        counts[num_decoding:] = [sequence.num_scheduled for sequence in prefilling]
        starts = np.zeros(num_sequences + 1, dtype=np.int64)
        np.cumsum(counts, out=starts[1:])

        is_node = np.arange(trees.parents.shape[1]) < trees.num_nodes[:, None]
        num_tree_rows, num_rows = int(starts[num_decoding]), int(starts[-1])
        input_ids = np.empty(num_rows, dtype=np.int32)
        position_ids = np.empty(num_rows, dtype=np.int64)
        input_ids[:num_tree_rows] = trees.token_ids[is_node]
        position_ids[:num_tree_rows] = (contexts[:num_decoding, None] + node_depths(trees))[is_node]
        for sequence, row in zip(prefilling, starts[num_decoding:].tolist(), strict=False):
            first, count = sequence.num_committed, sequence.num_scheduled
            input_ids[row : row + count] = sequence.token_ids[first : first + count]
            position_ids[row : row + count] = np.arange(first, first + count)

        is_done = np.fromiter((sequence.is_sampled for sequence in prefilling), np.bool_, len(prefilling))
        last_rows = starts[num_decoding + 1 :][is_done] - 1
        sample_rows = np.concatenate([np.arange(num_tree_rows), last_rows])
        sampled_seats = np.concatenate(
            [np.repeat(seats[:num_decoding], trees.num_nodes), seats[num_decoding:][is_done]]
        )
        temperature, top_k, top_p, numbers = self.sampling(sampled_seats, position_ids[sample_rows] + 1)
        batch = StepBatch(
            input_ids=input_ids,
            position_ids=position_ids.astype(np.int32),
            sequence_starts=starts.astype(np.int32),
            context_lengths=contexts.astype(np.int32),
            block_table=self.block_table(seats, int(contexts.max())),
            sample_rows=sample_rows.astype(np.int32),
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            uniform=numbers,
            packed_mask=self._packed_mask(trees, is_node, counts, num_decoding),
            edits=_edits(decoding, trees, [s for s, done in zip(prefilling, is_done, strict=True) if done]),
            wants_logits=wants_logits,
        )
        return Step(sequences, trees, batch, seats, is_node)

    def _packed_mask(
        self, trees: DraftTrees, is_node: NDArray[np.bool_], counts: NDArray[np.int64], num_decoding: int
    ) -> NDArray[np.int32] | None:
        """Return the mask of a step in which some tree branches; chains and prompts are causal without one."""
        is_chain = trees.parents == np.arange(-1, trees.parents.shape[1] - 1)
        if bool(np.all(is_chain | ~is_node)):
            return None
        nodes = packed_masks(trees)[is_node]
        mask = np.zeros((int(counts.sum()), -(-int(counts.max()) // 32)), dtype=np.int32)
        mask[: len(nodes), : nodes.shape[1]] = nodes[:, : mask.shape[1]]
        row = len(nodes)
        for count in counts[num_decoding:].tolist():
            words = -(-count // 32)
            mask[row : row + count, :words] = self._causal_mask[:count, :words]
            row += count
        return mask

    def committed_rows(self, step: Step, accepted: Accepted) -> CommittedRows:
        """Say which rows of the step are kept, and where."""
        batch, num_decoding = step.batch, len(step.trees.num_nodes)
        starts = batch.sequence_starts.astype(np.int64)
        is_kept = accepted.paths >= 0
        tree_rows = (starts[:num_decoding, None] + accepted.paths)[is_kept]
        rows = np.concatenate([tree_rows, np.arange(starts[num_decoding], starts[-1])])
        counts = np.diff(starts)
        counts[:num_decoding] = accepted.num_accepted_tokens + 1
        new_starts = np.concatenate([[0], np.cumsum(counts)])
        seats = np.repeat(step.seats, counts)
        positions = batch.position_ids[rows].astype(np.int64)
        last_rows = rows[new_starts[1:] - 1]
        sample_rows = np.full(len(counts), -1, dtype=np.int64)
        sample_rows[:num_decoding] = last_rows[:num_decoding]  # every row of a tree is sampled, in order
        next_sample = int(starts[num_decoding])
        for index, sequence in enumerate(step.prefilling, num_decoding):
            if sequence.is_sampled:
                sample_rows[index] = next_sample
                next_sample += 1
        return CommittedRows(new_starts, rows, positions, self.slots(seats, positions), sample_rows)


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
