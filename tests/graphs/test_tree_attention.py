"""The function body of ``draftline::TreeAttention``, run by ONNX Runtime, against the oracle."""

from __future__ import annotations

from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import onnx
import onnxruntime
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph
from draftline.graphs.tree_attention import load_tree_attention_function
from draftline.oracle import tree_attention
from draftline.tree import build_tree_mask, chain_parents, pack_mask

# Scores and values are of order 1, sums over a few hundred keys in float32: rounding stays below 2e-6 in practice, a
# wrong key, mask bit or position moves the result by more than 1e-3.
TOLERANCE = 1e-5
KEY_CHUNK = 128  # tokens; the block table spans a multiple of it


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    window: int

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


class Case(NamedTuple):
    """Committed tokens and in-step tree (``parents``) of each sequence of a step."""

    context_lengths: tuple[int, ...]
    trees: tuple[tuple[int, ...], ...]
    seed: int


def chain(num_nodes: int) -> tuple[int, ...]:
    return tuple(chain_parents(num_nodes).tolist())


def num_columns(shape: Shape, num_keys: int) -> int:
    return -(-num_keys // KEY_CHUNK) * KEY_CHUNK // shape.block_size


@lru_cache(maxsize=64)
def session(shape: Shape, num_threads: int = 1) -> onnxruntime.InferenceSession:
    graph = OnnxGraph()
    heads, kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    pool_shape: list[int | str] = ["num_blocks", 2, kv_heads, shape.block_size, head_size]
    inputs = [
        graph.input("q", TensorProto.FLOAT, ["T", heads, head_size]),
        graph.input("k_new", TensorProto.FLOAT, ["T", kv_heads, head_size]),
        graph.input("v_new", TensorProto.FLOAT, ["T", kv_heads, head_size]),
        graph.input("kv_pool", TensorProto.FLOAT, pool_shape),
        graph.input("block_table", TensorProto.INT32, ["B", "max_blocks"]),
        graph.input("context_lengths", TensorProto.INT32, ["B"]),
        graph.input("sequence_starts", TensorProto.INT32, ["B_plus_1"]),
        graph.input("packed_mask", TensorProto.INT32, ["T", "W"]),
    ]
    attributes = {**shape._asdict(), "scale": shape.scale}
    out = graph.op("TreeAttention", *inputs, domain=DRAFTLINE, **attributes)
    graph.output(out, "out", TensorProto.FLOAT, ["T", heads * head_size])
    model = graph.model("attention", [load_tree_attention_function()])
    onnx.checker.check_model(model)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = num_threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def make_inputs(shape: Shape, case: Case) -> dict[str, NDArray[Any]]:
    """Random rows, a pool whose blocks are handed out in random order, masks of W words for the largest tree."""
    random = np.random.default_rng(case.seed)
    lengths = [len(tree) for tree in case.trees]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    num_tokens, words = int(starts[-1]), -(-max(lengths) // 32)
    masks = np.zeros((num_tokens, words), np.int32)
    for first, tree in zip(starts, case.trees, strict=False):
        packed = pack_mask(build_tree_mask(tree))
        masks[first : first + len(tree), : packed.shape[1]] = packed
    # As the session does it: columns for in-step tokens as well, though they own no block (-1), up to whole chunks.
    committed_blocks = [-(-context // shape.block_size) for context in case.context_lengths]
    keys = [context + length for context, length in zip(case.context_lengths, lengths, strict=True)]
    table = np.full((len(keys), num_columns(shape, max(keys))), -1, np.int32)
    num_blocks = sum(committed_blocks) + 3
    free = random.permutation(num_blocks).tolist()
    for row, count in enumerate(committed_blocks):
        table[row, :count] = [free.pop() for _ in range(count)]

    def normal(*size: int) -> NDArray[np.float32]:
        return random.standard_normal(size).astype(np.float32)

    return {
        "q": normal(num_tokens, shape.num_heads, shape.head_size),
        "k_new": normal(num_tokens, shape.num_kv_heads, shape.head_size),
        "v_new": normal(num_tokens, shape.num_kv_heads, shape.head_size),
        "kv_pool": normal(num_blocks, 2, shape.num_kv_heads, shape.block_size, shape.head_size),
        "block_table": table,
        "context_lengths": np.array(case.context_lengths, np.int32),
        "sequence_starts": starts,
        "packed_mask": masks,
    }


def run(shape: Shape, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float32]:
    out: NDArray[np.float32] = session(shape).run(None, inputs)[0]
    return out


shapes = st.sampled_from(
    [
        Shape(4, 2, 16, 8, 0),
        Shape(4, 4, 8, 16, 0),
        Shape(6, 1, 24, 32, 0),
        Shape(1, 1, 64, 64, 0),
        Shape(9, 3, 2, 128, 0),
        Shape(4, 2, 16, 16, 1),
        Shape(2, 2, 16, 8, 7),
        Shape(3, 1, 32, 32, 20),
    ]
)


@st.composite
def trees(draw: st.DrawFn) -> tuple[int, ...]:
    num_nodes = draw(st.sampled_from([1, 1, 2, 3, 5, 8, 17, 31, 32, 33, 40, 64, 65, 70, 100]))
    if draw(st.booleans()):
        return chain(num_nodes)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return (-1, *(int(random.integers(node)) for node in range(1, num_nodes)))


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sequences = draw(st.lists(st.tuples(st.integers(0, 300), trees()), min_size=1, max_size=5))
    contexts, shapes_of_steps = zip(*sequences, strict=True)
    return Case(contexts, shapes_of_steps, draw(st.integers(0, 2**32 - 1)))


@settings(deadline=None, max_examples=120)
@given(shapes, cases())
@example(Shape(4, 2, 16, 8, 0), Case((0,), ((-1,),), 0))  # no context, one node
@example(Shape(2, 2, 16, 8, 7), Case((128, 127, 1), (chain(1), chain(2), (-1, 0, 0)), 1))  # on both sides of a chunk
def test_function_body_agrees_with_the_oracle(shape: Shape, case: Case) -> None:
    inputs = make_inputs(shape, case)
    expected = tree_attention(**inputs, scale=shape.scale, window=shape.window)
    np.testing.assert_allclose(run(shape, inputs), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("shape", [Shape(4, 2, 16, 8, 0), Shape(1, 1, 64, 64, 0), Shape(3, 1, 32, 32, 20)])
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
            "kv_pool": together["kv_pool"],
            "block_table": together["block_table"][index : index + 1, :columns],
            "context_lengths": together["context_lengths"][index : index + 1],
            "sequence_starts": np.array([0, len(tree)], np.int32),
            "packed_mask": together["packed_mask"][rows, : -(-len(tree) // 32)],
        }
        np.testing.assert_array_equal(run(shape, alone), whole[rows])


@pytest.mark.parametrize(("shape", "context"), [(Shape(9, 3, 64, 16, 0), 5000), (Shape(8, 1, 128, 16, 0), 700)])
def test_bits_of_a_row_do_not_depend_on_rows_and_threads(shape: Shape, context: int) -> None:
    """Products are cut among threads by their size; head sizes up to 128 are summed in one go wherever the cuts lie."""
    inputs = make_inputs(shape, Case((context,), (chain(24),), 7))
    expected = session(shape).run(None, inputs)[0]
    for num_threads, num_rows in ((8, 24), (8, 1), (3, 2), (1, 1)):
        part = {
            **inputs,
            **{name: inputs[name][:num_rows] for name in ("q", "k_new", "v_new", "packed_mask")},
            "sequence_starts": np.array([0, num_rows], np.int32),
            "block_table": inputs["block_table"][:, : num_columns(shape, context + num_rows)],
        }
        np.testing.assert_array_equal(session(shape, num_threads).run(None, part)[0], expected[:num_rows])


@pytest.mark.parametrize("num_threads", [1, 2, 8])
@pytest.mark.parametrize(
    "shape",
    [
        Shape(4, 2, 16, 8, 0),
        Shape(1, 1, 64, 64, 0),
        Shape(9, 3, 64, 16, 20),
        Shape(4, 4, 16, 16, 0),
        Shape(8, 1, 128, 16, 0),
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
