"""How many threads a graph runs on where the process may not use the whole machine."""

from __future__ import annotations

import os
from pathlib import Path

TOPOLOGY = Path("/sys/devices/system/cpu")


def choose_num_threads(wanted: int) -> int:
    """Return what to ask ONNX Runtime for when an engine wants ``wanted`` threads, 0 = one per physical core available.

    ONNX Runtime takes 0 for a thread on each core of the machine, pinned to it, whatever ``taskset`` left to the
    process. So 0 stays 0 only where all of them are available; elsewhere those that are left are counted, and threads
    run wherever the process may.
    """
    if wanted or not hasattr(os, "sched_getaffinity"):
        return wanted
    available = os.sched_getaffinity(0)
    if len(available) == os.cpu_count():
        return 0
    return len({_physical_core(cpu) for cpu in available})


def _physical_core(cpu: int) -> tuple[str, str]:
    """Name the package and the core of it; each ``cpu`` is a core of its own where the system does not say."""
    folder = TOPOLOGY / f"cpu{cpu}" / "topology"
    try:
        return (folder / "physical_package_id").read_text("ascii"), (folder / "core_id").read_text("ascii")
    except OSError:
        return "", str(cpu)
