"""What a run says while it works."""

from __future__ import annotations

import io

import pytest

from draftline.stages import progress
from draftline.stages.progress import Progress


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    terminal = Terminal()
    with Progress(terminal).follow("convert") as advance:
        for done in range(5):
            advance(done, 4)
    assert " convert 100%|" in terminal.getvalue()
    assert terminal.getvalue().endswith("\r")


def test_a_line_stands_above_the_bar() -> None:
    terminal = Terminal()
    progress = Progress(terminal)
    with progress.follow("convert") as advance:
        advance(1, 4)
        progress.say("hello")
        advance(2, 4)
    before, after = terminal.getvalue().split("hello\n")
    assert before.endswith("\r"), "the bar was wiped"
    assert " convert  25%|" in after, "and drawn again"


def test_elsewhere_there_are_lines_now_and_then(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with Progress(stream).follow("convert") as advance:
        advance(1, 4)
        monkeypatch.setattr(progress, "LINE_INTERVAL_SECONDS", 0.0)
        advance(0, 0)
        advance(2, 4)
    assert stream.getvalue() == "convert: 50 %\n"


def test_quiet_says_nothing() -> None:
    stream = io.StringIO()
    quiet = Progress(stream, quiet=True)
    with quiet.follow("convert") as advance:
        advance(1, 2)
    quiet.say("hello")
    assert stream.getvalue() == ""
