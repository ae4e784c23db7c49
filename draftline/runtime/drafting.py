"""What a step drafts for the sequences that decode: all drafters' candidates, cut to what is allowed and what pays."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from draftline.acceptance import Accepted
from draftline.draft_trees import DraftTrees, node_depths, roots_only
from draftline.runtime.drafters.drafter import Drafter, Roots, VerifiedStep
from draftline.runtime.selection import SpeculationPolicy
from draftline.runtime.sequence import Sequence
from draftline.runtime.step_builder import seats_of
from draftline.speculation import TreeShape
from draftline.tree_pruning import keep_best, keep_nodes, merge_trees


class Drafting:
    """Asks the drafters, and cuts their trees.

    ``key_chunk``: see ``Session``. A branching tree that reached over a multiple of it would be verified with other
    rounding than plain decoding, so it is made smaller there, or a chain.
    """

    def __init__(
        self, drafters: Many[Drafter], shape: TreeShape, policy: SpeculationPolicy | None, *, key_chunk: int
    ) -> None:
        assert policy is not None or not drafters, "what drafts has a policy"
        self._drafters = drafters
        self._num_forwards = 0
        self._policy, self._shape, self._key_chunk = policy, shape, key_chunk

    def take_num_forwards(self) -> int:
        """Return how many forwards the drafters' graphs ran since the last call."""
        before, self._num_forwards = self._num_forwards, sum(drafter.num_forwards for drafter in self._drafters)
        return self._num_forwards - before

    def join(self, sequence: Sequence) -> None:
        """Take a sequence that was given a seat."""
        for drafter in self._drafters:
            drafter.join(sequence)

    def leave(self, sequence: Sequence) -> None:
        """Forget a sequence that is about to lose its seat."""
        for drafter in self._drafters:
            drafter.leave(sequence.seat)

    def observe(self, step: VerifiedStep) -> None:
        """Let the drafters take in what a step committed."""
        for drafter in self._drafters:
            drafter.observe(step)

    def num_filled(self, sequence: Sequence) -> int:
        """Count the committed tokens whose blocks are of use to every drafter."""
        return min((drafter.num_filled(sequence) for drafter in self._drafters), default=sequence.num_committed)

    def draft(
        self,
        decoding: list[Sequence],
        *,
        num_other_rows: int,
        max_rows: int,
        cover_drafts: Callable[[list[Sequence], list[int]], list[int]],
    ) -> tuple[DraftTrees, NDArray[np.int64]]:
        """Return the trees to verify, and how many draft tokens were proposed for each ``[D] int64``.

        ``max_rows`` bounds the nodes of all trees; ``num_other_rows`` are in the same forward. ``cover_drafts`` finds
        slots for so many tokens behind each root and says for how many it could.
        """
        num_roots = len(decoding)
        root_ids = np.fromiter((s.token_ids[s.num_tokens - 1] for s in decoding), np.int32, num_roots)
        policy = self._policy
        num_depths = policy.plan(num_roots, num_other_rows) if policy is not None and num_roots else 0
        # The bonus token is emitted as well, so a path is one token shorter than what is left to emit.
        num_left = np.array([s.request.max_tokens - s.num_output_tokens - 1 for s in decoding], dtype=np.int64)
        max_drafts = np.array([s.max_draft_tokens for s in decoding], dtype=np.int64)
        max_depths = np.minimum(np.minimum(num_left, max_drafts), self._shape.max_depth)
        asked = [drafter for drafter in self._drafters if drafter.is_free or num_depths > 0]
        if policy is None or not asked or not max_depths.any():
            return roots_only(root_ids, 1), np.zeros(num_roots, dtype=np.int64)
        contexts = np.fromiter((s.num_committed for s in decoding), np.int64, num_roots)
        max_nodes = np.minimum(self._shape.max_nodes, max_drafts + 1)
        chain_only = np.zeros(num_roots, dtype=np.bool_)
        if self._key_chunk:
            room = self._key_chunk - contexts % self._key_chunk
            chain_only = (room <= max_depths) & (room < max_nodes)
            max_nodes = np.where(chain_only, max_nodes, np.minimum(max_nodes, room))
        roots = Roots(decoding, seats_of(decoding), root_ids, contexts, max_depths, max_nodes, chain_only)
        planned = replace(roots, max_depths=np.minimum(max_depths, num_depths))
        proposed = [drafter.propose(roots if drafter.is_free else planned) for drafter in asked]
        trees = proposed[0]
        if len(proposed) > 1:
            trees = keep_best(merge_trees(proposed), max_nodes, chain_only, max_depths)
        num_drafted = trees.num_nodes - 1
        keep = policy.select(trees, num_other_rows, max_rows)
        if np.count_nonzero(keep) < trees.num_rows:
            trees = keep_nodes(trees, keep)
        return self._cover(trees, decoding, cover_drafts), num_drafted

    def _cover(
        self,
        trees: DraftTrees,
        decoding: list[Sequence],
        cover_drafts: Callable[[list[Sequence], list[int]], list[int]],
    ) -> DraftTrees:
        """Find slots for the longest path of each tree; where blocks are short, drop the depths that have none."""
        wanted = trees.tree_depths.tolist()
        covered = cover_drafts(decoding, wanted)
        if covered == wanted:
            return trees
        depths = node_depths(trees)
        return keep_nodes(trees, (depths >= 0) & (depths <= np.array(covered)[:, None]))

    def observe_times(
        self, trees: DraftTrees, accepted: Accepted, *, draft_ms: float, verify_ms: float, num_rows: int
    ) -> None:
        """Tell the policy what a step accepted and took."""
        if self._policy is not None and len(trees.num_nodes):
            self._policy.observe(
                trees,
                accepted.paths.astype(np.int32),
                accepted.num_accepted_tokens,
                accepted.bonus_ids,
                draft_ms=draft_ms,
                verify_ms=verify_ms,
                num_rows=num_rows,
            )
