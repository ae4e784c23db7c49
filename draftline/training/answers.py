"""Let the target answer prompts with this project's own runtime, and keep answers and features as they come."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.checkpoints.disk_space import check_free_space
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.errors import PipelineError
from draftline.manifest import lock_directory
from draftline.sessions.engine_config import PoolDtype
from draftline.training.answering_engine import open_answering_engine
from draftline.training.asking import Asked, Run
from draftline.training.description import Description, hash_target, hash_tokenizer
from draftline.training.examples_writer import ExamplesWriter
from draftline.training.prompts import Prompt

ENGINE_DIRECTORY = "engine"
MAX_BATCH_SIZE, MAX_NUM_TOKENS, MAX_SEQ_LEN = 32, 128, 2048


@dataclass(frozen=True)
class AnswersSummary:
    """What a store holds now. ``num_skipped``: prompts without an answer, by rule; of this run alone.

    ``num_new_tokens``: of answers, drawn in ``seconds`` by this run.
    """

    num_sequences: int
    num_tokens: int
    num_answer_tokens: int
    num_skipped: dict[str, int]
    num_new_tokens: int
    seconds: float


def describe_answers(
    checkpoint: Path,
    *,
    captured_layers: Sequence[int],
    weights_dtype: str,
    prompts: Sequence[str],
    temperature: float,
    max_tokens: int,
    seed: int,
    max_user_tokens: int = 256,
    pool_dtype: PoolDtype = "float16",
) -> Description:
    """Describe what a target, a converted ``checkpoint``, will answer; see ``Description``.

    With 32 sequences in flight, reading keys and values takes as long as all products do; in float16 it is half of it,
    and what the rounding changes does not show: a KL divergence below 0.00001 (``docs/log.md``).
    """
    config = load_checkpoint_config(checkpoint)
    return Description(
        target_sha256=hash_target(checkpoint),
        tokenizer_sha256=hash_tokenizer(checkpoint),
        vocab_size=config.vocab_size,
        hidden_size=config.hidden_size,
        captured_layers=tuple(captured_layers),
        weights_dtype=weights_dtype,
        pool_dtype=pool_dtype,
        prompts=tuple(prompts),
        temperature=float(temperature),
        max_tokens=max_tokens,
        max_user_tokens=max_user_tokens,
        seed=seed,
    )


def answer_prompts(
    prompts: Sequence[Prompt],
    checkpoint: Path,
    directory: Path,
    description: Description,
    *,
    num_answer_tokens: int,
    minutes: float | None = None,
    max_repeats: int = 1000,
    max_batch_size: int = MAX_BATCH_SIZE,
    num_threads: int = 0,
    quiet: bool = False,
) -> AnswersSummary:
    """Answer prompts in order, until the store in ``directory`` has ``num_answer_tokens``, or ``minutes`` are over.

    When all are answered they are asked again with other seeds, ``max_repeats`` times in all; greedy answers would be
    the same, and are asked once. What runs when a budget is used up is finished, which takes as long as an answer does:
    cutting it off would keep the short ones. A prompt without a text is one whose text the target writes first.

    A run goes on with what is there. An answer depends on its prompt and seed alone, so it is the one that another run
    would have given, and the store holds the same sequences whenever a run was killed, if in another order.

    Raises: ArtifactError for a store of another description, a damaged one, one in use, or features that float16 cannot
    hold; CheckpointError for a full disk; PipelineError for prompts or limits the target cannot serve. What was
    answered before stays, in each case.
    """
    started = time.monotonic()
    config = load_checkpoint_config(checkpoint)
    max_seq_len = min(MAX_SEQ_LEN, config.max_position_embeddings)
    if description.max_tokens >= max_seq_len:
        rule = f"leaves room for a prompt within {max_seq_len} tokens"
        raise PipelineError("train.max_answer_tokens", rule, description.max_tokens, "lower it")
    with lock_directory(directory), ExamplesWriter(directory, description) as writer:
        before = writer.num_answer_tokens
        num_repeats = 1 if description.temperature == 0 else max_repeats
        asked = Asked(prompts, num_repeats, writer.names)
        num_skipped: Counter[str] = Counter()
        if before < num_answer_tokens and asked.peek() is not None:
            if minutes is None:  # else nobody knows how many there will be
                num_most = len(prompts) * num_repeats * description.max_tokens
                num_bytes = min(num_answer_tokens - before, num_most) * writer.token_bytes
                check_free_space(directory / ENGINE_DIRECTORY, num_bytes)
            with open_answering_engine(
                checkpoint,
                directory / ENGINE_DIRECTORY,
                description,
                max_batch_size=max_batch_size,
                max_num_tokens=max(MAX_NUM_TOKENS, max_batch_size),
                max_seq_len=max_seq_len,
                num_threads=num_threads,
            ) as engine:
                deadline = None if minutes is None else started + 60 * minutes
                run = Run(asked, engine, checkpoint, description, writer, num_answer_tokens, deadline, quiet=quiet)
                run.answer()
                num_skipped = run.num_skipped
        seconds, num_new = time.monotonic() - started, writer.num_answer_tokens - before
        return AnswersSummary(
            writer.num_sequences, writer.num_tokens, writer.num_answer_tokens, dict(num_skipped), num_new, seconds
        )
