"""What the answers in a store have in common, and the store's refusal of others."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.checkpoints import tokenizer, trtllm
from draftline.errors import ArtifactError
from draftline.manifest import MANIFEST, FileHasher, load_manifest
from draftline.sessions.engine_config import PoolDtype
from draftline.whole_file import replace_file

DESCRIPTION_FILE = "description.json"
FORMAT_VERSION = 1  # of all files of a store
_TARGET_FILES = (trtllm.CONFIG_FILE, trtllm.WEIGHTS_FILE)
_TOKENIZER_FILES = (tokenizer.TOKENIZER_FILE, tokenizer.TOKENIZER_CONFIG_FILE, tokenizer.CHAT_TEMPLATE_FILE)
_ELSEWHERE = "choose another folder for the answers, or remove this one"


@dataclass(frozen=True)
class Description:
    """Two runs of equal descriptions give the same answer under the same name.

    ``prompts``: the names of their sources. ``captured_layers`` (0-based outputs) and then the final hidden rows are
    the columns of the features. ``weights_dtype`` and ``pool_dtype``: of matrices, and of keys and values, in the
    engine that answered. ``max_tokens``: of an answer, the end token included. ``max_user_tokens``: of a user's turn
    that the target writes itself. ``seed``: with a prompt's name it gives the seed of the answer.
    """

    target_sha256: str
    tokenizer_sha256: str
    vocab_size: int
    hidden_size: int
    captured_layers: tuple[int, ...]
    weights_dtype: str
    pool_dtype: PoolDtype
    prompts: tuple[str, ...]
    temperature: float
    max_tokens: int
    max_user_tokens: int
    seed: int

    @property
    def feature_size(self) -> int:
        """Columns of the features, F."""
        return (len(self.captured_layers) + 1) * self.hidden_size


def hash_target(checkpoint: Path) -> str:
    """Return one hash of the config and the weights of a converted checkpoint."""
    return _hash_files(checkpoint, _TARGET_FILES)


def hash_tokenizer(checkpoint: Path) -> str:
    """Return one hash of the tokenizer, its settings and its chat template, that lie in a folder."""
    return _hash_files(checkpoint, _TOKENIZER_FILES)


def write_description(directory: Path, description: Description) -> None:
    """Write ``description.json`` whole or not at all."""
    path = directory / DESCRIPTION_FILE
    document = {"format_version": FORMAT_VERSION, **dataclasses.asdict(description)}
    with replace_file(path) as partial, partial.open("w", encoding="utf-8") as file:
        file.write(json.dumps(document, indent=2) + "\n")
        file.flush()
        os.fsync(file.fileno())


def load_description(directory: Path) -> Description:
    """Read the description of a store.

    Raises: ArtifactError where there is none, or it is damaged or of another version.
    """
    path = directory / DESCRIPTION_FILE
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        cure = "let the target answer prompts first (`draftline train`)"
        raise ArtifactError(path, "a folder of training data has a description", "none", cure) from None
    except ValueError as error:
        raise ArtifactError(path, "is JSON", str(error), _ELSEWHERE) from None
    version = document.pop("format_version", None) if isinstance(document, dict) else None
    if version != FORMAT_VERSION:
        raise ArtifactError(f"{path}: format_version", f"is {FORMAT_VERSION}", version, _ELSEWHERE)
    kinds = {field.name: type(getattr(_EXAMPLE, field.name)) for field in dataclasses.fields(Description)}
    values: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in document.items()
    }
    for name in kinds.keys() | values.keys():
        kind, value = kinds.get(name), values.get(name)
        if kind is None or type(value) is not kind:
            rule = "is no field of a description" if kind is None else f"is of type {kind.__name__}"
            raise ArtifactError(f"{path}: {name}", rule, value, _ELSEWHERE)
    if values["pool_dtype"] not in _POOL_DTYPES:
        rule = f"is {' or '.join(_POOL_DTYPES)}"
        raise ArtifactError(f"{path}: pool_dtype", rule, values["pool_dtype"], _ELSEWHERE)
    return Description(**values)


def check_same(directory: Path, found: Description, wanted: Description) -> None:
    """Raise ArtifactError, naming the first field that differs, unless a store has the answers that are wanted."""
    for field in dataclasses.fields(Description):
        got, expected = getattr(found, field.name), getattr(wanted, field.name)
        if got != expected:
            where = f"{directory / DESCRIPTION_FILE}: {field.name}"
            raise ArtifactError(where, f"is that of the answers to add, {_show(expected)}", _show(got), _ELSEWHERE)


_POOL_DTYPES: tuple[PoolDtype, ...] = ("float32", "float16")  # of the CPU engine, which answers
_EXAMPLE = Description("", "", 0, 0, (), "", "float32", (), 0.0, 0, 0, 0)


def _show(value: Any) -> object:
    return list(value) if isinstance(value, tuple) else value


def _hash_files(directory: Path, names: tuple[str, ...]) -> str:
    """Hash files by name; the manifest of a convert stage spares reading what did not change since."""
    manifest = load_manifest(directory) if (directory / MANIFEST).exists() else None
    known, hasher = {} if manifest is None else manifest.outputs, FileHasher()
    present = [name for name in names if (directory / name).exists()]
    lines = [f"{hasher.record(directory / name, known.get(name)).sha256}  {name}\n" for name in present]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
