"""The model repository: what the package stage writes and ``tritonserver`` loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from draftline.checkpoints.tokenizer import Tokenizer, load_tokenizer
from draftline.errors import ArtifactError
from draftline.share import share_path
from draftline.triton.chat import publish_chat_template
from draftline.triton.contract import MODELS, Model
from draftline.triton.model_config import build_model_config

ENGINE_PATH = "../engine"  # from the repository, so that a build directory can be moved
SERVE_FILE = "serve.json"


def write_model_repository(build_directory: Path, destination: Path, pipeline: Any) -> None:
    """Write the models ``preprocessing``, ``tensorrt_llm``, ``postprocessing`` and ``ensemble`` into ``destination``.

    ``pipeline`` gives ``engine.max_batch_size``, ``kv_cache``, ``serve`` and ``name``; the tokenizer's chat template is
    published in the configuration of ``preprocessing``. Raises ArtifactError where ``build_directory`` has no engine.
    """
    engine_directory = build_directory / "engine"
    if not (engine_directory / "config.json").is_file():
        raise ArtifactError(engine_directory, "must hold a built engine", "no config.json", "run the build stage first")
    parameters = build_parameters(pipeline, load_tokenizer(engine_directory))
    for model in MODELS:
        write_model(destination / model.name, model, pipeline.engine.max_batch_size, parameters[model.name])
    serve = {key: getattr(pipeline.serve, key) for key in ("host", "http_port", "grpc_port", "metrics_port")}
    (destination / SERVE_FILE).write_text(json.dumps({"name": pipeline.name, **serve}, indent=2) + "\n")


def build_parameters(pipeline: Any, tokenizer: Tokenizer) -> dict[str, dict[str, str]]:
    """Return the ``parameters`` of every model's configuration."""
    cache = pipeline.kv_cache
    return {
        "preprocessing": {
            "tokenizer_dir": ENGINE_PATH,
            "add_special_tokens": "true",
            **publish_chat_template(tokenizer),
        },
        "tensorrt_llm": {
            "gpt_model_type": "inflight_fused_batching",
            "gpt_model_path": ENGINE_PATH,
            "tokenizer_dir": ENGINE_PATH,
            "max_beam_width": "1",
            "max_tokens_in_paged_kv_cache": str(cache.block_size * cache.max_blocks),
            "batch_scheduler_policy": "max_utilization",
            "enable_kv_cache_reuse": _flag(cache.prefix_cache),
            "enable_chunked_context": "true",
            "exclude_input_in_output": "false",
            "cancellation_check_period_ms": "100",
            "stats_check_period_ms": "500",
            "decoding_mode": "top_k_top_p",
        },
        "postprocessing": {"tokenizer_dir": ENGINE_PATH, "skip_special_tokens": "true"},
        "ensemble": {},
    }


def write_model(
    directory: Path, model: Model, max_batch_size: int, parameters: dict[str, str], folder: str = "."
) -> None:
    """Write one model's directory: ``config.pbtxt`` and version 1, whose code lies in ``folder`` of ``model_repo``."""
    (directory / "1").mkdir(parents=True)
    config = build_model_config(model, max_batch_size=max_batch_size, parameters=parameters)
    (directory / "config.pbtxt").write_text(config, encoding="utf-8")
    if not model.steps and model.backend == "python":
        shutil.copyfile(share_path("model_repo") / folder / model.name / "1" / "model.py", directory / "1" / "model.py")


def _flag(value: bool) -> str:
    return "true" if value else "false"
