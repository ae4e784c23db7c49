"""The block that says how to train a draft."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.config import Pipeline, load_pipeline
from draftline.config.writing import pipeline_text
from draftline.errors import PipelineErrors

MINIMAL = "name: tiny\ntarget: {checkpoint: tiny}\ntrain: {method: METHOD, checkpoint: new}\n"


def load(directory: Path, method: str, *overrides: str) -> Pipeline:
    path = directory / "x.yaml"
    path.write_text(MINIMAL.replace("METHOD", method))
    return load_pipeline(path, overrides)


@pytest.mark.parametrize(
    ("method", "own"),
    [
        ("eagle3", {"ttt_steps", "ttt_growth", "ttt_share", "ttt_decay", "draft_vocab_size"}),
        ("eagle1", set()),
        ("medusa", {"num_heads", "own_lm_heads"}),
    ],
)
def test_a_method_gets_its_own_settings_and_no_others(tmp_path: Path, method: str, own: set[str]) -> None:
    train = load(tmp_path, method).train
    assert train is not None
    fields = ("ttt_steps", "ttt_growth", "ttt_share", "ttt_decay", "draft_vocab_size", "num_heads", "own_lm_heads")
    assert {name for name in fields if getattr(train, name) is not None} == own


def test_a_pipeline_serves_what_it_trains_before_the_folder_exists(tmp_path: Path) -> None:
    for method in ("eagle1", "eagle2"):
        pipeline = load(tmp_path, "eagle1", f"draft.method={method}", "draft.checkpoint=new")
        assert pipeline.draft[0].checkpoint == "new"
    load(tmp_path, "eagle1", "draft.method=eagle3", "draft.checkpoint=other")


def test_what_show_prints_loads_as_the_same_pipeline(tmp_path: Path) -> None:
    pipeline = load(tmp_path, "eagle3", "train.prompts=[own, text]", "train.budget_minutes=2.5")
    assert "prompts: [own, text]" in pipeline_text(pipeline)
    (tmp_path / "y.yaml").write_text(pipeline_text(pipeline))
    assert load_pipeline(tmp_path / "y.yaml") == pipeline


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        (
            "train.prompts=[own, own-words]",
            "is a list of own | topics | problems | code | python-docs | text | lm-eval; got a",
        ),
        ("train.prompts=[]", "is a list of own |"),
        ("train.temperature=-1", "is a number from 0 to 10; got -1; write temperature: 0.8"),
        ("train.validation_share=0", "is a number above 0, at most 0.5; got 0"),
        ("train.method=eagle2", "is eagle3 | eagle1 | medusa; got"),
    ],
)
def test_broken_values(tmp_path: Path, override: str, expected: str) -> None:
    with pytest.raises(PipelineErrors) as caught:
        load(tmp_path, "eagle3", override)
    assert f"{override.partition('=')[0]}: {expected}" in str(caught.value)
