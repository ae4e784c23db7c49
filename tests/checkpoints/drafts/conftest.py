"""The target that heads are converted for."""

from __future__ import annotations

from pathlib import Path

import pytest

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.huggingface_config import parse_huggingface_config
from draftline.checkpoints.json_object import load_json
from tests.tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="session")
def target_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_checkpoint(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="session")
def target(target_dir: Path) -> CheckpointConfig:
    return parse_huggingface_config(load_json(target_dir / "config.json"), None, "float32")
