"""How much memory a process holds, for the programs whose memory a test bounds."""

from __future__ import annotations

from pathlib import Path


def resident_bytes() -> int:
    """Return what this process holds."""
    return _read("VmRSS")


def peak_bytes() -> int:
    """Return what this process has held at most. ``ru_maxrss`` would count what its parent held when it was forked."""
    return _read("VmHWM")


def _read(key: str) -> int:
    lines = Path("/proc/self/status").read_text("utf-8").splitlines()
    (line,) = (line for line in lines if line.startswith(f"{key}:"))
    return int(line.split()[1]) * 1024
