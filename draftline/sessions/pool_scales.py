"""Scales of a float8 pool, from the keys and values of a text."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np

from draftline.errors import CheckpointError
from draftline.oracle import FLOAT8_MAX
from draftline.sessions.engine_config import PoolScales, load_engine_config
from draftline.sessions.onnxruntime_builder import build_engine
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.plain_step import plain_step

BLOCK_SIZE = 16
HEADROOM = 2.0  # times the largest value seen, at least, before a value is cut


def measure_pool_scales(
    checkpoint: Path,
    scratch: Path,
    texts: Sequence[Sequence[int]],
    *,
    num_threads: int,
    progress: Callable[[int, int], None],
) -> PoolScales:
    """Measure the scales of a converted checkpoint: of the keys and of the values of each layer, by ``pool_scale``.

    The CPU engine runs ``texts`` (token ids) with int8 weights, which change the largest value by a percent or so, and
    take a quarter of the memory of float32. It stands in the empty folder ``scratch``.

    Raises: CheckpointError where a key or value is not finite.
    """
    longest = max(map(len, texts))
    build_engine(
        checkpoint,
        scratch,
        weights_dtype="int8",
        max_batch_size=1,
        max_seq_len=longest,
        max_num_tokens=longest,
        num_threads=num_threads,
        block_size=BLOCK_SIZE,
        max_blocks=-(-longest // BLOCK_SIZE),
        prefix_cache=False,
        progress=progress,
    )
    config = load_engine_config(scratch)
    num_planes = 2 * config.model.num_hidden_layers
    largest = np.zeros(num_planes)
    with closing(OnnxRuntimeSession(scratch, config)) as session:
        for ids in texts:
            session.forward(plain_step(ids, 0, BLOCK_SIZE))
            planes = np.abs(session.kv_rows.reshape(len(ids), num_planes, -1))
            largest = np.maximum(largest, planes.max(axis=(0, 2)))
    if not np.isfinite(largest).all():
        cure = "fetch or train the checkpoint again"
        raise CheckpointError(checkpoint, "keys and values of a text are finite", "some that are not", cure)
    scales = [pool_scale(float(value)) for value in largest]
    return tuple(zip(scales[::2], scales[1::2], strict=True))


def pool_scale(largest: float) -> float:
    """Return the least power of two that leaves ``HEADROOM`` above ``largest``; 1 for zeros.

    float8 has as many bits for small numbers as for large ones: headroom costs none. A power of two makes the product
    of a number and its scale exact.

    >>> pool_scale(20.0), pool_scale(224.0), pool_scale(225.0)
    (0.125, 1.0, 2.0)
    """
    return 2.0 ** math.ceil(math.log2(largest * HEADROOM / FLOAT8_MAX)) if largest > 0 else 1.0
