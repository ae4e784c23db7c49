"""How much to speculate: how deep to draft, and which nodes the target verifies, by expected tokens per millisecond."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees, flat_parents, node_depths
from draftline.runtime.calibration import Calibration
from draftline.runtime.candidate_supply import CandidateSupply
from draftline.runtime.cost_curve import CostCurve
from draftline.runtime.draft_cost import DraftCost
from draftline.runtime.probing import ProbeTimer
from draftline.runtime.uneven_cost import UnevenCost
from draftline.speculation import TreeShape

_LEARNING_SEQUENCES = 4  # a batch of more teaches so much per step that not every step is learnt from
_TIE_BREAK = 1e-9
_VERIFIED_PROBES = 4  # one probe in so many verifies a node per sequence: what rows cost must be seen as well
_TRUST_RATE = 1 / 24  # at which drafted steps are forgotten that show how far expectations come true
_TRUST_TOKENS = 2.0  # as if so many had been expected and accepted
_MIN_GAIN = 1.02  # expected over plain decoding, below which it is not worth the host's work


class SpeculationPolicy:
    """Choose nodes over the whole batch while the expected tokens per millisecond grow (trees of kind ``auto``).

    A step is ``plan``, then ``select`` where something was drafted, then ``observe``, about the same sequences in the
    same order. Sequences that decode plainly take part with trees of a root alone. Nothing here reads a clock: equal
    calls make equal choices. Trees of other kinds are drafted and verified whole.

    Speculation stops where plain decoding is expected to be faster, and a shallower draft is taken where deeper levels
    do not pay for their forward. Now and then a probe drafts deeper than seems to pay. Probes are rare enough to cost
    at most 1.5 % where they fail. What they find of the draft needs no verification: the tokens that the target draws
    anyway tell which candidates they would have been.
    """

    def __init__(self, shape: TreeShape, cost: CostCurve, num_sources: int, *, is_free: bool = False) -> None:
        """``is_free``: no drafter runs a graph of its own, so nothing is saved by drafting less."""
        self._is_free = is_free
        self.shape = shape
        self.cost = cost
        self.calibration = Calibration(num_sources)
        self._draft_cost = DraftCost()
        self._uneven_cost = UnevenCost()
        self._supply = CandidateSupply(shape.max_depth)
        self._probes = ProbeTimer()
        self._depths = np.arange(1, shape.max_depth + 1)
        self._depth = 0  # of this step
        self._drafted: DraftTrees | None = None  # of this step, and the depths of its nodes
        self._node_depths: NDArray[np.int64] | None = None
        self._rate_to_beat: float | None = None  # of this step, where it is a probe: tokens/ms of what it replaces
        self._num_probes = 0
        self._num_plans = 0
        self._learns = True  # of this step
        self._best: tuple[int, float] | None = None  # depth and rate for the load below, by what was learnt last
        self._load = (0, 0)
        self._num_steps_unseen = 0  # since the supply was last observed
        self._expected = 0.0  # accepted tokens of this step
        self._recently_expected, self._recently_accepted = 0.0, 0.0

    def plan(self, num_sequences: int, num_other_rows: int) -> int:
        """Return how many depths to draft in this step, 0..max_depth; 0 = decode plainly.

        ``num_sequences`` decode; ``num_other_rows`` rows of prefill run in the same forward.
        """
        self._drafted = self._node_depths = self._rate_to_beat = None
        self._num_steps_unseen += 1
        self._depth = self.shape.max_depth
        if self.shape.kind != "auto" or self._is_free or not self._supply.is_known:
            return self._depth
        self._num_plans += 1
        self._learns = self._num_plans % (1 + num_sequences // _LEARNING_SEQUENCES) == 0
        if self._best is None or self._load != (num_sequences, num_other_rows):
            self._load = (num_sequences, num_other_rows)
            self._best = self._best_depth(num_sequences, num_other_rows)
        self._depth, rate = self._best
        if self._depth == self.shape.max_depth:
            self._probes.reset()
            return self._depth
        cost = self._draft_cost.per_depth_ms(num_sequences) / float(self.cost.at(num_sequences + num_other_rows))
        num_deeper = min(self._probes.num_affordable(cost), self.shape.max_depth - self._depth)
        if self._probes.is_due(num_deeper * cost):
            self._depth += num_deeper
            self._rate_to_beat = rate
            self._num_probes += 1
            self._learns = True
        return self._depth

    def select(self, trees: DraftTrees, num_other_rows: int, max_rows: int) -> NDArray[np.bool_]:
        """Choose the nodes to verify, ``[B, N] bool``, closed under parents, the roots always among them.

        ``max_rows`` bounds the rows of these trees over the whole batch, roots included and other rows not; the nodes
        least likely to be accepted go first.
        """
        num_sequences, width = trees.parents.shape
        is_node = np.arange(width) < trees.num_nodes[:, None]
        num_drafted = int(trees.num_nodes.sum()) - num_sequences
        num_allowed = max(min(num_drafted, max_rows - num_sequences), 0)
        if num_drafted == num_allowed and self.shape.kind != "auto":
            return is_node

        self._drafted, self._node_depths = trees, node_depths(trees)
        depths = self._node_depths.ravel()
        reach = self._reach(trees, int(depths.max(initial=0))).ravel()
        nodes = np.flatnonzero(depths > 0)
        reach, depths = reach[nodes], depths[nodes]
        # A child is never likelier than its parent. A minute discount per depth lets parents go first among equals;
        # where nothing is expected of either, the sort keeps the order of nodes, in which parents go first as well.
        order = np.argsort(reach * (_TIE_BREAK * depths - 1.0), kind="stable")
        num_kept = num_allowed
        if self.shape.kind == "auto":
            if self._learns:
                self._supply.observe(reach, depths, num_sequences, self._depth, self._num_steps_unseen)
                self._num_steps_unseen = 0
            order, num_kept = self._best_nodes(
                reach, order, nodes[order] // width, num_sequences, num_other_rows, num_allowed
            )
            if self._rate_to_beat is not None and self._num_probes % _VERIFIED_PROBES == 0:
                num_kept = max(num_kept, min(num_sequences, num_allowed))
        self._expected = float(reach[order[:num_kept]].sum())
        keep = np.zeros(trees.parents.size, np.bool_)
        keep[nodes[order[:num_kept]]] = True
        keep = keep.reshape(trees.parents.shape)
        keep[:, 0] = True
        return keep

    def _best_nodes(
        self,
        reach: NDArray[np.float64],
        order: NDArray[np.int64],
        owners: NDArray[np.int64],
        num_sequences: int,
        num_other_rows: int,
        num_allowed: int,
    ) -> tuple[NDArray[np.int64], int]:
        """Return nodes, best first, and how many of them to verify, for the most expected tokens per millisecond.

        Shapes: ``reach [M]`` of the nodes; ``order [M]``, best first, with ``owners [M]`` in that order. Among several
        sequences the largest tree has a price of its own, so bounds on its size compete.
        """
        ranks = _ranks(owners)  # of a node among those of its sequence, best first: 0, 1, ...
        num_roots, draft_ms = num_sequences + num_other_rows, self._draft_ms(num_sequences, self._depth)
        best_rate, best = -1.0, (order, 0)
        largest = int(ranks.max(initial=0)) + 1  # draft nodes of the largest tree
        bounds = [largest] if num_sequences == 1 else [*(2**i - 1 for i in range(1, largest.bit_length())), largest]
        for bound in bounds:
            chosen = order[ranks < bound][:num_allowed]
            tokens = num_sequences + np.concatenate([[0.0], np.cumsum(reach[chosen])])
            sizes = 1 + np.concatenate([[0], np.maximum.accumulate(ranks[ranks < bound][:num_allowed] + 1)])
            milliseconds = self.cost.at(num_roots + np.arange(len(tokens))) + draft_ms
            rates = tokens / (milliseconds + self._uneven_cost.at(num_sequences, sizes))
            num_kept = int(rates.argmax())
            if rates[num_kept] > best_rate:
                best_rate, best = float(rates[num_kept]), (chosen, num_kept)
        return best

    def observe(
        self,
        trees: DraftTrees,
        paths: NDArray[np.int32],
        num_accepted_tokens: NDArray[np.int64],
        bonus_ids: NDArray[np.int32],
        *,
        draft_ms: float,
        verify_ms: float,
        num_rows: int,
    ) -> None:
        """Learn from a step that verified ``trees`` (those that were kept).

        Shapes: ``paths [B, D + 1] int32`` accepted nodes of ``trees`` from the root on, padded with -1;
        ``num_accepted_tokens``, ``bonus_ids [B]``. ``draft_ms`` was spent on drafters in the step, ``verify_ms`` in the
        target's forward of ``num_rows`` rows, other rows included.
        """
        if self.shape.kind != "auto":
            return
        drafted, depths = self._drafted, self._node_depths
        if drafted is not None:
            self._recently_expected += self._expected - _TRUST_RATE * self._recently_expected
            self._recently_accepted += float(num_accepted_tokens.sum()) - _TRUST_RATE * self._recently_accepted
        if not self._learns:
            return
        self._best = None
        num_sequences = trees.parents.shape[0]
        largest_tree = int(trees.num_nodes.max())
        self.cost.observe(num_rows, verify_ms - float(self._uneven_cost.at(num_sequences, np.array(largest_tree))))
        if num_rows == int(trees.num_nodes.sum()):
            self._uneven_cost.observe(num_sequences, largest_tree, verify_ms - float(self.cost.at(num_rows)))
        self._draft_cost.observe(num_sequences, self._depth if drafted is not None else 0, draft_ms)
        if drafted is None or depths is None:
            return
        emitted_ids = _emitted_ids(trees, paths, num_accepted_tokens, bonus_ids)
        self.calibration.observe(drafted, depths, emitted_ids)
        if self._rate_to_beat is not None:
            # Where the probe did not trust its candidates enough to verify them, one per sequence might have paid.
            other_rows = num_rows - int(trees.num_nodes.sum())
            num_tokens = num_sequences + np.array([num_accepted_tokens.sum(), _count_first_hits(drafted, emitted_ids)])
            spent_ms = draft_ms + np.array([verify_ms, self.cost.at(other_rows + 2 * num_sequences)])
            self._probes.settle(float((num_tokens / (self._rate_to_beat * spent_ms)).max()) - 1.0)

    def _best_depth(self, num_sequences: int, num_other_rows: int) -> tuple[int, float]:
        """Return the depth of the highest expected rate, 0 = none, and that rate in tokens/ms."""
        num_roots = num_sequences + num_other_rows
        nodes, tokens = self._supply.totals()
        # Calibration needs trials of every probability to notice a change; the sum over all of them shows it sooner.
        trust = (self._recently_accepted + _TRUST_TOKENS) / (self._recently_expected + _TRUST_TOKENS)
        fixed_ms = self._draft_cost.fixed_ms(num_sequences)
        plain_rate = num_sequences / (float(self.cost.at(num_roots)) + fixed_ms)
        draft_ms = fixed_ms + self._depths * self._draft_cost.per_depth_ms(num_sequences)
        milliseconds = self.cost.at(num_roots + num_sequences * nodes) + draft_ms[:, None]
        milliseconds += self._uneven_cost.at(num_sequences, np.ceil(nodes).astype(np.int64) + 1)
        rates = (num_sequences * (1.0 + min(trust, 1.0) * tokens) / milliseconds).max(axis=1)
        best = int(rates.argmax())
        if rates[best] < _MIN_GAIN * plain_rate:
            return 0, plain_rate
        return best + 1, float(rates[best])

    def _draft_ms(self, num_sequences: int, depth: int) -> float:
        return self._draft_cost.fixed_ms(num_sequences) + depth * self._draft_cost.per_depth_ms(num_sequences)

    def _reach(self, trees: DraftTrees, max_depth: int) -> NDArray[np.float64]:
        """Estimate the probability that a node and all its ancestors are accepted, ``[B * N]``; 0 in padding."""
        parents = flat_parents(trees.parents)
        own = self.calibration.acceptance(trees.log_probs, trees.sources).ravel()
        reach = own
        for _ in range(max_depth - 1):  # multiplied from the root down, so that no rounding lifts a child over a parent
            reach = own * reach[parents]
        return reach


def _emitted_ids(
    trees: DraftTrees,
    paths: NDArray[np.int32],
    num_accepted_tokens: NDArray[np.int64],
    bonus_ids: NDArray[np.int32],
) -> NDArray[np.int32]:
    """The accepted draft tokens and the bonus token of every sequence, padded with -1: ``[B, D + 1] int32``."""
    sequences = np.arange(paths.shape[0])
    accepted = paths[:, 1:]
    emitted = np.full(paths.shape, -1, np.int32)
    emitted[:, :-1] = np.where(accepted >= 0, trees.token_ids[sequences[:, None], accepted], -1)
    emitted[sequences, num_accepted_tokens] = bonus_ids
    return emitted


def _ranks(owners: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number the entries of each owner in order: ``[M]`` -> ``[M]``.

    >>> _ranks(np.array([3, 1, 3, 3, 1])).tolist()
    [0, 0, 1, 2, 1]
    """
    grouped = np.argsort(owners, kind="stable")
    starts = np.flatnonzero(np.diff(owners[grouped], prepend=-1))
    ranks = np.empty_like(owners)
    ranks[grouped] = np.arange(len(owners)) - np.repeat(starts, np.diff(np.append(starts, len(owners))))
    return ranks


def _count_first_hits(trees: DraftTrees, emitted_ids: NDArray[np.int32]) -> int:
    """Count the sequences whose root's most probable child is what the target drew there."""
    log_probs = np.where(trees.parents == 0, trees.log_probs, -np.inf)
    first = log_probs.argmax(axis=1)  # the root itself where there is no child
    sequences = np.arange(first.size)
    return int(((first > 0) & (trees.token_ids[sequences, first] == emitted_ids[:, 0])).sum())
