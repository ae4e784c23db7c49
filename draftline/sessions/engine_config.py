"""``engine/config.json``: what was built, by which version, with which limits."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

import draftline
from draftline.checkpoints.config import CheckpointConfig
from draftline.errors import ArtifactError

CONFIG_FILE = "config.json"
FORMAT_VERSION = 1  # of the graph's inputs and outputs and of this file
_AGAIN = "build the engine again"


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
    """Write ``config.json``, the last file of an engine: it records the size of every other one."""
    sizes = {path.name: path.stat().st_size for path in sorted(directory.iterdir()) if path.name != CONFIG_FILE}
    document = {
        "format_version": FORMAT_VERSION,
        "draftline_version": draftline.__version__,
        "file_bytes": sizes,
        **dataclasses.asdict(config),
    }
    (directory / CONFIG_FILE).write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")


def load_engine_config(directory: Path) -> EngineConfig:
    """Read the config of an engine directory, and check that the files beside it are as long as they were built.

    Raises: ArtifactError if there is none, it is damaged, another version built the engine, or a file was cut.
    """
    path = directory / CONFIG_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArtifactError(
            path, "an engine directory has a config.json", "none", "run `draftline run` first"
        ) from None
    except ValueError as error:
        raise ArtifactError(path, "must be JSON", str(error), _AGAIN) from None
    if not isinstance(document, dict):
        raise ArtifactError(path, "must be a JSON object", type(document).__name__, _AGAIN)
    versions = {"draftline_version": draftline.__version__, "format_version": FORMAT_VERSION}
    for key, expected in versions.items():
        found = document.pop(key, None)
        if found != expected:
            raise ArtifactError(
                f"{path}: {key}", f"this draftline serves engines with {expected}", found, "run `draftline run` again"
            )
    _check_keys(document, {"file_bytes", *_field_names(EngineConfig)}, path)
    for name, num_bytes in document.pop("file_bytes").items():
        file = directory / name
        found = f"{file.stat().st_size} bytes" if file.is_file() else "no such file"
        if found != f"{num_bytes} bytes":
            raise ArtifactError(file, f"has the {num_bytes} bytes that were built", found, _AGAIN)
    model = document.pop("model")
    _check_keys(model, _field_names(CheckpointConfig), f"{path}: model")
    model["eos_token_ids"] = tuple(model["eos_token_ids"])
    return EngineConfig(**document, model=CheckpointConfig(**model))


def _field_names(kind: type[EngineConfig] | type[CheckpointConfig]) -> set[str]:
    return {field.name for field in dataclasses.fields(kind)}


def _check_keys(values: object, names: set[str], where: Path | str) -> None:
    if not isinstance(values, dict) or set(values) != names:
        keys = set(values) if isinstance(values, dict) else set()
        got = f"missing {sorted(names - keys)}, unexpected {sorted(keys - names)}"
        raise ArtifactError(where, "has the keys that were built", got, _AGAIN)
