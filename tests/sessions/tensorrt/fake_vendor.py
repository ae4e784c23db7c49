"""A vendor whose engines run the emitted graph in ONNX Runtime, on the memory of ``FakeCuda``.

What it has not itself is the real module's. TreeAttention is the function's body, which takes no padding: it is cut off
before and comes back as NaN, so that whoever reads it, sees it.
"""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import onnx
import onnxruntime
import tensorrt_rtx
from numpy.typing import NDArray

from draftline.graphs.tree_attention import inline_tree_attention
from draftline.sessions.batch_split import KEY_CHUNK, fit_columns
from draftline.sessions.tensorrt.vendor import VENDORS, Vendor
from tests.sessions.tensorrt.fake_cuda import ALIGNMENT, FakeCuda

MAGIC = b"fake plan\n"
SCRATCH_BYTES = 4096


def write_plan(model: onnx.ModelProto, profiles: dict[str, dict[str, tuple[int, int, int]]], kernels: bytes) -> bytes:
    """Return the plan of a graph, whose weights are in it, or inputs."""
    header = json.dumps({"kernels": kernels.hex(), "profiles": profiles}).encode()
    return MAGIC + header + b"\n" + kernels + b"\n" + inline_tree_attention(model).SerializeToString()


class FakeVendorModule:
    """``tensorrt_rtx`` without its runtime."""

    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.contexts: list[FakeContext] = []

        class Runtime(FakeRuntime):
            module = self

        self.Runtime = Runtime

    def __getattr__(self, name: str) -> Any:
        return getattr(tensorrt_rtx, name)

    def get_plugin_registry(self) -> Any:
        return _Registry()


class _Registry:
    def register_creator(self, creator: object, namespace: str) -> bool:
        return True


def fake_vendor(cuda: FakeCuda, backend: Any = "tensorrt_rtx") -> Vendor:
    return Vendor(backend, FakeVendorModule(cuda), VENDORS[backend])


class FakeRuntime:
    module: FakeVendorModule

    def __init__(self, logger: Any) -> None:
        self._logger = logger

    def deserialize_cuda_engine(self, serialized_engine: bytes) -> FakeEngine | None:
        if not serialized_engine.startswith(MAGIC):
            return None
        header, rest = serialized_engine[len(MAGIC) :].split(b"\n", 1)
        described = json.loads(header)
        size = len(bytes.fromhex(described["kernels"])) + 1
        return FakeEngine(self.module, described["profiles"], onnx.load_from_string(rest[size:]))


class FakeEngine:
    def __init__(self, module: FakeVendorModule, profiles: dict[str, Any], model: onnx.ModelProto) -> None:
        self.module, self.profiles, self.model = module, list(profiles.values()), model
        self.inputs = {value.name: value.type.tensor_type for value in model.graph.input}
        self.outputs = {value.name: value.type.tensor_type for value in model.graph.output}
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3
        self.session = onnxruntime.InferenceSession(
            model.SerializeToString(), options, providers=["CPUExecutionProvider"]
        )
        self.max_block_bytes = 0

    @property
    def num_io_tensors(self) -> int:
        return len(self.inputs) + len(self.outputs)

    @property
    def device_memory_size_v2(self) -> int:
        return SCRATCH_BYTES

    def get_tensor_name(self, index: int) -> str:
        return [*self.inputs, *self.outputs][index]

    def get_tensor_mode(self, name: str) -> Any:
        modes = tensorrt_rtx.TensorIOMode
        return modes.INPUT if name in self.inputs else modes.OUTPUT if name in self.outputs else modes.NONE

    def get_tensor_dtype(self, name: str) -> Any:
        kinds = {1: "FLOAT", 6: "INT32", 7: "INT64", 10: "HALF"}
        return getattr(tensorrt_rtx.DataType, kinds[self.type_of(name).elem_type])

    def get_tensor_shape(self, name: str) -> Any:
        return tensorrt_rtx.Dims([size if isinstance(size, int) else -1 for size in self.sizes_of(name)])

    def get_tensor_profile_shape(self, name: str, profile_index: int) -> list[Any]:
        profile = self.profiles[profile_index]
        return [
            tensorrt_rtx.Dims([size if isinstance(size, int) else profile[size][bound] for size in self.sizes_of(name)])
            for bound in range(3)
        ]

    def create_runtime_config(self) -> FakeRuntimeConfig:
        return FakeRuntimeConfig()

    def create_execution_context(self, runtime_config: Any) -> FakeContext:
        own = FakeRuntimeConfig()
        if isinstance(runtime_config, FakeRuntimeConfig):
            own = runtime_config
        else:  # tensorrt: the strategy itself
            own.set_execution_context_allocation_strategy(runtime_config)
        assert own.strategy == tensorrt_rtx.ExecutionContextAllocationStrategy.USER_MANAGED
        context = FakeContext(self, own)
        self.module.contexts.append(context)
        return context

    # Not the vendor's

    def type_of(self, name: str) -> Any:
        return self.inputs.get(name) or self.outputs[name]

    def sizes_of(self, name: str) -> list[int | str]:
        return [dim.dim_param or dim.dim_value for dim in self.type_of(name).shape.dim]

    def numpy_type(self, name: str) -> np.dtype[Any]:
        return onnx.helper.tensor_dtype_to_np_dtype(self.type_of(name).elem_type)


class FakeRuntimeConfig:
    def __init__(self) -> None:
        self.strategy: Any = None
        self.dynamic_shapes_kernel_specialization_strategy: Any = None
        self.cache: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Any) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> object:
        return object()

    def set_runtime_cache(self, cache: Any) -> bool:
        self.cache = cache
        return True


class FakeContext:
    """Refuses what TensorRT refuses: names, shapes outside the profile, unset or misaligned addresses, no memory, and a
    capture of shapes that did not run before. A graph whose context was changed since is not replayed."""

    def __init__(self, engine: FakeEngine, config: FakeRuntimeConfig) -> None:
        self.engine, self.config = engine, config
        self.profile = -1
        self.shapes: dict[str, tuple[int, ...]] = {
            name: tuple(engine.sizes_of(name))  # type: ignore[arg-type]
            for name in engine.inputs
            if all(isinstance(size, int) for size in engine.sizes_of(name))
        }
        self.addresses: dict[str, int] = {}
        self.memory = (0, 0)
        self.version = 0  # of shapes and addresses
        self.num_runs = 0
        self._has_run: int | None = None

    def set_device_memory(self, memory: int, size: int) -> None:
        assert memory % ALIGNMENT == 0
        self.memory = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.engine.module.cuda.stream(stream_handle)
        if not 0 <= profile_index < len(self.engine.profiles):
            return False
        self.profile = profile_index
        return True

    def set_input_shape(self, name: str, shape: Any) -> bool:
        if name not in self.engine.inputs or self.profile < 0:
            return False
        low, _, high = (tuple(each) for each in self.engine.get_tensor_profile_shape(name, self.profile))
        given = tuple(shape)
        if len(given) != len(low) or any(
            not least <= size <= most for size, least, most in zip(given, low, high, strict=True)
        ):
            return False
        if self.shapes.get(name) != given:
            self.version += 1
        self.shapes[name] = given
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        if name not in (*self.engine.inputs, *self.engine.outputs) or memory % ALIGNMENT or not memory:
            return False
        if self.addresses.get(name) != memory:
            self.version += 1
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        engine, cuda = self.engine, self.engine.module.cuda
        stream = cuda.stream(stream_handle)
        named = {*engine.inputs, *engine.outputs}
        if set(self.addresses) != named or set(self.shapes) != set(engine.inputs) or not self._sizes_agree():
            return False
        cuda.device(*self.memory)
        if self.memory[1] < engine.device_memory_size_v2:
            return False
        if stream.captured is not None and self._has_run != self.version:
            return False
        self._has_run = version = self.version

        def work() -> None:
            assert self.version == version, "a context is left as it is while its work waits, or its graph lives"
            self._run()

        stream.add(work)
        return True

    def _sizes_agree(self) -> bool:
        """Tell whether a size that several inputs have is the same in all."""
        sizes: dict[str, int] = {}
        return all(
            isinstance(name, int) or sizes.setdefault(name, size) == size
            for key, shape in self.shapes.items()
            for name, size in zip(self.engine.sizes_of(key), shape, strict=True)
        )

    def _run(self) -> None:
        self.num_runs += 1
        cuda, engine = self.engine.module.cuda, self.engine

        def view(name: str, shape: tuple[int, ...]) -> NDArray[Any]:
            dtype = engine.numpy_type(name)
            num_bytes = math.prod(shape) * dtype.itemsize
            return cuda.device(self.addresses[name], num_bytes).view(dtype).reshape(shape)

        feeds = {name: view(name, self.shapes[name]) for name in engine.inputs}
        num_rows = _cut_padding(engine, feeds)
        names = list(engine.outputs)
        sizes = {
            dim: size
            for name, shape in self.shapes.items()
            for dim, size in zip(engine.sizes_of(name), shape, strict=True)
            if isinstance(dim, str)
        }
        for name, value in zip(names, engine.session.run(names, feeds), strict=True):
            shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in engine.sizes_of(name))
            out = view(name, shape)
            if engine.sizes_of(name)[0] == "T":
                out.view(np.uint8)[:] = 0xFF
                out[:num_rows] = value
            else:
                out[:] = value


def _cut_padding(engine: FakeEngine, feeds: dict[str, NDArray[Any]]) -> int:
    """Leave of the inputs what the function's body takes; return the rows of sequences. Asserts the kernels' contract:
    empty sequences behind all others, block tables over what is committed."""
    starts, block_size = feeds["sequence_starts"], feeds["kv_pool.0"].shape[3]
    lengths = np.diff(starts)
    count, num_rows = np.count_nonzero(lengths), int(starts[-1])
    assert lengths[:count].all()
    assert (lengths >= 0).all()
    assert feeds["packed_mask"].shape[0] >= len(lengths), "tiles of rows are counted so"
    for name in feeds:
        if engine.sizes_of(name)[0] == "T":
            feeds[name] = feeds[name][:num_rows]
        elif name.startswith("kv_pool."):  # the body multiplies what nobody wrote by 0, a kernel does not read it
            feeds[name] = np.where(np.isnan(feeds[name]), np.zeros(1, feeds[name].dtype), feeds[name])
    contexts, table = feeds["context_lengths"][:count], feeds["block_table"][:count]
    for row, context in zip(table, contexts, strict=True):
        assert (row[: -(-int(context) // block_size)] >= 0).all(), "the table covers committed tokens"
    keys = int((contexts + lengths[:count]).max())
    columns = -(-keys // KEY_CHUNK) * KEY_CHUNK // block_size
    feeds |= {
        "context_lengths": contexts,
        "block_table": fit_columns(table, columns),
        "sequence_starts": starts[: count + 1],
    }
    return num_rows
