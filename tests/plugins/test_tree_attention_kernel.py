"""The native kernel of ``draftline::TreeAttention`` against the oracle, and its laws about bits."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnxruntime.capi.onnxruntime_pybind11_state import Fail, RuntimeException

from draftline.tree import build_tree_mask, pack_mask
from tests.plugins.native import instruction_set, open_session
from tests.tree_attention_cases import (
    TOLERANCE,
    Case,
    Shape,
    attention_model,
    cases,
    chain,
    make_inputs,
    oracle_output,
    trees,
)

SMOLLM2 = Shape(9, 3, 64, 16)
# Heads in groups of every size there is a tile for, and more than a tile holds; head sizes with and without whole
# vectors, and tiles of them; windows within a tile of rows and beyond.
shapes = st.sampled_from(
    [
        SMOLLM2,
        SMOLLM2._replace(half_pool=True),
        Shape(3, 3, 64, 16, 40),
        Shape(4, 2, 4, 8),
        Shape(4, 1, 8, 16, 7, half_pool=True),
        Shape(2, 2, 12, 32),
        Shape(1, 1, 1, 128, 1),
        Shape(6, 1, 24, 64, 200),
        Shape(7, 1, 80, 16, half_pool=True),
        Shape(8, 1, 96, 32),
        Shape(4, 2, 128, 16, 130),
        Shape(2, 1, 256, 16, half_pool=True),
        Shape(100, 2, 16, 8),
        Shape(4, 2, 24, 16, softcap=50.0),
        Shape(8, 1, 64, 8, 40, half_pool=True, softcap=2.0),
        Shape(2, 2, 4, 32, softcap=0.1),
        Shape(9, 3, 64, 16, sinks=True),
        Shape(100, 2, 16, 8, 40, half_pool=True, sinks=True),
        Shape(8, 1, 24, 32, softcap=2.0, sinks=True),
    ]
)


@lru_cache(maxsize=256)
def session(shape: Shape, num_threads: int = 1) -> onnxruntime.InferenceSession:
    return open_session(attention_model(shape, []), num_threads)


def run(shape: Shape, inputs: dict[str, NDArray[Any]], num_threads: int = 1) -> NDArray[np.float32]:
    out: NDArray[np.float32] = session(shape, num_threads).run(None, inputs)[0]
    return out


def narrow(inputs: dict[str, NDArray[Any]], block_size: int) -> dict[str, NDArray[Any]]:
    """Leave the columns of the block table that committed tokens need, and poison the memory that no one may read."""
    contexts, table = inputs["context_lengths"], inputs["block_table"]
    pool = np.full_like(inputs["kv_pool"], np.nan)
    for row, context in enumerate(contexts):
        for position in range(0, context, block_size):
            block, count = table[row, position // block_size], min(block_size, context - position)
            pool[block, :, :, :count] = inputs["kv_pool"][block, :, :, :count]
    columns = -(-int(contexts.max()) // block_size)
    return {**inputs, "kv_pool": pool, "block_table": table[:, :columns]}


@settings(deadline=None, max_examples=150)
@given(shapes, cases(), st.sampled_from([1, 2]))
@example(SMOLLM2, Case((0,), ((-1,),), 0), 1)  # no context, one node
@example(SMOLLM2, Case((1100, 5), (chain(1), chain(256)), 0), 2)  # parts of one row cut among threads
@example(Shape(3, 1, 64, 16, 130), Case((700,), (chain(140),), 0), 2)  # the window begins at each row's own position
def test_kernel_agrees_with_the_oracle(shape: Shape, case: Case, num_threads: int) -> None:
    """And reads no more of the pool than what is committed: the rest of it is NaN."""
    inputs = make_inputs(shape, case)
    actual = run(shape, narrow(inputs, shape.block_size), num_threads)
    np.testing.assert_allclose(actual, oracle_output(shape, inputs), rtol=0, atol=TOLERANCE)


def rows_of(inputs: dict[str, NDArray[Any]], sequence: int, context: int, rows: list[int]) -> dict[str, NDArray[Any]]:
    """Return the step of one sequence whose in-step tokens are a chain of ``rows``, behind ``context`` tokens."""
    return {
        **inputs,
        **{name: inputs[name][rows] for name in ("q", "k_new", "v_new")},
        "block_table": inputs["block_table"][sequence : sequence + 1],
        "context_lengths": np.array([context], np.int32),
        "sequence_starts": np.array([0, len(rows)], np.int32),
        "packed_mask": pack_mask(build_tree_mask(chain(len(rows)))),
    }


@settings(deadline=None, max_examples=60)
@given(shapes, cases(), st.sampled_from([1, 2, 8]))
@example(Shape(2, 2, 128, 16), Case((120, 1000), ((-1, *range(20), 3, 4, 5), (-1, 0, 0)), 3), 2)
def test_a_node_of_a_tree_has_the_bits_of_its_plain_text(shape: Shape, case: Case, num_threads: int) -> None:
    """Wherever chunks of keys end, with whatever neighbours, and however many threads."""
    inputs = narrow(make_inputs(shape, case), shape.block_size)
    out = run(shape, inputs, num_threads)
    for sequence, (context, tree) in enumerate(zip(case.context_lengths, case.trees, strict=True)):
        first = int(inputs["sequence_starts"][sequence])
        for node in {0, len(tree) // 2, len(tree) - 1}:
            path = [node]
            while tree[path[0]] >= 0:
                path.insert(0, tree[path[0]])
            alone = run(shape, rows_of(inputs, sequence, context, [first + node for node in path]))
            np.testing.assert_array_equal(alone[-1], out[first + node])


@settings(deadline=None, max_examples=60)
@given(shapes, st.integers(2, 400), st.data())
def test_bits_do_not_depend_on_what_is_committed(shape: Shape, length: int, data: st.DataObject) -> None:
    """A text cut anywhere into committed and in-step tokens; with halves, too, as in-step rows are rounded first."""
    inputs = make_inputs(shape, Case((0,), (chain(length),), data.draw(st.integers(0, 2**32 - 1))))
    random, num_blocks = np.random.default_rng(length), -(-length // shape.block_size)
    table = random.permutation(num_blocks + 2)[:num_blocks].astype(np.int32)
    pool = np.full((num_blocks + 2, *inputs["kv_pool"].shape[1:]), np.nan, inputs["kv_pool"].dtype)
    for position in range(length):
        block, place = table[position // shape.block_size], position % shape.block_size
        pool[block, 0, :, place] = inputs["k_new"][position]
        pool[block, 1, :, place] = inputs["v_new"][position]
    text = {**inputs, "kv_pool": pool, "block_table": table[None]}
    whole = run(shape, text)
    for _ in range(3):
        context = data.draw(st.integers(0, length - 1))
        end = data.draw(st.integers(context + 1, length))
        part = run(shape, rows_of(text, 0, context, list(range(context, end))))
        np.testing.assert_array_equal(part, whole[context:end])


@settings(deadline=None, max_examples=40)
@given(shapes, cases())
def test_bits_are_the_same_on_every_instruction_set(shape: Shape, case: Case) -> None:
    inputs = make_inputs(shape, case)
    expected = run(shape, inputs)
    with instruction_set("avx2") as available:
        if available:
            np.testing.assert_array_equal(run(shape, inputs), expected)


@pytest.mark.parametrize("instructions", ["best", "avx2"])
@pytest.mark.parametrize("value", [np.nan, np.inf])
@pytest.mark.parametrize("name", ["q", "k_new", "v_new"])
@pytest.mark.parametrize("softcap", [0.0, 2.0])
def test_what_is_not_finite_shows_in_the_rows_that_see_it(
    softcap: float, name: str, value: float, instructions: str
) -> None:
    """Also where a softcap would make a number of an infinite score."""
    shape = SMOLLM2._replace(softcap=softcap)
    inputs = make_inputs(shape, Case((130, 5), (chain(40), (-1, 0, 0, 1)), 0))
    with instruction_set(instructions):
        expected = run(shape, inputs)
        inputs[name][20] = value
        found = run(shape, inputs)
    rows = [20] if name == "q" else list(range(20, 40))
    assert not np.isfinite(found[rows]).any()
    others = np.setdiff1d(np.arange(44), rows)
    np.testing.assert_array_equal(found[others], expected[others])


@pytest.mark.parametrize("instructions", ["best", "avx2"])
def test_scores_of_any_size_are_limited(instructions: str) -> None:
    """From where tanh is its argument, beyond where it is 1, to where the exponential would leave float32."""
    shape = Shape(4, 2, 16, 8, softcap=2.0)
    inputs = make_inputs(shape, Case((100,), (chain(12),), 3))
    for row, size in enumerate((0, 1e-38, 1e-20, 1e-6, 1e-3, 0.1, 1, 3, 10, 30, 300, 1e30)):
        inputs["q"][row] *= size
    with instruction_set(instructions):
        out = run(shape, inputs)
    np.testing.assert_allclose(out, oracle_output(shape, inputs), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("softcap", [-1.0, np.inf, np.nan])
def test_another_softcap_is_refused(softcap: float) -> None:
    with pytest.raises(RuntimeException, match="TreeAttention: softcap: 0 or greater"):
        session(SMOLLM2._replace(softcap=softcap))


@pytest.mark.parametrize("instructions", ["best", "avx2"])
def test_sinks_of_any_size_take_their_share(instructions: str) -> None:
    """The head that has none has the bits of a model without; far above its scores a sink leaves a head nothing."""
    shape = SMOLLM2._replace(sinks=True)
    inputs = make_inputs(shape, Case((130, 5), (chain(40), (-1, 0, 0, 1)), 0))
    inputs["sinks"] = np.array([-np.inf, -1e30, -90.0, -3.0, 0.0, 3.0, 80.0, 200.0, 1e30], np.float32)
    with instruction_set(instructions):
        found = run(shape, inputs)
        without = run(SMOLLM2, {name: x for name, x in inputs.items() if name != "sinks"})
    np.testing.assert_allclose(found, oracle_output(shape, inputs), rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found[:, : 2 * 64], without[:, : 2 * 64])
    assert np.abs(found[:, 6 * 64 :]).max() < 1e-30


BROKEN_CASE = Case((37, 200, 0), (chain(3), (-1, 0, 0, 1, 2), chain(2)), 0)


def broken_rows(shape: Shape, inputs: dict[str, NDArray[Any]], expected: NDArray[np.float32]) -> list[int]:
    """Run, and return the rows that are not finite; all others must have the bits of ``expected``."""
    out = run(shape, inputs, 2)
    rows = np.flatnonzero(~np.isfinite(out).all(axis=1))
    np.testing.assert_array_equal(np.delete(out, rows, axis=0), np.delete(expected, rows, axis=0))
    return [int(row) for row in rows]


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("shape", [SMOLLM2, Shape(4, 1, 24, 16, half_pool=True)])
@pytest.mark.parametrize("name", ["avx512_vnni", "avx2", "neon_dotprod", "neon"])
def test_what_is_not_finite_stays_so_in_the_rows_that_read_it(name: str, shape: Shape, value: float) -> None:
    inputs = make_inputs(shape, BROKEN_CASE)
    expected = run(shape, inputs)
    with instruction_set(name) as has_it:
        if not has_it:
            return
        broken = {name: x.copy() for name, x in inputs.items()}
        broken["q"][4, 1, 5] = value
        assert broken_rows(shape, broken, expected) == [4]
        for plane, position in ((0, 3), (0, 130), (1, 130), (1, 199)):
            broken = {name: x.copy() for name, x in inputs.items()}
            block = inputs["block_table"][1, position // shape.block_size]
            broken["kv_pool"][block, plane, 0, position % shape.block_size, 7] = value
            assert broken_rows(shape, broken, expected) == [3, 4, 5, 6, 7], "of the second sequence"
        for tensor in ("k_new", "v_new"):
            broken = {name: x.copy() for name, x in inputs.items()}
            broken[tensor][4, 0, 7] = value
            assert broken_rows(shape, broken, expected) == [4, 6], "the node and its child, not its siblings"
            broken = {name: x.copy() for name, x in inputs.items()}
            broken[tensor][9] = value
            assert broken_rows(shape, broken, expected) == [9]


@settings(deadline=None, max_examples=20)
@given(trees(), st.integers(0, 2**32 - 1))
def test_in_step_tokens_stand_in_any_order(tree: tuple[int, ...], seed: int) -> None:
    """Ancestors are taken by depth, not by where they stand."""
    inputs = make_inputs(SMOLLM2, Case((130,), (tree,), seed))
    order = np.random.default_rng(seed).permutation(len(tree))
    mask = build_tree_mask(tree)[np.ix_(order, order)]
    shuffled = {**inputs, **{name: inputs[name][order] for name in ("q", "k_new", "v_new")}}
    shuffled["packed_mask"] = pack_mask(mask)
    np.testing.assert_array_equal(run(SMOLLM2, shuffled), run(SMOLLM2, inputs)[order])


@pytest.mark.parametrize(
    ("changes", "rule"),
    [
        ({"block_table": [[0, 99, -1]]}, "block_table: ids of blocks"),
        ({"block_table": [[0, -1, -1]]}, "block_table: ids of blocks"),
        ({"block_table": [[0]]}, "block_table: blocks for every committed token"),
        ({"context_lengths": [-1]}, "block_table: blocks for every committed token"),
        ({"sequence_starts": [0, 2]}, "sequence_starts: from 0"),
        ({"packed_mask": [[1], [3], [15]]}, "packed_mask: bits of in-step tokens"),
        ({"packed_mask": [[1], [3], [3]]}, "packed_mask: a row attends to its ancestors and itself"),
        ({"packed_mask": [[1], [0], [7]]}, "packed_mask: a row attends to its ancestors and itself"),
        ({"packed_mask": [[1], [3]]}, r"packed_mask: \[T, W\]"),
        ({"sinks": [0.0] * 8}, r"sinks: \[H\]"),
    ],
)
def test_inputs_that_break_the_contract_are_refused(changes: dict[str, Any], rule: str) -> None:
    shape = SMOLLM2._replace(sinks=True)
    inputs = make_inputs(shape, Case((20,), (chain(3),), 0))
    changed = {**inputs, **{name: np.array(value, inputs[name].dtype) for name, value in changes.items()}}
    with pytest.raises(Fail, match=f"TreeAttention: {rule}"):
        run(shape, changed)


def test_starts_whose_differences_leave_32_bits_are_refused() -> None:
    """Modulo 2^32 each sequence has a row and the last one ends at the last row."""
    inputs = make_inputs(SMOLLM2, Case((20, 3, 0, 1), (chain(1),) * 4, 0))
    inputs["sequence_starts"] = np.array([0, 2**31 - 1, -(2**31), -1, 4], np.int32)
    with pytest.raises(Fail, match="TreeAttention: sequence_starts: one row of each sequence at least"):
        run(SMOLLM2, inputs)
