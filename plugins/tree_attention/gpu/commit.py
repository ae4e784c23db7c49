"""Write accepted rows into the paged pools of all layers."""

import triton
import triton.language as tl

from .float8 import encode_float8


@triton.jit
def commit_rows(
    kv_rows,
    rows,
    slots,
    kv_pools,
    scales,
    layer_stride,
    NUM_KV_HEADS: tl.constexpr,
    PADDED_KV_HEADS: tl.constexpr,
    HEAD_SIZE: tl.constexpr,
    PADDED_HEAD_SIZE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    KV_IS_FLOAT8: tl.constexpr,
):
    """Program (i, plane): the keys (plane 2 * layer) or values (2 * layer + 1) of row ``rows[i]``; slot -1 is none."""
    index = tl.program_id(0)
    plane = tl.program_id(1)
    slot = tl.load(slots + index)
    if slot < 0:
        return
    row = tl.load(rows + index)
    heads = tl.arange(0, PADDED_KV_HEADS)[:, None]
    columns = tl.arange(0, PADDED_HEAD_SIZE)[None, :]
    is_place = (heads < NUM_KV_HEADS) & (columns < HEAD_SIZE)
    source = (row * tl.num_programs(1) + plane) * NUM_KV_HEADS + heads
    kv = tl.load(kv_rows + source * HEAD_SIZE + columns, mask=is_place)
    head_rows = ((slot // BLOCK_SIZE * 2 + plane % 2) * NUM_KV_HEADS + heads) * BLOCK_SIZE + slot % BLOCK_SIZE
    places = kv_pools + (plane // 2) * layer_stride + head_rows * HEAD_SIZE + columns
    if KV_IS_FLOAT8:
        stored = encode_float8(kv.to(tl.float32) / tl.load(scales + plane))
        tl.store(places, stored, mask=is_place)
    else:
        tl.store(places, kv.to(kv_pools.dtype.element_ty), mask=is_place)
