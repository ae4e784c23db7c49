from __future__ import annotations

import doctest

import pytest
from hypothesis import given
from hypothesis import strategies as st

import draftline.kernels.cost
from draftline.errors import BuildError
from draftline.kernels.configurations import candidates, default_configuration
from draftline.kernels.cost import WORKLOADS, Workload, predict_us
from draftline.kernels.devices import ARCHITECTURES, DEVICES
from draftline.kernels.launches import attention_launches, num_sections, workspace_bytes
from draftline.kernels.shape import KernelConfiguration, KernelShape

LLAMA = KernelShape(32, 8, 128, 16)


def test_examples() -> None:
    assert doctest.testmod(draftline.kernels.cost).failed == 0


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shape", [LLAMA, KernelShape(9, 3, 64, 16), KernelShape(48, 1, 256, 8)])
def test_the_default_is_never_far_from_the_fastest(shape: KernelShape, architecture: int) -> None:
    chosen, device = default_configuration(shape, architecture), DEVICES[architecture]
    assert chosen.tile_rows >= shape.group
    for workload in WORKLOADS:
        fastest = min(
            predict_us(shape, each, architecture, device, workload) for each in candidates(shape, architecture)
        )
        assert predict_us(shape, chosen, architecture, device, workload) <= 1.3 * fastest


def test_a_large_card_cuts_finer_than_a_small_one() -> None:
    small, large = (default_configuration(LLAMA, architecture) for architecture in (89, 90))
    assert large.min_section_keys < small.min_section_keys


@given(
    st.lists(st.integers(1, 200), min_size=1, max_size=20),
    st.sampled_from([(32, 8), (9, 3), (7, 1)]),
    st.sampled_from([16, 32, 64]),
)
def test_every_row_has_a_tile(lengths: list[int], heads: tuple[int, int], tile_rows: int) -> None:
    """The first tile of each sequence, as the kernel finds it, leaves room for all of its rows."""
    shape = KernelShape(*heads, 64, 16)
    configuration = KernelConfiguration(tile_rows, 64, 256, 32, 16, 64, 4, 2)
    rows = tile_rows // shape.group
    grid = attention_launches(shape, configuration, sum(lengths), len(lengths), 4)[0].grid
    starts = [sum(lengths[:sequence]) for sequence in range(len(lengths) + 1)]
    first_tiles = [(start - sequence) // rows + sequence for sequence, start in enumerate(starts)]
    for sequence, length in enumerate(lengths):
        assert first_tiles[sequence] + -(-length // rows) <= first_tiles[sequence + 1]
    assert grid == (first_tiles[-1], shape.num_kv_heads, 1)


def test_launches_by_hand() -> None:
    configuration = KernelConfiguration(64, 64, 256, 32, 16, 64, 4, 2)
    launches = attention_launches(LLAMA, configuration, 40, 10, 64)  # 1,024 tokens in the table
    assert [(launch.kernel, launch.grid) for launch in launches] == [
        ("tree_attention", (30 // 16 + 10, 8, 4)),
        ("tree_attention_reduce", (40, 32, 1)),
    ]
    assert workspace_bytes(LLAMA, configuration, 40, 10, 64) == 40 * 32 * 4 * 130 * 4
    assert workspace_bytes(LLAMA, configuration, 4000, 10, 64) == 640 * 32 * 4 * 130 * 4
    assert workspace_bytes(LLAMA, configuration, 40, 10, 31) == 0
    assert num_sections(KernelShape(32, 8, 128, 16, window=900), configuration, 1000) == 3
    assert num_sections(LLAMA, configuration, 10_000) == 16


def test_a_window_costs_what_it_sees() -> None:
    windowed = KernelShape(32, 8, 128, 16, window=1024)
    chosen = default_configuration(windowed, 90)
    times = [predict_us(windowed, chosen, 90, DEVICES[90], Workload(8, 1, context)) for context in (1024, 32768)]
    assert times[0] == times[1]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((32, 8, 128, 12), "block_size is one of 8, 16, 32, 64, 128; got 12"),
        ((32, 8, 100, 16), "head_size is a multiple of 8, 256 at most; got 100"),
        ((32, 8, 264, 16), "head_size is a multiple of 8, 256 at most; got 264"),
        ((32, 5, 128, 16), "num_heads is 1 to 64 times num_kv_heads; got 32 and 5"),
        ((65, 1, 128, 16), "num_heads is 1 to 64 times num_kv_heads; got 65 and 1"),
        ((32, 8, 128, 16, "float64"), "dtype is one of float32, float16, bfloat16; got float64"),
        (
            (32, 8, 128, 16, "float16", "bfloat16"),
            "kv_dtype beside float16 is one of float16, float8_e4m3fn; got bfloat16",
        ),
    ],
)
def test_what_has_no_kernel_is_refused(arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        KernelShape(*arguments)  # type: ignore[arg-type]
