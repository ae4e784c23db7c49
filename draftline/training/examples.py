"""The store of training data: answered sequences with their features, on disk, end to end, read where they lie.

A folder has, beside ``description.json``,

- ``token_ids.int32``, ``is_answer.bool``, ``features.float16 [N, F]``: raw, row-major, one row a token,
- ``sequences.jsonl``: a line for every sequence, in order; the truth about the others. They are written and synced
  before it, so what lies behind its last whole line, in any of the files, was left by a run that was killed.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from draftline.errors import ArtifactError
from draftline.training.description import Description, load_description

INDEX_FILE = "sequences.jsonl"
TOKENS_FILE, IS_ANSWER_FILE, FEATURES_FILE = "token_ids.int32", "is_answer.bool", "features.float16"
_AGAIN = "remove the folder and let the target answer again"
_CHUNK_ROWS = 4096


@dataclass(frozen=True)
class IndexEntry:
    """A line of the index: a sequence of ``num_tokens``, or a prompt without one and the rule it was ``skipped`` by."""

    name: str
    num_tokens: int = 0
    num_answer_tokens: int = 0
    skipped: str | None = None


@dataclass(frozen=True)
class Examples:
    """All sequences of a store, memory-mapped, S of them with N tokens.

    - ``token_ids [N] int32``: prompt and answer of sequence s are rows ``sequence_starts[s] : sequence_starts[s + 1]``.
    - ``is_answer [N] bool``: whether the target drew the token, so that a loss may be taken where it is predicted.
    - ``features [N, F] float16``: outputs of ``captured_layers``, then the final hidden row, which ``lm_head`` reads
      for the token after. **The last token of a sequence was drawn and never fed: zeros stand in place of its
      features.** It is there to be predicted, and nothing is predicted behind it, so no loss has a use for them.
    - ``names``: of the sequences: the prompt's, with ``#2`` behind it where it was answered a second time.
    - ``num_skipped``: prompts without a sequence, by rule.
    """

    token_ids: NDArray[np.int32]
    is_answer: NDArray[np.bool_]
    features: NDArray[np.float16]
    sequence_starts: NDArray[np.int64]
    names: tuple[str, ...]
    num_skipped: dict[str, int]
    description: Description

    @property
    def captured_layers(self) -> tuple[int, ...]:
        return self.description.captured_layers

    @property
    def hidden_size(self) -> int:
        return self.description.hidden_size


def open_examples(directory: Path, num_answer_tokens: int | None = None) -> Examples:
    """Open a store for reading; it may be growing meanwhile, and what is added later is not seen.

    Of a store with more than ``num_answer_tokens`` (None = all), the first sequences are taken that have as many. Every
    row of theirs is looked at once, which reads it into the system's page cache if it was not there.

    Raises: ArtifactError where there is no store, or it is empty, cut, of another version, or holds token ids outside
    the vocabulary or features that are no numbers.
    """
    description = load_description(directory)
    entries = first_entries(read_index(directory)[0], num_answer_tokens)
    sequences = [entry for entry in entries if entry.skipped is None]
    if not sequences:
        raise ArtifactError(directory, "holds answers", "none", "let the target answer prompts first")
    starts = np.zeros(len(sequences) + 1, np.int64)
    np.cumsum([entry.num_tokens for entry in sequences], out=starts[1:])
    num_tokens, feature_size = int(starts[-1]), description.feature_size
    check_sizes(directory, num_tokens, feature_size)
    token_ids: NDArray[np.int32] = np.memmap(directory / TOKENS_FILE, np.int32, "r", shape=(num_tokens,))
    is_answer: NDArray[np.bool_] = np.memmap(directory / IS_ANSWER_FILE, np.bool_, "r", shape=(num_tokens,))
    features: NDArray[np.float16] = np.memmap(
        directory / FEATURES_FILE, np.float16, "r", shape=(num_tokens, feature_size)
    )
    end = description.vocab_size
    outside = np.flatnonzero((token_ids < 0) | (token_ids >= end))
    if len(outside):
        got = f"{token_ids[outside[0]]} in row {outside[0]}"
        raise ArtifactError(directory / TOKENS_FILE, f"token ids lie in 0..{end - 1}", got, _AGAIN)
    for first in range(0, num_tokens, _CHUNK_ROWS):
        if has_no_number(features[first : first + _CHUNK_ROWS]):
            got = f"NaN or infinity in rows {first}..{min(first + _CHUNK_ROWS, num_tokens) - 1}"
            raise ArtifactError(directory / FEATURES_FILE, "features are finite", got, _AGAIN)
    num_skipped: dict[str, int] = {}
    for entry in entries:
        if entry.skipped is not None:
            num_skipped[entry.skipped] = num_skipped.get(entry.skipped, 0) + 1
    names = tuple(entry.name for entry in sequences)
    return Examples(token_ids, is_answer, features, starts, names, num_skipped, description)


def read_index(directory: Path) -> tuple[list[IndexEntry], int]:
    """Return the entries of the index, and how many bytes of the file they take; a torn last line is left out.

    Raises: ArtifactError where a line is damaged, or two are of one name.
    """
    path = directory / INDEX_FILE
    data = path.read_bytes() if path.exists() else b""
    whole = data[: data.rfind(b"\n") + 1]
    entries: dict[str, IndexEntry] = {}
    for number, line in enumerate(whole.splitlines(), 1):
        entry = _read_entry(line)
        if entry is None or entry.name in entries:
            rule = "is a sequence's name and its numbers of tokens" if entry is None else "names a sequence once"
            raise ArtifactError(f"{path}:{number}", rule, line.decode(errors="replace"), _AGAIN)
        entries[entry.name] = entry
    return list(entries.values()), len(whole)


def first_entries(entries: Sequence[IndexEntry], num_answer_tokens: int | None) -> list[IndexEntry]:
    """Return the first entries, up to the one with which they have ``num_answer_tokens``; all where none has.

    >>> sizes = [IndexEntry(name, 9, 4) for name in "abc"]
    >>> [entry.name for entry in first_entries(sizes, 5)], len(first_entries(sizes, None))
    (['a', 'b'], 3)
    """
    if num_answer_tokens is None:
        return list(entries)
    totals = itertools.accumulate(entry.num_answer_tokens for entry in entries)
    num_before = sum(1 for total in totals if total < num_answer_tokens)
    return list(entries[: num_before + 1])


def hash_examples(directory: Path, num_answer_tokens: int | None = None) -> str:
    """Return a hash of what ``open_examples`` takes of a store; features follow from it and the target."""
    entries = first_entries(read_index(directory)[0], num_answer_tokens)
    num_tokens = sum(entry.num_tokens for entry in entries)
    check_sizes(directory, num_tokens, load_description(directory).feature_size)
    digest = hashlib.sha256()
    for entry in entries:
        digest.update(json.dumps(dataclasses.asdict(entry)).encode() + b"\n")
    for name, dtype in ((TOKENS_FILE, np.int32), (IS_ANSWER_FILE, np.bool_)):
        if num_tokens:
            digest.update(np.memmap(directory / name, dtype, "r", shape=(num_tokens,)).data)
    return digest.hexdigest()


def check_sizes(directory: Path, num_tokens: int, feature_size: int) -> None:
    """Raise ArtifactError where a file of rows is shorter than the index says."""
    for name, row_bytes in row_bytes_of_files(feature_size).items():
        path, num_bytes = directory / name, num_tokens * row_bytes
        found = path.stat().st_size if path.exists() else 0
        if found < num_bytes:
            raise ArtifactError(path, f"has the {num_bytes} bytes that {INDEX_FILE} tells of", found, _AGAIN)


def row_bytes_of_files(feature_size: int) -> dict[str, int]:
    """Return the files of rows, and the bytes of a token's row in each."""
    return {TOKENS_FILE: 4, IS_ANSWER_FILE: 1, FEATURES_FILE: 2 * feature_size}


def has_no_number(features: NDArray[np.float16]) -> bool:
    """Tell whether NaN or an infinity is among float16 values: their exponents are all ones."""
    bits = features.view(np.uint16)
    return bool(((bits & 0x7C00) == 0x7C00).any())


def _read_entry(line: bytes) -> IndexEntry | None:
    """Read a line of the index; None where it is damaged."""
    try:
        values: dict[str, Any] = json.loads(line)
        entry = IndexEntry(**values)
    except (ValueError, TypeError):
        return None
    counts = (entry.num_tokens, entry.num_answer_tokens)
    if not isinstance(entry.name, str) or not all(isinstance(count, int) for count in counts):
        return None
    if entry.skipped is not None:
        return entry if isinstance(entry.skipped, str) and counts == (0, 0) else None
    return entry if 0 < entry.num_answer_tokens < entry.num_tokens else None
