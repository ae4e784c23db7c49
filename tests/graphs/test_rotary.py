from __future__ import annotations

import doctest
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import draftline.graphs.rotary
from draftline.errors import BuildError
from draftline.graphs.rotary import build_rotary_tables

YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
SCALINGS: dict[str, dict[str, Any] | None] = {
    "default": None,
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": LLAMA3 | {"original_max_position_embeddings": 256},
    "llama3-as-published": LLAMA3 | {"factor": 32.0, "original_max_position_embeddings": 8192},
    "yarn": YARN,
    "yarn-betas": YARN | {"beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-attention-factor": YARN | {"attention_factor": 1.5},
    "yarn-mscale": YARN | {"mscale": 0.7, "mscale_all_dim": 1.3},
    "yarn-not-truncated": YARN | {"truncate": False},
    "dynamic": {"rope_type": "dynamic", "factor": 3.0},
}


def test_examples() -> None:
    assert doctest.testmod(draftline.graphs.rotary).failed == 0


@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize(("head_size", "base"), [(64, 10000.0), (128, 5e5), (24, 1e6)])
def test_tables_equal_those_of_transformers(name: str, head_size: int, base: float) -> None:
    pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    scaling, max_positions = SCALINGS[name], 1024
    config = transformers.LlamaConfig(
        hidden_size=4 * head_size,
        num_attention_heads=4,
        head_dim=head_size,
        rope_theta=base,
        max_position_embeddings=max_positions,
        rope_scaling=dict(scaling) if scaling else None,
    )
    cosines, sines = build_rotary_tables(head_size, base, scaling, max_positions, max_positions + 50)
    assert cosines.shape == sines.shape == (max_positions + 50, head_size // 2)
    assert cosines.dtype == sines.dtype == np.float32
    for position in (0, 1, 17, 255, 256, 700, 1023, 1024, 1073):
        if scaling is None:
            frequencies, magnitude = base ** -(np.arange(0, head_size, 2) / head_size), 1.0
        else:
            compute = ROPE_INIT_FUNCTIONS[scaling["rope_type"]]
            found, magnitude = compute(config, "cpu", **({"seq_len": position + 1} if name == "dynamic" else {}))
            frequencies = found.double().numpy()
        angles = position * frequencies
        # transformers keeps frequencies in float32: a relative error of 1e-7 times the position.
        tolerance = 1e-6 + 3e-7 * position
        np.testing.assert_allclose(cosines[position], np.cos(angles) * magnitude, rtol=0, atol=tolerance)
        np.testing.assert_allclose(sines[position], np.sin(angles) * magnitude, rtol=0, atol=tolerance)


@settings(deadline=None, max_examples=30)
@given(st.sampled_from(list(SCALINGS)), st.integers(1, 40), st.integers(0, 300))
def test_a_row_does_not_depend_on_the_length_of_the_table(name: str, num_positions: int, more: int) -> None:
    short = build_rotary_tables(16, 1e4, SCALINGS[name], 64, num_positions)
    long = build_rotary_tables(16, 1e4, SCALINGS[name], 64, num_positions + more)
    for one, other in zip(short, long, strict=True):
        np.testing.assert_array_equal(one, other[:num_positions])


@pytest.mark.parametrize("given", [{}, {"attention_factor": 1.25}, {"factor": 1.0}, {"factor": 8.0}])
@pytest.mark.parametrize("max_seq_len", [128, 129])
def test_longrope_has_the_factors_that_the_engines_limit_chooses(given: dict[str, float], max_seq_len: int) -> None:
    """For texts of any length: a table may be longer than the limit, by what trees reach beyond it."""
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    lists = {"short_factor": [1.0 + i / 8 for i in range(6)], "long_factor": [1.0 + 2 * i for i in range(6)]}
    scaling = {"rope_type": "longrope", "original_max_position_embeddings": 128.0, **lists, **given}
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=4, head_dim=16, max_position_embeddings=1024, rope_theta=5e4
    )
    config.rope_parameters = {**scaling, "rope_theta": 5e4, "partial_rotary_factor": 0.75}
    found, magnitude = ROPE_INIT_FUNCTIONS["longrope"](config, "cpu", seq_len=max_seq_len)
    cosines, sines = build_rotary_tables(12, 5e4, scaling, 1024, 140, max_seq_len)
    angles = np.arange(140)[:, None] * found.double().numpy()
    np.testing.assert_allclose(cosines, np.cos(angles) * magnitude, rtol=0, atol=1e-4)
    np.testing.assert_allclose(sines, np.sin(angles) * magnitude, rtol=0, atol=1e-4)


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(BuildError, match=r"rotary_scaling.rope_type: must be default, .*; got proportional; "):
        build_rotary_tables(16, 1e4, {"rope_type": "proportional"}, 64, 8)
