"""Each row of the import matrix drafts what an independent reference of its variant drafts, and changes no text."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from draftline.generation import load_engine
from draftline.sessions.engine_config import DraftMethod, load_engine_config
from draftline.sessions.onnxruntime_draft_session import OnnxRuntimeDraftSession
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.speculation import TreeShape
from tests.sessions.draft_references import EagleReference, TargetReference, medusa_log_probs
from tests.sessions.draft_steps import DraftSteps
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_draft, write_tiny_medusa
from tests.tiny_layout_writers import load_tensors
from tests.tiny_layouts import NUM_LAYERS, ROWS, Row

pytestmark = pytest.mark.usefixtures("_one_torch_thread")

K = 3
TREE = TreeShape("dynamic", max_nodes=12, max_depth=3, top_k=K)
TOLERANCE = 1e-4  # both sides sum in other orders; 1e-5 in practice
PROMPT = np.random.default_rng(5).integers(3, 260, 21).tolist()


@pytest.fixture(scope="module")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("matrix") / "target", num_layers=NUM_LAYERS)


@pytest.fixture(scope="module")
def reference(target_dir: Path) -> TargetReference:
    return TargetReference(target_dir)


def check(log_probs: NDArray[np.float32], ids: NDArray[np.int32], expected: NDArray[np.float64]) -> None:
    best = np.sort(expected)[::-1][:K]
    np.testing.assert_allclose(log_probs, best, rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(expected[ids], best, rtol=0, atol=TOLERANCE)


def build(directory: Path, target_dir: Path, row: Row) -> tuple[Path, Path]:
    source = row.write(directory / "draft", target_dir)
    drafts: list[tuple[DraftMethod, Path | None]] = [(row.method, source)]
    return source, build_tiny_engine(directory, target_dir, drafts=drafts, tree=TREE)


def assert_same_text(engine: Path) -> None:
    with load_engine(engine) as loaded:
        (drafted,) = loaded.generate([PROMPT], max_tokens=16)
        (plain,) = loaded.generate([PROMPT], max_tokens=16, speculate=False)
    assert drafted.token_ids == plain.token_ids
    assert drafted.metrics.speculation.num_drafted_tokens > 0


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.method != "medusa"])
def test_an_eagle_head_drafts_as_its_reference(
    tmp_path: Path, target_dir: Path, reference: TargetReference, name: str
) -> None:
    """Three depths of a path: the first reads the target's features, the others the head's own output."""
    row = ROWS[name]
    source, engine = build(tmp_path, target_dir, row)
    config = load_engine_config(engine)
    target = OnnxRuntimeSession(engine, config)
    draft = OnnxRuntimeDraftSession(engine, config, 0, target)
    head = EagleReference(source, reference, row.captured)
    text, num_known = Text(list(range(4))), len(PROMPT)
    target.forward(make_batch([text], [PROMPT]))
    steps = DraftSteps(draft, [text])
    path, fed = [*PROMPT, 11], num_known - 1
    result = steps.first([path[1:]], [list(range(num_known))])
    for depth in range(3):
        check(result.log_probs[0], result.token_ids[0], head.log_probs(path, num_known))
        if depth < 2:
            path.append(int(result.token_ids[0, depth]))
            result = steps.later([[(path[-1], fed, fed)]])
            fed += 1
    draft.close()
    target.close()
    assert_same_text(engine)


@pytest.mark.parametrize("name", [name for name, row in ROWS.items() if row.method == "medusa"])
def test_medusa_heads_draft_as_their_reference(
    tmp_path: Path, target_dir: Path, reference: TargetReference, name: str
) -> None:
    _, engine = build(tmp_path, target_dir, ROWS[name])
    num_layers = 2 if name in ("medusa-v1-borrowed", "medusa-modelopt") else 1
    options = {"own_lm_head": name != "medusa-v1-borrowed", "num_layers": num_layers}
    canonical = write_tiny_medusa(tmp_path / "canonical", target_dir, **options)
    if name == "medusa-vllm-plain":
        path = canonical / "medusa_lm_head.safetensors"
        heads = load_tensors(path)
        heads = {key: np.zeros_like(values) if "bias" in key else values for key, values in heads.items()}
        heads |= {f"{head}.1.weight": heads["0.1.weight"] for head in range(3)}
        write_draft(canonical, heads, None, weights_file=path.name)
    session = OnnxRuntimeSession(engine, load_engine_config(engine))
    result = session.forward(make_batch([Text(list(range(4)))], [PROMPT]))
    session.close()
    assert result.head_ids is not None
    assert result.head_log_probs is not None
    for expected, ids, log_probs in zip(
        medusa_log_probs(canonical, reference, PROMPT, num_layers), result.head_ids, result.head_log_probs, strict=True
    ):
        for head in range(3):
            check(log_probs[head], ids[head], expected[head])
    assert_same_text(engine)
