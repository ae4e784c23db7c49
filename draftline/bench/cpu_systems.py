"""What the CPU benchmark compares: engines that continue prompts of token ids, greedily and to a fixed length."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from draftline.bench.openvino_reference import OpenVinoReference
from draftline.bench.timeline import Timeline
from draftline.bench.transformers_reference import TransformersReference
from draftline.errors import DraftlineError
from draftline.generation import LoadedEngine
from draftline.runtime.request import Output, Request

Prompts = Sequence[Sequence[int]]
Answers = tuple[list[Timeline], list[list[int]]]


class TokenSystem(Protocol):
    """``max_context_tokens``: of a whole batch; larger ones are cut for this system."""

    name: str
    max_context_tokens: int

    def prefill(self, prompts: Prompts) -> None:
        """Keep the keys and values of these prompts, so that answers to them and to their beginnings start at once."""
        ...

    def answer(self, prompts: Prompts, num_tokens: int) -> Answers:
        """Continue all prompts, which are equally long, at once."""
        ...


@dataclass
class _Answer:
    timeline: Timeline
    token_ids: list[int] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)
    error: str | None = None

    def extend(self, output: Output) -> None:
        """Note an output; called in the engine's thread."""
        self.token_ids += output.token_ids
        self.timeline.events.append((time.perf_counter(), len(self.token_ids)))
        if output.finish_reason is not None:
            self.error = output.error
            self.ended.set()


class DraftlineSystem:
    """This engine in process, through its runtime; its prefix cache keeps the prompts."""

    def __init__(self, loaded: LoadedEngine, name: str, max_context_tokens: int) -> None:
        self.name, self.max_context_tokens = name, max_context_tokens
        self._engine = loaded.engine
        self._numbers = itertools.count()

    def prefill(self, prompts: Prompts) -> None:
        for prompt in prompts:
            self.answer([prompt], 1)

    def answer(self, prompts: Prompts, num_tokens: int) -> Answers:
        answers = [_Answer(Timeline(time.perf_counter())) for _ in prompts]
        for prompt, answer in zip(prompts, answers, strict=True):
            self._engine.submit(Request(f"bench-{next(self._numbers)}", list(prompt), num_tokens, answer.extend))
        for answer in answers:
            answer.ended.wait()
            if answer.error is not None:
                raise DraftlineError("bench", "the engine answers", answer.error, "see the log")
        return [answer.timeline for answer in answers], [answer.token_ids for answer in answers]


class OpenVinoSystem:
    """``openvino-genai``; its prefix cache keeps the prompts."""

    def __init__(self, reference: OpenVinoReference, name: str, max_context_tokens: int) -> None:
        self.name, self.max_context_tokens = name, max_context_tokens
        self._reference = reference

    def prefill(self, prompts: Prompts) -> None:
        for prompt in prompts:
            self._reference.generate([prompt], 1)

    def answer(self, prompts: Prompts, num_tokens: int) -> Answers:
        return self._reference.generate(prompts, num_tokens)


class TransformersTokens:
    """``model.generate`` of transformers, which starts from copies of the kept keys and values."""

    def __init__(self, checkpoint: Path, name: str, max_context_tokens: int) -> None:
        self.name, self.max_context_tokens = name, max_context_tokens
        self._reference = TransformersReference(checkpoint)
        self._kept: dict[tuple[int, ...], Any] = {}

    def prefill(self, prompts: Prompts) -> None:
        for prompt in prompts:
            self._kept[tuple(prompt)] = self._reference.prefill(prompt)

    def answer(self, prompts: Prompts, num_tokens: int) -> Answers:
        timeline = Timeline(time.perf_counter())
        cache = self._reference.join([self._find(tuple(prompt)) for prompt in prompts], len(prompts[0]) - 1)

        def note(instant: float, count: int) -> None:
            timeline.events.append((instant, count))

        answers = self._reference.generate(prompts, num_tokens, note, cache)
        return [timeline] * len(prompts), answers

    def _find(self, prompt: tuple[int, ...]) -> Any:
        for kept, cache in self._kept.items():
            if kept[: len(prompt)] == prompt:
                return cache
        self.prefill([prompt])
        return self._kept[prompt]
