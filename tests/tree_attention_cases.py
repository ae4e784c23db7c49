"""Cases of ``draftline::TreeAttention`` for the tests of its function body and of its native kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx
from hypothesis import strategies as st
from numpy.typing import NDArray
from onnx import TensorProto

from draftline.graphs.onnx_graph import DRAFTLINE, OnnxGraph
from draftline.kernels.cases import TABLE_KEYS, chain, make_step, no_sinks, random_sinks
from draftline.kernels.cases import StepCase as Case
from draftline.oracle import tree_attention

# Scores and values are of order 1, sums over a few hundred keys in float32: rounding stays below 2e-6 in practice, a
# wrong key, mask bit or position moves the result by more than 1e-3.
TOLERANCE = 1e-5
HALF_TOLERANCE = 2e-3  # of float16: its rounding of a result between 2 and 4


class Shape(NamedTuple):
    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    window: int = 0
    half_pool: bool = False
    half_rows: bool = False
    softcap: float = 0.0
    sinks: bool = False

    @property
    def scale(self) -> float:
        return float(self.head_size**-0.5)


def num_columns(shape: Shape, num_keys: int) -> int:
    return -(-num_keys // TABLE_KEYS) * TABLE_KEYS // shape.block_size


def attention_model(shape: Shape, functions: Sequence[onnx.FunctionProto]) -> onnx.ModelProto:
    """Build a graph of the operator alone; ``functions`` holds its body where that is to run it.

    Sinks are an input where the shape has some, and a constant where not, as in graphs of models without.
    """
    graph = OnnxGraph()
    heads, kv_heads, head_size = shape.num_heads, shape.num_kv_heads, shape.head_size
    pool_shape: list[int | str] = ["num_blocks", 2, kv_heads, shape.block_size, head_size]
    row_type = TensorProto.FLOAT16 if shape.half_rows else TensorProto.FLOAT
    inputs = [
        graph.input("q", row_type, ["T", heads, head_size]),
        graph.input("k_new", row_type, ["T", kv_heads, head_size]),
        graph.input("v_new", row_type, ["T", kv_heads, head_size]),
        graph.input("kv_pool", TensorProto.FLOAT16 if shape.half_pool else TensorProto.FLOAT, pool_shape),
        graph.input("block_table", TensorProto.INT32, ["B", "max_blocks"]),
        graph.input("context_lengths", TensorProto.INT32, ["B"]),
        graph.input("sequence_starts", TensorProto.INT32, ["B_plus_1"]),
        graph.input("packed_mask", TensorProto.INT32, ["T", "W"]),
        graph.input("sinks", TensorProto.FLOAT, ["H"]) if shape.sinks else graph.constant(no_sinks(heads)),
    ]
    names = ("num_heads", "num_kv_heads", "head_size", "block_size", "window", "softcap")
    attributes = {name: getattr(shape, name) for name in names}
    attributes |= {"key_scale": 1.0, "value_scale": 1.0}
    out = graph.op("TreeAttention", *inputs, domain=DRAFTLINE, **attributes, scale=shape.scale)
    graph.output(out, "out", row_type, ["T", heads * head_size])
    return graph.model("attention", functions)


def make_inputs(shape: Shape, case: Case) -> dict[str, NDArray[Any]]:
    """Make a step's inputs as the kernels' cases do, with the shape's rows and pool."""
    inputs = make_step(shape.num_heads, shape.num_kv_heads, shape.head_size, shape.block_size, case)
    if shape.half_rows:
        inputs |= {name: inputs[name].astype(np.float16) for name in ("q", "k_new", "v_new")}
    if shape.sinks:
        inputs["sinks"] = random_sinks(shape.num_heads, case.seed)
    pool = inputs["kv_pool"]
    return {**inputs, "kv_pool": pool.astype(np.float16) if shape.half_pool else pool}


def oracle_output(shape: Shape, inputs: dict[str, NDArray[Any]]) -> NDArray[np.float64]:
    """Return the oracle's result."""
    return tree_attention(**inputs, scale=shape.scale, window=shape.window, softcap=shape.softcap)


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
        Shape(4, 2, 16, 16, 0, half_pool=True),
        Shape(6, 2, 24, 8, 9, half_pool=True),
        Shape(4, 2, 16, 16, softcap=2.0),
        Shape(3, 1, 32, 8, 20, softcap=50.0),
        Shape(6, 2, 24, 8, 9, half_pool=True, softcap=0.5),
        Shape(4, 2, 16, 16, sinks=True),
        Shape(3, 1, 32, 8, 20, softcap=2.0, sinks=True),
        Shape(6, 2, 24, 8, 9, half_pool=True, sinks=True),
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
