"""Run the kernels in Triton's interpreter, in a process of its own: the flag is read when the kernels are imported.

``interpreted(function, ...)`` runs one of the functions below there; arrays travel both ways.
"""

from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import lru_cache
from typing import Any, ParamSpec, TypeVar

import numpy as np
from numpy.typing import NDArray

from draftline.kernels.calling import call_attention, call_commit
from draftline.kernels.shape import KernelConfiguration, KernelShape

P = ParamSpec("P")
R = TypeVar("R")


def _begin() -> None:
    os.environ["TRITON_INTERPRET"] = "1"
    import torch

    torch.set_num_threads(1)
    warnings.simplefilter("error")


@lru_cache(maxsize=1)
def _process() -> ProcessPoolExecutor:
    return ProcessPoolExecutor(1, multiprocessing.get_context("spawn"), _begin)


def interpreted(function: Callable[P, R], *args: P.args, **kwargs: P.kwargs) -> R:
    return _process().submit(function, *args, **kwargs).result(timeout=600)


def to_torch(array: NDArray[Any]) -> Any:
    """Share an array's memory; float8 as its codes, bfloat16 by its bits."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array.view(np.uint8) if array.dtype.name == "float8_e4m3fn" else array)


def run_attention(
    shape: KernelShape,
    configuration: KernelConfiguration,
    inputs: dict[str, NDArray[Any]],
    scales: tuple[float, float, float],
) -> NDArray[np.float32]:
    """Return ``out``, NaN where nothing was written."""
    import torch

    tensors = {name: to_torch(array) for name, array in inputs.items()}
    out = torch.full((len(inputs["q"]), shape.num_heads * shape.head_size), torch.nan, dtype=tensors["q"].dtype)
    scale, key_scale, value_scale = scales
    call_attention(
        shape,
        configuration,
        tensors,
        out,
        scale=scale,
        key_scale=key_scale,
        value_scale=value_scale,
        is_interpreted=True,
    )
    result: NDArray[np.float32] = out.float().numpy()
    return result


def run_commit(
    shape: KernelShape,
    kv_rows: NDArray[Any],
    rows: NDArray[np.int64],
    slots: NDArray[np.int64],
    kv_pools: NDArray[Any],
    scales: NDArray[np.float32],
) -> NDArray[Any]:
    """Return the pools after the commit."""
    tensors = [to_torch(array) for array in (kv_rows, rows, slots, kv_pools, scales)]
    call_commit(shape, *tensors, is_interpreted=True)
    return kv_pools


def count_bytes(
    shape: KernelShape, configuration: KernelConfiguration, inputs: dict[str, NDArray[Any]]
) -> tuple[int, int]:
    """Return bytes that the kernels load and store: every address of a load once."""
    from triton.runtime.interpreter import InterpreterBuilder

    counts = {"create_masked_load": 0, "create_masked_store": 0}

    def counting(name: str) -> Any:
        original = getattr(InterpreterBuilder, name)

        def call(builder: Any, pointers: Any, *args: Any) -> Any:
            mask = args[0] if name == "create_masked_load" else args[1]
            addresses = np.unique(np.broadcast_to(pointers.data, mask.data.shape)[mask.data])
            counts[name] += addresses.size * (pointers.get_element_ty().primitive_bitwidth // 8)
            return original(builder, pointers, *args)

        return original, call

    originals = {}
    for name in counts:
        originals[name], replacement = counting(name)
        setattr(InterpreterBuilder, name, replacement)
    try:
        run_attention(shape, configuration, inputs, (1.0, 1.0, 1.0))
    finally:
        for name, original in originals.items():
            setattr(InterpreterBuilder, name, original)
    return counts["create_masked_load"], counts["create_masked_store"]
