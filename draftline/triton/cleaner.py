"""A program beside every server: ``python cleaner.py MARK DIRECTORY`` waits until its standard input ends.

That is when the process that started it closes the pipe or dies, however it dies. Then it kills every process whose
command line holds MARK (the server and its models), and removes the shared memory whose name starts with MARK and
DIRECTORY. A parent-death signal does not do: the models of a killed server may wait for it for ever, and a thread of
theirs cannot help, because they wait holding Python's interpreter lock.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
import time
from pathlib import Path


def find_processes(mark: str) -> list[int]:
    """Return the ids of the other processes whose command line holds ``mark``."""
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it ended while we looked
            if mark.encode() in entry.read_bytes() and int(entry.parent.name) != os.getpid():
                found.append(int(entry.parent.name))
    return found


def main() -> None:
    mark, directory = sys.argv[1:]
    sys.stdin.buffer.read()
    while processes := find_processes(mark):
        for pid in processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.02)
    for region in Path("/dev/shm").glob(f"{mark}*"):
        region.unlink(missing_ok=True)
    shutil.rmtree(directory)


if __name__ == "__main__":
    main()
