"""The GPU kernels of ``draftline::TreeAttention``, interpreted, against the oracle.

``scripts/check_kernels`` runs hundreds of cases; here are the borders and a few random ones.
"""

from __future__ import annotations

import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.kernels.cases import BORDERS, SMALL, KernelCase, StepCase, branching, chain, expected, kernel_inputs
from draftline.kernels.shape import KernelConfiguration, KernelShape
from tests.kernels.cases import difference, run
from tests.kernels.interpreter import interpreted, run_attention


@pytest.mark.parametrize("number", range(len(BORDERS) + 6))
def test_kernels_agree_with_the_oracle(number: int) -> None:
    """And read no more of the pool than what is committed: the rest of it is NaN."""
    found, allowed = difference(number)
    assert found <= allowed


def part_of(inputs: dict[str, NDArray[Any]], sequences: slice) -> dict[str, NDArray[Any]]:
    """Return the step of some neighbouring sequences alone."""
    starts = inputs["sequence_starts"][sequences.start : sequences.stop + 1]
    rows = slice(int(starts[0]), int(starts[-1]))
    return {
        **inputs,
        **{name: inputs[name][rows] for name in ("q", "k_new", "v_new", "packed_mask")},
        **{name: inputs[name][sequences] for name in ("block_table", "context_lengths")},
        "sequence_starts": starts - starts[0],
    }


@pytest.mark.parametrize("window", [0, 50])
def test_bits_of_a_row_do_not_depend_on_its_neighbours(window: int) -> None:
    """Though neighbours widen the table, and change which rows of the workspace are whose."""
    shape = KernelShape(2, 1, 16, 8, window=window)
    case = KernelCase(shape, SMALL, StepCase((300, 129, 0), (branching(3), chain(40), chain(1)), 5))
    inputs = kernel_inputs(case)
    whole = run(case, inputs)
    for sequence in range(3):
        first, end = inputs["sequence_starts"][sequence : sequence + 2]
        np.testing.assert_array_equal(run(case, part_of(inputs, slice(sequence, sequence + 1))), whole[first:end])


def test_what_is_not_finite_stays_in_its_sequence() -> None:
    case = KernelCase(KernelShape(2, 1, 16, 8), SMALL, StepCase((70, 40), (chain(3), (-1, 0, 0, 1)), 0))
    inputs = kernel_inputs(case)
    before = run(case, inputs)
    inputs["v_new"][4] = np.nan  # node 1 of the second sequence
    after = run(case, inputs)
    np.testing.assert_array_equal(after[:3], before[:3])
    assert np.isnan(after[[4, 6]]).all()


def attend_quietly(
    shape: KernelShape, configuration: KernelConfiguration, inputs: dict[str, NDArray[Any]]
) -> NDArray[np.float32]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # numpy warns where numbers are not finite
        return run_attention(shape, configuration, inputs, (0.25, 1.0, 1.0))


def test_a_softcap_hides_nothing() -> None:
    """tanh of an infinite score is 1."""
    case = KernelCase(KernelShape(2, 1, 16, 8, softcap=2.0), SMALL, StepCase((70,), (chain(3),), 0))
    inputs = kernel_inputs(case)
    before = run(case, inputs)
    inputs["k_new"][1, 0, 0] = np.inf
    after = interpreted(attend_quietly, case.shape, case.configuration, inputs)
    assert np.isnan(after[1:]).all()
    np.testing.assert_array_equal(after[0], before[0])


def test_sinks_of_any_size_take_their_share() -> None:
    """Without one a head has the bits of a kernel without; far above its scores a sink leaves a head nothing."""
    shape = KernelShape(8, 4, 16, 8, "float32", "float32", has_sinks=True)
    case = KernelCase(shape, SMALL, StepCase((300, 3), ((-1, 0, 0), (-1, 0)), 0))
    inputs = kernel_inputs(case)
    inputs["sinks"] = np.array([-np.inf, -1e30, -90.0, -3.0, 0.0, 3.0, 200.0, 1e30], np.float32)
    found = run(case, inputs)
    without = run(case._replace(shape=replace(shape, has_sinks=False)), inputs)
    np.testing.assert_allclose(found, expected(case, inputs), rtol=0, atol=1e-5)
    np.testing.assert_array_equal(found[:, : 2 * 16], without[:, : 2 * 16])
    assert np.abs(found[:, 6 * 16 :]).max() < 1e-30


def test_rows_behind_the_last_sequence_are_left_alone() -> None:
    """Steps are padded to the size that a CUDA graph was recorded for."""
    case = KernelCase(KernelShape(2, 1, 16, 8), SMALL, StepCase((300,), (chain(2),), 0))
    inputs = kernel_inputs(case)
    padded = {
        name: np.concatenate([inputs[name]] + [inputs[name][:1]] * 5) if name != "kv_pool" else inputs[name]
        for name in ("q", "k_new", "v_new", "packed_mask", "kv_pool")
    }
    out = run(case, {**inputs, **padded})
    np.testing.assert_array_equal(out[:2], run(case, inputs))
    assert np.isnan(out[2:]).all()
