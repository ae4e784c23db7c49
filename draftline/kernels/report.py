"""Registers, spills, shared memory and instructions of the kernels, per architecture, on a machine without a GPU.

``python -m draftline.kernels.report`` compiles the default configurations and prints a table; it fails where a kernel
spills registers.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from draftline.errors import DraftlineError
from draftline.kernels.compilation import compile_kernels
from draftline.kernels.compiled import CompiledKernel
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.instructions import KINDS, count_instructions
from draftline.kernels.shape import KernelShape

HEAD_SIZES = (64, 80, 96, 128, 256)
# A model of each head size: four query heads to a key/value head, blocks of 16.
VARIANTS = {
    "float16": {"dtype": "float16", "kv_dtype": "float16"},
    "bfloat16": {"dtype": "bfloat16", "kv_dtype": "bfloat16"},
    "float32": {"dtype": "float32", "kv_dtype": "float32"},
    "float8": {"dtype": "bfloat16", "kv_dtype": "float8_e4m3fn"},
    "window": {"dtype": "float16", "kv_dtype": "float16", "window": 4096},
    "softcap": {"dtype": "float16", "kv_dtype": "float16", "softcap": 50.0},
    "sinks": {"dtype": "float16", "kv_dtype": "float16", "has_sinks": True},
}
COLUMNS = ("kernel", "sm", "head", "variant", "tile", "registers", "spilled", "shared", *KINDS, "other")


def report_rows(
    variants: Sequence[str], head_sizes: Sequence[int], architectures: Sequence[int], cache: Path | None
) -> Iterator[tuple[CompiledKernel, tuple[str, ...]]]:
    """Compile, and yield each kernel with its line of the table; bytes of spills and KiB of shared memory."""
    for variant in variants:
        for head_size in head_sizes:
            shape = KernelShape(32, 8, head_size, 16, **VARIANTS[variant])  # type: ignore[arg-type]
            for architecture in architectures:
                for kernel in compile_kernels(shape, [architecture], cache):
                    yield kernel, _line(kernel, head_size, variant)


def _line(kernel: CompiledKernel, head_size: int, variant: str) -> tuple[str, ...]:
    is_attention = kernel.name == "tree_attention"
    tile = f"{kernel.configuration.tile_rows} x {kernel.configuration.tile_keys}" if is_attention else ""
    numbers = (kernel.num_registers, kernel.spill_bytes, -(-kernel.shared_bytes // 1024))
    counts = count_instructions(kernel.cubin).values()
    return (kernel.name, str(kernel.architecture), str(head_size), variant, tile, *map(str, (*numbers, *counts)))


def main(arguments: Sequence[str] | None = None) -> int:
    def listed(text: str) -> list[int]:
        return [int(part) for part in text.split(",")]

    parser = argparse.ArgumentParser(prog="python -m draftline.kernels.report", description=__doc__)
    parser.add_argument("--variants", default=",".join(VARIANTS), help=f"of {', '.join(VARIANTS)}")
    parser.add_argument("--head-sizes", type=listed, default=list(HEAD_SIZES))
    parser.add_argument("--architectures", type=listed, default=list(ARCHITECTURES))
    parser.add_argument("--cache", type=Path, help="a folder of compiled kernels, read and added to")
    options = parser.parse_args(arguments)
    unknown = set(options.variants.split(",")) - set(VARIANTS)
    if unknown:
        parser.error(f"--variants: one or more of {', '.join(VARIANTS)}; got {', '.join(sorted(unknown))}")
    print("| " + " | ".join(COLUMNS) + " |\n|" + "---|" * len(COLUMNS))
    spilling = 0
    try:
        for kernel, line in report_rows(
            options.variants.split(","), options.head_sizes, options.architectures, options.cache
        ):
            print("| " + " | ".join(line) + " |", flush=True)
            spilling += kernel.spill_bytes > 0
    except DraftlineError as error:
        print(error, file=sys.stderr)
        return 1
    print(f"{spilling} of these kernels spill registers.")
    return 1 if spilling else 0


if __name__ == "__main__":
    sys.exit(main())
