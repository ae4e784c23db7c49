"""``draftline::TreeAttention`` as a plugin of TensorRT and TensorRT-RTX (IPluginV3).

With the parser's flag ``ENABLE_PLUGIN_OVERRIDE`` the creator is called for every node of the function, and the network
holds the plugin in the place of the function's body. The vendor's module is a parameter: its interfaces are mixed into
the classes below when they are made.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, cast

import numpy as np
from numpy.typing import NDArray

from draftline.errors import BuildError
from draftline.kernels.shape import Dtype, KernelShape, KvDtype
from draftline.sessions.tensorrt.library_alias import ensure_parser_finds_library
from draftline.sessions.tensorrt.plugin_kernels import (
    INPUTS,
    KernelShelf,
    PluginKernels,
    kernels_of_window,
    read_archive,
)
from draftline.sessions.tensorrt.plugin_launch import AttentionCall, run_attention
from draftline.sessions.tensorrt.vendor import Vendor
from draftline.share import share_path

NAME, VERSION, NAMESPACE = "TreeAttention", "1", ""
SHAPE_FIELDS: dict[str, type[np.generic]] = {  # attributes that kernels are compiled for
    **dict.fromkeys(("num_heads", "num_kv_heads", "head_size", "block_size", "window"), np.int32),
    "softcap": np.float32,
}
SCALES = ("scale", "key_scale", "value_scale")  # attributes that a launch is given
POOL, TABLE, MASK = INPUTS.index("kv_pool"), INPUTS.index("block_table"), INPUTS.index("packed_mask")
SINKS = INPUTS.index("sinks")
ROW_TYPES = ("float32", "float16", "bfloat16")
POOL_TYPES = {name: name for name in ROW_TYPES} | {"int8": "float8_e4m3fn"}  # the bits of its numbers
KERNELS_FIELD, HASH_FIELD = "kernels", "kernels_sha256"
INTERFACES = ("IPluginV3", "IPluginV3OneCore", "IPluginV3OneBuild", "IPluginV3OneRuntime")


class TreeAttentionPlugin:
    """The methods of ``INTERFACES`` that are ours; the class of a vendor comes from ``register_plugin``."""

    vendor: Vendor
    shelf: KernelShelf

    def __init__(
        self, layer: str, attributes: Mapping[str, Any], scales: Mapping[str, float], kernels_sha256: str
    ) -> None:
        for interface in INTERFACES:
            getattr(self.vendor.module, interface).__init__(self)
        self.plugin_name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        self.num_outputs = 1
        self.layer, self.attributes, self.scales, self.kernels_sha256 = layer, attributes, scales, kernels_sha256

    @property
    def kernels(self) -> PluginKernels:
        return self.shelf.find(self.kernels_sha256)

    def get_capability_interface(self, kind: object) -> object:
        return self

    def clone(self) -> object:
        return type(self)(self.layer, self.attributes, self.scales, self.kernels_sha256)

    # While a network is built

    def get_output_data_types(self, input_types: Sequence[object]) -> list[object]:
        return [input_types[0]]

    def get_output_shapes(self, inputs: Sequence[Any], shape_inputs: Sequence[Any], expressions: Any) -> list[Any]:
        columns = self.attributes["num_heads"] * self.attributes["head_size"]
        return [self.vendor.module.DimsExprs([inputs[0][0], expressions.constant(columns)])]

    def supports_format_combination(self, position: int, tensors: Sequence[Any], num_inputs: int) -> bool:
        tensor = tensors[position].desc
        if tensor.format != self.vendor.module.TensorFormat.LINEAR:
            return False
        if position < POOL or position == num_inputs:
            return tensor.type == tensors[0].desc.type and self._name(tensor.type) in ROW_TYPES
        if position == POOL:
            return self._name(tensor.type) in POOL_TYPES
        types = self.vendor.module.DataType
        return bool(tensor.type == (types.FLOAT if position == SINKS else types.INT32))

    def configure_plugin(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._check_types([tensor.desc.type for tensor in inputs])

    def get_workspace_size(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> int:
        num_sequences, max_blocks = inputs[TABLE].max
        return self.kernels.workspace_bytes(inputs[0].max[0], num_sequences, max_blocks)

    def get_valid_tactics(self) -> list[int]:
        return []

    # While an engine runs

    def attach_to_context(self, context: object) -> object:
        return self.clone()

    def set_tactic(self, tactic: int) -> None:
        """Nothing: the kernels have their configuration."""

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        self._check_types([tensor.type for tensor in inputs])

    def enqueue(
        self,
        input_desc: Sequence[Any],
        output_desc: Sequence[Any],
        inputs: Sequence[int],
        outputs: Sequence[int],
        workspace: int,
        stream: int,
    ) -> int:
        num_sequences, max_blocks = input_desc[TABLE].dims
        run_attention(
            AttentionCall(
                kernels=self.kernels,
                pointers=dict(zip(INPUTS, inputs, strict=True)) | {"out": outputs[0], "workspace": workspace},
                num_tokens=input_desc[0].dims[0],
                num_sequences=num_sequences,
                max_blocks=max_blocks,
                mask_words=input_desc[MASK].dims[1],
                stream=stream,
                **self.scales,
            )
        )
        return 0

    def get_fields_to_serialize(self) -> object:
        values: dict[str, NDArray[Any]] = {
            name: np.array([self.attributes[name]], dtype) for name, dtype in SHAPE_FIELDS.items()
        }
        values |= {name: np.array([self.scales[name]], np.float32) for name in SCALES}
        values[HASH_FIELD] = np.frombuffer(bytes.fromhex(self.kernels_sha256), np.int8)
        if self.shelf.is_carrier(self.layer, self.kernels_sha256):
            values[KERNELS_FIELD] = np.frombuffer(self.kernels.archive, np.int8)
        self._serialized = _Fields(self.vendor, values)
        return self._serialized.collection

    def _name(self, data_type: object) -> str | None:
        return self.vendor.dtype_names.get(data_type)

    def _check_types(self, types: Sequence[object]) -> None:
        names = self._name(types[0]), POOL_TYPES.get(self._name(types[POOL]) or "")
        shape = KernelShape(
            **self.attributes,
            dtype=cast(Dtype, names[0]),
            kv_dtype=cast(KvDtype, names[1]),
            has_sinks=self.kernels.shape.has_sinks,
        )
        self.kernels.check_shape(shape, self.layer)


class TreeAttentionCreator:
    """The methods of ``IPluginCreatorV3One`` that are ours. ``kernels``: of the network that is being parsed."""

    vendor: Vendor
    shelf: KernelShelf
    plugin: type[TreeAttentionPlugin]

    def __init__(self) -> None:
        self.vendor.module.IPluginCreatorV3One.__init__(self)
        self.name, self.plugin_version, self.plugin_namespace = NAME, VERSION, NAMESPACE
        dtypes = SHAPE_FIELDS | dict.fromkeys(SCALES, np.float32)
        self._attributes = _Fields(self.vendor, {name: np.zeros(0, dtype) for name, dtype in dtypes.items()})
        self.field_names = self._attributes.collection
        self._kernels: Sequence[PluginKernels] = ()

    @contextmanager
    def building(self, kernels: Sequence[PluginKernels]) -> Iterator[None]:
        """Make plugins of ``kernels``, one for each window that layers have, while a network is parsed and built."""
        assert not self._kernels, "one network is built at a time"
        self._kernels = kernels
        self.shelf.carriers.clear()
        for own in kernels:
            self.shelf.put(own)
        try:
            yield
        finally:
            self._kernels = ()

    def create_plugin(self, name: str, fields: Sequence[Any], phase: object) -> object:
        values = {field.name: np.array(field.data) for field in fields}
        attributes = {key: values[key].item() for key in SHAPE_FIELDS}
        scales = {key: float(values[key].item()) for key in SCALES}
        if KERNELS_FIELD in values:
            self.shelf.put(read_archive(values[KERNELS_FIELD].tobytes()))
        if HASH_FIELD in values:
            sha256 = values[HASH_FIELD].tobytes().hex()
        elif self._kernels:
            sha256 = kernels_of_window(self._kernels, attributes["window"]).sha256
        else:
            rule = "a network with TreeAttention is parsed for kernels"
            raise BuildError(name, rule, "none", "build it through draftline.sessions.tensorrt")
        return self.plugin(name, attributes, scales, sha256)


@functools.cache
def register_plugin(vendor: Vendor) -> TreeAttentionCreator:
    """Register the plugin with ``vendor``, once a process; before any engine of draftline is parsed or loaded.

    Raises: BuildError where the parser would not find its library, or another TreeAttention is registered.
    """
    ensure_parser_finds_library(vendor)
    module, shelf = vendor.module, KernelShelf()
    interfaces = tuple(getattr(module, name) for name in INTERFACES)
    own = {"vendor": vendor, "shelf": shelf}
    plugin = type("TreeAttention", (TreeAttentionPlugin, *interfaces), own)
    creator_bases = (TreeAttentionCreator, module.IPluginCreatorV3One)
    creator = type("TreeAttentionCreator", creator_bases, own | {"plugin": plugin})()
    if not module.get_plugin_registry().register_creator(creator, NAMESPACE):
        rule, cure = f"the plugin {NAME} is registered", "load no other library that registers it"
        raise BuildError(vendor.backend, rule, "another one of this name", cure)
    return cast(TreeAttentionCreator, creator)


@functools.cache
def plugin_sha256() -> str:
    """Hash what plugin and network agree about: the operator's contract and function, and this plugin's version."""
    folder = share_path("plugins") / "tree_attention"
    digest = hashlib.sha256(f"{NAME} {VERSION}\n".encode())
    for path in sorted([*folder.glob("*.yaml"), *folder.glob("*.onnxtxt")]):
        digest.update(path.name.encode() + b"\n" + path.read_bytes())
    return digest.hexdigest()


class _Fields:
    """A collection of the vendor's, which keeps pointers: to arrays and fields that live as long as this object."""

    def __init__(self, vendor: Vendor, values: Mapping[str, NDArray[Any]]) -> None:
        module, kinds = vendor.module, {"int32": "INT32", "float32": "FLOAT32", "int8": "INT8"}
        self._values = dict(values)
        self._fields = [
            module.PluginField(name, array, getattr(module.PluginFieldType, kinds[array.dtype.name]))
            for name, array in self._values.items()
        ]
        self.collection = module.PluginFieldCollection(self._fields)
