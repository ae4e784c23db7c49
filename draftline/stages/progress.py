"""Progress on stderr: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from draftline.stages.stage import Advance

LINE_INTERVAL_SECONDS = 10.0


class Progress:
    """Says what a run does. ``quiet`` says nothing."""

    def __init__(self, stream: TextIO = sys.stderr, *, quiet: bool = False) -> None:
        self._stream, self._quiet = stream, quiet

    @property
    def is_quiet(self) -> bool:
        return self._quiet

    def say(self, line: str) -> None:
        """Print one line, above the bar where there is one."""
        if self._quiet:
            return
        if self._stream.isatty():
            from tqdm import tqdm

            tqdm.write(line, file=self._stream)
            self._stream.flush()
        else:
            print(line, file=self._stream, flush=True)

    @contextmanager
    def follow(self, name: str) -> Iterator[Advance]:
        """Give the function with which a stage reports how much is done."""
        if self._quiet:
            yield lambda done, total: None
        elif self._stream.isatty():
            with self._bar(name) as advance:
                yield advance
        else:
            yield self._lines(name)

    @contextmanager
    def _bar(self, name: str) -> Iterator[Advance]:
        from tqdm import tqdm

        layout = "{desc} {percentage:3.0f}%|{bar}| {elapsed} left {remaining}"
        with tqdm(desc=f"{name:>8}", total=1, file=self._stream, leave=False, bar_format=layout) as bar:

            def advance(done: int, total: int) -> None:
                bar.total = total
                bar.update(done - bar.n)
                if done >= total:  # what follows, hashing and syncing, shows a full bar
                    bar.refresh()

            yield advance

    def _lines(self, name: str) -> Advance:
        last = time.monotonic()

        def advance(done: int, total: int) -> None:
            nonlocal last
            now = time.monotonic()
            if now - last >= LINE_INTERVAL_SECONDS and total:
                last = now
                self.say(f"{name}: {100 * done // total} %")

        return advance
