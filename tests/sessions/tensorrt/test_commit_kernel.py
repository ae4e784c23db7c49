"""Accepted rows reach their slots: what the kernel is launched with, for pools of every dtype."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.checkpoints.dtypes import numpy_dtype
from draftline.errors import ArtifactError
from draftline.kernels.shape import KernelShape
from draftline.sessions.tensorrt.commit_kernel import CommitKernel, commit_file
from draftline.sessions.tensorrt.cuda_device import CudaDevice
from draftline.sessions.tensorrt.cuda_driver import CudaDriver
from draftline.sessions.tensorrt.device_engine import PoolShape
from tests.sessions.tensorrt.fake_cuda import FakeCuda
from tests.sessions.tensorrt.fake_engines import fake_commit

LAYERS, HEADS, SIZE, BLOCK, NUM_BLOCKS = 3, 2, 8, 8, 5
SCALES = ((0.5, 2.0), (0.25, 1.0), (4.0, 0.125))


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"), [("float32", "float16"), ("bfloat16", "bfloat16"), ("float16", "float8_e4m3fn")]
)
def test_rows_reach_their_slots(tmp_path: Path, dtype: Any, kv_dtype: Any) -> None:
    cuda = FakeCuda()
    device = CudaDevice(CudaDriver(cuda))
    archive = tmp_path / commit_file("draft-1.plan")
    assert archive.name == "draft-1.kernels"
    kernels = fake_commit(KernelShape(4, HEADS, SIZE, BLOCK, dtype, kv_dtype), (80, 89))
    archive.write_bytes(kernels.archive)
    is_float8 = kv_dtype == "float8_e4m3fn"
    kernel = CommitKernel(device, archive, 7, SCALES if is_float8 else ())

    row_dtype, pool_dtype = numpy_dtype(dtype if is_float8 else kv_dtype), numpy_dtype(kv_dtype)
    random = np.random.default_rng(0)
    kv_rows = random.normal(0, 2, (7, 2 * LAYERS, HEADS, SIZE)).astype(row_dtype)
    shape = PoolShape(LAYERS, HEADS, BLOCK, SIZE, kv_dtype)
    layer_bytes = shape.layer_bytes(NUM_BLOCKS)
    rows_at = device.allocate("rows", kv_rows.nbytes)
    device.upload(rows_at, kv_rows.view(np.uint8).ravel())
    pool_at = device.allocate("pool", LAYERS * layer_bytes)
    rows, slots = np.array([6, 0, 3, 3, 1]), np.array([39, 0, 17, -1, 8])
    kernel.enqueue(rows_at, rows, slots, pool_at, LAYERS, layer_bytes // pool_dtype.itemsize)
    device.synchronize()

    for layer in range(LAYERS):
        stored = cuda.device(pool_at + layer * layer_bytes, NUM_BLOCKS * shape.block_bytes).view(pool_dtype)
        pool = stored.reshape(NUM_BLOCKS, *shape.block_shape).astype(np.float32)
        for row, slot in zip(rows, slots, strict=True):
            if slot >= 0:
                given = kv_rows[row, 2 * layer : 2 * layer + 2].astype(np.float32)
                if is_float8:
                    given /= np.array(SCALES[layer], np.float32)[:, None, None]
                np.testing.assert_array_equal(pool[slot // BLOCK, :, :, slot % BLOCK], given.astype(pool_dtype))
        untouched = [slot for slot in range(NUM_BLOCKS * BLOCK) if slot not in slots]
        assert np.isnan(pool[np.array(untouched) // BLOCK, :, :, np.array(untouched) % BLOCK]).all()
    assert [launch["grid"] for launch in cuda.launches] == [(5, 2 * LAYERS, 1)]
    device.close()
    assert cuda.is_empty


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    archive = tmp_path / "model.kernels"
    archive.write_bytes(b"nothing of ours")
    with pytest.raises(ArtifactError, match="reads the kernels it was built with"):
        CommitKernel(CudaDevice(CudaDriver(FakeCuda())), archive, 7, ())
