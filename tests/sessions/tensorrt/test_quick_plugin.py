"""The quick plugin of ``tensorrt.plugin``, for which a stand-in serves: the package is not to be had here."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import onnx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.errors import BuildError
from draftline.graphs.tree_attention import load_tree_attention_function
from draftline.kernels.arguments import QUICK, SIGNATURES, constants
from draftline.kernels.cases import SMALL, KernelCase, branching, expected, kernel_inputs
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.configurations import default_configuration
from draftline.kernels.launches import attention_launches
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.kernels.source import import_triton, load_kernel
from draftline.sessions.tensorrt import quick_plugin
from draftline.sessions.tensorrt.plugin import SHAPE_FIELDS
from draftline.sessions.tensorrt.plugin_kernels import PluginKernels
from draftline.sessions.tensorrt.quick_plugin import (
    MAX_SHARED_BYTES,
    PLUGIN_ID,
    QuickPlugin,
    compile_quick_plugin_kernels,
    drop_scratch,
    float_bits,
    name_quick_plugin,
    register_quick_plugin,
)
from draftline.sessions.tensorrt.vendor import VENDORS, Vendor
from tests.kernels.interpreter import interpreted, to_torch
from tests.sessions.tensorrt.fake_quick_plugins import FakeQuickPlugins, evaluate
from tests.sessions.tensorrt.plans import emit_tiny, rtx
from tests.tree_attention_cases import Case, chain

SIZES = {
    "q": ("T", "H", "D"),
    "k_new": ("T", "K", "D"),
    "v_new": ("T", "K", "D"),
    "kv_pool": ("num_blocks", "two", "K", "S", "D"),
    "block_table": ("B", "max_blocks"),
    "context_lengths": ("B",),
    "sequence_starts": ("B_plus_1",),
    "packed_mask": ("T", "W"),
    "sinks": ("H",),
}
SHAPE = KernelShape(8, 2, 64, 16)


def kernel_of(shape: KernelShape, architecture: int = 89) -> CompiledKernel:
    names = (*SIGNATURES[QUICK], "global_scratch", "profile_scratch")
    parameters = ",\n".join(f"\t.param .u64 p_{index}" for index in range(len(names)))
    return CompiledKernel(
        name=QUICK,
        architecture=architecture,
        entry="quick_entry",
        cubin=b"",
        ptx=f".visible .entry quick_entry(\n{parameters}\n)\n.reqntid 128\n{{\n\tld.param.u64 %rd1, [p_16];\n}}",
        shared_bytes=MAX_SHARED_BYTES,
        num_warps=4,
        num_registers=128,
        spill_bytes=0,
        arguments=names,
        argument_types=("pointer",) * len(names),
        configuration=replace(default_configuration(shape, architecture), max_sections=1),
    )


def registered() -> tuple[QuickPlugin, FakeQuickPlugins]:
    module = FakeQuickPlugins()
    plugin = QuickPlugin(module)
    described, launched = quick_plugin._functions(plugin)
    module.register(PLUGIN_ID)(described)
    module.aot_impl(PLUGIN_ID)(launched)
    return plugin, module


def attributes_of(shape: KernelShape, scales: tuple[float, float, float] = (0.125, 1.0, 1.0)) -> dict[str, Any]:
    """In the order of the operator's attributes, as one-element arrays: the vendor's fields."""
    values = {name: getattr(shape, name) for name in SHAPE_FIELDS}
    values |= dict(zip(("scale", "key_scale", "value_scale"), scales, strict=True))
    return {name: np.array([values[name]]).item() for name in load_tree_attention_function().attribute}


@given(
    st.sampled_from([(8, 2, 64), (9, 3, 64), (32, 8, 128), (4, 4, 80), (8, 1, 256)]),
    st.sampled_from([0, 100]),
    st.sampled_from([0.0, 50.0]),
    st.integers(1, 70),
    st.integers(0, 2000),
    st.integers(1, 4096),
    st.integers(1, 8),
)
def test_the_launch_is_ours_for_all_sizes(
    heads: tuple[int, int, int],
    window: int,
    softcap: float,
    num_sequences: int,
    more_tokens: int,
    max_blocks: int,
    words: int,
) -> None:
    """The vendor evaluates the expressions; ``attention_launches`` says what we launch with these numbers."""
    shape = KernelShape(*heads, 16, window=window, softcap=softcap, has_sinks=window > 0)
    kernel, (plugin, module) = kernel_of(shape), registered()
    scales = (0.11785113, 2.0**-4, 8.0)
    with plugin.building([PluginKernels(shape, (kernel,))]):
        output, launch = module.definitions[PLUGIN_ID].build(SIZES, attributes_of(shape, scales))
    entry, _, parameters, arguments = launch
    num_tokens = num_sequences + more_tokens
    sizes = {"T": num_tokens, "B": num_sequences, "max_blocks": max_blocks, "W": words}
    (own,) = attention_launches(shape, kernel.configuration, num_tokens, num_sequences, max_blocks)
    grid = parameters.grid_x, parameters.grid_y, parameters.grid_z
    assert tuple(evaluate(value, sizes) for value in grid) == own.grid
    assert (parameters.block_x, parameters.shared_mem, entry) == (128, kernel.shared_bytes, "quick_entry")
    values = [evaluate(argument.value, sizes) for argument in arguments.values]
    given_scales = np.array(values[:3], np.int32).view(np.float32)
    np.testing.assert_array_equal(given_scales, np.array(scales, np.float32))
    assert values[3:] == [num_tokens, num_sequences, max_blocks, words]
    assert [evaluate(size, sizes) for size in output.shape_expr] == [num_tokens, heads[0] * heads[2]]
    assert output.dtype == "type of q"


def test_arguments_are_inputs_then_integers_then_outputs() -> None:
    """The order in which the vendor passes them."""
    kinds = list(SIGNATURES[QUICK].values())
    names = list(SIGNATURES[QUICK])
    assert names[:9] == list(SIZES)
    assert kinds[9:16] == ["i32"] * 7
    assert names[16:] == ["out"]


def test_a_layer_of_another_shape_is_refused() -> None:
    plugin, module = registered()
    attributes = attributes_of(KernelShape(4, 2, 64, 16))
    with (
        plugin.building([PluginKernels(SHAPE, (kernel_of(SHAPE),))]),
        pytest.raises(BuildError, match=r"draftline::TreeAttention: has the shape of the kernels, .*num_heads=8"),
    ):
        module.definitions[PLUGIN_ID].build(SIZES, attributes)
    with pytest.raises(BuildError, match=r"engine\.plugin: quick: a network is parsed for kernels; got none; "):
        module.definitions[PLUGIN_ID].build(SIZES, attributes)


def test_scratch_is_dropped_where_nobody_reads_it() -> None:
    kernel = kernel_of(SHAPE)
    ptx = drop_scratch(kernel)
    assert re.findall(r"\.param \.u64 (\w+)", ptx) == [f"p_{index}" for index in range(17)]
    assert ptx.endswith(kernel.ptx[kernel.ptx.index("\n.reqntid") :])
    with pytest.raises(BuildError, match=r"reads none of them; got p_18 is read; "):
        drop_scratch(replace(kernel, ptx=kernel.ptx.replace("[p_16]", "[p_18]")))
    with pytest.raises(BuildError, match="got no entry other; "):
        drop_scratch(replace(kernel, entry="other"))
    with pytest.raises(BuildError, match="ends in the parameters global_scratch and profile_scratch"):
        drop_scratch(replace(kernel, arguments=kernel.arguments[:-1]))


def test_real_ptx_without_scratch_assembles(tmp_path: Path) -> None:
    """The compiler's own code, with 17 parameters, through its assembler; in as much memory as a launch has."""
    kernels = compile_quick_plugin_kernels(KernelShape(4, 2, 64, 16), 89, tmp_path / "cache")
    (kernel,) = kernels.compiled
    assert kernel.configuration.max_sections == 1
    assert kernel.shared_bytes <= MAX_SHARED_BYTES
    assert kernel.spill_bytes == 0
    source = tmp_path / "quick.ptx"
    source.write_text(drop_scratch(kernel))
    assembler = import_triton().knobs.nvidia.ptxas.path
    command = [assembler, "-arch=sm_89", "-o", str(tmp_path / "quick.cubin"), str(source)]
    subprocess.run(command, check=True, capture_output=True)
    assert (tmp_path / "quick.cubin").stat().st_size > 1000


def test_more_memory_than_a_launch_has_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    large = replace(kernel_of(SHAPE), shared_bytes=MAX_SHARED_BYTES + 16)
    monkeypatch.setattr(quick_plugin, "compile_quick_kernel", lambda *arguments: large)
    with pytest.raises(
        BuildError, match=r"49152 bytes of shared memory at most; got 49168; set engine\.plugin to runtime"
    ):
        compile_quick_plugin_kernels(SHAPE, 89, tmp_path)


def run_quick(
    shape: KernelShape, configuration: KernelConfiguration, inputs: dict[str, NDArray[Any]], scales: tuple[float, ...]
) -> NDArray[np.float32]:
    """Call the kernel as the vendor does: inputs, integers, outputs. Interpreted."""
    tensors = {name: to_torch(array) for name, array in inputs.items()}
    num_tokens, words = tensors["packed_mask"].shape
    num_sequences, max_blocks = tensors["block_table"].shape
    out = tensors["q"].new_zeros((num_tokens, shape.num_heads * shape.head_size))
    integers = [*map(float_bits, scales), num_tokens, num_sequences, max_blocks, words]
    (launch,) = attention_launches(shape, configuration, num_tokens, num_sequences, max_blocks)
    fixed = constants(QUICK, shape, configuration) | {"DOT_IN_FLOAT32": True}
    load_kernel(QUICK)[launch.grid](*(tensors[name] for name in SIZES), *integers, out, **fixed)
    result: NDArray[np.float32] = out.float().numpy()
    return result


@pytest.mark.parametrize("has_sinks", [False, True])
def test_the_kernel_agrees_with_the_oracle(has_sinks: bool) -> None:
    """A tree behind a context of several sections' length, which one program takes here."""
    shape = KernelShape(4, 2, 16, 8, has_sinks=has_sinks)
    case = KernelCase(shape, replace(SMALL, max_sections=1), Case((150, 0), (branching(5), chain(2)), 0))
    inputs = kernel_inputs(case)
    found = interpreted(run_quick, shape, case.configuration, inputs, (case.scale, 1.0, 1.0))
    np.testing.assert_allclose(found, expected(case, inputs), rtol=0, atol=4e-3)


def test_nodes_name_the_plugin(tmp_path: Path) -> None:
    graph = emit_tiny(tmp_path).graphs[0]
    name_quick_plugin(graph.file)
    nodes = [node for node in onnx.load(graph.file, load_external_data=False).graph.node if node.domain == "draftline"]
    assert len(nodes) == 2
    for node in nodes:
        found = {attribute.name: onnx.helper.get_attribute_value(attribute) for attribute in node.attribute}
        assert (found["plugin_namespace"], found["aot"]) == (b"draftline", 1)


def test_a_vendor_without_quick_plugins_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """TensorRT-RTX's module has no such part."""
    with pytest.raises(BuildError, match=r"engine.plugin: quick: .* has tensorrt.plugin with aot_impl; got .*runtime"):
        register_quick_plugin(rtx())
    old = SimpleNamespace(__name__="old_vendor", __version__="10.14")
    monkeypatch.setitem(sys.modules, "old_vendor", ModuleType("old_vendor"))
    monkeypatch.setitem(sys.modules, "old_vendor.plugin", ModuleType("old_vendor.plugin"))
    with pytest.raises(BuildError, match=r"got no aot_impl in its module plugin; set engine\.plugin to runtime"):
        register_quick_plugin(Vendor("tensorrt", old, VENDORS["tensorrt"]))


def test_it_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    module = FakeQuickPlugins()
    monkeypatch.setitem(sys.modules, "new_vendor", ModuleType("new_vendor"))
    monkeypatch.setitem(sys.modules, "new_vendor.plugin", module)
    vendor = Vendor("tensorrt", SimpleNamespace(__name__="new_vendor", __version__="11.4"), VENDORS["tensorrt"])
    assert register_quick_plugin(vendor) is register_quick_plugin(vendor)
    definition = module.definitions["draftline::TreeAttention"]
    function = load_tree_attention_function()
    assert definition.tensors == tuple(function.input)
    assert list(definition.attributes) == list(function.attribute)
    assert definition.launched is not None
