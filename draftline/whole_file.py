"""Files that are under their names only when they are whole."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def replace_file(path: Path) -> Iterator[Path]:
    """Give a new name beside ``path`` to write to; what is written becomes ``path`` when the block ends.

    The name is of this process, so that two which write one file do not meet, and ends like ``path``, from which
    writers of pictures take their format. On an error what was written is removed, and the old file stays.
    """
    partial = path.with_name(f"{path.stem}.partial-{os.getpid()}{path.suffix}")
    try:
        yield partial
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)
