"""The processes of a server's models.

Triton neither restarts one that died nor stops being ready, and one whose server was killed may wait for it for ever.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterable
from pathlib import Path

STUB_NAME = "triton_python_backend_stub"
SHARED_MEMORY = Path("/dev/shm")
PERIOD_SECONDS = 0.5


def find_model_processes(server_pid: int) -> dict[str, int]:
    """Return model name -> process id of the Python models of a running server."""
    found = {}
    for children in Path(f"/proc/{server_pid}/task").glob("*/children"):
        for pid in map(int, _read(children).split()):
            arguments = _read_arguments(pid)
            if len(arguments) > 1 and Path(arguments[0]).name == STUB_NAME:
                found[Path(arguments[1]).parts[-3]] = pid  # .../NAME/VERSION/model.py
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not yet reaped does not."""
    status = _read(Path(f"/proc/{pid}/stat"))
    return bool(status) and status.rsplit(")", 1)[1].split()[0] not in ("Z", "X")


def end_model_processes(pids: Iterable[int], shared_memory_prefix: str) -> None:
    """End what a server left behind: its models' processes, and then their shared memory."""
    for pid in pids:
        if Path(_read_arguments(pid)[0]).name == STUB_NAME:  # else the id belongs to another process by now
            os.kill(pid, signal.SIGKILL)
    for region in SHARED_MEMORY.glob(f"{shared_memory_prefix}*"):
        region.unlink(missing_ok=True)


def end_with_server() -> None:
    """In a model's process: end it soon after its server is gone, however that ended. Called once, at the start."""
    threading.Thread(target=_watch, args=[os.getppid()], name="draftline-watch", daemon=True).start()


def _watch(server_pid: int) -> None:
    while os.getppid() == server_pid:
        time.sleep(PERIOD_SECONDS)
    arguments = _read_arguments(os.getpid())
    if len(arguments) > 2:
        (SHARED_MEMORY / Path(arguments[2]).name).unlink(missing_ok=True)  # the region this process shared with it
    os.kill(os.getpid(), signal.SIGKILL)


def _read_arguments(pid: int) -> list[str]:
    return _read(Path(f"/proc/{pid}/cmdline")).split("\0")


def _read(path: Path) -> str:
    """Return a file of /proc, empty where its process ended."""
    try:
        return path.read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
