"""The plugin TreeAttention in networks and plans of TensorRT-RTX."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import onnx
import pytest

from draftline.bench.gpu.plugin import attention_graph
from draftline.errors import ArtifactError, BuildError
from draftline.graphs.tensorrt_operators import NetworkDtype
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt import plugin as plugin_module
from draftline.sessions.tensorrt.emission import emit_graphs
from draftline.sessions.tensorrt.network import layers_of, parse_network
from draftline.sessions.tensorrt.plan_builder import build_plan
from draftline.sessions.tensorrt.plugin import (
    HASH_FIELD,
    KERNELS_FIELD,
    SCALES,
    SHAPE_FIELDS,
    TreeAttentionPlugin,
    register_plugin,
)
from draftline.sessions.tensorrt.plugin_launch import AttentionCall
from tests.sessions.tensorrt.plans import LIMITS, convert_tiny, emit_tiny, fake_kernels, parse_tiny, rtx
from tests.tiny_checkpoints import WINDOW


def plugins_of(tmp_path: Path, opened: ExitStack, dtype: NetworkDtype = "float16") -> list[TreeAttentionPlugin]:
    network = parse_tiny(emit_tiny(tmp_path, "qwen3", dtype), opened)
    return [layer.plugin for kind, layer in layers_of(network) if kind == "PLUGIN_V3"]


def test_every_layer_attends_through_the_plugin(tmp_path: Path) -> None:
    with ExitStack() as opened:
        first, second = plugins_of(tmp_path, opened)
        assert first.attributes == {
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_size": 128,
            "block_size": 16,
            "window": 0,
            "softcap": 0,
        }
        assert first.scales == {"scale": pytest.approx(128**-0.5), "key_scale": 1, "value_scale": 1}
        assert first.layer != second.layer
        assert first.kernels is second.kernels


def test_scales_of_a_float8_pool_are_those_of_the_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From the graph into the fields of a plan, and into the call."""
    converted, _ = convert_tiny(tmp_path, "llama", "float16")
    (tmp_path / "graphs").mkdir()
    scales = ((0.25, 0.5), (2.0, 0.125))
    graphs = emit_graphs(
        converted,
        tmp_path / "graphs",
        dtype="float16",
        pool_dtype="float8_e4m3fn",
        pool_scales=scales,
        limits=LIMITS,
    )
    calls: list[AttentionCall] = []
    monkeypatch.setattr(plugin_module, "run_attention", calls.append)
    creator = register_plugin(rtx())
    shapes = [(7, 4, 16), (7, 2, 16), (7, 2, 16), (24, 2, 2, 16, 16), (3, 5), (3,), (4,), (7, 2), (4,)]
    with ExitStack() as opened:
        network = parse_tiny(graphs, opened)
        for kind, layer in layers_of(network):
            if kind == "PLUGIN_V3":
                fields: Any = layer.plugin.get_fields_to_serialize()
                copy: Any = creator.create_plugin("copy", list(fields), rtx().module.TensorRTPhase.RUNTIME)
                copy.enqueue([SimpleNamespace(dims=shape) for shape in shapes], [], list(range(9)), [9], 10, 11)
    assert [(call.key_scale, call.value_scale) for call in calls] == list(scales)


def test_a_softcap_is_compiled_into_the_kernels(tmp_path: Path) -> None:
    """From the graph, through fields of float32, to the shape that the kernels were compiled for."""
    shape = KernelShape(4, 2, 16, 8, softcap=0.1)
    file = tmp_path / "attention.onnx"
    onnx.save(attention_graph(shape), file)
    creator = register_plugin(rtx())
    half = [SimpleNamespace(desc=SimpleNamespace(type=rtx().module.DataType.HALF))] * 9

    def copy_of_parsed(kernels: KernelShape) -> TreeAttentionPlugin:
        with ExitStack() as opened:
            network = parse_network(rtx(), file, (fake_kernels(kernels),), lambda line: None, opened)
            (plugin,) = (layer.plugin for kind, layer in layers_of(network) if kind == "PLUGIN_V3")
            fields: Any = plugin.get_fields_to_serialize()
            return cast(
                TreeAttentionPlugin, creator.create_plugin("copy", list(fields), rtx().module.TensorRTPhase.RUNTIME)
            )

    copy_of_parsed(shape).configure_plugin(half, [])
    with pytest.raises(BuildError, match=r"has the shape of the kernels, .*softcap=0\.0, .*\); got .*softcap=0\.1"):
        copy_of_parsed(replace(shape, softcap=0.0)).configure_plugin(half, [])


def test_one_layer_carries_the_kernels_and_all_can_be_made_again(tmp_path: Path) -> None:
    """What the vendor writes into a plan and reads back: fields, through the creator."""
    with ExitStack() as opened:
        plugins = plugins_of(tmp_path, opened)
        for is_carrier in (True, False), (True, False):  # the vendor asks more than once
            fields = [{field.name: field for field in plugin.get_fields_to_serialize()} for plugin in plugins]
            assert tuple(KERNELS_FIELD in own for own in fields) == is_carrier
        archive = np.array(fields[0][KERNELS_FIELD].data).tobytes()
        assert archive == plugins[0].kernels.archive
        creator = register_plugin(rtx())
        creator.shelf.by_hash.clear()
        runtime = rtx().module.TensorRTPhase.RUNTIME
        made = [creator.create_plugin(str(index), list(own.values()), runtime) for index, own in enumerate(fields)]
    for plugin, copy in zip(plugins, made, strict=True):
        assert isinstance(copy, TreeAttentionPlugin)
        assert (copy.attributes, copy.scales) == (plugin.attributes, plugin.scales)
        assert copy.kernels.compiled == fake_kernels(copy.kernels.shape).compiled
    assert set(fields[1]) == {*SHAPE_FIELDS, *SCALES, HASH_FIELD}


def test_layers_run_the_kernels_of_their_window(tmp_path: Path) -> None:
    """And the first layer of each window carries the archive of its kernels."""
    emitted = emit_tiny(tmp_path, "gemma3", "bfloat16")
    assert [shape.window for shape in emitted.graphs[0].kernel_shapes] == [0, WINDOW]
    with ExitStack() as opened:
        network = parse_tiny(emitted, opened)
        plugins = [layer.plugin for kind, layer in layers_of(network) if kind == "PLUGIN_V3"]
        assert [plugin.kernels.shape.window for plugin in plugins] == [WINDOW, 0]
        names = [{field.name for field in plugin.get_fields_to_serialize()} for plugin in plugins]
    assert all(KERNELS_FIELD in own for own in names)


def test_a_plugin_without_its_kernels_says_so(tmp_path: Path) -> None:
    with ExitStack() as opened:
        carrier, other = plugins_of(tmp_path, opened)
        carrier.get_fields_to_serialize()
        fields = list(other.get_fields_to_serialize())
        creator = register_plugin(rtx())
        creator.shelf.by_hash.clear()
        lost: Any = creator.create_plugin("lost", fields, rtx().module.TensorRTPhase.RUNTIME)
        with pytest.raises(ArtifactError, match="one layer of an engine carries the kernels; got none with the hash"):
            _ = lost.kernels


def test_a_plan_holds_the_kernels_of_one_layer(tmp_path: Path) -> None:
    """As often as it holds a layer's other fields: the vendor writes these twice for every profile."""
    emitted = emit_tiny(tmp_path)
    graph = emitted.graphs[0]
    kernels = fake_kernels(graph.kernel_shape)
    shares: list[int] = []
    with ExitStack() as opened:
        network = parse_network(rtx(), graph.file, (kernels,), lambda line: None, opened)
        model = onnx.load(graph.file, load_external_data=False)
        progress = lambda done, total: shares.append(done * 1000 // total)  # noqa: E731
        plan = build_plan(network, model, graph.profiles, (80, 120), progress)
    times = plan.count(kernels.archive)
    assert times > 0
    assert plan.count(bytes.fromhex(kernels.sha256)) == 2 * times, "of both layers"
    assert shares == sorted(shares)
    assert shares[-1] == 1000


def test_what_the_parser_refuses_is_named_by_node(tmp_path: Path) -> None:
    emitted = emit_tiny(tmp_path)
    graph = emitted.graphs[0]
    model = onnx.load(graph.file, load_external_data=False)
    next(node for node in model.graph.node if node.op_type == "TreeAttention").op_type = "Unheard"
    onnx.save(model, graph.file)
    with (
        ExitStack() as opened,
        pytest.raises(BuildError, match=r"model.onnx: TensorRT-RTX 1.*; got node treeattention: "),
    ):
        parse_network(rtx(), graph.file, (fake_kernels(graph.kernel_shape),), lambda line: None, opened)


def test_kernels_are_those_of_the_layers(tmp_path: Path) -> None:
    """Kernels of another dtype are found before a plan is built from them."""
    emitted = emit_tiny(tmp_path)
    graph = emitted.graphs[0]
    kernels = fake_kernels(replace(graph.kernel_shape, dtype="bfloat16", kv_dtype="bfloat16"))
    with ExitStack() as opened:
        network = parse_network(rtx(), graph.file, (kernels,), lambda line: None, opened)
        plugin = next(layer.plugin for kind, layer in layers_of(network) if kind == "PLUGIN_V3")
        half = rtx().module.DataType.HALF
        with pytest.raises(BuildError, match=r"has the shape of the kernels, .*bfloat16.*; got .*float16"):
            plugin.configure_plugin([SimpleNamespace(desc=SimpleNamespace(type=half))] * 9, [])


def test_formats_are_linear_and_of_fitting_types(tmp_path: Path) -> None:
    module = rtx().module
    types, linear = module.DataType, module.TensorFormat.LINEAR
    right = [*[types.HALF] * 3, types.INT8, *[types.INT32] * 4, types.FLOAT, types.HALF]

    def tensors(changed: int, data_type: Any, tensor_format: Any = linear) -> list[Any]:
        kinds = [data_type if index == changed else kind for index, kind in enumerate(right)]
        return [SimpleNamespace(desc=SimpleNamespace(type=kind, format=tensor_format)) for kind in kinds]

    wrong_types = {
        1: types.FLOAT,
        2: types.INT8,
        3: types.FP8,
        4: types.INT64,
        7: types.HALF,
        8: types.HALF,
        9: types.FLOAT,
    }
    with ExitStack() as opened:
        plugin = plugins_of(tmp_path, opened)[0]
        for position in range(10):
            assert plugin.supports_format_combination(position, tensors(-1, None), 9)
            assert not plugin.supports_format_combination(position, tensors(-1, None, module.TensorFormat.CHW4), 9)
        for position, wrong in wrong_types.items():
            assert not plugin.supports_format_combination(position, tensors(position, wrong), 9)


def test_a_call_goes_to_the_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[AttentionCall] = []
    monkeypatch.setattr(plugin_module, "run_attention", calls.append)
    shapes = [(7, 4, 128), (7, 2, 128), (7, 2, 128), (24, 2, 2, 16, 128), (3, 5), (3,), (4,), (7, 2), (4,)]
    with ExitStack() as opened:
        plugin = plugins_of(tmp_path, opened)[0]
        plugin.enqueue([SimpleNamespace(dims=shape) for shape in shapes], [], list(range(1, 10)), [10], 11, 12)
        (call,) = calls
        assert (call.num_tokens, call.num_sequences, call.max_blocks, call.mask_words) == (7, 3, 5, 2)
        assert [call.pointers[name] for name in ("q", "packed_mask", "sinks", "out")] == [1, 8, 9, 10]
        assert (call.pointers["workspace"], call.stream, call.scale) == (11, 12, plugin.scales["scale"])
        assert call.kernels is plugin.kernels


def test_one_network_is_parsed_for_kernels_at_a_time(tmp_path: Path) -> None:
    creator = register_plugin(rtx())
    with pytest.raises(BuildError, match="a network with TreeAttention is parsed for kernels; got none; "):
        creator.create_plugin("layer", _fields(), rtx().module.TensorRTPhase.BUILD)


def _fields() -> list[Any]:
    dtypes = SHAPE_FIELDS | dict.fromkeys(SCALES, np.float32)
    return [SimpleNamespace(name=name, data=np.array([4], dtype)) for name, dtype in dtypes.items()]
