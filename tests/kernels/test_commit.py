"""The kernel that commits rows, and the numbers of float8, interpreted."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from draftline.kernels.cases import NUMPY_DTYPES, SMALL, no_sinks
from draftline.kernels.shape import Dtype, KernelShape, KvDtype
from draftline.oracle import round_as_pool
from tests.kernels.interpreter import interpreted, run_attention, run_commit

NUM_LAYERS, NUM_BLOCKS = 2, 5
DTYPES: list[tuple[Dtype, KvDtype]] = [("float16", "float16"), ("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn")]


@pytest.mark.parametrize(("dtype", "kv_dtype"), DTYPES)
def test_rows_reach_their_slots_in_all_layers(dtype: Dtype, kv_dtype: KvDtype) -> None:
    shape = KernelShape(6, 3, 24, 8, dtype, kv_dtype)
    random = np.random.default_rng(0)
    numbers = random.standard_normal((7, 2 * NUM_LAYERS * 3, 24)).astype(np.float32) * 4
    kv_rows = numbers.astype(NUMPY_DTYPES[dtype])
    rows, slots = np.array([6, 0, 3, 2]), np.array([17, 39, -1, 0])
    scales = np.array([[1.0, 1.0], [1.0, 1.0]] if kv_dtype == dtype else [[0.02, 0.5], [0.01, 3.0]], np.float32)
    pools = np.zeros((NUM_LAYERS, NUM_BLOCKS, 2, 3, 8, 24), NUMPY_DTYPES[kv_dtype])
    expected = pools.copy()
    for row, slot in zip(rows, slots, strict=True):
        for plane in range(2 * NUM_LAYERS if slot >= 0 else 0):
            scale = scales[plane // 2, plane % 2]
            stored = round_as_pool(
                kv_rows[row, 3 * plane : 3 * plane + 3].astype(np.float32), pools.dtype, float(scale)
            )
            expected[plane // 2, slot // 8, plane % 2, :, slot % 8] = (stored / scale).astype(pools.dtype)
    found = interpreted(run_commit, shape, kv_rows, rows, slots, pools, scales)
    np.testing.assert_array_equal(found.view(np.uint8), expected.view(np.uint8))


def test_all_codes_of_float8() -> None:
    """As the values of the one committed token; the row's own are 0, and both weigh as much."""
    shape = KernelShape(1, 1, 256, 8, "float32", "float8_e4m3fn")
    codes = np.arange(256, dtype=np.uint8)
    pool = np.zeros((1, 2, 1, 8, 256), np.uint8)
    pool[0, 1, 0, 0] = codes
    row = np.zeros((1, 1, 256), np.float32)
    tables = {"block_table": [[0]], "context_lengths": [1], "sequence_starts": [0, 1], "packed_mask": [[1]]}
    integers = {name: np.array(table, np.int32) for name, table in tables.items()}
    inputs = {"q": row, "k_new": row, "v_new": row, "kv_pool": pool, "sinks": no_sinks(1), **integers}
    out = interpreted(run_attention, shape, SMALL, inputs, (1.0, 1.0, 1.0))
    np.testing.assert_array_equal(2 * out[0], codes.view(ml_dtypes.float8_e4m3fn).astype(np.float32))


def test_numbers_of_float8_are_the_nearest() -> None:
    """Every number, all that lie halfway, their neighbours on both sides, what is too large, and what is no number."""
    positive = np.arange(0x7F, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    halfway = (positive[1:] + positive[:-1]) / 2
    inside = np.concatenate([positive, halfway, np.nextafter(halfway, 0), np.nextafter(halfway, 448, dtype=np.float32)])
    numbers = np.concatenate([inside, -inside, [449.0, 1e30, np.inf, -np.inf, np.nan]]).astype(np.float32)
    numbers = np.concatenate([numbers, np.zeros(-len(numbers) % 16, np.float32)]).reshape(-1, 2, 8)
    shape = KernelShape(1, 1, 8, 8, "float32", "float8_e4m3fn")
    pools = np.zeros((1, -(-len(numbers) // 8), 2, 1, 8, 8), np.uint8)
    places = np.arange(len(numbers))
    found = interpreted(run_commit, shape, numbers, places, places, pools, np.ones((1, 2), np.float32))
    codes = found[0, places // 8, :, 0, places % 8]
    wanted = np.clip(numbers, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    np.testing.assert_array_equal(codes, np.where(np.isnan(numbers), codes | 0x7F, wanted))
    assert (codes[np.isnan(numbers)] & 0x7F == 0x7F).all()
