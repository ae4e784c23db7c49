"""``draftline::TreeAttention`` as a quick plugin of ``tensorrt.plugin``: the kernel is in the plan, and no Python runs.

Source: NVIDIA's pages of ``tensorrt.plugin`` (``register``, ``aot_impl``, ``KernelLaunchParams``, ``SymIntExprs``) and
the guide of Python plugins, TensorRT 11. TensorRT launches one kernel, and passes it addresses of inputs, integers that
are expressions of sizes, and addresses of outputs. Hence ``tree_attention_quick``: all keys in one section, scales as
the bits of float32. The module ``tensorrt.plugin`` is a parameter.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import GenericAlias
from typing import Any

import numpy as np
import onnx
from onnx import helper

from draftline.errors import BuildError
from draftline.graphs.onnx_graph import DRAFTLINE
from draftline.kernels.arguments import QUICK
from draftline.kernels.compilation import compile_quick_kernel
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.launches import attention_launches
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt.plugin import NAME, SCALES, SHAPE_FIELDS
from draftline.sessions.tensorrt.plugin_kernels import INPUTS, SCRATCH, PluginKernels, kernels_of_window
from draftline.sessions.tensorrt.vendor import Vendor

PLUGIN_ID = f"{DRAFTLINE}::{NAME}"
WHERE = "engine.plugin: quick"
MAX_SHARED_BYTES = 48 * 1024  # of a launch that allows no more by an attribute of the function
ATTRIBUTES = {  # of a node, in the operator's order
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_size", "block_size"), int),
    "scale": float,
    "window": int,
    **dict.fromkeys(("softcap", "key_scale", "value_scale"), float),
}


class QuickPlugin:
    """The functions that ``tensorrt.plugin`` asks. ``kernels``: of the network that is being parsed and built."""

    def __init__(self, module: Any) -> None:
        self.module = module
        self._kernels: Sequence[PluginKernels] = ()

    @contextmanager
    def building(self, kernels: Sequence[PluginKernels]) -> Iterator[None]:
        """Make plugins of ``kernels``, of one architecture, while a network is parsed and built."""
        assert not self._kernels, "one network is built at a time"
        self._kernels = kernels
        try:
            yield
        finally:
            self._kernels = ()

    def describe(self, tensors: Mapping[str, Any], attributes: Mapping[str, Any]) -> Any:
        """Return the description of ``out [T, H * D]``, of the dtype of ``q``."""
        q = tensors["q"]
        columns = attributes["num_heads"] * attributes["head_size"]
        return self.module.from_shape_expr((q.shape_expr[0], columns), dtype=q.dtype)

    def launch(self, tensors: Mapping[str, Any], attributes: Mapping[str, Any]) -> tuple[str, str, Any, Any]:
        """Return the kernel's symbol, its PTX, how it is launched, and the integers that it is passed.

        Raises: BuildError where no network is being built, or the layer has another shape than the kernel.
        """
        module = self.module
        if not self._kernels:
            raise BuildError(WHERE, "a network is parsed for kernels", "none", "build it through draftline")
        kernels = kernels_of_window(self._kernels, attributes["window"])
        shape = KernelShape(
            **{name: attributes[name] for name in SHAPE_FIELDS},
            dtype=kernels.shape.dtype,
            kv_dtype=kernels.shape.kv_dtype,
            has_sinks=kernels.shape.has_sinks,
        )
        kernels.check_shape(shape, PLUGIN_ID)
        (kernel,) = kernels.compiled
        sizes = {
            "num_tokens": tensors["q"].shape_expr[0],
            "num_sequences": tensors["context_lengths"].shape_expr[0],
            "max_blocks": tensors["block_table"].shape_expr[1],
            "mask_words": tensors["packed_mask"].shape_expr[1],
        }
        # The number of sections is 1 whatever the width of the table; the grid is that of numbers, in expressions.
        (launch,) = attention_launches(shape, kernel.configuration, sizes["num_tokens"], sizes["num_sequences"], 0)
        parameters = module.KernelLaunchParams()
        parameters.grid_x, parameters.grid_y, parameters.grid_z = launch.grid
        parameters.block_x = 32 * kernel.num_warps
        parameters.shared_mem = kernel.shared_bytes
        values = sizes | {f"{name}_bits": float_bits(attributes[name]) for name in SCALES}
        names = [name for name in kernel.arguments if name in values]
        arguments = module.SymIntExprs(len(names))
        for index, name in enumerate(names):
            arguments[index] = module.SymInt32(values[name])
        return kernel.entry, drop_scratch(kernel), parameters, arguments


@functools.cache
def register_quick_plugin(vendor: Vendor) -> QuickPlugin:
    """Register the plugin with ``tensorrt.plugin``, once a process.

    Raises: BuildError for a vendor without quick plugins that are compiled ahead of time.
    """
    try:
        module = importlib.import_module(f"{vendor.module.__name__}.plugin")
    except ImportError as error:
        raise _unavailable(vendor, error) from error
    if not hasattr(module, "aot_impl"):
        raise _unavailable(vendor, "no aot_impl in its module plugin")
    plugin = QuickPlugin(module)
    described, launched = _functions(plugin)
    module.register(PLUGIN_ID)(described)
    module.aot_impl(PLUGIN_ID)(launched)
    return plugin


def _unavailable(vendor: Vendor, got: object) -> BuildError:
    rule, cure = f"{vendor.title} has tensorrt.plugin with aot_impl", "set engine.plugin to runtime"
    return BuildError(WHERE, rule, got, cure)


def _functions(plugin: QuickPlugin) -> tuple[Any, Any]:
    """Return the two functions with the signatures that the vendor reads: tensors by name, then attributes."""
    description = plugin.module.TensorDesc
    tensors = dict.fromkeys(INPUTS, description)
    names = (*INPUTS, *ATTRIBUTES)

    def described(*values: Any, **named: Any) -> Any:
        given = dict(zip(names, values, strict=False)) | named
        return plugin.describe(given, given)

    def launched(*values: Any, **named: Any) -> Any:
        given = dict(zip((*names, "outputs", "tactic"), values, strict=False)) | named
        return plugin.launch(given, given)

    text = str | bytes
    result = GenericAlias(tuple, (text, text, plugin.module.KernelLaunchParams, plugin.module.SymIntExprs))
    outputs = GenericAlias(tuple, (description,))
    _sign(described, {**tensors, **ATTRIBUTES}, description)
    _sign(launched, {**tensors, **ATTRIBUTES, "outputs": outputs, "tactic": int}, result)
    return described, launched


def _sign(function: Any, parameters: Mapping[str, Any], result: Any) -> None:
    """Give ``function`` the signature that ``inspect`` reports: names, and types of the vendor's."""
    kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
    signed = [inspect.Parameter(name, kind, annotation=annotation) for name, annotation in parameters.items()]
    function.__signature__ = inspect.Signature(signed, return_annotation=result)


def compile_quick_plugin_kernels(shape: KernelShape, architecture: int, cache: Path) -> PluginKernels:
    """Compile the kernel of ``shape`` for one architecture; ``cache`` keeps it.

    Raises: BuildError where it needs more shared memory than a launch has; what ``compile_quick_kernel`` raises.
    """
    kernel = compile_quick_kernel(shape, architecture, MAX_SHARED_BYTES, cache)
    if kernel.shared_bytes > MAX_SHARED_BYTES:
        rule = f"a quick plugin's kernel has {MAX_SHARED_BYTES} bytes of shared memory at most"
        raise BuildError(WHERE, rule, kernel.shared_bytes, "set engine.plugin to runtime")
    return PluginKernels(shape, (kernel,))


def name_quick_plugin(file: Path) -> None:
    """Say in the graph in ``file`` which plugin serves TreeAttention: by attributes that the parser reads."""
    model = onnx.load(file, load_external_data=False)
    for node in model.graph.node:
        if (node.domain, node.op_type) == (DRAFTLINE, NAME):
            node.attribute.append(helper.make_attribute("plugin_namespace", DRAFTLINE))
            node.attribute.append(helper.make_attribute("aot", 1))
    onnx.save(model, file)


def float_bits(value: float) -> int:
    """Return the bits of a float32 as an int32.

    >>> float_bits(0.5) == 0x3F000000
    True
    """
    return int(np.array(value, np.float32).view(np.int32))


def drop_scratch(kernel: CompiledKernel) -> str:
    """Return the kernel's PTX without the parameters that Triton adds, which nobody passes.

    Raises: BuildError where the kernel reads one of them, or they are not the last.
    """
    rule = f"{QUICK} ends in the parameters {' and '.join(SCRATCH)}, and reads none of them"
    cure = "report it with the version of the package triton"
    head, parameters, body = _entry_parts(kernel, rule, cure)
    own, added = parameters[: -len(SCRATCH)], parameters[-len(SCRATCH) :]
    symbols = [parameter.split()[-1] for parameter in added]
    if kernel.arguments[-len(SCRATCH) :] != SCRATCH or len(parameters) != len(kernel.arguments):
        raise BuildError(WHERE, rule, ", ".join(kernel.arguments), cure)
    for symbol in symbols:
        if re.search(rf"\b{re.escape(symbol)}\b", body):
            raise BuildError(WHERE, rule, f"{symbol} is read", cure)
    return f"{head}(\n{','.join(own)}\n){body}"


def _entry_parts(kernel: CompiledKernel, rule: str, cure: str) -> tuple[str, list[str], str]:
    """Cut PTX at the parameters of its entry, which are declared once, between parentheses."""
    found = re.search(rf"(\.entry\s+{re.escape(kernel.entry)})\s*\((.*?)\)", kernel.ptx, re.DOTALL)
    if found is None:
        raise BuildError(WHERE, rule, f"no entry {kernel.entry}", cure)
    return kernel.ptx[: found.end(1)], found[2].split(","), kernel.ptx[found.end() :]
