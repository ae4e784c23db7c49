"""Cases that the commit kernel is compared with the oracle in, each from a number."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.kernels.cases import NUMPY_DTYPES, load_contract
from draftline.kernels.shape import KernelShape
from draftline.oracle import FLOAT8_MAX


class CommitCase(NamedTuple):
    """``kv_rows``, ``rows``, ``slots``, ``kv_pools`` and ``scales`` as in contract.yaml."""

    shape: KernelShape
    kv_rows: NDArray[Any]
    rows: NDArray[np.int64]
    slots: NDArray[np.int64]
    kv_pools: NDArray[Any]
    scales: NDArray[np.float32]

    def arrays(self) -> dict[str, NDArray[Any]]:
        """Return the arrays by the names of the kernel's arguments."""
        return {name: value for name, value in self._asdict().items() if name != "shape"}


def make_commit_case(number: int) -> CommitCase:
    """Rows in any order, some of them not committed, no slot twice."""
    random = np.random.default_rng(number)

    def choose(*choices: Any) -> Any:
        return choices[int(random.integers(len(choices)))]

    pairs = [(dtype, kv) for dtype, pools in load_contract()["implementations"]["gpu"]["pairs"].items() for kv in pools]
    dtype, kv_dtype = pairs[number % len(pairs)]
    heads, size, block_size = choose(1, 3, 8), choose(8, 24, 64, 80, 128, 256), choose(8, 16, 32)
    shape = KernelShape(heads, heads, size, block_size, dtype, kv_dtype)
    num_layers, num_blocks, num_tokens = choose(1, 2, 5), choose(4, 9), choose(1, 7, 40)
    numbers = random.standard_normal((num_tokens, 2 * num_layers * heads, size)).astype(np.float32) * 4
    num_rows = int(random.integers(1, min(num_tokens, num_blocks * block_size) + 1))
    rows, slots = random.permutation(num_tokens)[:num_rows], random.permutation(num_blocks * block_size)[:num_rows]
    slots[random.random(num_rows) < 0.2] = -1
    is_float8 = kv_dtype == "float8_e4m3fn"
    scales = random.uniform(0.01, 2, (num_layers, 2)) if is_float8 else np.ones((num_layers, 2))
    row_dtype = dtype if is_float8 else kv_dtype  # the graph rounds rows to the pool's dtype, but to float8
    return CommitCase(
        shape,
        numbers.astype(NUMPY_DTYPES[row_dtype]),
        rows.astype(np.int64),
        slots.astype(np.int64),
        np.zeros((num_layers, num_blocks, 2, heads, block_size, size), NUMPY_DTYPES[kv_dtype]),
        scales.astype(np.float32),
    )


def count_wrong(case: CommitCase, found: NDArray[Any]) -> int:
    """Count numbers of the pools ``found`` after the commit that are not the nearest to what was committed there.

    A float8 pool's kernel divides by the scale to within two units in the last place, so where two numbers are as near,
    to 1e-5, either is right.
    """
    exact = np.zeros(found.shape, np.float64)
    heads, block_size = case.shape.num_kv_heads, case.shape.block_size
    for row, slot in zip(case.rows.tolist(), case.slots.tolist(), strict=True):
        for plane in range(2 * len(exact) if slot >= 0 else 0):
            own = case.kv_rows[row, heads * plane : heads * (plane + 1)].astype(np.float64)
            place = plane // 2, slot // block_size, plane % 2, slice(None), slot % block_size
            exact[place] = own / case.scales[plane // 2, plane % 2]
    if case.shape.kv_dtype == "float8_e4m3fn":
        exact = np.clip(exact, -FLOAT8_MAX, FLOAT8_MAX)
    nearest = exact.astype(np.float32).astype(found.dtype)
    distances = (np.abs(pools.astype(np.float64) - exact) for pools in (found, nearest))
    is_wrong = ~np.less_equal(next(distances), next(distances) * (1 + 1e-5))
    return int(is_wrong.sum())
