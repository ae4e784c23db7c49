"""How much the policy speculates, in a simulated world whose times and acceptance are known."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from numpy.typing import NDArray

from draftline.draft_trees import DraftTrees, node_depths, roots_only
from draftline.runtime.cost_curve import CostCurve
from draftline.runtime.selection import SpeculationPolicy
from draftline.speculation import TreeKind, TreeShape
from tests.runtime.speculation_world import World

ROWS = [1, 2, 4, 8, 16, 32, 64]
LAPTOP = [35.0, 32.0, 33.0, 46.0, 62.0, 97.0, 163.0]  # milliseconds of a 135 M model on two cores
GPU = [10.0, 10.0, 10.0, 10.1, 10.3, 10.8, 12.0]
LINEAR = [float(rows) for rows in ROWS]  # no row is free: nothing can pay


def make_policy(milliseconds: list[float], kind: TreeKind = "auto", max_depth: int = 5) -> SpeculationPolicy:
    return SpeculationPolicy(TreeShape(kind, 33, max_depth, 3), CostCurve(ROWS, milliseconds), 1)


def truth(milliseconds: list[float]) -> Callable[[int], float]:
    curve = CostCurve(ROWS, milliseconds)
    return lambda rows: float(curve.at(rows))


def make_world(
    milliseconds: list[float], draft_ms: float, confidence: float, quality: float, noise: float = 0.05
) -> World:
    return World(truth(milliseconds), draft_ms, confidence, quality, noise=noise)


def mean_kept(policy: SpeculationPolicy, world: World, num_sequences: int, num_steps: int = 100) -> float:
    """Draft nodes chosen per sequence and step, once the policy knows the world."""
    world.run(policy, num_sequences, 100)
    kept = 0
    for _ in range(num_steps):
        policy.plan(num_sequences, 0)
        trees = world.draft(num_sequences, world.max_depth)
        kept += int(policy.select(trees, 0, 512).sum()) - num_sequences
    return kept / num_steps / num_sequences


def test_a_perfect_draft_is_used_to_its_full_depth() -> None:
    run = make_world(LAPTOP, 3.0, 1.0, 1.0).run(make_policy(LAPTOP), 1, 200)
    assert run.speedup > 3.0
    assert set(run.depths) == {5}


@pytest.mark.parametrize("num_sequences", [1, 16])
@pytest.mark.parametrize("milliseconds", [LAPTOP, GPU], ids=["laptop", "gpu"])
@pytest.mark.parametrize("draft_share", [0.01, 0.15, 0.5])
def test_a_useless_draft_costs_less_than_3_percent(
    milliseconds: list[float], num_sequences: int, draft_share: float
) -> None:
    world = make_world(milliseconds, draft_share * milliseconds[0], 0.8, 0.02)
    run = world.run(make_policy(milliseconds), num_sequences, 2000)
    assert run.speedup > 0.97


@pytest.mark.parametrize("confidence", [0.3, 0.6, 0.9])
def test_a_large_tree_among_small_ones_has_its_price(confidence: float) -> None:
    """As with ONNX Runtime at batch 16: one tree of eleven nodes costs what 16 of two do, or more."""
    milliseconds = [25.0 + 1.25 * rows for rows in ROWS]
    speedups = []
    for uneven_ms in (0.0, 3.0):
        world = make_world(milliseconds, 0.02, confidence, 0.9)
        world.uneven_ms = lambda largest, each=uneven_ms: min(each * (largest - 1), 35.0)  # type: ignore[misc]
        speedups.append(world.run(make_policy(milliseconds), 16, 1500).speedup)
        plain_ms = world.verify_ms(16)
    assert speedups[1] > 0.97
    assert speedups[1] <= speedups[0] + 0.02
    assert plain_ms == 45.0


def test_nothing_is_drafted_where_no_row_is_free() -> None:
    run = make_world(LINEAR, 0.1, 0.8, 1.0).run(make_policy(LINEAR), 8, 1000)
    assert run.speedup > 0.98
    assert np.mean(run.depths[500:]) < 0.3


@pytest.mark.parametrize("num_sequences", [1, 4])
def test_comes_back_when_the_draft_becomes_good(num_sequences: int) -> None:
    world, policy = make_world(GPU, 1.0, 0.8, 0.0), make_policy(GPU)
    assert np.mean(world.run(policy, num_sequences, 500).depths[250:]) < 0.2
    world.quality = 1.0
    depths = world.run(policy, num_sequences, 200).depths
    assert next(step for step in range(200) if all(depth > 0 for depth in depths[step : step + 20])) < 150
    assert world.run(policy, num_sequences, 200).speedup > 2.0


def test_a_cost_curve_measured_at_a_bad_moment_is_not_for_ever() -> None:
    policy, world = make_policy([10.0 * rows for rows in LINEAR]), make_world(GPU, 1.0, 0.8, 1.0)
    first = world.run(policy, 1, 1000)
    assert first.speedup > 0.97
    assert world.run(policy, 1, 1000).speedup > 2.0


def test_gives_up_soon_when_the_draft_becomes_useless() -> None:
    world, policy = make_world(GPU, 1.0, 0.8, 1.0), make_policy(GPU)
    assert world.run(policy, 1, 300).speedup > 2.0
    world.quality = 0.0
    assert world.run(policy, 1, 200).speedup > 0.85
    assert np.mean(world.run(policy, 1, 100).depths) < 0.3


def test_trees_are_wide_at_batch_1_and_narrow_at_batch_16() -> None:
    wide = mean_kept(make_policy(LAPTOP), make_world(LAPTOP, 0.1, 0.6, 1.0), 1)
    narrow = mean_kept(make_policy(LAPTOP), make_world(LAPTOP, 0.1, 0.6, 1.0), 16)
    assert wide > 3.0
    assert 0.3 < narrow < wide / 2


def test_at_high_load_what_is_left_of_a_tree_is_a_chain() -> None:
    world, policy = make_world(LAPTOP, 0.1, 0.7, 1.0), make_policy(LAPTOP)
    world.run(policy, 16, 100)
    widths = []
    for _ in range(50):
        policy.plan(16, 0)
        trees = world.draft(16, 5)
        keep = policy.select(trees, 0, 512)
        depths = np.where(keep, node_depths(trees), 0)
        widths += [np.count_nonzero(depths == depth, axis=1).max() for depth in (1, 2)]
    assert np.mean(np.array(widths) == 1) > 0.9


def test_a_changing_load_is_followed_both_ways() -> None:
    world, policy = make_world(LAPTOP, 6.0, 0.7, 1.0), make_policy(LAPTOP)
    for _ in range(3):
        assert world.run(policy, 32, 150).speedup > 0.95
        assert world.run(policy, 1, 150).speedup > 1.4


def test_a_slow_prefill_in_the_same_step_makes_nodes_cheap() -> None:
    policy, world = make_policy(LAPTOP), make_world(LAPTOP, 0.1, 0.6, 1.0)
    world.run(policy, 16, 100)
    policy.plan(16, 0)
    trees = world.draft(16, 5)
    assert policy.select(trees, 100, 512).sum() > policy.select(trees, 0, 512).sum()


@pytest.mark.parametrize("kind", ["chain", "static", "dynamic"])
def test_other_kinds_are_drafted_and_verified_whole(kind: TreeKind) -> None:
    policy, world = make_policy(LINEAR, kind), make_world(LINEAR, 50.0, 0.7, 0.0)
    assert set(world.run(policy, 4, 20).depths) == {5}
    trees = world.draft(4, 5)
    assert int(policy.select(trees, 0, 512).sum()) == int(trees.num_nodes.sum())


def test_other_kinds_are_cut_to_the_rows_there_are_the_likeliest_kept() -> None:
    policy, world = make_policy(GPU, "dynamic"), make_world(GPU, 1.0, 1.0, 1.0)
    trees = world.draft(2, 5)
    keep = policy.select(trees, 0, 8)
    assert np.sort(node_depths(trees)[keep]).tolist() == [0, 0, 1, 1, 2, 2, 3, 3]


def test_equal_calls_make_equal_choices() -> None:
    runs = [make_world(LAPTOP, 5.0, 0.7, 0.8).run(make_policy(LAPTOP), 4, 150) for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_step_that_could_draft_nothing_teaches_nothing_about_drafting() -> None:
    policy = make_policy(GPU)
    assert policy.plan(2, 0) == 5
    trees = roots_only(np.zeros(2, np.int32))
    paths = np.zeros((2, 1), np.int32)
    none = np.zeros(2, np.int64)
    policy.observe(trees, paths, none, np.ones(2, np.int32), draft_ms=0.1, verify_ms=10.0, num_rows=2)
    assert policy.plan(2, 0) == 5


@st.composite
def random_trees(draw: st.DrawFn) -> DraftTrees:
    num_sequences, width = draw(st.integers(1, 4)), draw(st.integers(1, 12))
    shape = (num_sequences, width)
    num_nodes = np.array(draw(st.lists(st.integers(1, width), min_size=num_sequences, max_size=num_sequences)))
    is_node = np.arange(width) < num_nodes[:, None]
    drawn: NDArray[np.int64] = draw(hnp.arrays(np.int64, shape, elements=st.integers(0, 1000)))
    is_child = is_node & (np.arange(width) > 0)
    parents = np.where(is_child, drawn % np.maximum(np.arange(width), 1), -1)
    probs: NDArray[np.float64] = draw(hnp.arrays(np.float64, shape, elements=st.sampled_from([0.0, 1e-30, 0.3, 1.0])))
    with np.errstate(divide="ignore"):
        log_probs = np.where(is_child, np.log(probs), np.where(is_node, 0.0, -np.inf))
    return DraftTrees(
        parents=parents.astype(np.int32),
        token_ids=np.where(is_node, np.arange(width), -1).astype(np.int32),
        log_probs=log_probs.astype(np.float32),
        sources=np.where(is_child, drawn % 2, -1).astype(np.int8),
        num_nodes=num_nodes,
    )


@given(random_trees(), st.integers(0, 40), st.integers(0, 40), st.sampled_from(["auto", "dynamic"]), st.booleans())
def test_choices_are_closed_under_parents_and_within_the_rows(
    trees: DraftTrees, num_other_rows: int, max_rows: int, kind: TreeKind, is_steep: bool
) -> None:
    shape = TreeShape(kind, 12, 11, 4)
    policy = SpeculationPolicy(shape, CostCurve(ROWS, LAPTOP if is_steep else GPU), 2)
    num_sequences = trees.num_nodes.size
    policy.plan(num_sequences, num_other_rows)
    keep = policy.select(trees, num_other_rows, max_rows)
    assert keep[:, 0].all()
    assert not keep[np.arange(keep.shape[1]) >= trees.num_nodes[:, None]].any()
    assert int(keep.sum()) <= max(max_rows, num_sequences)
    for sequence, node in np.argwhere(keep[:, 1:]).tolist():
        assert keep[sequence, trees.parents[sequence, node + 1]]
    if kind == "dynamic":
        assert int(keep.sum()) == max(num_sequences, min(max_rows, int(trees.num_nodes.sum())))
