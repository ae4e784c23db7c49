"""Let a target answer prompts, and take down what a draft proposes there: acceptance at depth 1."""

from __future__ import annotations

import tempfile
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.safetensors_file import map_tensor, tensor_locations
from draftline.sessions.draft_builder import DraftSource
from draftline.sessions.draft_variants import add_rotary_variants
from draftline.sessions.engine_config import METHODS_WITH_SESSIONS, EngineConfig, load_engine_config
from draftline.sessions.native_kernels import WantedKernels
from draftline.sessions.onnxruntime_builder import CHECKPOINT_FILE, build_engine
from draftline.sessions.onnxruntime_draft_session import OnnxRuntimeDraftSession
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.plain_step import plain_step
from draftline.sessions.protocol import DraftBatch
from draftline.speculation import TreeShape
from draftline.stages.acceptance import Candidates, Proposals, propose
from draftline.stages.answers import BLOCK_SIZE, Answer, Answers, as_candidates, joined

NUM_CANDIDATES = 8  # of a draft
TREE = TreeShape("dynamic", NUM_CANDIDATES + 1, 1, NUM_CANDIDATES)


class DraftProbe:
    """A draft beside the answers of its target, measured as often as it can be read.

    One pass of the target serves all: what variants of a head read of it is kept.
    """

    def __init__(
        self,
        draft_folder: Path,
        engine: Path,
        config: EngineConfig,
        answers: Answers,
        readings: Sequence[HeadConfig],
        layers: Sequence[int],
        opened: ExitStack,
    ) -> None:
        """``readings``: the draft's own first; ``layers``: of the captured columns of the answers' features."""
        self._draft_folder = draft_folder
        self._engine, self._config, self._answers, self._opened = engine, config, answers, opened
        self._layers, self._max_length = list(layers), config.max_seq_len
        self._rotary = rotary_settings(readings)
        num_positions = config.max_seq_len + TREE.max_depth
        self._with_variants = (
            add_rotary_variants(engine, config, self._rotary[1:], num_positions) if len(self._rotary) > 1 else config
        )
        self._drafters: dict[int, OnnxRuntimeDraftSession] = {}
        self.features = np.empty((0, 0), np.float32)  # of the text that is measured

    def go_on(self, num_tokens: int) -> None:
        """Let answers have ``num_tokens`` at least, as far as they go."""
        self._answers.go_on(num_tokens, self._max_length)

    def guesses(self) -> Proposals:
        """Return how often the target itself guesses the next token of the prompts."""
        parts, targets = [], []
        for answer in self._answers.answers:
            count = answer.num_prompt_tokens - 1
            found = joined(answer.candidates)
            targets.append(Candidates(found.token_ids[:count], found.probabilities[:count]))
            ids = np.array(answer.ids[1 : count + 1], np.int64)[:, None]
            parts.append(Candidates(ids, np.ones(ids.shape)))
        return propose(joined(targets), joined(parts), tuple(len(part.token_ids) for part in parts))

    def measure(self, head: HeadConfig | None, *, has_ids: bool = False) -> Proposals:
        """Return what the draft proposes for each token of the answers; ``head`` is one of the readings.

        ``has_ids``: as if ``d2t`` held the target's ids.
        """
        targets, drafts = [], []
        for answer in self._answers.answers:
            rows = answer.judged_rows
            found, proposed = joined(answer.candidates), self._candidates(answer, head)
            targets.append(Candidates(found.token_ids[rows], found.probabilities[rows]))
            ids = self._as_ids(proposed.token_ids) if has_ids else proposed.token_ids
            drafts.append(Candidates(ids[rows], proposed.probabilities[rows]))
        return propose(joined(targets), joined(drafts), tuple(len(part.token_ids) for part in targets))

    def _candidates(self, answer: Answer, head: HeadConfig | None) -> Candidates:
        """Return the draft's candidates by the row whose token they are of; nothing of value stands for row 0."""
        if self._config.drafts[0].method not in METHODS_WITH_SESSIONS:
            heads = joined(answer.head_candidates)  # the first head looks one token past the target's own choice
            return Candidates(np.roll(heads.token_ids, 1, 0), np.roll(heads.probabilities, 1, 0))
        if head is None:
            found = self._drafter(0).forward(_draft_batch(answer.ids[: answer.num_read]))
            return as_candidates(found.token_ids, found.log_probs)
        drafter = self._drafter(next(i for i, known in enumerate(self._rotary) if _is_same_rotary(known, head)))
        features = np.concatenate(answer.features)
        self.features = features[:, self._columns(head)]
        rows = np.arange(answer.num_read - 1)  # row t of a head reads the feature of token t, and token t + 1
        drafter.keep_features(rows, rows)
        found = drafter.forward(_draft_batch(answer.ids[1 : answer.num_read]))
        first = np.zeros((1, found.token_ids.shape[1]))
        of_rows = as_candidates(found.token_ids, found.log_probs)
        return joined([Candidates(first.astype(np.int64), first), of_rows])

    def _as_ids(self, token_ids: NDArray[np.int64]) -> NDArray[np.int64]:
        """Take back what ``d2t`` added: target id = draft id + d2t[draft id] rises with the draft's."""
        path = self._draft_folder / CHECKPOINT_FILE
        offsets = map_tensor(path, tensor_locations(path)["d2t"])
        draft_ids = np.searchsorted(np.arange(len(offsets)) + offsets, token_ids)
        return np.asarray(offsets[np.minimum(draft_ids, len(offsets) - 1)], np.int64)

    def _columns(self, head: HeadConfig) -> NDArray[np.int64]:
        size = head.target_hidden_size
        places = [self._layers.index(layer) for layer in head.captured_layers] or [0]
        return np.concatenate([np.arange(place * size, (place + 1) * size) for place in places])

    def _drafter(self, index: int) -> OnnxRuntimeDraftSession:
        if index not in self._drafters:
            drafter = OnnxRuntimeDraftSession(self._engine, self._with_variants, index, self)
            self._opened.callback(drafter.close)
            self._drafters[index] = drafter
        return self._drafters[index]


@contextmanager
def open_probe(
    target: Path,
    draft: DraftSource,
    prompts: Sequence[Sequence[int]],
    end_ids: Collection[int],
    max_length: int,
    scratch: Path,
    *,
    readings: Sequence[HeadConfig] = (),
    kernels: WantedKernels = "auto",
    num_threads: int = 0,
) -> Iterator[DraftProbe]:
    """Open a probe of a draft; both are converted checkpoints, run in float32.

    ``readings``: what a head can be read as, that of its own checkpoint first; none of a draft model. ``max_length``:
    of a text, prompt and answer. An engine stands in the folder ``scratch`` for as long as that takes.
    """
    assert draft.checkpoint is not None, "others have no weights to be wrong"
    own = readings[0].captured_layers if readings else ()
    further = sorted({layer for head in readings for layer in head.captured_layers} - set(own))
    blocks_of_answer = -(-max_length // BLOCK_SIZE)
    with tempfile.TemporaryDirectory(dir=scratch) as folder, ExitStack() as opened:
        engine = Path(folder, "engine")
        engine.mkdir()
        build_engine(
            target,
            engine,
            weights_dtype="float32",
            kernels=kernels,
            max_batch_size=len(prompts),
            max_seq_len=max_length,
            max_num_tokens=max(max_length, len(prompts)),
            num_threads=num_threads,
            block_size=BLOCK_SIZE,
            max_blocks=blocks_of_answer * len(prompts),
            prefix_cache=False,
            progress=lambda done, total: None,
            drafts=[draft],
            tree=TREE,
            further_layers=further,
        )
        config = load_engine_config(engine)
        session = OnnxRuntimeSession(engine, config)
        opened.callback(session.close)
        answers = Answers(session, prompts, end_ids, blocks_of_answer, has_features=config.has_features)
        yield DraftProbe(draft.checkpoint, engine, config, answers, readings, (*own, *further), opened)


def rotary_settings(readings: Sequence[HeadConfig]) -> list[HeadConfig]:
    """Return a reading of each rotary setting, in order."""
    found: list[HeadConfig] = []
    for head in readings:
        if not any(_is_same_rotary(head, known) for known in found):
            found.append(head)
    return found


def _is_same_rotary(left: HeadConfig, right: HeadConfig) -> bool:
    return (left.rotary_base, left.rotary_scaling) == (right.rotary_base, right.rotary_scaling)


def _draft_batch(ids: Sequence[int]) -> DraftBatch:
    step, rows = plain_step(ids, 0, BLOCK_SIZE), np.arange(len(ids), dtype=np.int32)
    return DraftBatch(
        is_first=True,
        input_ids=step.input_ids,
        position_ids=step.position_ids,
        feature_rows=rows,
        sequence_starts=step.sequence_starts,
        row_ids=rows,
        context_lengths=step.context_lengths,
        block_table=step.block_table,
        candidate_rows=step.sample_rows,
        temperature=step.temperature,
        top_k=step.top_k,
        top_p=step.top_p,
        uniform=step.uniform,
    )
