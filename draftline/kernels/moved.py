"""Bytes that decoding moves against those it must move, by context and tree, as counted from the kernels' loops.

``python -m draftline.kernels.moved`` prints a table for one architecture and one sequence. Keys and values that several
tiles of a tree read count each time, though all but the first find them in the cache.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np

from draftline.kernels.configurations import default_configuration
from draftline.kernels.counted import CountedStep, moved_bytes, needed_bytes
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.shape import KernelShape
from draftline.tree import build_tree_mask, chain_parents, pack_mask

SHAPES = {
    "32 / 8 heads of 128": KernelShape(32, 8, 128, 16),
    "32 / 8 heads of 128, float8": KernelShape(32, 8, 128, 16, "bfloat16", "float8_e4m3fn"),
    "9 / 3 heads of 64": KernelShape(9, 3, 64, 16),
    "32 / 32 heads of 96": KernelShape(32, 32, 96, 16),
    "8 / 1 heads of 256": KernelShape(8, 1, 256, 16),
}
CONTEXTS = (1024, 4096, 32768)
NODES = (1, 8, 16, 64)


def decoding_step(shape: KernelShape, context: int, num_nodes: int) -> CountedStep:
    """Return the step of one sequence: a chain of ``num_nodes`` behind ``context`` tokens."""
    return CountedStep(
        np.array([context], np.int32),
        np.array([0, num_nodes], np.int32),
        pack_mask(build_tree_mask(chain_parents(num_nodes))),
        -(-context // shape.block_size),
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m draftline.kernels.moved", description=__doc__)
    parser.add_argument("--architecture", type=int, choices=ARCHITECTURES, default=80)
    architecture = parser.parse_args(arguments).architecture
    print("| model | nodes | " + " | ".join(f"context {context:,}" for context in CONTEXTS) + " |")
    print("|---|---|" + "---|" * len(CONTEXTS))
    for name, shape in SHAPES.items():
        configuration = default_configuration(shape, architecture)
        for num_nodes in NODES:
            steps = [decoding_step(shape, context, num_nodes) for context in CONTEXTS]
            ratios = [moved_bytes(shape, configuration, step).total / needed_bytes(shape, step).total for step in steps]
            print(f"| {name} | {num_nodes} | " + " | ".join(f"{ratio:.3f}" for ratio in ratios) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
