"""The repository of TensorRT-LLM up to 1.2.1: complete configurations, in Triton's protobuf."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from draftline.config.schema import Pipeline
from draftline.errors import ServerError
from draftline.sessions.tensorrt_llm import EngineLimits
from draftline.triton.contract import MODELS
from draftline.triton.server import serve
from draftline.triton.tensorrtllm_repository import ADDITIONS, CLASSIC_MODELS, write_tensorrtllm_repository
from tests.tiny_checkpoints import write_tiny_checkpoint

# Every template variable of TensorRT-LLM's config.pbtxt that its backend does not start without.
MANDATORY = ("gpt_model_type", "gpt_model_path")


def make_pipeline(**engine: Any) -> Pipeline:
    return Pipeline.model_validate(
        {
            "name": "example",
            "target": {"checkpoint": "tiny", "dtype": "float16"},
            "engine": {
                "backend": "tensorrt_llm",
                "route": "trtllm_build",
                "weights_dtype": "float16",
                "max_batch_size": 4,
                "max_seq_len": 1024,
                **engine,
            },
            "kv_cache": {"dtype": "float16", "block_size": 32, "max_blocks": 100, "prefix_cache": False},
        }
    )


def write(root: Path, method: Any = None, window: int | None = None, **engine: Any) -> dict[str, Any]:
    write_tiny_checkpoint(root / "checkpoint")
    limits = EngineLimits(4, 1024, 128, 32, method, 3 if method else 0)
    write_tensorrtllm_repository(
        root,
        root / "model_repository",
        make_pipeline(**engine),
        engine=root / "engine",
        limits=limits,
        choices=((0,), (1,), (0, 2)),
        sliding_window=window,
    )
    configs = {}
    for path in (root / "model_repository").glob("*/config.pbtxt"):
        text = path.read_text("utf-8")
        assert "${" not in text
        configs[path.parent.name] = text_format.Parse(text, model_config_pb2.ModelConfig())
    return configs


def parameters(config: Any) -> dict[str, str]:
    return {key: value.string_value for key, value in config.parameters.items()}


@pytest.mark.parametrize(
    ("method", "expected"),
    [
        (None, {"decoding_mode": "top_k_top_p", "enable_chunked_context": "true"}),
        ("medusa", {"decoding_mode": "medusa", "medusa_choices": "{0},{1},{0,2}", "enable_chunked_context": "false"}),
        ("eagle1", {"decoding_mode": "eagle", "eagle_choices": "{0},{1},{0,2}", "enable_chunked_context": "false"}),
    ],
)
def test_the_engine_model_is_complete(tmp_path: Path, method: Any, expected: dict[str, str]) -> None:
    config = write(tmp_path, method)["tensorrt_llm"]
    assert config.backend == "tensorrtllm"
    assert config.max_batch_size == 4
    assert config.model_transaction_policy.decoupled
    assert list(config.dynamic_batching.preferred_batch_size) == [4]
    assert config.dynamic_batching.HasField("default_queue_policy")
    found = parameters(config)
    assert all(found.values())
    assert set(MANDATORY) <= set(found)
    assert found["gpt_model_type"] == "inflight_fused_batching"
    assert found["gpt_model_path"] == str(tmp_path / "engine")
    assert found["max_tokens_in_paged_kv_cache"] == "3200"
    assert found["enable_kv_cache_reuse"] == "false"
    assert found["kv_cache_free_gpu_mem_fraction"] == "0.9"
    choices = {"medusa_choices", "eagle_choices", "decoding_mode", "enable_chunked_context"}
    assert {key: value for key, value in found.items() if key in choices} == expected
    assert "max_attention_window_size" not in found


def test_no_mandatory_value_of_the_templates_is_left_open(tmp_path: Path) -> None:
    """Their variables, by the places that they fill: docs of Triton's tensorrtllm backend, model configuration."""
    configs = write(tmp_path, "medusa")
    engine = configs["tensorrt_llm"]
    types = {tensor.name: tensor.data_type for tensor in (*engine.input, *engine.output)}
    floats = {model_config_pb2.TYPE_FP16, model_config_pb2.TYPE_FP32}
    for name in ("encoder_input_features", "prompt_embedding_table", "draft_logits", "context_logits"):
        assert types[name] in floats, name  # encoder_input_features_data_type, ..., logits_datatype
    for name in ("preprocessing", "postprocessing"):
        assert configs[name].max_batch_size == 4  # triton_max_batch_size
        assert [group.count for group in configs[name].instance_group] == [1]  # *_instance_count
        directory = parameters(configs[name])["tokenizer_dir"]
        assert (tmp_path / "model_repository" / directory / "tokenizer.json").is_file()
    assert configs["ensemble"].platform == "ensemble"
    assert [step.model_name for step in configs["ensemble"].ensemble_scheduling.step] == [
        "preprocessing",
        "tensorrt_llm",
        "postprocessing",
    ]


def test_a_sliding_window_is_told(tmp_path: Path) -> None:
    assert parameters(write(tmp_path, window=256)["tensorrt_llm"])["max_attention_window_size"] == "256"


def test_the_contract_is_the_vendors_own() -> None:
    for ours, classic in zip(MODELS, CLASSIC_MODELS, strict=True):
        names = {tensor.name for tensor in (*classic.inputs, *classic.outputs)}
        assert names == {tensor.name for tensor in (*ours.inputs, *ours.outputs)} - ADDITIONS
        for step in classic.steps:
            model = next(model for model in CLASSIC_MODELS if model.name == step.model)
            known = {tensor.name for tensor in (*model.inputs, *model.outputs)}
            assert set(step.inputs) | set(step.outputs) <= known
    ensemble = CLASSIC_MODELS[-1]
    wires = {wire for step in ensemble.steps for wire in (*step.inputs.values(), *step.outputs.values())}
    assert {tensor.name for tensor in (*ensemble.inputs, *ensemble.outputs)} <= wires
    produced = {wire for step in ensemble.steps for wire in step.outputs.values()}
    needed = {wire for step in ensemble.steps for wire in step.inputs.values() if wire.startswith("_")}
    assert needed <= produced


def test_only_our_own_models_have_code(tmp_path: Path) -> None:
    write(tmp_path)
    code = {path.parents[1].name for path in (tmp_path / "model_repository").glob("*/1/model.py")}
    assert code == {"preprocessing", "postprocessing"}
    assert (tmp_path / "model_repository" / "tensorrt_llm" / "1").is_dir()


def test_the_script_refuses_to_serve_without_an_engine(tmp_path: Path) -> None:
    write(tmp_path)
    done = subprocess.run([tmp_path / "model_repository" / "serve.sh"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert f"{tmp_path}/engine: the engine is built; got no config.json; run engine/build.sh" in done.stderr
    with pytest.raises(ServerError, match=r"runs where its Triton server is; got .*; run .*serve.sh there"):
        serve(tmp_path)


def test_the_script_starts_a_server_for_each_rank(tmp_path: Path) -> None:
    """Through an mpirun and an engine that only look like it: what matters is what is asked of them."""
    write(tmp_path, tensor_parallel_size=2)
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "config.json").write_text("{}")
    mpirun = tmp_path / "bin" / "mpirun"
    mpirun.parent.mkdir()
    mpirun.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    mpirun.chmod(0o755)
    done = subprocess.run(
        [tmp_path / "model_repository" / "serve.sh"],
        capture_output=True,
        text=True,
        check=True,
        env={"PATH": f"{mpirun.parent}:/usr/bin:/bin"},
    )
    first, second = " ".join(done.stdout.splitlines()).split(" : ")
    assert first.startswith("--allow-run-as-root -n 1 tritonserver --model-repository=")
    assert "--load-model" not in first
    assert "--http-address=127.0.0.1" in first
    assert "-n 1 tritonserver" in second
    assert "--load-model=tensorrt_llm" in second
