"""``draftline.ops`` on CPU tensors: interpreted, and refused where they are not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from draftline import ops
from draftline.errors import RequestError
from draftline.kernels.cases import SMALL, KernelCase, StepCase, branching, chain, expected, kernel_inputs
from draftline.kernels.shape import KernelShape
from tests.kernels.interpreter import interpreted, to_torch

CASE = KernelCase(KernelShape(4, 2, 16, 8), SMALL, StepCase((40, 0), (branching(5), chain(2)), 0))


def attend_traced(inputs: dict[str, NDArray[Any]], scale: float) -> NDArray[np.float32]:
    """Call the operator, after PyTorch's own checks of operators."""
    tensors = {name: to_torch(array) for name, array in inputs.items()}
    operator = ops._operator()
    torch.library.opcheck(
        operator, (*tensors.values(), scale, 0, 0.0, 1.0, 1.0), test_utils=("test_schema", "test_faketensor")
    )
    out: NDArray[np.float32] = ops.tree_attention(**tensors, scale=scale).float().numpy()
    return out


def commit_float8() -> float:
    pools = torch.zeros((1, 2, 2, 1, 8, 8)).to(torch.float8_e4m3fn)
    rows = torch.full((1, 2, 8), 0.5, dtype=torch.bfloat16)
    places = torch.zeros(1, dtype=torch.int64)
    ops.commit_rows(rows, places, places + 9, pools, torch.full((1, 2), 0.25))
    return float(pools[0, 1, 1, 0, 1, 0].float())


def test_the_operator_agrees_with_the_oracle() -> None:
    inputs = kernel_inputs(CASE)
    np.testing.assert_allclose(
        interpreted(attend_traced, inputs, CASE.scale), expected(CASE, inputs), rtol=0, atol=4e-3
    )


def test_committing_to_float8_divides_by_the_scale() -> None:
    assert interpreted(commit_float8) == 2.0


def test_tensors_on_a_cpu_are_refused() -> None:
    tensors = {name: to_torch(array) for name, array in kernel_inputs(CASE).items()}
    with pytest.raises(RequestError, match=r"draftline.ops: tensors are on an NVIDIA GPU; got cpu; move them with"):
        ops.tree_attention(**tensors, scale=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_table": torch.zeros((2, 5), dtype=torch.int64)}, r"block_table is \[2, 5\] int32; got \[2, 5\] int64"),
        ({"k_new": torch.zeros((7, 2, 16))}, r"k_new is \[7, 2, 16\] float16; got \[7, 2, 16\] float32"),
        ({"packed_mask": torch.zeros((2, 7), dtype=torch.int32).T}, r"packed_mask is contiguous; got strides \(1, 7\)"),
    ],
)
def test_other_tensors_are_refused(
    change: dict[str, torch.Tensor], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ops, "_is_interpreted", lambda tensor: True)
    tensors = {name: to_torch(array) for name, array in kernel_inputs(CASE).items()} | change
    with pytest.raises(RequestError, match=message):
        ops.tree_attention(**tensors, scale=1.0)
