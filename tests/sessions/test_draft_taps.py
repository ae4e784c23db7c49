"""What drafters take from the target's forward: features by row, Medusa's candidates; what draft models draw."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from draftline.errors import BuildError
from draftline.sessions.batch_split import StepCost
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.native_kernels import Kernels
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.opening import open_draft_sessions, open_session
from draftline.sessions.protocol import StepBatch
from draftline.speculation import TreeShape
from tests.sessions.draft_references import TargetReference, medusa_log_probs
from tests.sessions.draft_steps import DraftSteps
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1, write_tiny_eagle3, write_tiny_medusa

pytestmark = pytest.mark.usefixtures("_one_torch_thread")

K = 3
TREE = TreeShape("dynamic", max_nodes=16, max_depth=4, top_k=K)
TOLERANCE = 1e-4
LENGTHS = (5, 1, 33)


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("taps") / "target", num_layers=3)


def make_chains() -> tuple[list[list[int]], StepBatch]:
    random = np.random.default_rng(3)
    chains = [random.integers(3, 260, length).tolist() for length in LENGTHS]
    texts = [Text(list(range(first, first + 4))) for first in (0, 4, 8)]
    return chains, make_batch(texts, chains)


def price_weights(monkeypatch: pytest.MonkeyPatch, session: OnnxRuntimeSession, weights: float | None) -> None:
    """Make the session run steps at once, or in parts; None where it knows one way only."""
    if weights is not None:
        monkeypatch.setattr(session._passes, "cost", StepCost(weights, 1.0, 1.0))


@pytest.mark.parametrize(
    ("kernels", "weights"), [("native", None), ("onnxruntime", 1e30), ("onnxruntime", 0.0)], indirect=["kernels"]
)
def test_features_stand_in_the_order_of_the_step(
    tmp_path: Path, target: Path, monkeypatch: pytest.MonkeyPatch, kernels: Kernels, weights: float | None
) -> None:
    """EAGLE-3's captured layers first, EAGLE-1's final hidden rows behind them, wherever the drafts stand."""
    drafts = [
        ("eagle1", write_tiny_eagle1(tmp_path / "one", target)),
        ("eagle3", write_tiny_eagle3(tmp_path / "three", target, captured_layers=(0, 1))),
    ]
    engine = build_tiny_engine(tmp_path, target, kernels=kernels, drafts=drafts, tree=TREE)
    config = load_engine_config(engine)
    session = open_session(engine, config)
    assert isinstance(session, OnnxRuntimeSession)
    price_weights(monkeypatch, session, weights)
    chains, batch = make_chains()
    session.forward(batch)
    hidden = [TargetReference(target).hidden(chain) for chain in chains]
    for draft, layers in zip(config.drafts, ((-1,), (1, 2)), strict=True):
        expected = np.concatenate([np.concatenate([text[layer] for layer in layers], -1) for text in hidden])
        columns = slice(draft.feature_start, draft.feature_start + draft.feature_size)
        np.testing.assert_allclose(session.features[:, columns], expected, rtol=0, atol=TOLERANCE)
    session.close()


@pytest.mark.parametrize("layers", [(0, 1), ()])
def test_an_engine_without_drafts_captures_for_a_trainer(
    tmp_path: Path, target: Path, kernels: Kernels, layers: tuple[int, ...]
) -> None:
    engine = build_tiny_engine(tmp_path, target, kernels=kernels, captured_layers=layers)
    config = load_engine_config(engine)
    assert config.captured_layers == layers
    session = open_session(engine, config)
    assert isinstance(session, OnnxRuntimeSession)
    chains, batch = make_chains()
    session.forward(batch)
    hidden = [TargetReference(target).hidden(chain) for chain in chains]
    rows = [np.concatenate([text[layer + 1] for layer in layers] + [text[-1]], -1) for text in hidden]
    np.testing.assert_allclose(session.features, np.concatenate(rows), rtol=0, atol=TOLERANCE)
    session.close()


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ((1, 0), r"captured_layers: rise, and are layers of the target, 0..2; got \(1, 0\)"),
        ((1, 1), "got \\(1, 1\\)"),
        ((3,), "got \\(3,\\)"),
        ((-1,), "got \\(-1,\\)"),
    ],
)
def test_layers_to_capture_are_the_targets(tmp_path: Path, target: Path, layers: tuple[int, ...], message: str) -> None:
    with pytest.raises(BuildError, match=message):
        build_tiny_engine(tmp_path, target, captured_layers=layers)


def test_only_an_engine_without_drafts_captures_for_a_trainer(tmp_path: Path, target: Path) -> None:
    with pytest.raises(BuildError, match="captured_layers: stand in an engine without drafts; got ngram"):
        build_tiny_engine(tmp_path, target, drafts=[("ngram", None)], tree=TREE, captured_layers=(0,))


@pytest.mark.parametrize(
    ("kernels", "num_layers", "own_lm_head", "weights"),
    [
        ("native", 1, False, None),
        ("native", 2, True, None),
        ("onnxruntime", 1, True, 1e30),
        ("onnxruntime", 2, False, 0.0),
    ],
    indirect=["kernels"],
)
def test_medusa_heads_propose_from_every_sampled_row(
    tmp_path: Path,
    target: Path,
    monkeypatch: pytest.MonkeyPatch,
    kernels: Kernels,
    num_layers: int,
    own_lm_head: bool,
    weights: float | None,
) -> None:
    heads = write_tiny_medusa(tmp_path / "medusa", target, num_layers=num_layers, own_lm_head=own_lm_head)
    engine = build_tiny_engine(
        tmp_path, target, kernels=kernels, drafts=[("medusa", heads), ("ngram", None)], tree=TREE
    )
    config = load_engine_config(engine)
    session = open_session(engine, config)
    assert isinstance(session, OnnxRuntimeSession)
    assert open_draft_sessions(engine, config, session) == (None, None)
    price_weights(monkeypatch, session, weights)
    chains, batch = make_chains()
    result = session.forward(batch)
    reference = TargetReference(target)
    expected = np.concatenate([medusa_log_probs(heads, reference, chain, num_layers) for chain in chains])
    assert result.head_ids is not None
    assert result.head_log_probs is not None
    assert result.head_ids.shape == (sum(LENGTHS), config.drafts[0].num_heads, K) == (39, 3, 3)
    best = np.sort(expected, axis=-1)[..., ::-1][..., :K]
    np.testing.assert_allclose(result.head_log_probs, best, rtol=0, atol=TOLERANCE)
    chosen = np.take_along_axis(expected, result.head_ids.astype(np.int64), axis=-1)
    np.testing.assert_allclose(chosen, best, rtol=0, atol=TOLERANCE)
    no_rows = make_batch([Text([12])], [[5, 6]])
    nothing = np.empty(0, np.int32)
    no_rows = replace(no_rows, sample_rows=nothing, temperature=nothing.astype(np.float32), top_k=nothing)
    no_rows = replace(no_rows, top_p=nothing.astype(np.float32), uniform=nothing.astype(np.float32))
    empty = session.forward(no_rows)
    assert empty.head_ids is not None
    assert empty.head_ids.shape == (0, 3, K)
    session.close()


@pytest.mark.parametrize("weights_dtype", ["float32", "int8"])
def test_a_draft_model_draws_what_the_target_would(
    tmp_path: Path, target: Path, kernels: Kernels, weights_dtype: str
) -> None:
    """With the target's own weights and random numbers: common random numbers at every temperature."""
    engine = build_tiny_engine(
        tmp_path,
        target,
        weights_dtype=weights_dtype,
        kernels=kernels,
        drafts=[("draft_model", target)],
        tree=TREE,
    )
    config = load_engine_config(engine)
    session = open_session(engine, config)
    (draft,) = open_draft_sessions(engine, config, session)
    assert draft is not None
    chains, batch = make_chains()
    random = np.random.default_rng(0)
    num_rows = len(batch.input_ids)
    sampling = {
        "temperature": random.choice(np.array([0.0, 0.7, 1.5], np.float32), num_rows),
        "top_k": random.choice(np.array([0, 5, 40], np.int32), num_rows),
        "top_p": random.choice(np.array([0.5, 0.9, 1.0], np.float32), num_rows),
        "uniform": random.random(num_rows, np.float32),
    }
    drawn = session.forward(replace(batch, **sampling)).sampled_ids
    steps = DraftSteps(draft, [Text(list(range(first, first + 4))) for first in (0, 4, 8)], is_head=False)
    steps.first(chains, [[0] * length for length in LENGTHS])
    again = steps.batch_of_last_forward
    assert again is not None
    rows = np.arange(num_rows, dtype=np.int32)
    result = draft.forward(replace(again, candidate_rows=rows, **sampling))
    assert result.sampled_ids is not None
    np.testing.assert_array_equal(result.sampled_ids, drawn)
    assert len(set(drawn.tolist())) > 20
    draft.close()
    session.close()
