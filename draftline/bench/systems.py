"""What is measured: anything that answers a batch of prompts greedily and says when its tokens came."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from draftline.bench.timeline import Timeline
from draftline.bench.transformers_reference import TransformersReference
from draftline.checkpoints.tokenizer import Tokenizer
from draftline.errors import DraftlineError
from draftline.generation import LoadedEngine
from draftline.runtime.request import Output, Request
from draftline.runtime.speculation_numbers import NO_SPECULATION, SpeculationNumbers
from draftline.runtime.text_stream import TextStream
from draftline.triton.client import Client


class System(Protocol):
    """``name`` identifies it in the results."""

    @property
    def name(self) -> str: ...

    def answer(self, prompts: Sequence[str], num_tokens: int) -> list[Timeline]:
        """Answer all prompts at once, greedily, with ``num_tokens`` tokens each."""
        ...


class TransformersSystem:
    def __init__(self, checkpoint: Path, tokenizer: Tokenizer, name: str) -> None:
        self.name = name
        self._tokenizer = tokenizer
        self._reference = TransformersReference(checkpoint)

    def answer(self, prompts: Sequence[str], num_tokens: int) -> list[Timeline]:
        timeline = Timeline(time.perf_counter())
        ids = [self._tokenizer.encode(prompt) for prompt in prompts]
        self._reference.generate(ids, num_tokens, lambda instant, count: timeline.events.append((instant, count)))
        return [timeline] * len(prompts)


class InProcessSystem:
    """The engine in this process, text included: a request goes in as text and its tokens come out as text.

    ``speculate`` False decodes plainly. ``speculation`` gathers the numbers of all answers.
    """

    def __init__(self, loaded: LoadedEngine, name: str, *, speculate: bool = True) -> None:
        self.name = name
        self.speculation: list[SpeculationNumbers] = []
        self._loaded = loaded
        self._speculate = speculate
        self._numbers = itertools.count()

    def answer(self, prompts: Sequence[str], num_tokens: int) -> list[Timeline]:
        answers = [_Answer() for _ in prompts]
        tokenizer = self._loaded.tokenizer
        for prompt, answer in zip(prompts, answers, strict=True):
            self._loaded.engine.submit(
                Request(
                    request_id=f"bench-{next(self._numbers)}",
                    prompt_ids=tokenizer.encode(prompt),
                    max_tokens=num_tokens,
                    on_output=answer.extend,
                    text_stream=TextStream(tokenizer.decode, ()),
                    speculate=self._speculate,
                )
            )
        timelines = [answer.wait() for answer in answers]
        self.speculation += [answer.speculation for answer in answers]
        return timelines


class _Answer:
    def __init__(self) -> None:
        self._timeline = Timeline(time.perf_counter())
        self._num_tokens = 0
        self._ended = threading.Event()
        self._error: str | None = None
        self.speculation = NO_SPECULATION

    def extend(self, output: Output) -> None:
        """Note an output; called in the engine's thread."""
        self._num_tokens += len(output.token_ids)
        self._timeline.events.append((time.perf_counter(), self._num_tokens))
        if output.finish_reason is not None:
            self._error = output.error
            if output.metrics is not None:
                self.speculation = output.metrics.speculation
            self._ended.set()

    def wait(self) -> Timeline:
        self._ended.wait()
        if self._error is not None:
            raise DraftlineError("bench", "the engine answers", self._error, "see the log")
        return self._timeline


class GrpcSystem:
    """The served ensemble, streaming over gRPC; one client thread per prompt."""

    def __init__(self, client: Client, name: str) -> None:
        self.name = name
        self._client = client

    def answer(self, prompts: Sequence[str], num_tokens: int) -> list[Timeline]:
        timelines = [Timeline(0.0) for _ in prompts]
        errors: list[DraftlineError] = []

        def ask(prompt: str, timeline: Timeline) -> None:
            timeline.started = time.perf_counter()
            try:
                for chunk in self._client.stream_chunks(prompt, max_tokens=num_tokens):
                    assert chunk.num_output_tokens is not None, "draftline's servers count tokens"
                    timeline.events.append((time.perf_counter(), chunk.num_output_tokens))
            except DraftlineError as error:
                errors.append(error)

        threads = [
            threading.Thread(target=ask, args=pair, daemon=True) for pair in zip(prompts, timelines, strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        return timelines
