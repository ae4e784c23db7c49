"""Numbers of the architectures that kernels are compiled for, and of a card of each, for the cost model.

Source: CUDA C++ programming guide, table of technical specifications per compute capability (shared memory of a block);
NVIDIA's data sheets (A100 80GB SXM, A10, L4, H100 SXM, B200, RTX 5090): dense float16 products with float32 sums.
"""

from __future__ import annotations

from dataclasses import dataclass

SHARED_BYTES = {  # of a block, at most: what an SM has, less 1 KiB
    80: 163 * 1024,
    86: 99 * 1024,
    89: 99 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
    120: 99 * 1024,
}
ARCHITECTURES = tuple(SHARED_BYTES)


@dataclass(frozen=True)
class Device:
    """A card: streaming multiprocessors, memory and product rates."""

    name: str
    num_sms: int
    memory_gb_per_s: float
    tflops: float


DEVICES = {
    80: Device("A100 80GB SXM", 108, 2039, 312),
    86: Device("A10", 72, 600, 125),
    89: Device("L4", 58, 300, 121),
    90: Device("H100 SXM", 132, 3350, 989),
    100: Device("B200", 148, 8000, 2250),
    120: Device("RTX 5090", 170, 1792, 209.5),
}
