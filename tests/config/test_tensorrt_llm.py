"""Rules of pipelines for TensorRT-LLM's own routes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from draftline.config import check_runnable, load_pipeline
from draftline.config.rule import Rule
from draftline.config.tensorrt_llm import REFUSED_METHODS, TENSORRT_LLM_RULES
from draftline.errors import PipelineErrors
from draftline.share import share_path

TRTLLM = share_path("pipelines") / "smollm2-135m-medusa-trtllm.yaml"
PLAIN = share_path("pipelines") / "smollm2-135m.yaml"
LLMAPI = ("engine.route=llmapi", "draft.method=eagle3", "tree.choices=null", "tree.kind=chain", "tree.max_depth=4")


def last_of_each(overrides: Sequence[str]) -> list[str]:
    """Return the last override of each field."""
    return list({override.partition("=")[0]: override for override in overrides}.values())


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["engine.route=null"],
            "engine.route: is given beside engine.backend tensorrt_llm, .*; got nothing; choose trtl",
        ),
        (["draft.method=eagle3"], "EAGLE-3 reads those of several; got eagle3; set engine.route to llmapi"),
        (["draft.method=eagle2"], "static trees alone; got eagle2; set draft.method to eagle1"),
        (["draft.method=draft_model"], "one request at a time; got draft_model; set engine.route to llmapi"),
        (["tree.kind=auto", "tree.choices=null"], "trtllm_build has static trees and chains, .*; got auto; "),
        (["tree.kind=dynamic", "tree.choices=null"], "got dynamic; set it to one that trtllm_build has"),
        (["acceptance.rule=typical"], "take no thresholds of typical acceptance; got typical; "),
        (["target.dtype=float32"], "target.dtype: .* in float16 or bfloat16; got float32"),
        (
            ["engine.weights_dtype=int8"],
            "engine.weights_dtype: .* in target.dtype float16; got int8; set it to float16",
        ),
        (["kv_cache.dtype=bfloat16"], "kv_cache.dtype: .*; got bfloat16; set it to float16"),
        (
            ["engine.pipeline_parallel_size=2"],
            "one pipeline stage; got 2; set it to 1 and raise engine.tensor_parallel",
        ),
        (["engine.num_threads=4"], "engine.num_threads: engine.backend tensorrt_llm runs on GPUs; got 4; remove it"),
        (["engine.kernels=native"], "engine.kernels: .* its own kernels; got native; remove it"),
        (["check.perplexity=always"], "check.perplexity: .* not measured here; got always"),
        (["draft.weights_dtype=int8"], "draft.weights_dtype: stands beside engine.backend onnxruntime"),
        ([*LLMAPI, "draft.method=medusa"], "has no Medusa heads; got medusa; set engine.route to trtllm_build"),
        ([*LLMAPI, "draft.method=eagle1"], "reads EAGLE-3 heads alone; got eagle1; set engine.route to trtllm_build"),
        (
            [*LLMAPI, "draft.method=draft_model", "tree.kind=dynamic"],
            "of EAGLE-3 heads alone; got dynamic; set it to ch",
        ),
        (
            [*LLMAPI, "tree.kind=dynamic", "tree.max_nodes=64"],
            r"tree.top_k 4 \* tree.max_depth 4 draft tokens .*; got 64",
        ),
        ([*LLMAPI, "engine.route=trtllm_build", "tree.kind=auto"], "EAGLE-3 reads those of several"),
    ],
)
def test_what_does_not_fit_together(overrides: list[str], message: str) -> None:
    with pytest.raises(PipelineErrors, match=message):
        load_pipeline(TRTLLM, last_of_each(overrides))


TENSORRT_LLM = ["engine.backend=tensorrt_llm", "engine.route=llmapi"]
HALF = ["target.dtype=float16", "engine.weights_dtype=float16", "kv_cache.dtype=float16"]
API = [*TENSORRT_LLM, *HALF]
BUILD = [TENSORRT_LLM[0], "engine.route=trtllm_build", *HALF]
TWO_DRAFTS = "draft: [{method: ngram}, {method: eagle3, checkpoint: a}]\n"
NGRAM = ["draft.method=ngram", "tree.kind=chain"]
BROKEN_RULES = [
    [TENSORRT_LLM[0], *HALF],
    ["engine.tensor_parallel_size=2"],
    ["engine.pipeline_parallel_size=2"],
    *(
        [*route, f"draft.method={method}", *([] if method == "ngram" else ["draft.checkpoint=a"]), "tree.kind=chain"]
        for route, refused in zip((BUILD, API), REFUSED_METHODS.values(), strict=True)
        for method in refused
    ),
    [*API, "tree.kind=chain"],  # beside TWO_DRAFTS
    [*API, *NGRAM, "engine.pipeline_parallel_size=2"],
    [*BUILD, "draft.method=medusa", "draft.checkpoint=a", "tree.kind=auto"],
    [*API, "draft.method=draft_model", "draft.checkpoint=a", "tree.kind=dynamic"],
    [*API, "draft.method=eagle3", "draft.checkpoint=a", "tree.kind=dynamic", "tree.max_nodes=64"],
    [*API, *NGRAM, "acceptance.rule=typical"],
    TENSORRT_LLM,
    [*TENSORRT_LLM, HALF[0], HALF[2]],
    [*TENSORRT_LLM, HALF[0], HALF[1]],
    [*API, "engine.kernels=native"],
    [*API, "engine.num_threads=2"],
    [*API, "check.perplexity=always"],
    [*API, "check.network=always"],
]


@pytest.mark.parametrize(("rule", "overrides"), list(zip(TENSORRT_LLM_RULES, BROKEN_RULES, strict=True)))
def test_each_rule_can_be_broken_alone(tmp_path: Path, rule: Rule, overrides: list[str]) -> None:
    path = tmp_path / "x.yaml"
    drafts = TWO_DRAFTS if rule.fields[0] == "draft" else ""
    path.write_text(f"name: tiny\ntarget: {{checkpoint: tiny}}\n{drafts}")
    with pytest.raises(PipelineErrors) as caught:
        load_pipeline(path, overrides)
    assert [f" {rule.fields[0]}: " in line for line in str(caught.value).splitlines()] == [True]


@pytest.mark.parametrize(
    "override", ["engine.route=llmapi", "engine.tensor_parallel_size=2", "engine.pipeline_parallel_size=2"]
)
def test_other_backends_have_no_route_and_no_ranks(override: str) -> None:
    with pytest.raises(PipelineErrors, match=rf"{override.partition('=')[0]}: .* tensorrt_llm.*; .*remove"):
        load_pipeline(PLAIN, [override])


@pytest.mark.parametrize(
    "overrides",
    [
        [],
        ["draft.method=eagle1"],
        ["tree.kind=chain", "tree.choices=null", "tree.max_depth=4"],
        ["engine.tensor_parallel_size=4"],
        LLMAPI,
        [*LLMAPI, "tree.kind=dynamic", "tree.max_nodes=17"],
        [*LLMAPI, "draft.method=draft_model"],
    ],
)
def test_what_does(overrides: list[str]) -> None:
    pipeline = load_pipeline(TRTLLM, last_of_each(overrides))
    check_runnable(pipeline)


def test_a_list_of_drafts_is_refused(tmp_path: Path) -> None:
    text = TRTLLM.read_text().replace(
        "draft: {method: medusa, checkpoint: ../drafts/smollm2-135m-medusa}",
        "draft:\n  - {method: medusa, checkpoint: a}\n  - {method: eagle1, checkpoint: b}",
    )
    path = tmp_path / "list.yaml"
    path.write_text(text)
    with pytest.raises(PipelineErrors, match=r"draft: is one draft beside engine.backend tensorrt_llm"):
        load_pipeline(path)


def test_every_method_is_of_one_route_at_most_and_refused_with_a_way_out() -> None:
    methods = {"eagle1", "eagle2", "eagle3", "medusa", "draft_model", "ngram"}
    served = {route: methods - set(refused) for route, refused in REFUSED_METHODS.items()}
    assert served == {"trtllm_build": {"medusa", "eagle1"}, "llmapi": {"eagle3", "draft_model", "ngram"}}
    for refused in REFUSED_METHODS.values():
        assert all(why and "set " in cure for why, cure in refused.values())
