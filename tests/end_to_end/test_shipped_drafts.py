"""The drafts in the repository: small, of a known origin, and accepted by the target."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftline.bench.prompts import render_prompts
from draftline.config import load_pipeline
from draftline.generation import load_engine
from draftline.stages.runner import run_pipeline
from draftline.training.acceptance import Settings, measure_acceptance
from draftline.training.steps import PROVENANCE_FILE

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("smollm2-135m-eagle3", "smollm2-135m-eagle1", "smollm2-135m-medusa")
MOST_BYTES = 25_000_000
FEW = Settings(num_prompts=3, max_tokens=32)
UNCHECKED = ("check.perplexity=never", "check.acceptance=never")  # test_acceptance_check does


def pipeline_file(name: str) -> Path:
    return ROOT / "pipelines" / f"{name}.yaml"


@pytest.mark.parametrize("name", NAMES)
def test_a_draft_is_small_and_was_made_as_its_pipeline_says(name: str) -> None:
    train = load_pipeline(pipeline_file(name)).train
    assert train is not None
    draft = pipeline_file(name).parent / train.checkpoint
    provenance = json.loads((draft / PROVENANCE_FILE).read_text())
    now = train.model_dump(mode="json", exclude_none=True)
    assert provenance["settings"] == {name: now[name] for name in provenance["settings"]}
    assert provenance["argv"][:3] == ["draftline", "train", f"pipelines/{name}.yaml"]
    assert provenance["data"]["num_answer_tokens"] >= train.answer_tokens
    assert provenance["data"]["prompts"] == list(train.prompts)
    assert sum(path.stat().st_size for path in draft.iterdir()) <= MOST_BYTES


@pytest.mark.end_to_end
def test_the_target_accepts_eagle3_most_often_and_the_others_too(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    for name in NAMES:
        pipeline = load_pipeline(pipeline_file(name), UNCHECKED if name == NAMES[0] else UNCHECKED[:1])
        run_pipeline(pipeline, tmp_path / name, root=pipeline_file(name).parent, until="build")
    engines = {name: tmp_path / name / "engine" for name in NAMES}
    report = measure_acceptance(engines, FEW, lambda line: None)
    first = {(entry.draft, entry.held_out): entry.acceptance_rate_at[0] for entry in report.acceptances}
    for held_out in ("mt-bench", "human-eval"):
        eagle3, eagle1, medusa = (first[name, held_out] for name in NAMES)
        assert eagle3 > max(eagle1, medusa, 0.2)
        assert min(eagle1, medusa) > 0.08


@pytest.mark.end_to_end
def test_the_head_and_n_grams_draft_in_one_tree(tmp_path: Path) -> None:
    file = pipeline_file("smollm2-135m-eagle3-ngram")
    run_pipeline(load_pipeline(file, UNCHECKED), tmp_path / "both", root=file.parent, until="build")
    with load_engine(tmp_path / "both" / "engine") as loaded:
        prompts = render_prompts(loaded.tokenizer, ["Write the numbers from 1 to 20, each on a line of its own."])
        (plain,) = loaded.generate(prompts, max_tokens=64, speculate=False)
        (both,) = loaded.generate(prompts, max_tokens=64)
    assert both.token_ids == plain.token_ids
    assert both.metrics.speculation.acceptance_length > 1.2
