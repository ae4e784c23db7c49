"""The processes of a server's models: Triton neither restarts one that died nor stops being ready."""

from __future__ import annotations

from pathlib import Path

STUB_NAME = "triton_python_backend_stub"


def find_model_processes(server_pid: int) -> dict[str, int]:
    """Return model name -> process id of the Python models of a running server."""
    found = {}
    for children in Path(f"/proc/{server_pid}/task").glob("*/children"):
        for pid in map(int, _read(children).split()):
            arguments = _read(Path(f"/proc/{pid}/cmdline")).split("\0")
            if len(arguments) > 1 and Path(arguments[0]).name == STUB_NAME:
                found[Path(arguments[1]).parts[-3]] = pid  # .../NAME/VERSION/model.py
    return found


def is_alive(pid: int) -> bool:
    """Return whether a process runs; one that ended and was not yet reaped does not."""
    status = _read(Path(f"/proc/{pid}/stat"))
    return bool(status) and status.rsplit(")", 1)[1].split()[0] not in ("Z", "X")


def _read(path: Path) -> str:
    """Return a file of /proc, empty where its process ended."""
    try:
        return path.read_text("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return ""
