"""What a stage leaves behind: an atomic directory with a manifest of its inputs and outputs.

A stage writes into ``<name>.partial-<pid>``; the whole directory, manifest included, is renamed to ``<name>`` when it
is complete and on disk. So a directory that has its own name is whole, whatever was killed; what has another name is
removed by the next run, which holds the build directory's lock.

Inputs and outputs are compared by SHA-256. A file is hashed once: the manifest keeps its size and modification time,
and it is read again only where these changed.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from draftline.errors import ArtifactError
from draftline.whole_file import replace_file

MANIFEST = "manifest.json"
REPRODUCE = "reproduce.sh"
PIPELINE = "pipeline.yaml"
NOT_OUTPUTS = frozenset({MANIFEST, REPRODUCE, PIPELINE})  # they say how and when, and may differ between equal outputs
LOCK = ".lock"


@dataclass(frozen=True)
class FileRecord:
    """A file as it was when it was hashed."""

    size: int
    mtime_ns: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """``inputs`` maps a name such as ``setting target.dtype`` or ``file config.json`` to a value or a hash.

    ``input_files`` and ``outputs`` map relative names to records; ``result`` is what the stage returned.
    """

    stage: str
    draftline_version: str
    inputs: Mapping[str, str]
    input_files: Mapping[str, FileRecord]
    outputs: Mapping[str, FileRecord]
    argv: Sequence[str]
    seconds: float
    created: str
    result: Mapping[str, object] = field(default_factory=dict)

    def outputs_sha256(self) -> str:
        """Return one hash of all outputs' names and contents."""
        lines = [f"{record.sha256}  {name}\n" for name, record in sorted(self.outputs.items())]
        return hashlib.sha256("".join(lines).encode()).hexdigest()


class FileHasher:
    """Hashes files, each once: what a record or a hard link already tells is not read again."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], str] = {}

    def record(self, path: Path, known: FileRecord | None = None) -> FileRecord:
        """Return the record of ``path``; ``known`` is trusted where size and modification time still agree."""
        stat = path.stat()
        key = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns)
        if known is not None and (known.size, known.mtime_ns) == key[2:]:
            self._known[key] = known.sha256
        if key not in self._known:
            with path.open("rb") as file:
                self._known[key] = _sha256(file.fileno())
        return FileRecord(stat.st_size, stat.st_mtime_ns, self._known[key])


def _sha256(descriptor: int) -> str:
    digest = hashlib.sha256()
    buffer = memoryview(bytearray(1 << 20))
    while count := os.readv(descriptor, [buffer]):
        digest.update(buffer[:count])
    return digest.hexdigest()


def load_manifest(directory: Path) -> Manifest | None:
    """Return the manifest of a stage's directory, None where there is none or it cannot be read.

    Raises: ArtifactError where a directory of that name holds files of somebody else, which no stage may replace.
    """
    try:
        data = json.loads((directory / MANIFEST).read_bytes())
        if "draftline_version" not in data:
            raise FileNotFoundError(MANIFEST)
        input_files, outputs = _read_records(data.pop("input_files")), _read_records(data.pop("outputs"))
        return Manifest(input_files=input_files, outputs=outputs, **data)
    except FileNotFoundError:
        if directory.is_dir() and any(directory.iterdir()):
            cure = "choose another output directory, or move it away"
            raise ArtifactError(
                directory, f"a directory that draftline replaces has a {MANIFEST}", "none", cure
            ) from None
        return None
    except (ValueError, TypeError, KeyError, AttributeError):
        return None


def _read_records(data: dict[str, dict[str, Any]]) -> dict[str, FileRecord]:
    return {name: FileRecord(**record) for name, record in data.items()}


def find_change(directory: Path, inputs: Mapping[str, str], hasher: FileHasher) -> str | None:
    """Say why the stage that owns ``directory`` must run, or return None where its output is whole and current."""
    manifest = load_manifest(directory)
    if manifest is None:
        return f"it has a damaged {MANIFEST}" if (directory / MANIFEST).exists() else "it never ran"
    for name in manifest.inputs.keys() | inputs.keys():
        before, now = manifest.inputs.get(name), inputs.get(name)
        if before != now:
            hashed = len(before or now or "") == 64
            return f"{name} changed" if hashed else f"{name} changed from {before} to {now}"
    return find_damage(directory, manifest, hasher)


def find_damage(directory: Path, manifest: Manifest, hasher: FileHasher) -> str | None:
    """Say which output of ``directory`` is not what its manifest says, or return None."""
    present = set(_output_names(directory))
    for name in sorted(present ^ manifest.outputs.keys()):
        return f"output {name} was added" if name in present else f"output {name} is gone"
    for name, known in manifest.outputs.items():
        if hasher.record(directory / name, known).sha256 != known.sha256:
            return f"output {name} was changed"
    return None


def is_current(directory: Path, inputs: Mapping[str, str], hasher: FileHasher) -> bool:
    """Return whether ``directory`` is whole and was made from ``inputs``."""
    return find_change(directory, inputs, hasher) is None


def record_outputs(directory: Path, hasher: FileHasher) -> dict[str, FileRecord]:
    """Return the record of every output file in ``directory``, by relative name."""
    return {name: hasher.record(directory / name) for name in _output_names(directory)}


def _output_names(directory: Path) -> Iterator[str]:
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if not path.is_dir() and name not in NOT_OUTPUTS and "__pycache__" not in path.parts:
            yield name


def write_manifest(directory: Path, manifest: Manifest) -> None:
    """Write ``manifest.json`` whole or not at all."""
    with replace_file(directory / MANIFEST) as partial:
        partial.write_text(json.dumps(asdict(manifest), indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


@contextmanager
def replace_directory(directory: Path) -> Iterator[Path]:
    """Give a new empty directory that takes the place of ``directory`` when the block ends without an error.

    On an error the new directory is removed and the old one stays.
    """
    partial = directory.with_name(f"{directory.name}.partial-{os.getpid()}")
    partial.mkdir()
    try:
        yield partial
        _sync(partial)
    except BaseException as error:
        if isinstance(error, OSError) and error.filename is None:  # a failed write does not name its file
            error.filename = str(directory)
        shutil.rmtree(partial, ignore_errors=True)
        raise
    old = directory.with_name(f"{directory.name}.old-{os.getpid()}")
    if directory.exists():
        os.rename(directory, old)
    os.rename(partial, directory)
    _sync_file(directory.parent)
    shutil.rmtree(old, ignore_errors=True)


def remove_leftovers(build_directory: Path, names: Sequence[str]) -> None:
    """Remove what killed runs left of the stages' directories ``names``. The caller holds the lock."""
    pattern = re.compile(rf"(?:{'|'.join(map(re.escape, names))})\.(?:partial|old)-\d+(?:\..*)?")
    for path in build_directory.iterdir():
        if pattern.fullmatch(path.name):
            shutil.rmtree(path)


@contextmanager
def lock_directory(build_directory: Path) -> Iterator[None]:
    """Make ``build_directory`` and hold its lock; the kernel lets go of it when the process ends, however it ends.

    Raises: ArtifactError where another run holds it, or a file is in the way.
    """
    try:
        build_directory.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError):
        cure = "choose another output directory"
        raise ArtifactError(build_directory, "the output is a directory", "a file in its place", cure) from None
    with (build_directory / LOCK).open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            rule = "one run at a time writes a build directory"
            cure = "wait for it to end, or choose another output directory"
            raise ArtifactError(build_directory, rule, "another run that holds its lock", cure) from None
        yield


def _sync(directory: Path) -> None:
    for path in directory.rglob("*"):
        _sync_file(path)
    _sync_file(directory)


def _sync_file(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
