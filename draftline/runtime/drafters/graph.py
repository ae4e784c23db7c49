"""Drafts from a graph with its own KV, depth by depth: EAGLE heads and draft models.

Source: EAGLE (Li et al., 2024), EAGLE-2 and EAGLE-3 for heads; Leviathan et al., 2023 for draft models.

The drafter's pool has the target's blocks, so a token's slot is the same in both. What stands at position p:

    head    the target's feature at p with the token at p + 1; the last row of the known text predicts depth 1
    model   the token at p; the root's row predicts depth 1, and is not committed before the root is
"""

from __future__ import annotations

from typing import TypedDict

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees
from draftline.runtime.drafters.drafter import Roots, VerifiedStep
from draftline.runtime.drafters.in_step_rows import InStepRows
from draftline.runtime.sequence import Sequence
from draftline.runtime.step_builder import StepBuilder
from draftline.sessions.protocol import DraftBatch, DraftResult, DraftSession
from draftline.speculation import TreeShape
from draftline.tree_growth import TreeGrowth, max_frontier_nodes, needed_candidates


class _Sampling(TypedDict):
    temperature: NDArray[np.float32]
    top_k: NDArray[np.int32]
    top_p: NDArray[np.float32]
    uniform: NDArray[np.float32]


class GraphDrafter:
    """One session's drafter; state by seat.

    Rows that a step committed wait until somebody drafts, or until ``max_waiting`` have gathered; then one forward
    fills the pool with all of them, and gives the candidates of depth 1 for who decodes. So steps that decode plainly
    cost next to nothing. A sequence is followed up to ``max_positions``, behind which it is decoded without this
    drafter.
    """

    is_free = False

    def __init__(
        self,
        session: DraftSession,
        builder: StepBuilder,
        *,
        num_seats: int,
        shape: TreeShape,
        is_head: bool,
        max_positions: int,
        max_waiting: int,
        source: int,
    ) -> None:
        self._session, self._builder, self._shape, self._source = session, builder, shape, source
        self._is_head, self._max_positions, self._max_waiting = is_head, max_positions, max_waiting
        num_candidates = needed_candidates(shape)
        self._is_followed = np.zeros(num_seats, dtype=np.bool_)
        self._texts: list[NDArray[np.int32]] = [np.empty(0, dtype=np.int32)] * num_seats
        self._num_filled = np.zeros(num_seats, dtype=np.int64)  # rows in the pool
        self._num_known = np.zeros(num_seats, dtype=np.int64)  # committed rows whose tokens are known; the rest waits
        self._decodes = np.zeros(num_seats, dtype=np.bool_)  # whether the next token has been drawn
        self._places = np.zeros((num_seats, 0), dtype=np.int64)  # of the features of waiting rows, by position
        self._num_waiting = 0
        self._has_candidates = np.zeros(num_seats, dtype=np.bool_)
        self._candidate_ids = np.zeros((num_seats, num_candidates), dtype=np.int32)
        self._candidate_log_probs = np.zeros((num_seats, num_candidates), dtype=np.float32)
        self._root_row_ids = np.zeros(num_seats, dtype=np.int64)  # of the row that predicted these candidates
        self._num_rows = 0  # rows that the session ran since its step began
        self.num_forwards = 0

    def join(self, sequence: Sequence) -> None:
        seat = sequence.seat
        self._is_followed[seat] = sequence.max_draft_tokens > 0
        self._texts[seat] = sequence.token_ids
        self._num_filled[seat] = self._num_known[seat] = sequence.num_committed
        self._has_candidates[seat] = False

    def leave(self, seat: int) -> None:
        self._is_followed[seat] = self._has_candidates[seat] = False

    def num_filled(self, sequence: Sequence) -> int:
        """Count the committed tokens whose rows are in the pool, or never will be."""
        filled = int(self._num_filled[sequence.seat])
        is_followed = self._is_followed[sequence.seat] and filled < self._max_positions
        return filled if is_followed else sequence.num_committed

    def propose(self, roots: Roots) -> DraftTrees:
        seats = roots.seats
        if self._num_waiting:
            self._fill()
        # The deepest nodes are not run, and a head's row stands one position before its token.
        room = self._max_positions - roots.contexts + self._is_head
        max_depths = np.where(self._has_candidates[seats], np.clip(roots.max_depths, 0, room), 0)
        growth = TreeGrowth(self._shape, roots.token_ids, max_depths, self._source)
        if growth.frontier_ids.shape[1]:
            log_probs = np.where(max_depths[:, None] > 0, self._candidate_log_probs[seats], np.float32(-np.inf))
            growth.expand(self._candidate_ids[seats][:, None], log_probs[:, None])
        if growth.frontier_ids.shape[1]:
            self._grow(growth, roots, np.flatnonzero(max_depths > 1))
        return growth.finish(roots.max_nodes, roots.chain_only)

    def _grow(self, growth: TreeGrowth, roots: Roots, members: NDArray[np.int64]) -> None:
        """Run the frontier, depth by depth, of the trees that grow on: ``members``, indices into the roots."""
        num_roots, everyone = len(roots.sequences), len(members) == len(roots.sequences)
        seats, contexts = roots.seats[members], roots.contexts[members]
        block_table, context_lengths = self._builder.block_table(seats, int(contexts.max())), contexts.astype(np.int32)
        in_step = InStepRows(self._root_row_ids[seats], max_frontier_nodes(self._shape), has_root=not self._is_head)
        while growth.frontier_ids.shape[1]:
            frontier_ids, parents = growth.frontier_ids, growth.frontier_parents
            if not everyone:
                frontier_ids, parents = frontier_ids[members], parents[members]
            parent_row_ids = in_step.append(parents, self._num_rows)
            self._num_rows += frontier_ids.size
            starts, row_ids, packed_mask = in_step.pack()
            # Trees that ended earlier go on as padding, which must not leave the positions that the drafter knows.
            depth_positions = np.minimum(contexts + growth.depth, self._max_positions - 1 + self._is_head)
            positions = np.repeat(depth_positions, frontier_ids.shape[1])
            sampling = self._sampling(np.repeat(seats, frontier_ids.shape[1]), positions + 1)
            result = self._forward(
                DraftBatch(
                    is_first=False,
                    input_ids=frontier_ids.ravel(),
                    position_ids=(positions - self._is_head).astype(np.int32),
                    feature_rows=(-1 - parent_row_ids).ravel().astype(np.int32),
                    sequence_starts=starts,
                    row_ids=row_ids,
                    context_lengths=context_lengths,
                    block_table=block_table,
                    candidate_rows=np.arange(frontier_ids.size, dtype=np.int32),
                    packed_mask=packed_mask,
                    **sampling,
                )
            )
            token_ids, log_probs = _sampled_first(result, sampling["temperature"])
            shape = (*frontier_ids.shape, token_ids.shape[1])
            growth.expand(*_spread(token_ids.reshape(shape), log_probs.reshape(shape), members, num_roots))

    def _sampling(self, seats: NDArray[np.int64], positions: NDArray[np.int64]) -> _Sampling:
        """Return the sampling arrays of candidate rows; heads draw nothing, and get neutral ones."""
        if not self._is_head:
            temperature, top_k, top_p, numbers = self._builder.sampling(seats, positions)
            return {"temperature": temperature, "top_k": top_k, "top_p": top_p, "uniform": numbers}
        zeros = np.zeros(len(seats), dtype=np.float32)
        return {
            "temperature": zeros,
            "top_k": np.zeros(len(seats), dtype=np.int32),
            "top_p": np.ones(len(seats), dtype=np.float32),
            "uniform": zeros,
        }

    def observe(self, step: VerifiedStep) -> None:
        rows, seats = step.rows, step.seats
        self._has_candidates[seats] = False
        if not self._is_followed[seats].any():
            return
        self._num_known[seats] = rows.positions[rows.starts[1:] - 1] + 1
        self._decodes[seats] = rows.sample_rows >= 0
        ended = [sequence for sequence in step.sequences if sequence.is_finished]
        for sequence in ended:
            # A head's row needs the token behind it, and what was accepted behind the end is no text.
            self._num_known[sequence.seat] = min(sequence.num_committed, sequence.num_tokens - self._is_head)
            self._decodes[sequence.seat] = False
        if self._is_head:
            self._keep_features(np.repeat(seats, np.diff(rows.starts)), rows.positions, rows.rows)
        self._num_waiting += len(rows.rows)
        if self._num_waiting >= self._max_waiting or any(self._must_share(sequence) for sequence in ended):
            self._fill()

    def _must_share(self, sequence: Sequence) -> bool:
        """Whether a finished answer has whole blocks that nobody could share unless they are filled now."""
        num_blocks = int(self._num_known[sequence.seat]) // self._builder.block_size
        return bool(self._is_followed[sequence.seat]) and sequence.num_published_blocks < num_blocks

    def _keep_features(self, seats: NDArray[np.int64], positions: NDArray[np.int64], rows: NDArray[np.int64]) -> None:
        places = self._num_waiting + np.arange(len(rows))
        self._session.keep_features(rows, places)
        width = 2 * self._max_waiting
        if self._places.shape[1] != width:
            self._places = np.zeros((len(self._texts), width), dtype=np.int64)
        self._places[seats, positions % width] = places

    def _fill(self) -> None:
        """Fill the pool with the rows that wait, and keep the candidates of depth 1 of the sequences that decode."""
        self._num_waiting = 0
        room = np.maximum(self._max_positions - self._num_filled, 0)
        num_waiting = (self._num_known - self._num_filled) * self._is_followed
        num_roots = (self._decodes & self._is_followed) * np.int64(not self._is_head)
        decodes = self._decodes & (num_waiting + num_roots <= room)
        num_committed: NDArray[np.int64] = np.minimum(num_waiting, room)
        num_new: NDArray[np.int64] = num_committed + num_roots * decodes
        seats = np.flatnonzero(num_new)
        if not seats.size:
            return
        num_new, num_committed, decodes = num_new[seats], num_committed[seats], decodes[seats]
        contexts, starts = self._num_filled[seats], _starts(num_new)
        owners = np.repeat(seats, num_new)
        positions = np.arange(starts[-1]) + np.repeat(contexts - starts[:-1], num_new)
        pieces = zip(seats.tolist(), (contexts + self._is_head).tolist(), num_new.tolist(), strict=True)
        input_ids = np.concatenate([self._texts[seat][first : first + count] for seat, first, count in pieces])
        candidate_rows = (starts[1:] - 1)[decodes]
        drawn_seats = seats[decodes]
        sampling = self._sampling(drawn_seats, positions[candidate_rows] + 1 + self._is_head)
        places = self._places[owners, positions % self._places.shape[1]] if self._is_head else np.zeros_like(positions)
        result = self._forward(
            DraftBatch(
                is_first=True,
                input_ids=input_ids,
                position_ids=positions.astype(np.int32),
                feature_rows=places.astype(np.int32),
                sequence_starts=starts,
                row_ids=np.arange(starts[-1], dtype=np.int32),
                context_lengths=contexts.astype(np.int32),
                block_table=self._builder.block_table(seats, int(contexts.max())),
                candidate_rows=candidate_rows.astype(np.int32),
                **sampling,
            )
        )
        self._num_rows = len(input_ids)
        is_committed = positions < np.repeat(contexts + num_committed, num_new)
        slots = self._builder.slots(owners[is_committed], positions[is_committed])
        self._session.commit(np.flatnonzero(is_committed), slots)
        self._num_filled[seats] += num_committed
        token_ids, log_probs = _sampled_first(result, sampling["temperature"])
        width = self._candidate_ids.shape[1]  # a graph that was built for wider trees gives more
        self._candidate_ids[drawn_seats] = token_ids[:, :width]
        self._candidate_log_probs[drawn_seats] = log_probs[:, :width]
        self._root_row_ids[drawn_seats] = candidate_rows
        self._has_candidates[drawn_seats] = True

    def _forward(self, batch: DraftBatch) -> DraftResult:
        self.num_forwards += 1
        return self._session.forward(batch)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _spread(
    token_ids: NDArray[np.int32], log_probs: NDArray[np.float32], members: NDArray[np.int64], num_roots: int
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Put the candidates ``[M, F, k]`` of some roots where they stand among all; the others have none."""
    if len(members) == num_roots:
        return token_ids, log_probs
    everyones = (num_roots, *token_ids.shape[1:])
    all_ids, all_log_probs = np.zeros(everyones, np.int32), np.full(everyones, -np.inf, np.float32)
    all_ids[members], all_log_probs[members] = token_ids, log_probs
    return all_ids, all_log_probs


def _sampled_first(
    result: DraftResult, temperature: NDArray[np.float32]
) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
    """Put the token that a draft model drew with the target's random number before its most probable ones.

    It is the likeliest one to be accepted, so its log-probability is at least theirs. Candidates stay distinct.
    """
    if result.sampled_ids is None or not temperature.any():
        return result.token_ids, result.log_probs
    num_candidates = result.token_ids.shape[1]
    is_sampled = result.token_ids == result.sampled_ids[:, None]
    place = np.where(is_sampled.any(axis=1), is_sampled.argmax(axis=1), num_candidates - 1)
    drawn = (temperature > 0) & (result.sampled_ids >= 0)
    place[~drawn] = 0
    columns = np.arange(num_candidates)
    order = np.where(columns == 0, place[:, None], columns - (columns <= place[:, None]))
    token_ids = np.take_along_axis(result.token_ids, order, axis=1)
    log_probs = np.take_along_axis(result.log_probs, order, axis=1)
    token_ids[drawn, 0] = result.sampled_ids[drawn]
    log_probs[drawn, 0] = result.log_probs[drawn, 0]
    return token_ids, log_probs
