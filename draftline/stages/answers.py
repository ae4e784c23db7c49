"""A target's greedy answers to prompts, with what drafts are measured by: drawn as far as somebody asks."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.protocol import StepBatch, StepResult
from draftline.stages.acceptance import Candidates

BLOCK_SIZE = 16
NUM_CANDIDATES = 16  # of the target; what a draft gives to others counts as lost


@dataclass
class Answer:
    """One text. ``ids``: of the prompt and what was drawn; the target has read all but the last.

    What it said behind each token that it read: ``candidates``; ``features [., F]`` where it has some; those of the
    first Medusa head, where there is one, in ``head_candidates``. Each is a list of parts.
    """

    ids: list[int]
    num_prompt_tokens: int
    candidates: list[Candidates] = field(default_factory=list)
    head_candidates: list[Candidates] = field(default_factory=list)
    features: list[NDArray[np.float32]] = field(default_factory=list)

    @property
    def num_read(self) -> int:
        return len(self.ids) - 1

    @property
    def judged_rows(self) -> slice:
        """The rows behind which a token of the answer was drawn; the first row of a text has no draft."""
        return slice(max(self.num_prompt_tokens - 1, 1), self.num_read)


class Answers:
    """The answers to ``prompts``, each of at least two tokens, by a session that has a pool for all of them."""

    def __init__(
        self,
        session: OnnxRuntimeSession,
        prompts: Sequence[Sequence[int]],
        end_ids: Collection[int],
        num_blocks: int,
        *,
        has_features: bool,
    ) -> None:
        """``num_blocks``: of the pool, for each answer."""
        self._session, self._end_ids, self._num_blocks = session, frozenset(end_ids), num_blocks
        self._has_features = has_features
        self.answers = [Answer(list(prompt), len(prompt)) for prompt in prompts]
        for index, answer in enumerate(self.answers):
            self._read([index], [answer.ids], [0])

    def go_on(self, num_tokens: int, max_length: int) -> None:
        """Draw on until each answer has ``num_tokens``, or its text ``max_length``, or it has ended."""
        while True:
            going = [
                index
                for index, answer in enumerate(self.answers)
                if len(answer.ids) < min(answer.num_prompt_tokens + num_tokens, max_length)
                and answer.ids[-1] not in self._end_ids
            ]
            if not going:
                return
            answers = [self.answers[index] for index in going]
            self._read(going, [answer.ids[-1:] for answer in answers], [answer.num_read for answer in answers])

    def _read(self, indices: Sequence[int], tokens: Sequence[Sequence[int]], contexts: Sequence[int]) -> None:
        """Read ``tokens`` of the answers ``indices`` behind their ``contexts``, and draw a token behind the last."""
        batch = self._step(indices, tokens, contexts)
        result = self._session.forward(batch)
        found, heads = _target_candidates(result), _head_candidates(result)
        features = self._session.features if self._has_features else None
        rows = np.arange(len(batch.input_ids))
        sequences = np.repeat(np.arange(len(indices)), np.diff(batch.sequence_starts))
        blocks = batch.block_table[sequences, batch.position_ids // BLOCK_SIZE]
        self._session.commit(rows, blocks.astype(np.int64) * BLOCK_SIZE + batch.position_ids % BLOCK_SIZE)
        for number, index in enumerate(indices):
            part = slice(*batch.sequence_starts[number : number + 2])
            answer = self.answers[index]
            answer.candidates.append(Candidates(found.token_ids[part], found.probabilities[part]))
            if heads is not None:
                answer.head_candidates.append(Candidates(heads.token_ids[part], heads.probabilities[part]))
            if features is not None:
                answer.features.append(features[part].copy())
            answer.ids.append(int(found.token_ids[part][-1, 0]))

    def _step(self, indices: Sequence[int], tokens: Sequence[Sequence[int]], contexts: Sequence[int]) -> StepBatch:
        counts = [len(ids) for ids in tokens]
        num_rows = sum(counts)
        table = np.array(indices)[:, None] * self._num_blocks + np.arange(self._num_blocks)
        return StepBatch(
            input_ids=np.concatenate([np.array(ids, np.int32) for ids in tokens]),
            position_ids=np.concatenate(
                [np.arange(first, first + count, dtype=np.int32) for first, count in zip(contexts, counts, strict=True)]
            ),
            sequence_starts=np.cumsum([0, *counts], dtype=np.int32),
            context_lengths=np.array(contexts, np.int32),
            block_table=table.astype(np.int32),
            sample_rows=np.arange(num_rows, dtype=np.int32),
            temperature=np.zeros(num_rows, np.float32),
            top_k=np.zeros(num_rows, np.int32),
            top_p=np.ones(num_rows, np.float32),
            uniform=np.zeros(num_rows, np.float32),
            wants_logits=True,
        )


def joined(parts: Sequence[Candidates]) -> Candidates:
    return Candidates(
        np.concatenate([part.token_ids for part in parts]), np.concatenate([part.probabilities for part in parts])
    )


def _target_candidates(result: StepResult) -> Candidates:
    """The first candidate is what the session drew, whatever stands beside it with the same logit."""
    assert result.logits is not None, "they were asked for"
    logits, drawn = result.logits, result.sampled_ids.astype(np.int64)
    k = min(NUM_CANDIDATES, logits.shape[1])
    ids = np.argpartition(-logits, k - 1, axis=1)[:, :k]
    largest = logits.max(axis=1, keepdims=True)
    total = np.exp(logits - largest).sum(axis=1, dtype=np.float64)[:, None]
    probabilities = np.exp(np.take_along_axis(logits, ids, 1).astype(np.float64) - largest) / total
    order = np.lexsort((-probabilities, ids != drawn[:, None]))
    return Candidates(np.take_along_axis(ids, order, 1), np.take_along_axis(probabilities, order, 1))


def _head_candidates(result: StepResult) -> Candidates | None:
    if result.head_ids is None or result.head_log_probs is None:
        return None
    return as_candidates(result.head_ids[:, 0], result.head_log_probs[:, 0])


def as_candidates(token_ids: NDArray[np.int32], log_probs: NDArray[np.float32]) -> Candidates:
    return Candidates(token_ids.astype(np.int64), np.exp(log_probs.astype(np.float64)))
