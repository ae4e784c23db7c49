"""A graph loaded by ONNX Runtime with its paged pool: what sessions of the target and of drafters share."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import ArtifactError, MissingPackageError
from draftline.sessions.available_cores import choose_num_threads
from draftline.sessions.engine_config import EngineConfig, PoolDtype
from draftline.sessions.native_kernels import library_of_engine
from draftline.sessions.pool_memory import allocate_pool

ORT_TYPES: dict[PoolDtype, str] = {"float32": "tensor(float)", "float16": "tensor(float16)"}


class OnnxRuntimeGraph:
    """``pool [layers, max_blocks, 2, K, S, D]`` of the engine's ``pool_dtype`` is one numpy array, read in place as
    ``kv_pool.L``.

    ``takes_turns``: whether another graph runs when this one is done. Its threads then stop at once instead of spinning
    for more work on the cores that the other one needs.
    """

    def __init__(
        self, path: Path, config: EngineConfig, pool_shape: tuple[int, int, int, int, int, int], *, takes_turns: bool
    ) -> None:
        """Load the graph at ``path`` of the engine of ``config``.

        Raises: ArtifactError for a damaged graph, or native operators that are not to be had here;
        MissingPackageError without ONNX Runtime.
        """
        try:
            import onnxruntime
        except ImportError:
            raise MissingPackageError(
                "engine.backend: onnxruntime", "needs the package onnxruntime", "none", "run `pip install onnxruntime`"
            ) from None
        state = onnxruntime.capi.onnxruntime_pybind11_state
        self._failures = (state.Fail, state.RuntimeException, state.InvalidArgument, state.EPFail)
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = choose_num_threads(config.num_threads)
        options.enable_mem_pattern = False  # every step has other shapes
        options.log_severity_level = 3
        if takes_turns:
            options.add_session_config_entry("session.force_spinning_stop", "1")
        if config.kernels == "native":
            options.register_custom_ops_library(str(library_of_engine(path.parent)))
        try:
            self._session = onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        except (*self._failures, state.NoSuchFile, state.InvalidGraph, state.InvalidProtobuf) as error:
            raise ArtifactError(
                path, "is a graph that ONNX Runtime loads", str(error), "build the engine again"
            ) from error
        self._check_pools(path, config.pool_dtype, pool_shape)
        self.pool = allocate_pool(pool_shape, config.pool_dtype)
        self._binding = self._session.io_binding()
        self._bound: dict[str, NDArray[Any]] = {}  # by input: bound arrays are read in place, and live as long
        self._pool_values = [onnxruntime.OrtValue.ortvalue_from_numpy(layer) for layer in self.pool]
        for layer, value in enumerate(self._pool_values):
            self._binding.bind_ortvalue_input(f"kv_pool.{layer}", value)

    def _check_pools(self, path: Path, dtype: PoolDtype, pool_shape: tuple[int, int, int, int, int, int]) -> None:
        """Raise ArtifactError unless the graph reads the pools that ``config.json`` describes."""
        num_layers, _, *shape = pool_shape
        described = {f"kv_pool.{layer}": (ORT_TYPES[dtype], shape) for layer in range(num_layers)}
        inputs = {
            value.name: (value.type, value.shape[1:])
            for value in self._session.get_inputs()
            if "kv_pool." in value.name
        }
        if inputs != described:
            got = f"{len(inputs)} layers of {next(iter(inputs.values()), None)}"
            rule = f"reads the pools of config.json, {len(described)} layers of {(ORT_TYPES[dtype], shape)}"
            raise ArtifactError(path, rule, got, "build the engine again")

    def run(self, feeds: Mapping[str, NDArray[Any]], names: tuple[str, ...]) -> dict[str, NDArray[Any]]:
        """Run one forward and return the outputs ``names``.

        Raises: RuntimeError for a failure inside ONNX Runtime.
        """
        for name, value in feeds.items():
            if self._bound.get(name) is not value:
                self._binding.bind_cpu_input(name, value)
                self._bound[name] = value
        for name in names:
            self._binding.bind_output(name)
        try:
            self._session.run_with_iobinding(self._binding)
            outputs = self._binding.copy_outputs_to_cpu()
        except self._failures as error:  # direct children of Exception
            raise RuntimeError(f"ONNX Runtime: {error}") from error
        finally:
            self._binding.clear_binding_outputs()  # else the next step returns them too, or they keep their memory
        return dict(zip(names, outputs, strict=True))

    def write_rows(self, kv_rows: NDArray[Any], rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Write ``rows`` of ``kv_rows [T, 2 * layers * K, D]`` into ``slots`` of the pool; dtypes are the same."""
        layers, _, _, num_heads, block_size, head_size = self.pool.shape
        blocks, offsets = np.divmod(slots, block_size)
        self.pool[:, blocks, :, :, offsets] = kv_rows[rows].reshape(-1, layers, 2, num_heads, head_size)

    def close(self) -> None:
        del self._binding, self._pool_values, self._session
