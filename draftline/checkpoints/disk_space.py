"""Errors about a full disk that name the file and the bytes it needs."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

from draftline.errors import CheckpointError

_DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def check_free_space(path: Path, num_bytes: int) -> None:
    """Raise CheckpointError unless the disk of ``path``'s folder has ``num_bytes`` free."""
    free_bytes = shutil.disk_usage(path.parent).free
    if free_bytes < num_bytes:
        raise _disk_full(path, num_bytes, f"{free_bytes} bytes free")


@contextlib.contextmanager
def disk_full_named(path: Path, num_bytes: int) -> Iterator[None]:
    """Turn an operating system's error about a full disk into a CheckpointError about ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno not in _DISK_FULL:
            raise
        raise _disk_full(path, num_bytes, os.strerror(error.errno)) from error


def _disk_full(path: Path, num_bytes: int, got: str) -> CheckpointError:
    return CheckpointError(path, f"the disk has room for {num_bytes} bytes", got, "free space or choose another folder")
