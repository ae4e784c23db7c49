"""A simulated target and drafter, with times and acceptance that are known, for the policy to be tried on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees, roots_only
from draftline.runtime.selection import SpeculationPolicy
from draftline.tree_pruning import keep_nodes


@dataclass
class World:
    """Every node of the most probable path has ``top_k`` children; the others have none.

    ``confidence`` is the mean draft probability of the first child; the target takes a child with ``quality`` times
    its draft probability. ``verify_ms(rows)``, and ``draft_ms`` per depth; ``noise`` is the spread of both, in log.
    ``uneven_ms(nodes of the largest tree)`` comes on top where there are several sequences.
    """

    verify_ms: Callable[[int], float]
    draft_ms: float
    confidence: float
    quality: float
    max_depth: int = 5
    top_k: int = 3
    noise: float = 0.0
    uneven_ms: Callable[[int], float] = lambda largest: 0.0
    random: np.random.Generator = field(default_factory=lambda: np.random.default_rng(1))

    def draft(self, num_sequences: int, depth: int) -> DraftTrees:
        if depth == 0:
            return roots_only(np.zeros(num_sequences, np.int32))
        shape = (num_sequences, depth, self.top_k)
        level = np.arange(depth)
        parents = np.where(level == 0, 0, 1 + (level - 1) * self.top_k)[:, None]
        if self.confidence == 1.0:
            best = np.ones(shape[:2])
        else:
            best = self.random.beta(4 * self.confidence, 4 * (1 - self.confidence), shape[:2])
        probs = (1 - best)[..., None] * 0.5 ** np.arange(self.top_k)
        probs[..., 0] = best
        trees = roots_only(np.zeros(num_sequences, np.int32), 1 + depth * self.top_k)
        trees.parents[:, 1:] = np.broadcast_to(parents, shape[1:]).reshape(-1)
        trees.token_ids[:, 1:] = np.tile(np.arange(1, self.top_k + 1), depth)
        trees.log_probs[:, 1:] = np.log(np.maximum(probs, 1e-9)).reshape(num_sequences, -1)
        trees.sources[:, 1:] = 0
        trees.num_nodes[:] = 1 + depth * self.top_k
        return trees

    def step(self, policy: SpeculationPolicy, num_sequences: int, num_other_rows: int = 0) -> tuple[int, float, int]:
        """Run one step and return the tokens it emitted, its milliseconds, and the depth it drafted."""
        depth = policy.plan(num_sequences, num_other_rows)
        trees = drafted = self.draft(num_sequences, depth)
        if depth:
            trees = keep_nodes(drafted, policy.select(drafted, num_other_rows, 512))
        draws = self._draw(drafted, depth)
        paths, num_accepted, bonus_ids = accept(trees, draws)
        num_rows = int(trees.num_nodes.sum()) + num_other_rows
        uneven_ms = self.uneven_ms(int(trees.num_nodes.max())) if num_sequences > 1 else 0.0
        verify_ms = (self.verify_ms(num_rows) + uneven_ms) * self._jitter()
        draft_ms = depth * self.draft_ms * self._jitter()
        policy.observe(trees, paths, num_accepted, bonus_ids, draft_ms=draft_ms, verify_ms=verify_ms, num_rows=num_rows)
        return num_sequences + int(num_accepted.sum()), verify_ms + draft_ms, depth

    def run(self, policy: SpeculationPolicy, num_sequences: int, num_steps: int) -> Run:
        steps = [self.step(policy, num_sequences) for _ in range(num_steps)]
        num_tokens, milliseconds = sum(step[0] for step in steps), sum(step[1] for step in steps)
        plain = num_sequences / self.verify_ms(num_sequences)
        return Run(num_tokens / milliseconds / plain, [step[2] for step in steps])

    def _draw(self, trees: DraftTrees, depth: int) -> NDArray[np.int32]:
        """What the target draws behind the root and behind the first child of every depth: ``[B, depth + 1]``."""
        num_sequences = trees.parents.shape[0]
        probs = self.quality * np.exp(trees.log_probs[:, 1:].astype(np.float64))
        ends = probs.reshape(num_sequences, depth, self.top_k).cumsum(axis=2)
        numbers = self.random.random((num_sequences, depth, 1))
        ranks = (numbers >= ends).sum(axis=2)  # top_k where no child is taken
        draws = np.full((num_sequences, depth + 1), -7, np.int32)
        draws[:, :-1] = np.where(ranks < self.top_k, ranks + 1, -7)
        return draws

    def _jitter(self) -> float:
        return float(np.exp(self.noise * self.random.standard_normal()))


@dataclass(frozen=True)
class Run:
    """``speedup`` over plain decoding, and the depth drafted in every step."""

    speedup: float
    depths: list[int]


def accept(
    trees: DraftTrees, draws: NDArray[np.int32]
) -> tuple[NDArray[np.int32], NDArray[np.int64], NDArray[np.int32]]:
    """Walk down in plain Python: paths, accepted tokens, bonus tokens."""
    num_sequences, width = draws.shape
    paths = np.full((num_sequences, width), -1, np.int32)
    num_accepted = np.zeros(num_sequences, np.int64)
    bonus_ids = np.zeros(num_sequences, np.int32)
    for sequence in range(num_sequences):
        parents, tokens = trees.parents[sequence].tolist(), trees.token_ids[sequence].tolist()
        node, depth = 0, 0
        paths[sequence, 0] = 0
        while True:
            drawn = int(draws[sequence, depth]) if depth == 0 or tokens[node] == 1 else -7
            children = [child for child, parent in enumerate(parents) if parent == node and tokens[child] == drawn]
            if not children:
                break
            node, depth = children[0], depth + 1
            paths[sequence, depth] = node
        num_accepted[sequence], bonus_ids[sequence] = depth, max(drawn, 0)
    return paths, num_accepted, bonus_ids
