"""A YAML file as plain values with the line of every key, and the overrides laid over it."""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from draftline.errors import PipelineError, PipelineErrors


@dataclass
class Document:
    """``values`` has at most two levels; ``places`` says where each dotted name was written."""

    path: Path
    values: dict[str, object] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    problems: list[PipelineError] = field(default_factory=list)

    def place(self, name: str) -> str:
        """Return where ``name`` stands, or where the nearest thing around it does."""
        while name not in self.places and "." in name:
            name = name.rpartition(".")[0]
        return self.places.get(name, f"{self.path}:1")

    def report(self, name: str, rule: str, got: object, cure: str, place: str | None = None) -> None:
        """Add a problem of the field ``name``."""
        self.problems.append(PipelineError(f"{place or self.place(name)}: {name}", rule, got, cure))


def read_document(path: Path, overrides: Sequence[str] = ()) -> Document:
    """Read ``path`` and lay ``block.key=value`` overrides over it.

    Problems that leave something to check further are collected in the document.
    Raises: PipelineErrors where the file is absent, not UTF-8, not YAML, or not a mapping.
    """
    document = Document(path)
    text = _read_text(path)
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if not isinstance(node, yaml.MappingNode):
            got = "an empty file" if node is None else "a list" if isinstance(node, yaml.SequenceNode) else "a text"
            raise _single(f"{path}:1", "a pipeline file is a mapping", got, "start from a file in pipelines/")
        for name, line, value in _entries(document, loader, node, ""):
            document.places[name] = f"{path}:{line}"
            if isinstance(value, yaml.MappingNode):
                block: dict[str, object] = {}
                for key, key_line, scalar in _entries(document, loader, value, f"{name}."):
                    document.places[f"{name}.{key}"] = f"{path}:{key_line}"
                    block[key] = _scalar(loader, scalar)
                document.values[name] = block
            else:
                document.values[name] = _scalar(loader, value)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = mark.line + 1 if mark else 1
        raise _single(f"{path}:{line}", "is YAML", error.problem, "correct the line or the one before") from error
    except yaml.reader.ReaderError as error:
        line = text[: error.position].count("\n") + 1
        got = f"the character {chr(error.character)!r}"
        raise _single(f"{path}:{line}", "is YAML text", got, "remove the character") from error
    except RecursionError as error:
        cure = "start from a file in pipelines/"
        raise _single(str(path), "has blocks with keys, no deeper", "a deep nest", cure) from error
    for number, override in enumerate(overrides, 1):
        _apply_override(document, f"override {number}", override)
    return document


def _single(where: str, rule: str, got: object, cure: str) -> PipelineErrors:
    return PipelineErrors([PipelineError(where, rule, got, cure)])


def _read_text(path: Path) -> str:
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise _single(str(path), "a pipeline file exists", "no such file", "check the path") from error
    except OSError as error:
        raise _single(str(path), "a pipeline file can be read", error.strerror, "check the path") from error
    try:
        return data.removeprefix(codecs.BOM_UTF8).decode()
    except UnicodeDecodeError as error:
        line = data[: error.start].count(b"\n") + 1
        got = f"the byte {data[error.start]:#04x}"
        raise _single(f"{path}:{line}", "a pipeline file is UTF-8", got, "save it as UTF-8") from error


def _entries(
    document: Document, loader: yaml.SafeLoader, mapping: yaml.MappingNode, prefix: str
) -> Iterator[tuple[str, int, yaml.Node]]:
    """Yield key, line and value; report keys that are not words or stand there twice."""
    seen: dict[str, int] = {}
    for key_node, value in mapping.value:
        line = key_node.start_mark.line + 1
        place = f"{document.path}:{line}"
        key = _scalar(loader, key_node)
        if not isinstance(key, str) or key_node.tag == "tag:yaml.org,2002:merge":
            document.report(f"{prefix}{key}", "a key is a word", key, "write it out", place)
        elif key in seen:
            document.report(
                f"{prefix}{key}", "a key stands once", f"it again, after line {seen[key]}", "remove one", place
            )
        else:
            seen[key] = line
            yield key, line, value


def _scalar(loader: yaml.SafeLoader, node: yaml.Node) -> object:
    """Return a scalar's value. Collections stand where no field takes one: an empty list or mapping says enough."""
    if isinstance(node, yaml.ScalarNode):
        try:
            return loader.construct_object(node)
        except ValueError as error:  # such as a date that does not exist
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error
    return {} if isinstance(node, yaml.MappingNode) else []


def _apply_override(document: Document, place: str, override: str) -> None:
    name, equals, text = override.partition("=")
    block, _, key = name.rpartition(".")
    if not equals or not key or "." in block:
        problem = PipelineError(
            place, "reads block.key=value", override, "write for instance engine.weights_dtype=int8"
        )
        document.problems.append(problem)
        return
    if document.places.get(name, "").startswith("override"):
        document.report(name, "is overridden once", f"{document.places[name]} as well", "remove one", place)
        return
    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        value = None if node is None else _scalar(loader, node)
    except yaml.YAMLError:
        document.report(name, "the value is a YAML scalar", text, "put it in quotes", place)
        return
    document.places[name] = place
    if not block:
        document.values[name] = value
        return
    document.places.setdefault(block, place)
    values = document.values.setdefault(block, {})
    if not isinstance(values, dict):  # such as draft=null, or a file that wrote a scalar there
        values = document.values[block] = {}
    values[key] = value
