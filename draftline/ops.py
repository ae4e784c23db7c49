"""PyTorch operators around the GPU kernels, for models outside an engine: ``torch.ops.draftline.tree_attention``.

The kernels are compiled by Triton at the first call with a shape, for the GPU that the tensors are on. On a CPU they
run in Triton's interpreter alone (``TRITON_INTERPRET=1``), which is slow and for tests.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from draftline.errors import MissingPackageError, RequestError
from draftline.kernels.calling import call_attention, call_commit
from draftline.kernels.configurations import default_configuration
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.shape import KernelShape
from draftline.kernels.source import import_triton

if TYPE_CHECKING:
    from torch import Tensor

WHERE = "draftline.ops"
INTEGERS = ("block_table", "context_lengths", "sequence_starts", "packed_mask")


def tree_attention(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    context_lengths: Tensor,
    sequence_starts: Tensor,
    packed_mask: Tensor,
    sinks: Tensor | None = None,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> Tensor:
    """Attend from in-step tokens to the committed tokens of their sequences and to their ancestors in the step.

    Shapes, dtypes and meaning as in ``plugins/tree_attention/README.md``; returns ``[T, H * D]`` in the dtype of ``q``.
    Nothing is written: ``commit_rows`` does that, after acceptance. A pool of ``torch.float8_e4m3fn`` has scales.
    Without ``sinks`` no head has one.

    Raises: RequestError for tensors on a CPU, not contiguous, or of other shapes and dtypes; BuildError for what has no
    kernel; MissingPackageError without torch or Triton.
    """
    inputs = (q, k_new, v_new, kv_pool, block_table, context_lengths, sequence_starts, packed_mask, sinks)
    result: Tensor = _operator()(*inputs, scale, window, softcap, key_scale, value_scale)
    return result


def commit_rows(kv_rows: Tensor, rows: Tensor, slots: Tensor, kv_pools: Tensor, scales: Tensor | None = None) -> None:
    """Write accepted rows into the pools of all layers: ``rows[i]`` to slot ``slots[i]``, -1 = not.

    Shapes: L layers, n rows to write. ``kv_rows [T, 2 L K, D]``: keys of a layer, then its values; ``rows``, ``slots
    [n] int64``; ``kv_pools [L, num_blocks, 2, K, S, D]``; ``scales [L, 2] float32``, needed by a float8 pool.

    Raises: as ``tree_attention``.
    """
    num_layers, _, _, num_kv_heads, block_size, head_size = kv_pools.shape
    is_interpreted = _is_interpreted(kv_pools)
    is_float8 = _name(kv_pools) == "float8_e4m3fn"
    _check("kv_rows", kv_rows, (kv_rows.shape[0], 2 * num_layers * num_kv_heads, head_size), None)
    for name, tensor in (("rows", rows), ("slots", slots)):
        _check(name, tensor, (len(rows),), "int64")
    if scales is None:
        if is_float8:
            raise RequestError(WHERE, "a float8 pool has scales [L, 2]", "none", "pass those it was written with")
        scales = kv_pools.new_ones((num_layers, 2), dtype=_torch().float32)
    _check("scales", scales, (num_layers, 2), "float32")
    dtype = _name(kv_rows) if is_float8 else _name(kv_pools)
    shape = KernelShape(num_kv_heads, num_kv_heads, head_size, block_size, dtype, _name(kv_pools))
    if len(rows):
        call_commit(shape, kv_rows, rows, slots, _codes(kv_pools), scales, is_interpreted=is_interpreted)


@lru_cache(maxsize=1)
def _operator() -> Any:
    """Register the operator with PyTorch, which then can trace it."""
    torch = _torch()
    # PyTorch reads the schema from the signature: the types themselves, though torch is imported here alone.
    tensors = dict.fromkeys(("q", "k_new", "v_new", "kv_pool", *INTEGERS, "return"), torch.Tensor)
    sinks = {"sinks": torch.Tensor | None}
    floats = dict.fromkeys(("scale", "softcap", "key_scale", "value_scale"), float)
    _run.__annotations__ = {**tensors, **sinks, **floats, "window": int}
    operator = torch.library.custom_op("draftline::tree_attention", _run, mutates_args=())
    operator.register_fake(lambda q, *others: q.new_empty((q.shape[0], q.shape[1] * q.shape[2])))
    return operator


def _run(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    kv_pool: Tensor,
    block_table: Tensor,
    context_lengths: Tensor,
    sequence_starts: Tensor,
    packed_mask: Tensor,
    sinks: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    key_scale: float,
    value_scale: float,
) -> Tensor:
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads, block_size = k_new.shape[1], kv_pool.shape[3]
    num_sequences = len(context_lengths)
    dtypes, has_sinks = (_name(q), _name(kv_pool)), sinks is not None
    shape = KernelShape(num_heads, num_kv_heads, head_size, block_size, *dtypes, window, softcap, has_sinks)
    if sinks is None:
        sinks = q.new_empty((num_heads,), dtype=_torch().float32)  # which no kernel reads
    is_interpreted = _is_interpreted(q)
    for name, tensor in (("k_new", k_new), ("v_new", v_new)):
        _check(name, tensor, (num_tokens, num_kv_heads, head_size), shape.dtype)
    _check("q", q, (num_tokens, num_heads, head_size), shape.dtype)
    _check("kv_pool", kv_pool, (len(kv_pool), 2, num_kv_heads, block_size, head_size), shape.kv_dtype)
    _check("block_table", block_table, (num_sequences, block_table.shape[1]), "int32")
    _check("context_lengths", context_lengths, (num_sequences,), "int32")
    _check("sequence_starts", sequence_starts, (num_sequences + 1,), "int32")
    _check("packed_mask", packed_mask, (num_tokens, packed_mask.shape[1]), "int32")
    _check("sinks", sinks, (num_heads,), "float32")
    inputs = dict(zip(INTEGERS, (block_table, context_lengths, sequence_starts, packed_mask), strict=True))
    inputs |= {"q": q, "k_new": k_new, "v_new": v_new, "kv_pool": _codes(kv_pool), "sinks": sinks}
    out = q.new_empty((num_tokens, num_heads * head_size))
    call_attention(
        shape,
        default_configuration(shape, _architecture(q)),
        inputs,
        out,
        scale=scale,
        key_scale=key_scale,
        value_scale=value_scale,
        is_interpreted=is_interpreted,
    )
    return out


def _torch() -> Any:
    try:
        import torch
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise MissingPackageError(
            WHERE, "the package torch is installed", "no such package", "pip install torch"
        ) from error
    return torch


def _name(tensor: Tensor) -> Any:
    """Return a dtype as this package calls it."""
    return str(tensor.dtype).removeprefix("torch.")


def _codes(pool: Tensor) -> Tensor:
    return pool.view(_torch().uint8) if _name(pool) == "float8_e4m3fn" else pool


def _is_interpreted(tensor: Tensor) -> bool:
    is_interpreted: bool = import_triton().knobs.runtime.interpret
    if not tensor.is_cuda and not is_interpreted:
        cure = "move them with .cuda(); draftline.oracle.tree_attention runs on a CPU"
        raise RequestError(WHERE, "tensors are on an NVIDIA GPU", tensor.device, cure)
    return is_interpreted


def _architecture(tensor: Tensor) -> int:
    """Return the nearest architecture there is a configuration for: of the same generation, not newer."""
    if not tensor.is_cuda:
        return ARCHITECTURES[0]
    major, minor = _torch().cuda.get_device_capability(tensor.device)
    known = [architecture for architecture in ARCHITECTURES if 10 * major <= architecture <= 10 * major + minor]
    if not known:
        got = f"sm_{major}{minor}"
        raise RequestError(
            WHERE, f"the GPU is one of sm_{', sm_'.join(map(str, ARCHITECTURES))}", got, "use another GPU"
        )
    return max(known)


def _check(name: str, tensor: Tensor, shape: tuple[int, ...], dtype: str | None) -> None:
    if tuple(tensor.shape) != shape or dtype not in (None, _name(tensor)):
        got = f"{list(tensor.shape)} {_name(tensor)}"
        raise RequestError(WHERE, f"{name} is {list(shape)} {dtype or ''}".rstrip(), got, "see the operator's contract")
    if not tensor.is_contiguous():
        raise RequestError(WHERE, f"{name} is contiguous", f"strides {tensor.stride()}", "call .contiguous() first")
