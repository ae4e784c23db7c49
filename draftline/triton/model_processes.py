"""The processes of a server's models: Triton neither restarts one that died nor stops being ready."""

from __future__ import annotations

from pathlib import Path

STUB_NAME = "triton_python_backend_stub"


def find_model_processes(server_pid: int) -> dict[str, int]:
    """Return model name -> process id of the Python models of a running server."""
    found = {}
    for children in Path(f"/proc/{server_pid}/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            arguments = _read_arguments(pid)
            if len(arguments) > 1 and Path(arguments[0]).name == STUB_NAME:
                found[Path(arguments[1]).parts[-3]] = pid  # .../NAME/VERSION/model.py
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not yet reaped does not."""
    try:
        status = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    return status.rsplit(")", 1)[1].split()[0] not in ("Z", "X")


def _read_arguments(pid: int) -> list[str]:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text("utf-8", "replace").split("\0")
    except FileNotFoundError:  # it ended while we looked
        return []
