"""A YAML file as plain values with the line of every key, and the overrides laid over it."""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from draftline.errors import PipelineError, PipelineErrors

DEEPEST_VALUE = 2  # levels of lists: a list of paths


@dataclass
class Document:
    """A block is a dict of keys, or a list of such dicts; ``places`` says where each dotted name was written.

    Names are ``block``, ``block.key``, and in a list of blocks ``block.0``, ``block.0.key``.
    """

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
            document.values[name] = _block(document, loader, value, name)
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
        key = _value(loader, key_node)
        if not isinstance(key, str) or key_node.tag == "tag:yaml.org,2002:merge":
            document.report(f"{prefix}{key}", "a key is a word", key, "write it out", place)
        elif key in seen:
            document.report(
                f"{prefix}{key}", "a key stands once", f"it again, after line {seen[key]}", "remove one", place
            )
        else:
            seen[key] = line
            yield key, line, value


def _block(document: Document, loader: yaml.SafeLoader, node: yaml.Node, name: str) -> object:
    """Return the keys of a block, a list of blocks, or the value that stands in a block's place."""
    if isinstance(node, yaml.MappingNode):
        return _keys(document, loader, node, name)
    if not isinstance(node, yaml.SequenceNode):
        return _value(loader, node)
    items: list[object] = []
    for item in node.value:
        item_name = f"{name}.{len(items)}"
        document.places[item_name] = f"{document.path}:{item.start_mark.line + 1}"
        is_block = isinstance(item, yaml.MappingNode)
        items.append(_keys(document, loader, item, item_name) if is_block else _value(loader, item))
    return items


def _keys(document: Document, loader: yaml.SafeLoader, node: yaml.MappingNode, name: str) -> dict[str, object]:
    block: dict[str, object] = {}
    for key, line, value in _entries(document, loader, node, f"{name}."):
        document.places[f"{name}.{key}"] = f"{document.path}:{line}"
        block[key] = _value(loader, value)
    return block


def _value(loader: yaml.SafeLoader, node: yaml.Node, levels: int = DEEPEST_VALUE) -> object:
    """Return a scalar, or a list of ``levels``. No field takes a mapping or more: an empty one says enough."""
    if isinstance(node, yaml.ScalarNode):
        try:
            return loader.construct_object(node)
        except ValueError as error:  # such as a date that does not exist
            raise yaml.MarkedYAMLError(problem=str(error), problem_mark=node.start_mark) from error
    if isinstance(node, yaml.MappingNode):
        return {}
    return [_value(loader, item, levels - 1) for item in node.value] if levels else []


def _apply_override(document: Document, place: str, override: str) -> None:
    name, equals, text = override.partition("=")
    block, _, key = name.rpartition(".")
    if not equals or not key or not re.fullmatch(r"[^.]*(?:\.\d+)?", block):
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
        value = None if node is None else _value(loader, node)
    except (yaml.YAMLError, RecursionError):
        document.report(name, "the value is YAML", text, "put it in quotes", place)
        return
    if not block:
        document.places[name] = place
        document.values[name] = value
    elif (values := _block_to_change(document, block, place)) is not None:
        document.places[name] = place
        document.places.setdefault(block, place)
        values[key] = value


def _block_to_change(document: Document, block: str, place: str) -> dict[str, object] | None:
    """Return the keys of ``block``, made where it is absent; None, with a problem, where it is not one block."""
    name, is_item, index = block.partition(".")
    there = document.values.get(name)
    if not is_item:
        if isinstance(there, list):
            document.report(block, "is a list of blocks", block, f"number them from 0: {block}.0", place)
            return None
        if not isinstance(there, dict):  # such as draft=null, or a file that wrote a scalar there
            there = document.values[name] = {}
        return there
    items = there if isinstance(there, list) else []
    item = items[int(index)] if int(index) < len(items) else None
    if isinstance(item, dict):
        return item
    got = f"{len(items)} of them" if isinstance(there, list) else "no list"
    document.report(block, f"is a block in the list {name}, numbered from 0", got, "add it in the file", place)
    return None
