"""What a serving process started, and what it left behind."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path


def traces_of(pid: int) -> list[str]:
    """Return the processes and shared memory of the server that process ``pid`` started: all carry its mark."""
    mark = f"draftline_{pid}_"
    found = [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.startswith(mark)]
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = entry.read_bytes()
        except OSError:  # it ended while we looked
            continue
        if mark.encode() in command:
            found.append(f"{entry.parent.name} {command.replace(bytes(1), b' ').decode()[:100]}")
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    """Wait until the condition holds; return whether it does."""
    deadline = time.monotonic() + seconds
    while not (holds := condition()) and time.monotonic() < deadline:
        time.sleep(0.05)
    return holds
