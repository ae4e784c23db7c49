"""The bytes that kernels move: counted, as the interpreter sees them, and against what must be moved."""

from __future__ import annotations

import numpy as np
import pytest

from draftline.kernels.cases import SMALL, KernelCase, StepCase, branching, chain, kernel_inputs
from draftline.kernels.configurations import default_configuration
from draftline.kernels.counted import CountedStep, moved_bytes, needed_bytes
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.moved import CONTEXTS, NODES, SHAPES, main
from draftline.kernels.shape import KernelConfiguration, KernelShape
from draftline.tree import build_tree_mask, pack_mask
from tests.kernels.interpreter import count_bytes, interpreted

MODELS = [
    KernelShape(32, 8, 128, 16),  # LLaMA 3 8B
    KernelShape(9, 3, 64, 16),  # SmolLM2 135M
    KernelShape(14, 2, 64, 16),
    KernelShape(32, 32, 80, 32),
    KernelShape(32, 32, 96, 128),
    KernelShape(8, 1, 256, 8),
    KernelShape(64, 8, 128, 16, "bfloat16", "bfloat16"),
    KernelShape(32, 8, 128, 16, "bfloat16", "float8_e4m3fn"),
    KernelShape(32, 8, 128, 16, window=4096),
    KernelShape(64, 8, 64, 16, "bfloat16", "bfloat16", has_sinks=True),
]


def counted_step(shape: KernelShape, contexts: list[int], tree: tuple[int, ...]) -> CountedStep:
    """Return a step of one tree behind each of ``contexts``."""
    mask = pack_mask(build_tree_mask(tree))
    return CountedStep(
        np.array(contexts, np.int32),
        np.arange(len(contexts) + 1, dtype=np.int32) * len(tree),
        np.concatenate([mask] * len(contexts)),
        -(-max(contexts) // shape.block_size),
    )


@pytest.mark.parametrize(
    ("shape", "configuration", "step"),
    [
        (KernelShape(4, 2, 16, 8), SMALL, StepCase((150, 0, 33), (branching(5), chain(1), chain(2)), 0)),
        (
            KernelShape(3, 1, 80, 16, window=40, has_sinks=True),
            SMALL,
            StepCase((200, 20), (branching(40), chain(45)), 0),
        ),
        (
            KernelShape(2, 2, 16, 32, "bfloat16", "float8_e4m3fn"),
            KernelConfiguration(16, 64, 32, 1, 20, 2, 4, 2),
            StepCase((300, 70), (chain(2), chain(3)), 0),
        ),
    ],
)
def test_counts_are_those_of_the_interpreter(
    shape: KernelShape, configuration: KernelConfiguration, step: StepCase
) -> None:
    inputs = kernel_inputs(KernelCase(shape, configuration, step))
    names = ("context_lengths", "sequence_starts", "packed_mask")
    counted = CountedStep(**{name: inputs[name] for name in names}, max_blocks=inputs["block_table"].shape[1])
    assert moved_bytes(shape, configuration, counted).total == sum(
        interpreted(count_bytes, shape, configuration, inputs)
    )


@pytest.mark.parametrize("context", [1024, 4096, 32768])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("shape", MODELS, ids=str)
def test_decoding_moves_a_tenth_more_than_it_must_at_most(shape: KernelShape, architecture: int, context: int) -> None:
    """Plain decoding, and the largest tree whose rows are one tile: sections are as long as their rows are many."""
    configuration = default_configuration(shape, architecture)
    for num_nodes in {1, configuration.tile_rows // shape.group}:
        step = counted_step(shape, [context], branching(num_nodes))
        assert moved_bytes(shape, configuration, step).total <= 1.1 * needed_bytes(shape, step).total


def test_needed_bytes_by_hand() -> None:
    """Two rows behind 20 tokens: keys and values, four rows of q and out a head, new keys and values, integers."""
    shape = KernelShape(4, 2, 16, 8)
    needed = needed_bytes(shape, counted_step(shape, [20], chain(2)))
    assert needed.pool == 20 * 2 * 16 * 2 * 2
    assert needed.rows == 2 * (4 + 4 + 2 + 2) * 16 * 2
    assert needed.integers == 4 * (3 + 2 + 2)
    assert needed.total == needed.pool + needed.rows + needed.integers


def test_the_table_has_a_line_for_each_model_and_tree(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--architecture", "90"]) == 0
    lines = capsys.readouterr().out.splitlines()[2:]
    assert len(lines) == len(SHAPES) * len(NODES)
    for line in lines:
        ratios = [float(cell) for cell in line.strip("| ").split(" | ")[2:]]
        assert len(ratios) == len(CONTEXTS)
        assert min(ratios) >= 1.0
