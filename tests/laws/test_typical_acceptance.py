"""Typical acceptance: lossy by its name, exact for greedy requests, and never a token that its rule refuses."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from draftline.generation import load_engine
from draftline.runtime.request import SamplingParameters
from draftline.speculation import Acceptance, TreeShape
from tests.sessions.tiny_engines import Text, build_tiny_engine, open_tiny_session, run_text
from tests.tiny_checkpoints import write_tiny_checkpoint

CHAIN = TreeShape("chain", max_nodes=5, max_depth=4, top_k=1)
TREE = TreeShape("dynamic", max_nodes=12, max_depth=3, top_k=3)
PROMPTS = [[5, 6, 7], [200, 3, 77, 8], [9] * 30]


def build(directory: Path, shape: TreeShape, acceptance: Acceptance) -> Path:
    target = write_tiny_checkpoint(directory / "target")
    draft = write_tiny_checkpoint(directory / "draft", seed=1)
    return build_tiny_engine(directory, target, drafts=[("draft_model", draft)], tree=shape, acceptance=acceptance)


@pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
def test_it_accepts_what_its_thresholds_allow(tmp_path: Path, shape: TreeShape) -> None:
    lengths = {}
    sampling = SamplingParameters(1.0, seed=4)
    for name, acceptance in (
        ("exact", Acceptance()),
        ("strict", Acceptance("typical", epsilon=1.0, alpha=1e6)),  # p > 1: nothing
        ("loose", Acceptance("typical", epsilon=1e-12, alpha=1.0)),
    ):
        (tmp_path / name).mkdir()
        with load_engine(build(tmp_path / name, shape, acceptance)) as engine:
            answers = engine.generate(PROMPTS, 40, sampling)
            plain = engine.generate(PROMPTS, 40, sampling, speculate=False)
            assert all(len(answer.token_ids) == 40 or answer.finish_reason == "end_id" for answer in answers)
            lengths[name] = max(answer.metrics.speculation.acceptance_length for answer in answers)
            if name == "strict":
                assert [answer.token_ids for answer in answers] == [answer.token_ids for answer in plain]
            greedy = engine.generate(PROMPTS, 30)
            assert [a.token_ids for a in greedy] == [a.token_ids for a in engine.generate(PROMPTS, 30, speculate=False)]
    assert lengths["strict"] == 1.0
    assert lengths["loose"] > 3.0 > lengths["exact"]


def test_every_accepted_token_is_typical(tmp_path: Path) -> None:
    acceptance = Acceptance("typical", epsilon=0.002, alpha=0.3)
    engine_directory = build(tmp_path, CHAIN, acceptance)
    with load_engine(engine_directory) as engine:
        (answer,) = engine.generate([PROMPTS[0]], 40, SamplingParameters(1.0, seed=4))
        exact = engine.generate([PROMPTS[0]], 40, SamplingParameters(1.0, seed=4), speculate=False)[0].token_ids
    assert answer.token_ids != exact
    assert answer.metrics.speculation.num_accepted_tokens > 0
    session = open_tiny_session(engine_directory)
    text = [*PROMPTS[0], *answer.token_ids]
    logits = run_text(session, Text(list(range(8))), text).astype(np.float64)
    session.close()
    probabilities = np.exp(logits - logits.max(axis=1, keepdims=True))
    probabilities /= probabilities.sum(axis=1, keepdims=True)
    entropy = -(probabilities * np.log(probabilities)).sum(axis=1)
    thresholds = np.minimum(acceptance.epsilon, acceptance.alpha * np.exp(-entropy))
    drawn = probabilities[np.arange(len(text) - 1), text[1:]][len(PROMPTS[0]) - 1 :]
    # The bonus tokens are the target's own draws, of any probability; there is one per step.
    num_refused = int((drawn <= thresholds[len(PROMPTS[0]) - 1 : -1]).sum())
    assert num_refused <= answer.metrics.speculation.num_steps + 1
