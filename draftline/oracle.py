"""Oracles: the operators of the graphs in plain numpy, one sequence at a time, for tests and checks."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32] | NDArray[np.float64]
Pool = NDArray[Any]  # float16, float32 or float64; bfloat16 or float8_e4m3fn of ml_dtypes
FLOAT8_MAX = 448.0


def tree_attention(
    q: Floats,
    k_new: Floats,
    v_new: Floats,
    kv_pool: Pool,
    block_table: NDArray[np.int32],
    context_lengths: NDArray[np.int32],
    sequence_starts: NDArray[np.int32],
    packed_mask: NDArray[np.int32],
    sinks: NDArray[np.float32] | None = None,
    *,
    scale: float,
    window: int,
    softcap: float = 0.0,
    key_scale: float = 1.0,
    value_scale: float = 1.0,
) -> NDArray[np.float64]:
    """Attend from each in-step token to the committed tokens of its sequence and to its ancestors in the step.

    Source: the contract of ``draftline::TreeAttention``; paged keys and values as in PagedAttention (arXiv 2309.06180),
    the mask as in tree attention of SpecInfer (arXiv 2305.09781), shared key/value heads as in GQA (arXiv 2305.13245),
    the window as in Mistral's ``sliding_window``, capped scores as in Gemma 2 (arXiv 2408.00118, section 2), sinks as
    in gpt-oss (arXiv 2508.10925). Unlike those, nothing is written.

    Shapes: T packed tokens of B sequences, H query heads, K key/value heads (query head h reads head h // (H / K)),
    head size D, block size S, W mask words.

    - ``q [T, H, D]``, ``k_new``, ``v_new [T, K, D]``: rotated rows of this step; those of sequence b are
      ``sequence_starts[b] : sequence_starts[b + 1]`` (``[B + 1]``).
    - ``kv_pool [num_blocks, 2, K, S, D]``: keys at index 0, values at 1. ``block_table [B, max_blocks]`` covers the
      ``context_lengths[b]`` committed tokens of each sequence; what lies behind them is not read. ``k_new`` and
      ``v_new`` are rounded to the pool's dtype first (to nearest, ties to even), as they would be committed.
    - ``key_scale``, ``value_scale``: of a float8 pool: a key is its number in the pool times ``key_scale``, and is
      committed as the nearest number to the key over ``key_scale``, beyond 448 as 448. 1 for other pools.
    - ``packed_mask [T, W]``: bit j of a row = may attend to in-step token j of its own sequence; reflexive and closed
      under ancestors, so the depth of a row is the number of its bits minus one.
    - ``sinks [H]``: of each query head, a score beside those of its keys that has no value and is neither scaled nor
      capped; -inf = the head has none, None = no head has one.
    - ``window``: a row of position p attends to positions above p - window; 0 = no window. The position of a committed
      token is its index, that of a row ``context_lengths[b]`` + its depth.
    - ``softcap``: scores become ``softcap * tanh(score / softcap)`` before the softmax, and what is not finite NaN;
      0 = they stay as they are.

    Returns ``[T, H * D] float64``, head by head.

    Numerics: float64 throughout, softmax shifted by its maximum. A float32 implementation differs by its rounding:
    about 1e-6 times the size of the values where scores are of order 1.

    >>> pool = np.zeros((1, 2, 1, 8, 2))
    >>> pool[0, 1, 0, 0] = [4.0, 0.0]  # the value of the only committed token
    >>> key, value = np.zeros((1, 1, 2)), np.array([[[0.0, 2.0]]])
    >>> tables = [np.array(x, np.int32) for x in ([[0]], [1], [0, 1], [[1]])]
    >>> tree_attention(key, key, value, pool, *tables, scale=1.0, window=0).tolist()
    [[2.0, 1.0]]
    >>> tree_attention(key, key, value, pool, *tables, scale=1.0, window=1).tolist()
    [[0.0, 2.0]]
    >>> key[:] = 3.0  # a score of 18 against that of the committed token, 0
    >>> capped = tree_attention(key, key, value, pool, *tables, scale=1.0, window=0, softcap=1.0)
    >>> capped.round(3).tolist()  # weights 1 : e
    [[1.076, 1.462]]
    >>> sunk = tree_attention(key, key, value, pool, *tables, np.array([18.0], np.float32), scale=1.0, window=1)
    >>> sunk.tolist()  # half of the weight is the sink's
    [[0.0, 1.0]]
    """
    num_tokens, num_heads, head_size = q.shape
    num_kv_heads = k_new.shape[1]
    k_new, v_new = round_as_pool(k_new, kv_pool.dtype, key_scale), round_as_pool(v_new, kv_pool.dtype, value_scale)
    scales = np.array([key_scale, value_scale]).reshape(2, 1, 1, 1)
    out = np.empty((num_tokens, num_heads, head_size), np.float64)
    for sequence, context in enumerate(context_lengths.tolist()):
        first, end = int(sequence_starts[sequence]), int(sequence_starts[sequence + 1])
        blocks = block_table[sequence, : -(-context // kv_pool.shape[3])]
        # [2, K, blocks, S, D] -> keys and values by position: [2, K, P, D]
        paged = kv_pool[blocks].transpose(1, 2, 0, 3, 4).reshape(2, num_kv_heads, -1, head_size)[:, :, :context]
        paged = paged.astype(np.float64) * scales
        k = np.concatenate([paged[0], k_new[first:end].transpose(1, 0, 2)], axis=1, dtype=np.float64)
        v = np.concatenate([paged[1], v_new[first:end].transpose(1, 0, 2)], axis=1, dtype=np.float64)
        in_step = np.arange(end - first)
        tree_mask = (packed_mask[first:end, in_step // 32] >> (in_step % 32) & 1).astype(np.bool_)
        depths = tree_mask.sum(axis=1) - 1
        positions = np.concatenate([np.arange(context), context + depths])
        attended = np.concatenate([np.ones((end - first, context), np.bool_), tree_mask], axis=1)
        if window > 0:
            attended &= positions[None, :] > positions[context:, None] - window
        for head in range(num_heads):
            kv_head = head // (num_heads // num_kv_heads)
            scores = q[first:end, head].astype(np.float64) @ k[kv_head].T * scale
            if softcap > 0:
                scores = softcap * np.tanh(scores / softcap) + 0 * scores
            scores = np.where(attended, scores, -np.inf)
            sink = -np.inf if sinks is None else float(sinks[head])
            row_max = np.maximum(scores.max(axis=1, keepdims=True), sink)
            weights = np.exp(scores - row_max)
            sums = weights.sum(axis=1, keepdims=True) + np.exp(sink - row_max)
            out[first:end, head] = weights / sums @ v[kv_head]
    return out.reshape(num_tokens, num_heads * head_size)


def round_as_pool(rows: Floats, dtype: np.dtype[Any], scale: float = 1.0) -> Floats:
    """Round keys or values to what a pool of ``dtype`` holds of them; see ``tree_attention``.

    >>> round_as_pool(np.array([0.1, 3000.0], np.float32), np.dtype(np.float16)).tolist()
    [0.0999755859375, 3000.0]
    """
    if dtype.itemsize >= 4:  # float32 and float64 hold what is computed here
        return rows
    scaled = rows / np.float32(scale)
    if dtype.itemsize == 1:
        scaled = np.clip(scaled, -FLOAT8_MAX, FLOAT8_MAX)
    rounded: Floats = scaled.astype(dtype).astype(np.float32) * np.float32(scale)
    return rounded
