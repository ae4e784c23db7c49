"""Drafts from a graph with its own KV, depth by depth: EAGLE heads and draft models.

Source: EAGLE (Li et al., 2024), EAGLE-2 and EAGLE-3 for heads; Leviathan et al., 2023 for draft models.

The drafter's pool has the target's blocks, so a token's slot is the same in both. What stands at position p:

    head    the target's feature at p with the token at p + 1; the last row of the known text predicts depth 1
    model   the token at p; the root's row predicts depth 1, and is not committed before the root is
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees
from draftline.runtime.drafters.drafter import Roots, VerifiedStep
from draftline.runtime.sequence import Sequence
from draftline.runtime.step_builder import StepBuilder
from draftline.sessions.protocol import DraftBatch, DraftResult, DraftSession
from draftline.speculation import TreeShape
from draftline.tree_growth import TreeGrowth, needed_candidates


class GraphDrafter:
    """One session's drafter; state by seat.

    A sequence is followed from its first chunk on: its committed tokens have rows in the drafter's pool, up to
    ``max_positions``, behind which it is decoded without this drafter.
    """

    def __init__(
        self,
        session: DraftSession,
        builder: StepBuilder,
        *,
        num_seats: int,
        shape: TreeShape,
        is_head: bool,
        max_positions: int,
        source: int,
    ) -> None:
        self._session, self._builder, self._shape, self._source = session, builder, shape, source
        self._is_head, self._max_positions = is_head, max_positions
        num_candidates = needed_candidates(shape)
        self._is_followed = np.zeros(num_seats, dtype=np.bool_)
        self._has_candidates = np.zeros(num_seats, dtype=np.bool_)
        self._candidate_ids = np.zeros((num_seats, num_candidates), dtype=np.int32)
        self._candidate_log_probs = np.zeros((num_seats, num_candidates), dtype=np.float32)
        self._root_row_ids = np.zeros(num_seats, dtype=np.int64)  # of the row that predicted these candidates
        self._num_rows = 0  # rows that the session ran since its step began
        self.num_forwards = 0

    def join(self, sequence: Sequence) -> None:
        self._is_followed[sequence.seat] = sequence.max_draft_tokens > 0
        self._has_candidates[sequence.seat] = False

    def propose(self, roots: Roots) -> DraftTrees:
        num_roots, seats = len(roots.sequences), roots.seats
        # The deepest nodes are not run, and a head's row stands one position before its token.
        room = self._max_positions - roots.contexts + self._is_head
        max_depths = np.where(self._has_candidates[seats], np.clip(roots.max_depths, 0, room), 0)
        growth = TreeGrowth(self._shape, roots.token_ids, max_depths, self._source)
        row_ids_of = np.full((num_roots, 1), -1, dtype=np.int64)
        row_ids_of[:, 0] = self._root_row_ids[seats]
        run = np.zeros((num_roots, 0 if self._is_head else 1), dtype=np.int64)  # nodes with a row, in order
        if growth.frontier.shape[1]:
            growth.expand(self._candidate_ids[seats][:, None], self._candidate_log_probs[seats][:, None])
        while growth.frontier.shape[1]:
            frontier = growth.frontier
            row_ids_of = _widen(row_ids_of, growth.parents.shape[1])
            run = np.concatenate([run, frontier], axis=1)
            order = np.argsort(run < 0, axis=1, kind="stable")
            run = np.take_along_axis(run, order, axis=1)
            growth.expand(*self._run_frontier(roots, growth, frontier, run, row_ids_of))
        return growth.finish(np.full(num_roots, self._shape.max_nodes), np.zeros(num_roots, dtype=np.bool_))

    def _run_frontier(
        self,
        roots: Roots,
        growth: TreeGrowth,
        frontier: NDArray[np.int64],
        run: NDArray[np.int64],
        row_ids_of: NDArray[np.int64],
    ) -> tuple[NDArray[np.int32], NDArray[np.float32]]:
        """Run the frontier's nodes and return their candidates ``[D, F, k]``; enter their rows into ``row_ids_of``."""
        is_new = frontier >= 0
        owner, place = np.nonzero(is_new)
        nodes = frontier[owner, place]
        new_ids = np.arange(self._num_rows, self._num_rows + len(nodes))
        row_ids_of[owner, nodes] = new_ids
        self._num_rows += len(nodes)
        depths = growth.depths[owner, nodes].astype(np.int64)
        next_positions = roots.contexts[owner] + depths + 1
        parent_rows = row_ids_of[owner, growth.parents[owner, nodes]]

        takes_part = is_new.any(axis=1)
        part_run = run[takes_part]
        is_run = part_run >= 0
        counts = is_run.sum(axis=1)
        width = int(counts.max())
        part_run, is_run = part_run[:, :width], is_run[:, :width]
        mask = growth.run_mask(run)[takes_part][:, :width, :width]
        padded = np.zeros((*mask.shape[:2], -(-width // 32) * 32), dtype=np.bool_)
        padded[:, :, :width] = mask
        packed = np.packbits(padded, axis=2, bitorder="little").view("<i4").astype(np.int32, copy=False)
        contexts = roots.contexts[takes_part]
        temperature, top_k, top_p, numbers = self._builder.sampling(roots.seats[owner], next_positions)
        result = self._forward(
            DraftBatch(
                is_first=False,
                input_ids=growth.token_ids[owner, nodes],
                position_ids=(next_positions - 1 - self._is_head).astype(np.int32),
                feature_rows=(-1 - parent_rows if self._is_head else np.zeros_like(nodes)).astype(np.int32),
                sequence_starts=_starts(counts),
                row_ids=np.take_along_axis(row_ids_of[takes_part], part_run, axis=1)[is_run].astype(np.int32),
                context_lengths=contexts.astype(np.int32),
                block_table=self._builder.block_table(roots.seats[takes_part], int(contexts.max())),
                candidate_rows=np.arange(len(nodes), dtype=np.int32),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                uniform=numbers,
                packed_mask=packed[is_run],
            )
        )
        num_candidates = self._candidate_ids.shape[1]
        token_ids = np.zeros((*frontier.shape, num_candidates), dtype=np.int32)
        log_probs = np.full(token_ids.shape, -np.inf, dtype=np.float32)
        token_ids[owner, place], log_probs[owner, place] = _sampled_first(result, temperature)
        return token_ids, log_probs

    def observe(self, step: VerifiedStep) -> None:
        """Fill the pool with the committed rows, and keep the candidates of depth 1."""
        rows, seats = step.rows, step.seats
        contexts, counts = rows.positions[rows.starts[:-1]], np.diff(rows.starts)
        room = np.maximum(self._max_positions - contexts, 0) * self._is_followed[seats]
        is_drawn = (rows.sample_rows >= 0) & (counts + (not self._is_head) <= room)
        num_committed = np.minimum(counts, room)
        num_new = num_committed + (0 if self._is_head else is_drawn)
        self._has_candidates[seats] = is_drawn
        takes_part = num_new > 0
        if not takes_part.any():
            return
        is_kept = rows.positions - np.repeat(contexts, counts) < np.repeat(num_committed, counts)
        is_drawn, num_new, contexts = is_drawn[takes_part], num_new[takes_part], contexts[takes_part]
        starts = _starts(num_new)
        pieces = zip(
            np.flatnonzero(takes_part).tolist(), (contexts + self._is_head).tolist(), num_new.tolist(), strict=True
        )
        texts = [sequence.token_ids for sequence in step.sequences]
        input_ids = np.concatenate([texts[index][first : first + count] for index, first, count in pieces])
        position_ids = np.arange(starts[-1]) + np.repeat(contexts - starts[:-1], num_new)
        candidate_rows = (starts[1:] - 1)[is_drawn]
        seats = seats[takes_part]
        drawn_seats = seats[is_drawn]
        temperature, top_k, top_p, numbers = self._builder.sampling(
            drawn_seats, position_ids[candidate_rows] + 1 + self._is_head
        )
        result = self._forward(
            DraftBatch(
                is_first=True,
                input_ids=input_ids,
                position_ids=position_ids.astype(np.int32),
                feature_rows=(rows.rows[is_kept] if self._is_head else np.zeros(len(input_ids))).astype(np.int32),
                sequence_starts=starts,
                row_ids=np.arange(starts[-1], dtype=np.int32),
                context_lengths=contexts.astype(np.int32),
                block_table=self._builder.block_table(seats, int(contexts.max())),
                candidate_rows=candidate_rows.astype(np.int32),
                temperature=temperature,
                top_k=top_k,
                top_p=top_p,
                uniform=numbers,
            )
        )
        self._num_rows = len(input_ids)
        is_committed = np.ones(len(input_ids), dtype=np.bool_)
        if not self._is_head:
            is_committed[candidate_rows] = False
        self._session.commit(np.flatnonzero(is_committed), rows.slots[is_kept])
        token_ids, log_probs = _sampled_first(result, temperature)
        self._candidate_ids[drawn_seats], self._candidate_log_probs[drawn_seats] = token_ids, log_probs
        self._root_row_ids[drawn_seats] = candidate_rows

    def _forward(self, batch: DraftBatch) -> DraftResult:
        self.num_forwards += 1
        return self._session.forward(batch)


def _starts(counts: NDArray[np.int64]) -> NDArray[np.int32]:
    starts = np.zeros(len(counts) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    return starts


def _widen(array: NDArray[np.int64], width: int) -> NDArray[np.int64]:
    """Pad ``[D, M]`` to ``width`` columns with -1."""
    wide = np.full((len(array), width), -1, dtype=np.int64)
    wide[:, : array.shape[1]] = array[:, :width]
    return wide


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
    place[temperature == 0] = 0
    columns = np.arange(num_candidates)
    order = np.where(columns == 0, place[:, None], columns - (columns <= place[:, None]))
    token_ids = np.take_along_axis(result.token_ids, order, axis=1)
    log_probs = np.take_along_axis(result.log_probs, order, axis=1)
    drawn = temperature > 0
    token_ids[drawn, 0] = result.sampled_ids[drawn]
    log_probs[drawn, 0] = result.log_probs[drawn, 0]
    return token_ids, log_probs
