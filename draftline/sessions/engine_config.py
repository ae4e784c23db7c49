"""``engine/config.json``: what was built, by which version, with which limits."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import draftline
from draftline.checkpoints.config import CheckpointConfig
from draftline.errors import ArtifactError

FORMAT_VERSION = 1  # of the graph's inputs and outputs and of this file


@dataclass(frozen=True)
class EngineConfig:
    """Limits are inclusive; ``num_threads`` 0 = one per physical core available."""

    backend: str
    weights_dtype: str
    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    num_threads: int
    block_size: int
    max_blocks: int
    prefix_cache: bool
    model: CheckpointConfig


def write_engine_config(directory: Path, config: EngineConfig) -> None:
    document = {
        "format_version": FORMAT_VERSION,
        "draftline_version": draftline.__version__,
        **dataclasses.asdict(config),
    }
    (directory / "config.json").write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_engine_config(directory: Path) -> EngineConfig:
    """Read the config of an engine directory.

    Raises: ArtifactError if there is none, it is damaged, or another version built the engine.
    """
    path = directory / "config.json"
    try:
        document: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            path, "an engine directory has a config.json", "none", "run `draftline run` first"
        ) from None
    except ValueError as error:
        raise ArtifactError(path, "must be JSON", str(error), "build the engine again") from None
    versions = {"draftline_version": draftline.__version__, "format_version": FORMAT_VERSION}
    for key, expected in versions.items():
        if document.pop(key, None) != expected:
            found = json.loads(path.read_text(encoding="utf-8")).get(key)
            raise ArtifactError(
                f"{path}: {key}", f"this draftline serves engines with {expected}", found, "run `draftline run` again"
            )
    model = document.pop("model")
    model["eos_token_ids"] = tuple(model["eos_token_ids"])
    return EngineConfig(**document, model=CheckpointConfig(**model))
