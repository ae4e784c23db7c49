"""Real tiny engines, stepped by hand: what is said, and when, is decided by a seed alone."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random
from typing import Any

import numpy as np

from draftline.draft_trees import DraftTrees
from draftline.runtime.core import Emission, EngineCore, Statistics
from draftline.runtime.cost_curve import CostCurve
from draftline.runtime.drafters.building import PLAIN, DrafterSetup, Speculation
from draftline.runtime.limits import EngineLimits, check_request
from draftline.runtime.request import Output, Request, SamplingParameters
from draftline.runtime.selection import SpeculationPolicy
from draftline.runtime.sequence import Sequence as Served
from draftline.runtime.text_stream import TextStream
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.opening import open_draft_sessions, open_session
from draftline.sessions.protocol import Session
from draftline.speculation import TreeShape

CHAIN = TreeShape("chain", max_nodes=5, max_depth=4, top_k=1)
STATIC = TreeShape("static", 9, 4, 1, choices=((0,), (1,), (2,), (0, 0), (0, 1), (1, 0), (0, 0, 0), (0, 0, 0, 0)))
DYNAMIC = TreeShape("dynamic", max_nodes=12, max_depth=4, top_k=3)
AUTO = TreeShape("auto", max_nodes=12, max_depth=4, top_k=3)
SHAPES = {"chain": CHAIN, "static": STATIC, "dynamic": DYNAMIC, "auto": AUTO}


class TimelessPolicy(SpeculationPolicy):
    """Believes in given times, so that the same seed makes the same choices on every machine."""

    def __init__(self, shape: TreeShape, num_sources: int) -> None:
        super().__init__(shape, CostCurve([1, 64, 256], [10.0, 20.0, 80.0]), num_sources)

    def observe(self, trees: DraftTrees, *accepted: Any, draft_ms: float, verify_ms: float, num_rows: int) -> None:
        verify_ms = float(self.cost.at(num_rows))
        super().observe(trees, *accepted, draft_ms=1.0, verify_ms=verify_ms, num_rows=num_rows)


_LAST_ID = 266  # of the tiny tokenizer


def ignore(output: Output) -> None:
    pass


def make_request(name: str, prompt_ids: Sequence[int], max_tokens: int, **fields: Any) -> Request:
    return Request(name, prompt_ids, max_tokens, ignore, **fields)


@dataclass(frozen=True)
class Said:
    """All that a request was given."""

    outputs: tuple[Output, ...]

    @property
    def last(self) -> Output:
        return self.outputs[-1]

    @property
    def token_ids(self) -> list[int]:
        return [token_id for output in self.outputs for token_id in output.token_ids]

    @property
    def text(self) -> str:
        return "".join(output.text or "" for output in self.outputs)


class OpenEngine:
    """The sessions of an engine folder; ``serve`` puts a new core on them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.config = load_engine_config(directory)
        self.session: Session = open_session(directory, self.config)
        self.draft_sessions = open_draft_sessions(directory, self.config, self.session)

    def speculation(self) -> Speculation:
        if self.config.tree is None:
            return PLAIN
        sources = tuple(
            DrafterSetup(draft.method, session, draft.max_position_embeddings)
            for draft, session in zip(self.config.drafts, self.draft_sessions, strict=True)
        )
        return Speculation(sources, self.config.tree, self.config.acceptance)

    def serve(self, *, prefix_cache: bool = True, **limits: int) -> Traffic:
        return Traffic(self, prefix_cache=prefix_cache, **limits)

    def close(self) -> None:
        for draft_session in self.draft_sessions:
            if draft_session is not None:
                draft_session.close()
        self.session.close()


class Traffic:
    """A core, and all that it emitted. ``limits`` replace the engine's own, and are at most as large."""

    def __init__(self, engine: OpenEngine, *, prefix_cache: bool = True, **limits: int) -> None:
        config = engine.config
        self.limits = replace(
            EngineLimits(
                config.max_batch_size,
                config.max_seq_len,
                config.max_num_tokens,
                config.block_size,
                config.max_blocks,
                config.model.vocab_size,
            ),
            **limits,
        )
        speculation = engine.speculation()
        policy = TimelessPolicy(speculation.shape, len(speculation.sources)) if speculation.sources else None
        self.core = EngineCore(
            engine.session, self.limits, prefix_cache=prefix_cache, speculation=speculation, policy=policy
        )
        self.outputs: dict[str, list[Output]] = {}

    def add(self, request: Request) -> None:
        self.outputs[request.request_id] = []
        self.core.add(Served(request, check_request(request, self.limits), time.time_ns()))

    def step(self) -> list[Emission]:
        return self.record(self.core.step())

    def cancel(self, name: str) -> None:
        self.record(self.core.cancel(name))

    def record(self, emissions: list[Emission]) -> list[Emission]:
        for _, output in emissions:
            assert output.error is None, output.error
            self.outputs[output.request_id].append(output)
        return emissions

    def active(self) -> list[str]:
        return [name for name, outputs in self.outputs.items() if not outputs or not outputs[-1].finish_reason]

    def said(self, name: str) -> Said:
        return Said(tuple(self.outputs[name]))

    def run(self) -> Statistics:
        """Run until nobody waits; every block must be free again."""
        while not self.core.is_idle:
            self.step()
        self.core.check_integrity()
        statistics = self.core.statistics()
        assert statistics.num_blocks_free == self.limits.max_blocks
        return statistics

    def run_all(self, requests: Iterable[Request]) -> dict[str, Said]:
        names = []
        for request in requests:
            self.add(request)
            names.append(request.request_id)
        self.run()
        return {name: self.said(name) for name in names}

    def run_jostling(self, requests: Sequence[Request], random: Random, *, cancelling: float = 0.0) -> Statistics:
        """Let requests join between steps at random moments, and cancel ``cancelling`` of them on their way."""
        doomed = {request.request_id for request in requests if random.random() < cancelling}
        for request in requests:
            self.add(request)
            for _ in range(random.choice((0, 0, 1, 2, 5))):
                self.step()
                self._cancel_one(doomed, random)
        while not self.core.is_idle:
            self.step()
            self._cancel_one(doomed, random)
        return self.run()

    def _cancel_one(self, doomed: set[str], random: Random) -> None:
        ready = [name for name in self.active() if name in doomed]
        if ready and random.random() < 0.15:
            self.cancel(random.choice(ready))


def make_requests(
    random: Random,
    count: int,
    *,
    max_prompt: int = 150,
    max_tokens: int = 40,
    sampling: Callable[[int], SamplingParameters] = lambda index: SamplingParameters(),
) -> list[Request]:
    """Make requests of all sorts.

    Prompts are random and stand around multiples of 128 and of a block; every other one begins as another does. Some
    end early at one of a few ids; some decode plainly, or cap their drafts.
    """
    shared = [random.randint(3, _LAST_ID) for _ in range(max_prompt)]
    requests = []
    for index in range(count):
        borders = [length for length in (7, 8, 15, 16, 17, 112, 124, 126, 127, 128, 129) if length <= max_prompt]
        length = random.choice((random.randint(1, max_prompt), random.choice(borders)))
        num_shared = random.choice((length // 2, length - 1)) if index % 2 else 0
        prompt = shared[:num_shared] + [random.randint(3, _LAST_ID) for _ in range(length - num_shared)]
        end_ids = random.choices(range(3, _LAST_ID), k=6) if random.random() < 0.3 else ()
        requests.append(
            make_request(
                str(index),
                prompt,
                random.randint(max_tokens // 4, max_tokens),
                sampling=sampling(index),
                end_ids=frozenset(end_ids),
                speculate=random.random() > 0.1,
                max_draft_tokens=random.choice((None, None, None, None, 0, 1, 2, 3)),
            )
        )
    return requests


def with_stream(request: Request, decode: Callable[[Sequence[int]], str], stop_words: Sequence[str] = ()) -> Request:
    """A request can be served once by its stream, so every run needs a copy."""
    return replace(request, text_stream=TextStream(decode, stop_words))


def assert_said_plainly(speculative: Said, plain: Said) -> None:
    """Cancelled requests have a beginning of the plain text, all others the whole."""
    said, expected = speculative.token_ids, plain.token_ids
    if speculative.last.finish_reason == "cancelled":
        assert said == expected[: len(said)]
    else:
        assert said == expected
        assert speculative.last.finish_reason == plain.last.finish_reason
    metrics = speculative.last.metrics
    assert metrics is not None
    assert metrics.num_output_tokens == len(said)
    numbers = metrics.speculation
    assert sum(numbers.histogram) == numbers.num_steps
    assert np.dot(numbers.histogram, range(len(numbers.histogram))) == numbers.num_accepted_tokens
    # A prompt's last chunk draws a token as well, unless a single token is left for it: that one is decoded.
    assert numbers.num_emitted_tokens <= len(said)
    assert numbers.num_emitted_tokens <= numbers.num_accepted_tokens + numbers.num_steps
