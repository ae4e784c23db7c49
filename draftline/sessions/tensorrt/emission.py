"""The graphs of an engine for TensorRT, with their weights beside them: the target's, and one of each drafter."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
from onnx import TensorProto, helper

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.errors import BuildError
from draftline.graphs.decoder import Pool
from draftline.graphs.eagle import head_layers
from draftline.graphs.onnx_graph import TensorLocation
from draftline.graphs.target import EMBEDDING, LM_HEAD, build_target_graph
from draftline.graphs.tensorrt_operators import NetworkDtype, TensorRtOperators
from draftline.kernels.shape import KernelShape
from draftline.sessions.draft_builder import DraftParts, DraftSource, describe_drafts, target_taps
from draftline.sessions.engine_config import DraftConfig, PoolDtype, PoolScales
from draftline.sessions.engine_weights import (
    CHECKPOINT_FILE,
    WEIGHTS_FILE,
    read_engine_weights,
)
from draftline.sessions.gpu_weight_forms import STORED_AS
from draftline.sessions.rotary_weights import rotary_entries
from draftline.sessions.tensorrt.profiles import Profile, StepLimits, draft_profiles, target_profiles
from draftline.speculation import TreeShape

TARGET = "model"
POOL_TYPES: dict[PoolDtype, int] = {
    "float32": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "bfloat16": TensorProto.BFLOAT16,
    "float8_e4m3fn": TensorProto.INT8,  # the bits of its numbers
}


@dataclass(frozen=True)
class EmittedGraph:
    """A graph in ``file``, for the kernels of ``kernel_shapes`` and within ``profiles``. ``name``: ``model``,
    ``draft-I``. ``pool_scales``: of a float8 pool, of the keys and of the values of each layer.

    ``kernel_shapes``: one for each window that layers have, 0 = none; they differ in nothing else. ``has_experts``:
    whether rows choose among MLPs."""

    name: str
    file: Path
    kernel_shapes: tuple[KernelShape, ...]
    profiles: dict[str, Profile]
    pool_scales: PoolScales = ()
    has_experts: bool = False

    @property
    def kernel_shape(self) -> KernelShape:
        """The first of ``kernel_shapes``, for what all have alike."""
        return self.kernel_shapes[0]

    @property
    def plan_file(self) -> str:
        return f"{self.name}.plan"


@dataclass(frozen=True)
class EmittedGraphs:
    """All graphs of an engine, the target's first, and what ``config.json`` says of them."""

    model: CheckpointConfig
    drafts: tuple[DraftConfig, ...]
    graphs: tuple[EmittedGraph, ...]


def emit_graphs(
    checkpoint: Path,
    destination: Path,
    *,
    dtype: NetworkDtype,
    pool_dtype: PoolDtype,
    limits: StepLimits,
    pool_scales: PoolScales = (),
    weights_dtype: str | None = None,
    drafts: Sequence[DraftSource] = (),
    tree: TreeShape | None = None,
    is_widened: bool = False,
) -> EmittedGraphs:
    """Write the graphs of a converted checkpoint, and links to its weights, into the existing folder ``destination``.

    ``weights_dtype``: one of ``STORED_AS``, or None = ``dtype``; matrices from and to the vocabulary have ``dtype`` in
    either. ``is_widened``: matrices have ``dtype``, float32, and hold what ``weights_dtype`` rounds them to.

    ``pool_scales``: of a float8 pool. Beside ``pool_dtype`` of another type the target's graph rounds rows as a float8
    pool would, and its pool holds what that one would, widened. Pools of drafters have ``dtype`` where the target's is
    float8: nothing says how large a drafter's keys are.

    Raises: BuildError for a checkpoint of another dtype, for rows that overflow it, and for drafts that do not fit.
    """
    config = load_checkpoint_config(checkpoint)
    check_checkpoint_dtype("target", config.dtype, dtype)
    check_rows_fit("target", config, dtype)
    form = STORED_AS.get(weights_dtype or dtype)
    stored, rounded_as = (dtype, form) if is_widened else (form or dtype, None)
    described = describe_drafts(config, drafts, tree, stored, "onnxruntime", limits.max_seq_len, rounded_as)
    pool, operators = Pool(limits.block_size, POOL_TYPES[pool_dtype], pool_scales), TensorRtOperators(dtype)
    draft_pool_dtype: PoolDtype = dtype if pool_scales else pool_dtype
    draft_pool = Pool(limits.block_size, POOL_TYPES[draft_pool_dtype])
    num_positions = limits.max_seq_len + (0 if tree is None else tree.max_depth)
    target = read_engine_weights(
        checkpoint,
        config.dtype,
        stored,
        "onnxruntime",
        outer=(EMBEDDING, LM_HEAD),
        first=rotary_entries(config, limits.max_seq_len, num_positions),
        file=WEIGHTS_FILE,
        linked_file=CHECKPOINT_FILE,
        rounded_as=rounded_as,
    )
    locations = target.write(destination, lambda: None)
    tensors = [draft.weights.write(destination, lambda: None) if draft.weights else {} for draft in described]
    heads = [own for draft, own in zip(described, tensors, strict=True) if draft.config.method == "medusa"]
    model = build_target_graph(config, locations | dict(ChainMap(*heads)), pool, target_taps(described), operators)

    def save(
        name: str,
        graph: onnx.ModelProto,
        layers: CheckpointConfig,
        own_pool: PoolDtype,
        profiles: dict[str, Profile],
        scales: PoolScales = (),
    ) -> EmittedGraph:
        file, shapes = destination / f"{name}.onnx", kernel_shapes(layers, limits.block_size, dtype, own_pool)
        onnx.save(graph, file)
        return EmittedGraph(name, file, shapes, profiles, scales, layers.experts is not None)

    graphs = [save(TARGET, model, config, pool_dtype, target_profiles(limits), pool_scales)]
    for index, (draft, own) in enumerate(zip(described, tensors, strict=True)):
        graph = draft.build_graph(own, locations, config, draft_pool, operators)
        if graph is not None:
            layers = _layers_of(draft)
            check_checkpoint_dtype(f"drafts[{index}]", layers.dtype, dtype)
            check_rows_fit(f"drafts[{index}]", layers, dtype)
            graphs.append(save(f"draft-{index}", graph, layers, draft_pool_dtype, draft_profiles(limits)))
    return EmittedGraphs(config, tuple(draft.config for draft in described), tuple(graphs))


def kernel_shapes(
    layers: CheckpointConfig, block_size: int, dtype: NetworkDtype, pool_dtype: PoolDtype
) -> tuple[KernelShape, ...]:
    """Return the shapes of the kernels of these layers, one for each window that some have.

    Raises: BuildError where kernels have no code for one.
    """
    windows = sorted({layers.window(layer) for layer in range(layers.num_hidden_layers)})
    heads = layers.num_attention_heads, layers.num_key_value_heads, layers.head_size
    others = layers.attention_softcap or 0.0, layers.attention_sinks
    return tuple(KernelShape(*heads, block_size, dtype, pool_dtype, window, *others) for window in windows)


def check_checkpoint_dtype(where: str, found: str, dtype: NetworkDtype) -> None:
    """Raise BuildError unless a converted checkpoint has the network's dtype, or is widened to float32."""
    if dtype not in (found, "float32"):
        rule, cure = f"the converted checkpoint is of the network's dtype, {dtype}", "set target.dtype to it"
        raise BuildError(where, rule, found, cure)


def check_rows_fit(where: str, layers: CheckpointConfig, dtype: NetworkDtype) -> None:
    """Raise BuildError where rows of this network grow beyond what float16 holds.

    Source: the residual streams of Gemma 2 and 3 do; vLLM's ``_FLOAT16_NOT_SUPPORTED_MODELS`` names both. That of
    gpt-oss-120b does in its last layer (pull request 2444 of onnxruntime-genai).
    """
    has_clamped_gates = layers.experts is not None and layers.experts.gate_limit is not None
    if dtype == "float16" and (layers.post_norms or has_clamped_gates):
        rule = f"rows of {layers.architecture} need more than float16's 65504"
        raise BuildError(where, rule, dtype, "set target.dtype to bfloat16 or float32")


def make_weights_inputs(graph: onnx.ModelProto) -> dict[str, TensorLocation]:
    """Make inputs of the initializers that lie in files: weights are then bound to a network, not built into it.

    Returns where they lie, by the input's name.
    """
    outside = [tensor for tensor in graph.graph.initializer if tensor.data_location == TensorProto.EXTERNAL]
    locations = {}
    for tensor in outside:
        where = {entry.key: entry.value for entry in tensor.external_data}
        offset, num_bytes, shape = int(where["offset"]), int(where["length"]), tuple(tensor.dims)
        locations[tensor.name] = TensorLocation(where["location"], offset, num_bytes, tensor.data_type, shape)
        graph.graph.input.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, shape))
        graph.graph.initializer.remove(tensor)
    return locations


def _layers_of(draft: DraftParts) -> CheckpointConfig:
    if draft.model is not None:
        return draft.model
    assert draft.head is not None, "a drafter with a graph has layers"
    return head_layers(draft.head)
