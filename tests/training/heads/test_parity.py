"""What torch trains is what the graphs compute: chains of drafts against engines and independent references."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from draftline.sessions.engine_config import DraftMethod, load_engine_config
from draftline.sessions.onnxruntime_draft_session import OnnxRuntimeDraftSession
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.speculation import TreeShape
from draftline.training.batch import Batch
from draftline.training.export import export_draft
from tests.sessions.draft_references import EagleReference, medusa_log_probs
from tests.sessions.draft_steps import DraftSteps
from tests.sessions.tiny_engines import Text, build_tiny_engine
from tests.sessions.tiny_engines import make_batch as make_step
from tests.training.tiny_heads import (
    CAPTURED_LAYERS,
    HEADS,
    HeadName,
    TinyTarget,
    candidates,
    make_batch,
    make_head,
    make_target,
    random_texts,
)

TOLERANCE = 1e-4  # both sides sum in other orders; 1e-5 in practice
NUM_DEPTHS, K = 3, 4
LENGTHS = (21, 6, 40)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> TinyTarget:
    return make_target(tmp_path_factory.mktemp("parity"))


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    return random_texts(7, LENGTHS)


@pytest.fixture(scope="module")
def batch(target: TinyTarget, texts: list[list[int]]) -> Batch:
    return make_batch(target, texts, [[True] * len(text) for text in texts])


def starts_of(texts: list[list[int]]) -> list[tuple[int, int]]:
    """Text and row within it, of every row of all texts end to end."""
    return [(text, row) for text, tokens in enumerate(texts) for row in range(len(tokens))]


@pytest.mark.parametrize("name", HEADS)
def test_every_chain_equals_the_independent_reference(
    tmp_path: Path, target: TinyTarget, texts: list[list[int]], batch: Batch, name: HeadName
) -> None:
    head = make_head(name, target.tensors)
    export_draft(head, tmp_path / "draft", {})
    captured = CAPTURED_LAYERS if name == "eagle3" else ()
    eagle = None if name.startswith("medusa") else EagleReference(tmp_path / "draft", target.reference, captured)
    where = starts_of(texts)
    for depth, (rows, found) in enumerate(candidates(head, batch, NUM_DEPTHS), 1):
        assert len(rows) == sum(length - 1 - depth for length in LENGTHS)
        for log_probs, row in zip(found, rows.tolist(), strict=True):
            text, start = where[row]
            if eagle is None:
                expected = medusa_log_probs(tmp_path / "draft", target.reference, texts[text], 1)[start, depth - 1]
            else:
                expected = eagle.log_probs(texts[text][: start + 1 + depth], start + 1)
            np.testing.assert_allclose(log_probs.numpy(), expected, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("name", ["eagle3", "eagle1"])
def test_chains_equal_the_engine(
    tmp_path: Path, target: TinyTarget, texts: list[list[int]], batch: Batch, name: HeadName
) -> None:
    """The engine drafts behind known rows, depth by depth, each fed with its own output of the depth before."""
    head = make_head(name, target.tensors)
    export_draft(head, tmp_path / "draft", {"seed": 0})
    method: DraftMethod = "eagle3" if name == "eagle3" else "eagle1"
    tree = TreeShape("dynamic", max_nodes=16, max_depth=4, top_k=K)
    engine = build_tiny_engine(tmp_path, target.checkpoint, drafts=[(method, tmp_path / "draft")], tree=tree)
    config = load_engine_config(engine)
    session = OnnxRuntimeSession(engine, config)
    draft = OnnxRuntimeDraftSession(engine, config, 0, session)
    of_torch = candidates(head, batch, NUM_DEPTHS)
    known = [15, 2, 35]  # rows with the target's features
    prefixes = [text[:count] for text, count in zip(texts, known, strict=True)]
    blocks = [list(range(6)), [40, 9, 30], list(range(20, 26))]
    session.forward(make_step([Text(list(ids)) for ids in blocks], prefixes))
    steps = DraftSteps(draft, [Text(list(ids)) for ids in blocks])
    first_rows = np.split(np.arange(sum(known)), np.cumsum(known)[:-1])
    shifted = [text[1 : count + 1] for text, count in zip(texts, known, strict=True)]
    result = steps.first(shifted, [rows.tolist() for rows in first_rows])
    in_order = [0, 1, 2]
    for depth, (rows, log_probs) in enumerate(of_torch):
        if depth > 0:
            lasts = [
                (text[count + depth], len(step.ids) - 1, step.ids[-1])
                for text, count, step in zip(texts, known, steps.in_step, strict=True)
            ]
            result = steps.later([[node] for node in lasts])
            in_order = [2, 1, 0]  # ids go from the last sequence to the first
        for place, text in enumerate(in_order):
            start = sum(LENGTHS[:text]) + known[text] - 1
            expected = log_probs[rows == start][0].numpy()
            best = np.sort(expected)[::-1][:K]
            np.testing.assert_allclose(result.log_probs[place], best, rtol=0, atol=TOLERANCE)
            np.testing.assert_allclose(expected[result.token_ids[place]], best, rtol=0, atol=TOLERANCE)
    draft.close()
    session.close()


@pytest.mark.parametrize("name", ["medusa", "medusa-shared"])
def test_medusa_heads_equal_the_engine(
    tmp_path: Path, target: TinyTarget, texts: list[list[int]], batch: Batch, name: HeadName
) -> None:
    head = make_head(name, target.tensors)
    export_draft(head, tmp_path / "draft", {})
    tree = TreeShape("dynamic", max_nodes=16, max_depth=3, top_k=K)
    engine = build_tiny_engine(tmp_path, target.checkpoint, drafts=[("medusa", tmp_path / "draft")], tree=tree)
    session = OnnxRuntimeSession(engine, load_engine_config(engine))
    result = session.forward(make_step([Text([0, 1]), Text([2]), Text([3, 4, 5])], texts))
    assert result.head_ids is not None
    assert result.head_log_probs is not None
    for depth, (rows, log_probs) in enumerate(candidates(head, batch, NUM_DEPTHS)):
        best, ids = (values.numpy() for values in torch.topk(log_probs, K))
        np.testing.assert_allclose(result.head_log_probs[rows, depth], best, rtol=0, atol=TOLERANCE)
        np.testing.assert_array_equal(result.head_ids[rows, depth], ids)
    session.close()
