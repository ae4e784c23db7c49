"""One answer in the terminal, as it grows."""

from __future__ import annotations

import contextlib
import sys
import time
from typing import TextIO

from draftline.triton.client import Client


def generate(
    prompt: str,
    *,
    url: str,
    max_tokens: int,
    temperature: float | None,
    top_k: int | None,
    top_p: float | None,
    seed: int | None,
    stop_words: list[str],
    raw: bool,
    out: TextIO,
) -> int:
    """Stream the answer to ``out`` and its speed to stderr; return 0.

    The prompt is a user's message for the model's chat template, or the text itself where ``raw``.
    """
    with Client(url) as client:
        text = prompt if raw else client.render_chat([{"role": "user", "content": prompt}])
        started = time.perf_counter()
        times: list[tuple[float, int]] = []
        chunks = client.stream_chunks(
            text,
            max_tokens=max_tokens,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            seed=seed,
            stop_words=stop_words,
        )
        with contextlib.closing(chunks):  # Ctrl-C cancels the request
            for chunk in chunks:
                times.append((time.perf_counter(), chunk.num_output_tokens))
                out.write(chunk.text)
                out.flush()
        out.write("\n")
        out.flush()
    print(describe_speed(started, times), file=sys.stderr)
    return 0


def describe_speed(started: float, times: list[tuple[float, int]]) -> str:
    """Say how fast the answer came; ``times``: when how many tokens were there, in seconds.

    The rate counts the tokens after the first response: what comes before is the prompt's time.

    >>> describe_speed(10.0, [(10.5, 1), (11.5, 21), (12.5, 41)])
    '41 tokens, 20.0 tokens/s after a first token at 500 ms'
    """
    if not times:
        return "0 tokens"
    (first_time, num_first), (last_time, num_tokens) = times[0], times[-1]
    first = f"{(first_time - started) * 1000:.0f} ms"
    if num_tokens == num_first:
        return f"{num_tokens} tokens at {first}"
    rate = (num_tokens - num_first) / (last_time - first_time)
    return f"{num_tokens} tokens, {rate:.1f} tokens/s after a first token at {first}"
