"""``scripts/check_kernels``: many cases of the GPU kernels against the oracle."""

from __future__ import annotations

import sys
from collections import defaultdict

from tests.kernels.cases import difference, make_case


def main(first: int, count: int) -> int:
    failed, worst = 0, defaultdict[str, float](float)
    for number in range(first, first + count):
        found, allowed = difference(number)
        if not found <= allowed:  # NaN is a failure
            failed += 1
            print(f"case {number}: off by {found:.3g}, {allowed:g} allowed; {make_case(number)}", flush=True)
        dtype = make_case(number).shape.dtype
        worst[dtype] = max(worst[dtype], found)
    largest = ", ".join(f"{dtype} {value:.2g}" for dtype, value in sorted(worst.items()))
    print(f"{count - failed} of {count} cases from {first} on agree with the oracle; largest differences: {largest}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2])))
