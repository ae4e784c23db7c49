"""The function body of ``draftline::TreeAttention``, run by ONNX Runtime, against the oracle."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.graphs.tree_attention import inline_tree_attention, load_tree_attention_function
from draftline.tree import build_tree_mask, pack_mask
from tests.tree_attention_cases import (
    HALF_TOLERANCE,
    TOLERANCE,
    Case,
    Shape,
    attention_model,
    cases,
    chain,
    make_inputs,
    num_columns,
    oracle_output,
    shapes,
)


@lru_cache(maxsize=8)
def half_session(shape: Shape) -> onnxruntime.InferenceSession:
    model = attention_model(shape, [load_tree_attention_function()])
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


@lru_cache(maxsize=64)
def session(shape: Shape, num_threads: int = 1) -> onnxruntime.InferenceSession:
    model = inline_tree_attention(attention_model(shape, [load_tree_attention_function()]))
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def run(shape: Shape, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    out: NDArray[np.float32] = session(shape).run(None, inputs)[0]
    return out


@settings(deadline=None, max_examples=120)
@given(shapes, cases())
@example(Shape(4, 2, 16, 8, 0), Case((0,), ((-1,),), 0))  # no context, one node
@example(Shape(2, 2, 16, 8, 7), Case((128, 127, 1), (chain(1), chain(2), (-1, 0, 0)), 1))  # on both sides of a chunk
@example(Shape(4, 2, 16, 8, 0, half_pool=True), Case((0, 40), ((-1, 0, 0), chain(5)), 2))
def test_function_body_agrees_with_the_oracle(shape: Shape, case: Case) -> None:
    inputs = make_inputs(shape, case)
    np.testing.assert_allclose(run(shape, inputs), oracle_output(shape, inputs), rtol=0, atol=TOLERANCE)


@settings(deadline=None, max_examples=30)
@given(
    st.sampled_from(
        [
            Shape(4, 2, 16, 8, 0, True, True),
            Shape(6, 2, 24, 8, 9, True, True),
            Shape(4, 2, 16, 8, 0, True, True, 2.0, True),
        ]
    ),
    cases(),
)
def test_rows_of_float16_are_rounded_once(shape: Shape, case: Case) -> None:
    """Not inlined, as the network check runs it: the builder of the CPU's engines has float32 rows."""
    inputs = make_inputs(shape, case)
    (found,) = half_session(shape).run(None, inputs)
    assert found.dtype == np.float16
    np.testing.assert_allclose(found, oracle_output(shape, inputs), rtol=0, atol=HALF_TOLERANCE)


@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 2, 16, 8, 0),
        Shape(1, 1, 64, 64, 0),
        Shape(3, 1, 32, 32, 20),
        Shape(3, 1, 32, 32, 20, softcap=2.0, sinks=True),
    ],
)
def test_bits_of_a_row_do_not_depend_on_its_neighbours(shape: Shape) -> None:
    """Not even where neighbours widen the table, the padded rows and the mask."""
    parts = [(3, (-1, 0, 0, 1)), (200, chain(1)), (17, chain(70)), (0, chain(33)), (129, (-1, 0))]
    together = make_inputs(shape, Case(tuple(p[0] for p in parts), tuple(p[1] for p in parts), 5))
    whole = run(shape, together)
    starts = together["sequence_starts"]
    for index, (context, tree) in enumerate(parts):
        rows = slice(starts[index], starts[index + 1])
        columns = num_columns(shape, context + len(tree))
        alone = {
            **{name: together[name][rows] for name in ("q", "k_new", "v_new")},
            **{name: together[name] for name in together.keys() & {"kv_pool", "sinks"}},
            "block_table": together["block_table"][index : index + 1, :columns],
            "context_lengths": together["context_lengths"][index : index + 1],
            "sequence_starts": np.array([0, len(tree)], np.int32),
            "packed_mask": together["packed_mask"][rows, : -(-len(tree) // 32)],
        }
        np.testing.assert_array_equal(run(shape, alone), whole[rows])


@pytest.mark.parametrize(
    ("shape", "context"),
    [(Shape(9, 3, 64, 16), 5000), (Shape(8, 1, 128, 16), 700), (Shape(8, 1, 128, 16, softcap=2.0, sinks=True), 700)],
)
def test_bits_of_a_row_do_not_depend_on_rows_and_threads(shape: Shape, context: int) -> None:
    """Products are cut among threads by their size; head sizes up to 128 are summed in one go wherever the cuts lie."""
    inputs = make_inputs(shape, Case((context,), (chain(24),), 7))
    whole = session(shape).run(None, inputs)[0]
    for num_threads, num_rows in ((8, 24), (8, 1), (3, 2), (1, 1)):
        part = {
            **inputs,
            **{name: inputs[name][:num_rows] for name in ("q", "k_new", "v_new", "packed_mask")},
            "sequence_starts": np.array([0, num_rows], np.int32),
            "block_table": inputs["block_table"][:, : num_columns(shape, context + num_rows)],
        }
        np.testing.assert_array_equal(session(shape, num_threads).run(None, part)[0], whole[:num_rows])


@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 2, 16, 8, 0),
        Shape(1, 1, 64, 64, 0),
        Shape(9, 3, 64, 16, 20),
        Shape(4, 4, 16, 16, 0),
        Shape(8, 1, 128, 16, 0),
        Shape(4, 2, 16, 8, 0, softcap=2.0),
        Shape(4, 2, 16, 8, 0, sinks=True),
    ],
)
def test_a_node_of_a_tree_has_the_bits_of_its_chain(shape: Shape, num_threads: int) -> None:
    """In whatever columns of a chunk of keys the node and its ancestors stand, however many others between them."""
    random = np.random.default_rng(8)
    for num_nodes, context in ((2, 0), (17, 300), (64, 64), (40, 600), (9, 119), (64, 128)):
        tree = (-1, *(int(random.integers(max(0, node - 8), node)) for node in range(1, num_nodes)))
        inputs = make_inputs(shape, Case((context, 77), (tree, chain(3)), num_nodes))
        out = session(shape, num_threads).run(None, inputs)[0]
        for node in {*random.integers(num_nodes, size=6).tolist(), num_nodes - 1}:
            path = [node]
            while tree[path[0]] >= 0:
                path.insert(0, tree[path[0]])
            alone = {
                **inputs,
                **{name: inputs[name][path] for name in ("q", "k_new", "v_new")},
                "block_table": inputs["block_table"][:1, : num_columns(shape, context + len(path))],
                "context_lengths": np.array([context], np.int32),
                "sequence_starts": np.array([0, len(path)], np.int32),
                "packed_mask": pack_mask(build_tree_mask(chain(len(path)))),
            }
            np.testing.assert_array_equal(run(shape, alone)[-1], out[node])


def test_what_lies_behind_the_committed_tokens_is_not_read() -> None:
    shape = Shape(4, 2, 16, 16, 0)
    inputs = make_inputs(shape, Case((21, 40), (chain(3), (-1, 0, 0)), 6))
    before = run(shape, inputs)
    pool = inputs["kv_pool"]
    for row, context in enumerate(inputs["context_lengths"]):
        last = inputs["block_table"][row, (context - 1) // shape.block_size]
        pool[last, :, :, context % shape.block_size :] = 1e6
    for block in set(range(len(pool))) - set(inputs["block_table"].ravel().tolist()):
        pool[block] = -1e6
    np.testing.assert_array_equal(run(shape, inputs), before)


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_softcap_hides_nothing(value: float) -> None:
    """Tanh of an infinite score is 1."""
    shape = Shape(4, 2, 16, 8, softcap=2.0)
    inputs = make_inputs(shape, Case((20,), (chain(3),), 0))
    inputs["q"][1] = value
    out = run(shape, inputs)
    assert np.isnan(out[1]).all()
    assert np.isfinite(out[[0, 2]]).all()


def test_sinks_of_any_size_take_their_share() -> None:
    """The head that has none has the bits of a model without; far above its scores a sink leaves a head nothing."""
    shape = Shape(9, 3, 16, 8)
    inputs = make_inputs(shape, Case((130, 5), (chain(40), (-1, 0, 0, 1)), 0))
    without = run(shape, inputs)
    shape = shape._replace(sinks=True)
    inputs["sinks"] = np.array([-np.inf, -1e30, -90.0, -3.0, 0.0, 3.0, 80.0, 200.0, 1e30], np.float32)
    found = run(shape, inputs)
    np.testing.assert_allclose(found, oracle_output(shape, inputs), rtol=0, atol=TOLERANCE)
    np.testing.assert_array_equal(found[:, : 2 * 16], without[:, : 2 * 16])
    assert np.abs(found[:, 6 * 16 :]).max() < 1e-30


def optimised_nodes(shape: Shape, folder: Path) -> list[onnx.NodeProto]:
    """Return what ONNX Runtime makes of the inlined function."""
    model = inline_tree_attention(attention_model(shape, [load_tree_attention_function()]))
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(folder / "optimised.onnx")
    options.log_severity_level = 4
    onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(onnx.load(options.optimized_model_filepath).graph.node)


@pytest.mark.parametrize(("half_pool", "num_casts"), [(False, 0), (True, 6)])
def test_a_float32_pool_costs_no_casts(half_pool: bool, num_casts: int, tmp_path: Path) -> None:
    nodes = optimised_nodes(Shape(4, 2, 16, 8, half_pool=half_pool), tmp_path)
    assert sum(node.op_type == "Cast" and node.output[0].startswith(("k_", "v_")) for node in nodes) == num_casts


@pytest.mark.parametrize(("softcap", "added"), [(0.0, []), (2.0, ["Add", "Div", "Mul", "Mul", "Tanh"])])
def test_no_softcap_costs_no_nodes(softcap: float, added: list[str], tmp_path: Path) -> None:
    """The scores go from their product to the sum with the mask, and nobody chooses between two graphs."""
    nodes = optimised_nodes(Shape(4, 2, 16, 8, softcap=softcap), tmp_path)
    assert "If" not in {node.op_type for node in nodes}
    (product,) = (node for node in nodes if node.op_type == "FusedMatMul")
    (total,) = (node for node in nodes if node.op_type == "Add" and node.output[0].startswith("scores__"))
    between, names = [], {product.output[0]}
    for node in nodes:
        if node is not total and names & set(node.input):
            between.append(node.op_type)
            names |= set(node.output)
        if node is total:
            break
    assert sorted(between) == added
