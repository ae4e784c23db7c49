"""One plan on the GPU: its engine, its outputs, its execution contexts and the graphs captured of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.errors import ArtifactError, DraftlineError
from draftline.sessions.engine_config import PlanFacts
from draftline.sessions.passes import ROW_OUTPUTS
from draftline.sessions.tensorrt.cuda_device import CudaDevice, aligned
from draftline.sessions.tensorrt.execution_contexts import ContextMaker
from draftline.sessions.tensorrt.loading import load_plan
from draftline.sessions.tensorrt.transfers import Inputs, LogitsReader, Results, RowArray
from draftline.sessions.tensorrt.vendor import Vendor

MAX_GRAPHS = 64  # of a plan; shapes that come up later run without
LOGITS = "logits"


class Resident(NamedTuple):
    """An input that is in device memory already."""

    address: int
    shape: tuple[int, ...]


class _Captured(NamedTuple):
    graph: int
    context: Any  # lives as long as the graph, and is left as it is


class PlanRunner:
    """Runs a plan. Whatever runs on the device's stream runs in order, so all contexts share scratch memory, inputs
    and outputs.

    Inputs are of four sorts: ``kv_pool.L``; weights that are not in the plan; ``resident`` ones, whose address comes
    with each run; and the rest, small integers that the host gives. Of the outputs those with a value for each row of a
    step, and logits, stay on the device; the others are copied to the host.
    """

    def __init__(
        self,
        vendor: Vendor,
        device: CudaDevice,
        directory: Path,
        facts: PlanFacts,
        weights: Mapping[str, int],
        resident: Collection[str] = (),
    ) -> None:
        """Load the plan; ``weights`` are the addresses of external ones, by input.

        Raises: what ``load_plan`` raises; ArtifactError where it has not these inputs.
        """
        self._vendor, self._device, self._where = vendor, device, directory / facts.file
        self.profiles = facts.profiles
        self._loaded = load_plan(vendor, directory, facts)
        engine, mode = self._loaded.engine, vendor.module.TensorIOMode.INPUT
        names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
        inputs = [name for name in names if engine.get_tensor_mode(name) == mode]
        self._pool_names = [f"kv_pool.{layer}" for layer in range(sum("kv_pool." in name for name in inputs))]
        self._weights = dict(weights)
        elsewhere = {*weights, *resident, *self._pool_names}
        if not elsewhere <= set(inputs):
            unknown = ", ".join(sorted(elsewhere - set(inputs)))
            raise ArtifactError(self._where, "has the inputs of config.json", f"none of {unknown}", _AGAIN)
        types = {name: numpy_dtype(vendor.dtype_names[engine.get_tensor_dtype(name)]) for name in names}
        self._input_types = {name: types[name] for name in inputs if name not in elsewhere}
        self._outputs = {name: self._allocate(name, types[name]) for name in names if name not in inputs}
        most = max(map(self._inputs_bytes, range(len(self.profiles))))
        self._inputs = Inputs(device, facts.file, most)
        to_host = {name: out for name, out in self._outputs.items() if name not in (*ROW_OUTPUTS, LOGITS)}
        self._results = Results(device, to_host, self._most("R"))
        self._pools: Sequence[Resident] = ()
        self._contexts: ContextMaker | None = None
        self._plain: dict[str, Any] = {}
        self._captured: dict[object, _Captured] = {}

    @property
    def scratch_bytes(self) -> int:
        """Memory that the plan works in while it runs."""
        return int(self._loaded.engine.device_memory_size_v2)

    def output(self, name: str) -> RowArray:
        """Return where an output is; the next run overwrites it."""
        return self._outputs[name]

    def logits_reader(self) -> LogitsReader:
        return LogitsReader(self._device, self._outputs[LOGITS])

    def prepare(self, scratch: Resident) -> None:
        """Make a context for each profile, all of which work in ``scratch``."""
        self._contexts = ContextMaker(self._vendor, self._loaded.engine, scratch.address, *scratch.shape)
        for profile in self.profiles:
            self._plain[profile] = self._new_context(profile, is_captured=False)

    def bind_pools(self, pools: Sequence[Resident]) -> None:
        """Read keys and values of each layer in ``pools`` from now on."""
        assert len(pools) == len(self._pool_names)
        self._pools = pools
        for context in self._plain.values():
            self._bind_pools(context)

    def run(
        self,
        profile: str,
        feeds: Mapping[str, NDArray[Any]],
        resident: Mapping[str, Resident] | None = None,
        *,
        num_results: int,
        captures: bool,
    ) -> dict[str, NDArray[Any]]:
        """Run one forward and wait for it; return the first ``num_results`` rows of the outputs that go to the host.

        ``captures``: a shape that has run before is replayed as a graph, one that has not is captured. The arrays that
        are returned are overwritten by the next run.

        Raises: RuntimeError where the vendor refuses; DraftlineError where the driver does.
        """
        resident = resident or {}
        assert {name: value.dtype for name, value in feeds.items()} == self._input_types, self._where.name
        addresses = self._inputs.stage(feeds)
        key = (profile, tuple(value.shape for value in feeds.values()), tuple(resident.values()))
        captured = self._captured.get(key)
        if captured is not None:
            self._device.launch(captured.graph)
            return self._finish(num_results)
        is_captured = captures and len(self._captured) < MAX_GRAPHS
        context = self._new_context(profile, is_captured=True) if is_captured else self._plain[profile]
        for name, value in feeds.items():
            self._set_input(context, name, Resident(addresses[name], value.shape))
        for name, given in resident.items():
            self._set_input(context, name, given)

        def enqueue() -> None:
            self._inputs.enqueue()
            self._check(context.execute_async_v3(self._device.stream), "execute_async_v3")
            self._results.enqueue(num_results)

        enqueue()
        results = self._finish(num_results)
        if is_captured:  # after a run of these shapes, as TensorRT asks
            try:
                self._captured[key] = _Captured(self._device.capture(enqueue), context)
            except (RuntimeError, DraftlineError) as error:
                raise RuntimeError(f"{error}; while a CUDA graph was captured: engine.cuda_graphs=false") from error
        return results

    def close(self) -> None:
        """Release contexts and engine, before the device is closed."""
        for captured in self._captured.values():
            self._device.destroy_graph(captured.graph)
        self._captured.clear()
        self._plain.clear()
        del self._contexts, self._loaded

    def _finish(self, num_results: int) -> dict[str, NDArray[Any]]:
        self._device.synchronize()
        return self._results.read(num_results)

    def _new_context(self, profile: str, *, is_captured: bool) -> Any:
        assert self._contexts is not None, "prepare comes first"
        context = self._contexts.make(is_captured=is_captured)
        index, stream = list(self.profiles).index(profile), self._device.stream
        self._check(context.set_optimization_profile_async(index, stream), "set_optimization_profile_async")
        addresses = self._weights | {name: output.address for name, output in self._outputs.items()}
        for name, address in addresses.items():
            self._check(context.set_tensor_address(name, address), f"set_tensor_address of {name}")
        self._bind_pools(context)
        return context

    def _bind_pools(self, context: Any) -> None:
        for name, pool in zip(self._pool_names, self._pools, strict=False):  # there are none before they are bound
            self._set_input(context, name, pool)

    def _set_input(self, context: Any, name: str, given: Resident) -> None:
        self._check(context.set_input_shape(name, given.shape), f"set_input_shape of {name} to {given.shape}")
        self._check(context.set_tensor_address(name, given.address), f"set_tensor_address of {name}")

    def _allocate(self, name: str, dtype: np.dtype[Any]) -> RowArray:
        """Allocate an output for the largest sizes; the first of its sizes varies, no other."""
        shape: tuple[int, ...] = tuple(self._loaded.engine.get_tensor_shape(name))[1:]
        rows = self._most("N" if "N" in next(iter(self.profiles.values())) else "T")
        array = RowArray(0, shape, dtype)
        num_rows = rows if name in ROW_OUTPUTS else self._most("R")
        return array._replace(address=self._device.allocate(f"{self._where.name}: {name}", num_rows * array.row_bytes))

    def _most(self, dimension: str) -> int:
        return max(bounds[dimension][2] for bounds in self.profiles.values())

    def _inputs_bytes(self, profile: int) -> int:
        """Return what the host's inputs take where all are largest."""
        largest = self._loaded.engine.get_tensor_profile_shape
        return sum(
            aligned(math.prod(tuple(largest(name, profile)[2])) * dtype.itemsize)
            for name, dtype in self._input_types.items()
        )

    def _check(self, is_done: bool, call: str) -> None:
        if not is_done:
            said = "; ".join(self._loaded.errors[-3:]) or "no reason"
            raise RuntimeError(f"{self._where.name}: {call} of {self._vendor.title} failed: {said}")


_AGAIN = "build the engine again"
