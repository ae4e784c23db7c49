"""Append sequences to a store of training data: what was committed stays, whatever is killed and whenever."""

from __future__ import annotations

import json
import os
from contextlib import ExitStack
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.checkpoints.disk_space import check_free_space, disk_full_named
from draftline.errors import ArtifactError
from draftline.training.description import (
    DESCRIPTION_FILE,
    Description,
    check_same,
    load_description,
    write_description,
)
from draftline.training.examples import (
    FEATURES_FILE,
    INDEX_FILE,
    IS_ANSWER_FILE,
    TOKENS_FILE,
    IndexEntry,
    check_sizes,
    has_no_number,
    read_index,
    row_bytes_of_files,
)


class ExamplesWriter:
    """A context manager; the caller holds the folder's lock. ``append`` writes rows, ``commit`` makes them count.

    Leaving the block commits, after an error as well: what was appended is whole.
    """

    def __init__(self, directory: Path, description: Description) -> None:
        """Begin a store in ``directory``, or go on with the one there, cut to what was committed.

        Raises: ArtifactError for a store of another description, or a damaged one.
        """
        if (directory / DESCRIPTION_FILE).exists():
            check_same(directory, load_description(directory), description)
        else:
            write_description(directory, description)
        entries, index_bytes = read_index(directory)
        self.names = {entry.name for entry in entries}
        self.num_sequences = sum(entry.skipped is None for entry in entries)
        self.num_tokens = sum(entry.num_tokens for entry in entries)
        self.num_answer_tokens = sum(entry.num_answer_tokens for entry in entries)
        self._directory, self._feature_size = directory, description.feature_size
        self._row_bytes = row_bytes_of_files(self._feature_size)
        self._pending: list[IndexEntry] = []
        check_sizes(directory, self.num_tokens, self._feature_size)
        with ExitStack() as opened:
            self._files = {name: opened.enter_context(_open(directory / name)) for name in self._row_bytes}
            self._index = opened.enter_context(_open(directory / INDEX_FILE))
            self._index_bytes = index_bytes
            self._cut()
            os.truncate(self._index.fileno(), index_bytes)
            self._opened = opened.pop_all()

    @property
    def token_bytes(self) -> int:
        """Bytes that a token takes."""
        return sum(self._row_bytes.values())

    def append(
        self, name: str, token_ids: NDArray[np.int32], is_answer: NDArray[np.bool_], features: NDArray[np.float16]
    ) -> None:
        """Write a sequence: ``token_ids [n]``, ``is_answer [n]``, ``features [n - 1, F]``: the last token has none.

        Raises: ArtifactError, and nothing is written, for features that are NaN or beyond float16; CheckpointError for
        a full disk, and the store is as it was before.
        """
        assert name not in self.names, name
        assert token_ids.dtype == np.int32
        assert is_answer.shape == token_ids.shape
        assert features.shape == (len(token_ids) - 1, self._feature_size)
        if has_no_number(features):
            rule = "features of a sequence are numbers of float16, 65504 at most"
            cure = "check the target's weights; activations beyond that cannot be stored"
            raise ArtifactError(f"{self._directory}: {name}", rule, "NaN, infinity or a larger one", cure)
        num_bytes = len(token_ids) * self.token_bytes
        path = self._directory / FEATURES_FILE
        check_free_space(path, num_bytes)
        rows: dict[str, list[NDArray[Any]]] = {
            TOKENS_FILE: [token_ids],
            IS_ANSWER_FILE: [is_answer.astype(np.bool_)],
            FEATURES_FILE: [features, np.zeros((1, self._feature_size), np.float16)],
        }
        try:
            with disk_full_named(path, num_bytes):
                for file_name, arrays in rows.items():
                    for array in arrays:
                        _write(self._files[file_name].fileno(), array)
        except BaseException:
            self._cut()
            raise
        self._add(IndexEntry(name, len(token_ids), int(is_answer.sum())))

    def skip(self, name: str, rule: str) -> None:
        """Note that a prompt gives no sequence."""
        self._add(IndexEntry(name, skipped=rule))

    def commit(self) -> None:
        """Make everything appended so far last: rows first, then the index.

        Raises: CheckpointError for a full disk; the sequences since the last commit are lost then.
        """
        if not self._pending:
            return
        lines = "".join(json.dumps(_values(entry)) + "\n" for entry in self._pending).encode()
        try:
            with disk_full_named(self._directory / INDEX_FILE, len(lines)):
                for file in self._files.values():
                    os.fsync(file.fileno())
                _write(self._index.fileno(), np.frombuffer(lines, np.uint8))
                os.fsync(self._index.fileno())
        except BaseException:
            os.truncate(self._index.fileno(), self._index_bytes)
            raise
        self._index_bytes += len(lines)
        self._pending = []

    def __enter__(self) -> ExamplesWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._opened:
            self.commit()

    def _add(self, entry: IndexEntry) -> None:
        self._pending.append(entry)
        self.names.add(entry.name)
        self.num_sequences += entry.skipped is None
        self.num_tokens += entry.num_tokens
        self.num_answer_tokens += entry.num_answer_tokens

    def _cut(self) -> None:
        """Cut the files of rows to the sequences that were appended whole."""
        for name, row_bytes in self._row_bytes.items():
            os.truncate(self._files[name].fileno(), self.num_tokens * row_bytes)


def _open(path: Path) -> FileIO:
    return path.open("ab", buffering=0)


def _write(descriptor: int, array: NDArray[Any]) -> None:
    data = np.ascontiguousarray(array).data.cast("B")
    while data:
        data = data[os.write(descriptor, data) :]


def _values(entry: IndexEntry) -> dict[str, object]:
    if entry.skipped is not None:
        return {"name": entry.name, "skipped": entry.skipped}
    return {"name": entry.name, "num_tokens": entry.num_tokens, "num_answer_tokens": entry.num_answer_tokens}
