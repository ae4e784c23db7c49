"""One answer in the terminal, as it grows."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, TextIO

from draftline.runtime.speculation_numbers import SpeculationNumbers
from draftline.triton.chunk import Piece
from draftline.triton.client import Client


def generate(
    prompt: str, *, url: str, raw: bool, show_acceptance: bool, out: TextIO, use_colour: bool, **options: Any
) -> int:
    """Stream the answer to ``out`` and its speed to stderr; return 0.

    The prompt is a user's message for the model's chat template, or the text itself where ``raw``. ``options`` are the
    fields of ``AnswerOptions``. ``show_acceptance`` marks the tokens that were drafted, by colour or by brackets, and
    adds a line of numbers to stderr.
    """
    with Client(url) as client:
        text = prompt if raw else client.render_chat([{"role": "user", "content": prompt}])
        started = time.perf_counter()
        times: list[tuple[float, int]] = []
        numbers, unit, num_characters = None, "token", 0
        chunks = client.stream_chunks(text, return_acceptance=show_acceptance, **options)
        with contextlib.closing(chunks):  # Ctrl-C cancels the request
            for chunk in chunks:
                num_characters += len(chunk.text)
                count = chunk.num_output_tokens
                if count is None:
                    unit, count = "character", num_characters
                times.append((time.perf_counter(), count))
                out.write(mark_drafted(chunk.pieces, use_colour=use_colour) if show_acceptance else chunk.text)
                out.flush()
                numbers = chunk.speculation
        out.write("\n")
        out.flush()
    print(describe_speed(started, times, unit), file=sys.stderr)
    if numbers is not None:
        print(describe_acceptance(numbers), file=sys.stderr)
    return 0


def allows_colour(out: TextIO, environment: Mapping[str, str]) -> bool:
    """Return whether ``out`` is a terminal that shows colours and whose user wants them (https://no-color.org)."""
    return out.isatty() and not environment.get("NO_COLOR") and environment.get("TERM", "dumb") != "dumb"


def mark_drafted(pieces: Sequence[Piece], *, use_colour: bool) -> str:
    """Return the text with the drafted tokens in green, or each in brackets.

    >>> mark_drafted([Piece("The", False), Piece(" sky", True), Piece(" is", True)], use_colour=False)
    'The⟦ sky⟧⟦ is⟧'
    """
    before, after = ("\x1b[32m", "\x1b[0m") if use_colour else ("⟦", "⟧")
    return "".join(f"{before}{piece.text}{after}" if piece.is_draft and piece.text else piece.text for piece in pieces)


def describe_acceptance(numbers: SpeculationNumbers) -> str:
    """Say how speculation went.

    >>> describe_acceptance(SpeculationNumbers(4, 16, 12, 6, 10, histogram=(1, 0, 3)))
    'steps 4, drafted 16, accepted 6, acceptance_length 2.50, acceptance_rate 0.38, acceptance_rate_at 0.75 0.75'
    """
    words = [
        f"steps {numbers.num_steps}",
        f"drafted {numbers.num_drafted_tokens}",
        f"accepted {numbers.num_accepted_tokens}",
        f"acceptance_length {numbers.acceptance_length:.2f}",
        f"acceptance_rate {numbers.acceptance_rate:.2f}",
    ]
    if numbers.acceptance_rate_at:
        words.append(f"acceptance_rate_at {' '.join(f'{rate:.2f}' for rate in numbers.acceptance_rate_at)}")
    return ", ".join(words)


def describe_speed(started: float, times: list[tuple[float, int]], unit: str = "token") -> str:
    """Say how fast the answer came; ``times``: when how many of ``unit`` were there, in seconds.

    The rate counts what came after the first response: what comes before is the prompt's time.

    >>> describe_speed(10.0, [(10.5, 1), (11.5, 21), (12.5, 41)])
    '41 tokens, 20.0 tokens/s after a first token at 500 ms'
    """
    if not times:
        return f"0 {unit}s"
    (first_time, num_first), (last_time, count) = times[0], times[-1]
    first = f"{(first_time - started) * 1000:.0f} ms"
    if count == num_first:
        return f"{count} {unit}s at {first}"
    rate = (count - num_first) / (last_time - first_time)
    return f"{count} {unit}s, {rate:.1f} {unit}s/s after a first {unit} at {first}"
