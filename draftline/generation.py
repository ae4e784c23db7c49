"""An engine ready to answer: session, runtime and tokenizer, in this process.

>>> with load_engine(Path("builds/smollm2-135m/engine")) as loaded:  # doctest: +SKIP
...     print(loaded.generate(["The capital of France is"], max_tokens=8)[0].text)
"""

from __future__ import annotations

import itertools
import queue
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from draftline.checkpoints.tokenizer import Tokenizer, load_tokenizer
from draftline.errors import DraftlineError, RequestError
from draftline.runtime.drafters.building import PLAIN, DrafterSetup, Speculation
from draftline.runtime.engine import Engine
from draftline.runtime.request import FinishReason, Metrics, Output, Request, SamplingParameters
from draftline.runtime.text_stream import TextStream
from draftline.sessions.engine_config import EngineConfig, load_engine_config
from draftline.sessions.opening import open_draft_sessions, open_session
from draftline.sessions.protocol import DraftSession

GREEDY = SamplingParameters()


@dataclass(frozen=True)
class Answer:
    """``token_ids`` without the end id; ``text`` cut before a stop word."""

    token_ids: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    metrics: Metrics


class LoadedEngine:
    """A context manager: leaving it ends outstanding requests and releases the sessions."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer, config: EngineConfig, opened: ExitStack) -> None:
        """``opened`` closes the engine, then its sessions."""
        self.engine, self.tokenizer, self.config = engine, tokenizer, config
        self._opened = opened
        self._numbers = itertools.count()

    def generate(
        self,
        prompts: Sequence[str | Sequence[int]],
        max_tokens: int,
        sampling: SamplingParameters | Sequence[SamplingParameters] = GREEDY,
        stop_words: Sequence[str] = (),
        *,
        speculate: bool = True,
        max_draft_tokens: int | None = None,
    ) -> list[Answer]:
        """Answer all prompts, batched in flight; a prompt is a text (encoded with special tokens) or token ids.

        ``speculate`` and ``max_draft_tokens`` as in ``Request``: they change the speed, never the answers, which say in
        ``metrics.speculation`` what was accepted.

        Raises: RequestError for a prompt or a parameter that the engine cannot serve; DraftlineError if a step fails.
        """
        if isinstance(sampling, SamplingParameters):
            sampling = [sampling] * len(prompts)
        ids = [self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt) for prompt in prompts]
        outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()
        names = [f"generate-{next(self._numbers)}" for _ in prompts]
        submitted: list[str] = []
        try:
            for name, prompt_ids, parameters in zip(names, ids, sampling, strict=True):
                self.engine.submit(
                    Request(
                        name,
                        prompt_ids,
                        max_tokens,
                        outputs.put,
                        parameters,
                        frozenset(self.config.model.eos_token_ids),
                        TextStream(self.tokenizer.decode, stop_words),
                        speculate=speculate,
                        max_draft_tokens=max_draft_tokens,
                    )
                )
                submitted.append(name)
        except RequestError:
            for name in submitted:
                self.engine.cancel(name)
            raise
        tokens: dict[str, list[int]] = {name: [] for name in names}
        texts: dict[str, list[str]] = {name: [] for name in names}
        ended: dict[str, Answer] = {}
        while len(ended) < len(names):
            output = outputs.get()
            tokens[output.request_id] += output.token_ids
            texts[output.request_id].append(output.text or "")
            if output.finish_reason == "error":
                raise DraftlineError(output.request_id, "a step of the engine succeeds", output.error, "see the log")
            if output.finish_reason:
                assert output.metrics
                ended[output.request_id] = Answer(
                    tuple(tokens[output.request_id]),
                    "".join(texts[output.request_id]),
                    output.finish_reason,
                    output.metrics,
                )
        return [ended[name] for name in names]

    def close(self) -> None:
        self._opened.close()

    def __enter__(self) -> LoadedEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def load_engine(directory: Path) -> LoadedEngine:
    """Load an engine directory (``builds/NAME/engine``) and start its runtime.

    Raises: ArtifactError if another version built it or it is damaged.
    """
    return open_engine(directory, load_engine_config(directory))


def open_engine(directory: Path, config: EngineConfig) -> LoadedEngine:
    """Start the runtime of an engine directory with ``config``: its own, or one that uses less of what was built.

    Less is n-gram lookup instead of its drafts, or a tree that is no deeper and no wider than the one it was built for.
    """
    tokenizer = load_tokenizer(directory)
    with ExitStack() as opened:
        session = open_session(directory, config)
        opened.callback(session.close)
        draft_sessions = open_draft_sessions(directory, config, session)
        for draft_session in filter(None, draft_sessions):
            opened.callback(draft_session.close)
        engine = Engine(
            session,
            max_batch_size=config.max_batch_size,
            max_seq_len=config.max_seq_len,
            max_num_tokens=config.max_num_tokens,
            block_size=config.block_size,
            max_blocks=session.num_blocks,
            prefix_cache=config.prefix_cache,
            vocab_size=config.model.vocab_size,
            speculation=_speculation(config, draft_sessions),
        )
        opened.callback(engine.close)
        return LoadedEngine(engine, tokenizer, config, opened.pop_all())


def _speculation(config: EngineConfig, sessions: Sequence[DraftSession | None]) -> Speculation:
    if config.tree is None:
        return PLAIN
    sources = tuple(
        DrafterSetup(draft.method, session, draft.max_position_embeddings)
        for draft, session in zip(config.drafts, sessions, strict=True)
    )
    return Speculation(sources, config.tree, config.acceptance)
