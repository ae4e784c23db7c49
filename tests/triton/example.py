"""The fixed example of the golden configurations, and a build with a reciting engine for the real server.

``python -m tests.triton.example`` (from the checkout) writes ``model_repo/*/config.pbtxt`` again.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.config.schema import Pipeline
from draftline.sessions.engine_config import EngineConfig, write_engine_config
from draftline.triton.repository import write_model_repository
from tests.tiny_checkpoints import NUM_TOKENS, write_tiny_checkpoint

CHECKOUT = Path(__file__).resolve().parents[2]
SCRIPT = "Hello the world, 😀 你好 naïve café. 👩‍👩‍👧 and then in an on the hello! "


def make_pipeline() -> Pipeline:
    return Pipeline.model_validate(
        {"name": "example", "target": {"checkpoint": "tiny"}, "engine": {"max_batch_size": 8, "max_seq_len": 2048}}
    )


def make_engine_config() -> EngineConfig:
    model = CheckpointConfig(
        "LlamaForCausalLM", "float32", NUM_TOKENS, 64, 2, 4, 2, 16, 96, 1e-5, 10000.0, 2048, eos_token_ids=(2,)
    )
    return EngineConfig("onnxruntime", "onnxruntime", "float32", "float32", 8, 2048, 64, 0, 16, 512, True, model)


def write_build(build_directory: Path) -> Path:
    """Write a build whose engine recites ``SCRIPT``; return ``build_directory``."""
    engine, repository = build_directory / "engine", build_directory / "model_repository"
    write_tiny_checkpoint(engine)
    write_engine_config(engine, make_engine_config())
    (engine / "script.txt").write_text(SCRIPT, encoding="utf-8")
    repository.mkdir()
    write_model_repository(build_directory, repository, make_pipeline())
    model = Path(__file__).parent / "scripted_engine" / "model.py"
    shutil.copyfile(model, repository / "tensorrt_llm" / "1" / "model.py")
    return build_directory


def write_golden_configurations() -> None:
    with tempfile.TemporaryDirectory() as directory:
        for config in sorted((write_build(Path(directory)) / "model_repository").glob("*/config.pbtxt")):
            shutil.copyfile(config, CHECKOUT / "model_repo" / config.parent.name / "config.pbtxt")


if __name__ == "__main__":
    write_golden_configurations()
