"""Typed access to a JSON object of a checkpoint, with errors that name file, key, value and cure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from draftline.errors import CheckpointError


class JsonObject:
    """A JSON object and the file it came from; ``prefix`` is what stands before its keys in error messages."""

    def __init__(self, where: Path, values: Mapping[str, Any], prefix: str = "") -> None:
        self.where, self.values, self.prefix = where, values, prefix

    def section(self, key: str) -> JsonObject | None:
        """Return the object under ``key``, or None where the key is absent or null."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            raise self.error(key, "an object", value)
        return JsonObject(self.where, value, f"{self.prefix}{key}.")

    def get(self, key: str) -> Any:
        """Return the value, or None where the key is absent or null."""
        return self.values.get(key)

    def integer(self, key: str, default: int | None = None) -> int:
        """Return a positive integer; an absent or null key is an error unless there is a ``default``."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not int or value < 1:
            raise self.error(key, "a positive integer", value)
        return value

    def optional_integer(self, key: str) -> int | None:
        """Return a positive integer, or None where the key is absent or null."""
        return None if self.get(key) is None else self.integer(key)

    def number(self, key: str, default: float | None = None) -> float:
        """Return a positive number; an absent or null key is an error unless there is a ``default``."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) not in (int, float) or not 0 < value < float("inf"):
            raise self.error(key, "a positive number", value)
        return float(value)

    def optional_number(self, key: str, default: float | None = None) -> float | None:
        """Return a positive number, None where the key is null, and ``default`` where it is absent."""
        if key not in self.values:
            return default
        return None if self.get(key) is None else self.number(key)

    def numbers(self, key: str, length: int) -> list[float]:
        """Return a list of ``length`` positive numbers."""
        value = self.get(key)
        is_list = isinstance(value, list) and len(value) == length
        if not is_list or not all(type(item) in (int, float) and 0 < item < float("inf") for item in value):
            got = f"{len(value)} values" if isinstance(value, list) and len(value) != length else value
            raise self.error(key, f"a list of {length} positive numbers", got)
        return [float(item) for item in value]

    def flag(self, key: str, default: bool | None = None) -> bool:
        """Return a boolean; an absent or null key is an error unless there is a ``default``."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        if type(value) is not bool:
            raise self.error(key, "true or false", value)
        return value

    def text(self, key: str) -> str:
        """Return a string; an absent key is an error."""
        value = self.get(key)
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value

    def integers(self, key: str) -> tuple[int, ...]:
        """Return an integer or a list of integers (not negative) as a tuple; absent or null is an empty one."""
        value = self.get(key)
        values = [] if value is None else value if isinstance(value, list) else [value]
        if not all(type(item) is int and item >= 0 for item in values):
            raise self.error(key, "an integer or a list of integers", value)
        return tuple(values)

    def error(
        self, key: str, kind: str, value: Any, cure: str = "correct the file or fetch it again"
    ) -> CheckpointError:
        """Make the error for a key whose value is not of the ``kind`` wanted."""
        got = "nothing" if value is None else json.dumps(value, default=str)
        return CheckpointError(self.where, f"{self.prefix}{key} is {kind}", got, cure)


def load_json(path: Path) -> JsonObject:
    """Read a file that holds one JSON object.

    Raises:
        CheckpointError: the file is missing, not UTF-8, not JSON, or not an object.
    """
    if not path.is_file():
        raise CheckpointError(path, "the file exists", "no such file", "fetch the whole checkpoint")
    try:
        values = json.loads(path.read_bytes())
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(path, "the file is JSON", str(error), "correct the file or fetch it again") from error
    if not isinstance(values, dict):
        got = type(values).__name__
        raise CheckpointError(path, "the file holds a JSON object", got, "correct the file or fetch it again")
    return JsonObject(path, values)
