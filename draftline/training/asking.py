"""The loop that keeps an engine full of requests, and stores what ends."""

from __future__ import annotations

import queue
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import numpy as np
from numpy.typing import NDArray
from tqdm import tqdm

from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.errors import DraftlineError, PipelineError
from draftline.runtime.request import FinishReason, Output, Request, SamplingParameters
from draftline.training.answering_engine import AnsweringEngine
from draftline.training.description import Description
from draftline.training.examples_writer import ExamplesWriter
from draftline.training.prompts import Prompt, installed_held_out
from draftline.training.turns import Turns, derive_seed

_NUM_WAITING = 4  # requests beyond those that run: a place is taken again in the step after it was left
_COMMIT_SECONDS = 10.0
_NUM_TRIED_TURNS = 64  # user's turns of which one must be a request


class Asked:
    """The prompts that a store has no answer to, in order, repeats under names of their own."""

    def __init__(self, prompts: Sequence[Prompt], max_repeats: int, known: set[str]) -> None:
        self._hopeless: set[str] = set()
        self._asked = self._generate(prompts, max_repeats, known)
        self._next = next(self._asked, None)

    def peek(self) -> tuple[str, str] | None:
        return self._next

    def take(self) -> tuple[str, str]:
        """Return the name and the text of the next one, which ``peek`` has shown to be there."""
        taken, self._next = self._next, next(self._asked, None)
        assert taken is not None
        return taken

    def drop(self, name: str) -> None:
        """Do not ask the prompt of this name again: no answer to it can ever be had."""
        self._hopeless.add(name.partition("#")[0])

    def _generate(self, prompts: Sequence[Prompt], max_repeats: int, known: set[str]) -> Iterator[tuple[str, str]]:
        for repeat in range(1, max_repeats + 1):
            for prompt in prompts:
                name = prompt.name if repeat == 1 else f"{prompt.name}#{repeat}"
                if name not in known and prompt.name not in self._hopeless:
                    yield name, prompt.text


@dataclass
class _Ended:
    """A request, and what came of it when it ended. ``token_ids``: prompt, then what was drawn, the end token too."""

    name: str
    is_user_turn: bool
    prompt_ids: list[int]
    drawn_ids: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    error: str | None = None
    features: NDArray[np.float16] | None = None

    @property
    def token_ids(self) -> NDArray[np.int32]:
        return np.array(self.prompt_ids + self.drawn_ids, np.int32)


class Run:
    """Keeps the engine full of requests until a budget is used up, and stores what ends."""

    def __init__(
        self,
        asked: Asked,
        engine: AnsweringEngine,
        checkpoint: Path,
        description: Description,
        writer: ExamplesWriter,
        num_answer_tokens: int,
        deadline: float | None,
        *,
        quiet: bool,
    ) -> None:
        self.num_skipped: Counter[str] = Counter()
        self._asked = asked
        self._num_user_turns = self._num_requests = 0  # that the target wrote, and that were requests
        self._engine, self._description, self._writer = engine, description, writer
        self._num_answer_tokens, self._deadline = num_answer_tokens, deadline
        self._turns = Turns(load_tokenizer(checkpoint))
        self._held_out = installed_held_out()
        self._end_ids = frozenset(engine.config.model.eos_token_ids)
        self._max_in_flight = engine.config.max_batch_size + _NUM_WAITING
        self._num_in_flight = 0
        self._outputs: queue.SimpleQueue[_Ended] = queue.SimpleQueue()
        self._bar: tqdm[NoReturn] = tqdm(
            desc="answers",
            total=num_answer_tokens,
            initial=writer.num_answer_tokens,
            unit=" tokens",
            unit_scale=True,
            smoothing=0.05,
            mininterval=0.5 if sys.stderr.isatty() else 10.0,
            disable=quiet,
        )

    def answer(self) -> None:
        """Return when all is asked, or a budget is used up and what ran then has ended."""
        asked, last_commit = self._asked, time.monotonic()
        with self._bar:
            while True:
                while self._num_in_flight < self._max_in_flight and asked.peek() is not None and self._has_budget:
                    self._ask(*asked.take())
                if not self._num_in_flight:
                    return
                ended = self._outputs.get()
                self._num_in_flight -= 1
                self._keep(ended)
                if time.monotonic() - last_commit >= _COMMIT_SECONDS:
                    self._writer.commit()
                    last_commit = time.monotonic()

    @property
    def _has_budget(self) -> bool:
        if self._deadline is not None and time.monotonic() >= self._deadline:
            return False
        writer = self._writer
        expected = self._num_in_flight * writer.num_answer_tokens / max(1, writer.num_sequences)
        return writer.num_answer_tokens + expected < self._num_answer_tokens

    def _ask(self, name: str, text: str) -> None:
        if text:
            self._submit(name, self._turns.asking(text), is_user_turn=False)
        else:
            self._submit(name, self._turns.opening(), is_user_turn=True, is_own=True)

    def _submit(self, name: str, prompt_ids: list[int], *, is_user_turn: bool, is_own: bool = False) -> None:
        description, capture = self._description, self._engine.capture
        max_tokens = description.max_user_tokens if is_user_turn else description.max_tokens
        max_prompt_tokens = self._engine.config.max_seq_len - max_tokens
        if len(prompt_ids) > max_prompt_tokens:
            self._skip(name, f"the prompt has more than {max_prompt_tokens} tokens")
            if not is_own:
                self._asked.drop(name)
            return
        ended = _Ended(name, is_user_turn, prompt_ids)
        request_id = f"{name}/user" if is_user_turn else name

        def extend(output: Output) -> None:  # in the engine's thread, before the next step
            ended.drawn_ids += output.token_ids
            if output.finish_reason is None:
                return
            ended.finish_reason, ended.error = output.finish_reason, output.error
            if output.end_id is not None:
                ended.drawn_ids.append(output.end_id)
            if output.finish_reason in ("end_id", "max_tokens"):
                ended.features = capture.features_of(ended.token_ids[:-1])
            self._outputs.put(ended)

        sampling = SamplingParameters(description.temperature, seed=derive_seed(description.seed, request_id))
        self._engine.engine.submit(Request(request_id, prompt_ids, max_tokens, extend, sampling, self._end_ids))
        self._num_in_flight += 1

    def _keep(self, ended: _Ended) -> None:
        if ended.features is None or ended.finish_reason is None:
            cure = "see the message; what was answered before is kept"
            raise DraftlineError(ended.name, "a step of the engine succeeds", ended.error, cure)
        if ended.is_user_turn:
            self._ask_own(ended, ended.finish_reason)
            return
        token_ids = ended.token_ids
        is_answer = np.arange(len(token_ids)) >= len(ended.prompt_ids)
        self._writer.append(ended.name, token_ids, is_answer, ended.features)
        self._bar.update(len(ended.drawn_ids))

    def _ask_own(self, ended: _Ended, finish_reason: FinishReason) -> None:
        """Ask what the target wrote as the user, in tokens of its text as a client's would be."""
        drawn_ids = ended.drawn_ids[:-1] if finish_reason == "end_id" else ended.drawn_ids
        text, rule = self._turns.read(drawn_ids, finish_reason)
        if rule is None and self._held_out.find_leak(Prompt(ended.name, text)) is not None:
            rule = "the user's turn holds a held-out prompt"
        self._num_user_turns += 1
        if rule is None:
            self._num_requests += 1
            self._submit(ended.name, self._turns.asking(text), is_user_turn=False, is_own=True)
            return
        self._skip(ended.name, rule)
        if not self._num_requests and self._num_user_turns >= _NUM_TRIED_TURNS:
            got = f"{self._num_user_turns} without one; the last: {rule}"
            cure = "leave `own` out: this target was not tuned on chats"
            raise PipelineError("train.prompts", "`own` has the target write requests", got, cure)

    def _skip(self, name: str, rule: str) -> None:
        self._writer.skip(name, rule)
        self.num_skipped[rule] += 1
