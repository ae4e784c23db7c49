"""The printed reference, and the pipeline files of the project."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.config import check_runnable, load_pipeline
from draftline.config.reference import describe_values, write_reference
from draftline.config.schema import BLOCKS
from draftline.errors import PipelineErrors
from draftline.share import share_path

TENSORRT_LLM = ["engine.backend=tensorrt_llm", "engine.route=llmapi", "draft.method=ngram", "tree.kind=chain"]
TENSORRT_LLM += [f"{field}=float16" for field in ("target.dtype", "engine.weights_dtype", "kv_cache.dtype")]
FILES = sorted(share_path("pipelines").glob("*.yaml"))


def test_the_readme_is_the_reference() -> None:
    path = share_path("pipelines") / "README.md"
    assert path.read_text() == write_reference(), "draftline show --fields > pipelines/README.md"


def test_every_field_is_described() -> None:
    for name, block in BLOCKS.items():
        for key, field in block.model_fields.items():
            assert field.description, f"{name}.{key}"
            assert describe_values(f"{name}.{key}")


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_pipeline_file_is_valid_and_begins_with_its_command(path: Path) -> None:
    pipeline = load_pipeline(path)
    assert pipeline.name == path.stem
    until = {"onnxruntime": "", "tensorrt_llm": " --until package"}.get(pipeline.engine.backend, " --until build")
    assert path.read_text().splitlines()[0] == f"# draftline run pipelines/{path.name}{until}"


def test_pipelines_that_share_training_data_agree_on_it() -> None:
    """Else the second one is refused: the data are the answers of another description."""
    settings = [train for train in (load_pipeline(path).train for path in FILES) if train is not None]
    assert {train.method for train in settings} == {"eagle1", "eagle3", "medusa"}
    fields = ("data", "prompts", "max_answer_tokens", "temperature", "seed")
    for field in fields:
        assert len({getattr(train, field) for train in settings}) == 1, field


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_pipeline_serves_what_it_trains_and_says_how(path: Path) -> None:
    pipeline = load_pipeline(path)
    if pipeline.train is None:
        return
    assert [(draft.method, draft.checkpoint) for draft in pipeline.draft] == [
        (pipeline.train.method, pipeline.train.checkpoint)
    ]
    assert pipeline.tree is not None
    assert pipeline.tree.max_depth <= (pipeline.train.num_heads or pipeline.tree.max_depth), "no tree is deeper"
    assert f"\ntrain:  # draftline train pipelines/{path.name}\n" in path.read_text()


@pytest.mark.parametrize(
    ("overrides", "fields"),
    [
        ([], []),
        (["draft.method=ngram"], []),
        (["draft.method=eagle3", "draft.checkpoint=head"], []),
        (TENSORRT_LLM, []),
        (["draft.method=ngram", "engine.backend=tensorrt_rtx"], []),
        (["engine.backend=tensorrt"], []),
        (["kv_cache.dtype=float16"], []),
        (["target.dtype=bfloat16", "kv_cache.dtype=bfloat16"], ["kv_cache.dtype"]),
    ],
)
def test_what_this_version_cannot_run(overrides: list[str], fields: list[str]) -> None:
    pipeline = load_pipeline(share_path("pipelines") / "smollm2-135m.yaml", overrides)
    if not fields:
        check_runnable(pipeline)
        return
    with pytest.raises(PipelineErrors) as caught:
        check_runnable(pipeline)
    assert [problem.where.split(": ")[1] for problem in caught.value.problems] == fields
