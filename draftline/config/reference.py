"""What each field of a pipeline file may hold, in words: for error messages and for the printed reference."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Iterable
from functools import cache
from typing import Any

from draftline.config.block import Block
from draftline.config.schema import BLOCKS, OPTIONAL_BLOCKS, Pipeline

INTRODUCTION = """\
# Pipeline files

One file, one deployment: `draftline run pipelines/smollm2-135m.yaml`. The first line of each file is the command that
runs it. Keys that this page does not list are errors. `draftline validate FILE` reports every problem at once, and
`draftline show FILE` prints a file with its defaults. Any value can be replaced on the command line:
`draftline run FILE engine.weights_dtype=int8 serve.http_port=9000`.

This page is the output of `draftline show --fields`.
"""


@cache
def field_schemas(block: type[Block]) -> dict[str, dict[str, Any]]:
    """Return the JSON schema of each field of ``block``; ``X or null`` is flattened, with ``nullable`` set."""
    schemas: dict[str, dict[str, Any]] = {}
    for name, schema in block.model_json_schema()["properties"].items():
        flat = dict(schema)
        for choice in flat.pop("anyOf", []):
            flat |= {"nullable": True} if choice.get("type") == "null" else choice
        schemas[name] = flat
    return schemas


def field_schema(field: str) -> dict[str, Any]:
    """Return the schema of a dotted field name; ``draft.1.method`` is that of ``draft.method``."""
    block, *_, key = field.split(".") if "." in field else ("", field)
    return field_schemas(BLOCKS[block] if block else Pipeline)[key]


def describe_values(field: str) -> str:
    """Say what ``field`` may hold, such as ``an integer from 1 to 65535``."""
    schema = field_schema(field)
    if "items" in schema:
        if "enum" in schema["items"]:
            return "a list of " + " | ".join(map(str, schema["items"]["enum"]))
        if schema["items"].get("type") == "integer":
            return f"a list of integers from {schema['items']['minimum']} on"
        return " | ".join(schema["enum"]) + " | a list of paths such as [[0], [1], [0, 0]]"
    if "enum" in schema:
        return " | ".join(str(value) for value in schema["enum"])
    if "pattern" in schema:
        return f"lower-case letters, digits and . _ - after a letter or digit, at most {schema['maxLength']}"
    if schema["type"] == "number":
        if "minimum" in schema:
            return f"a number from {schema['minimum']:g} to {schema['maximum']:g}"
        return f"a number above {schema['exclusiveMinimum']:g}, at most {schema['maximum']:g}"
    words = {"integer": "an integer", "boolean": "true or false", "string": "a non-empty text"}[schema["type"]]
    return f"{words} from {schema['minimum']} to {schema['maximum']}" if "minimum" in schema else words


def suggest_value(field: str, got: object) -> str:
    """Return the cure for a wrong value of ``field``."""
    schema = field_schema(field)
    if isinstance(got, str) and schema.get("type") in ("integer", "number", "boolean"):
        return "write it without quotes" if got.isdigit() or got in ("true", "false") else f"write {_example(field)}"
    if isinstance(got, str) and "enum" in schema and (close := closest(got, map(str, schema["enum"]))):
        return f"did you mean {close}?"
    if schema.get("type") == "string" and isinstance(got, (int, float)):
        return f'put it in quotes: "{got}"'
    return f"write {_example(field)}"


def suggest_missing(field: str) -> str:
    """Return the cure for a required ``field`` (or block) that is absent."""
    return f"add the block {field}" if field in BLOCKS else f"add {_example(field)}"


def suggest_key(key: str, known: Iterable[str]) -> str:
    """Return the cure for an unknown ``key``: the closest of the ``known`` ones, or all of them."""
    known = list(known)
    close = closest(key, known)
    return f"did you mean {close}?" if close else f"the keys are {', '.join(known)}"


def closest(word: str, known: Iterable[str]) -> str | None:
    """Return the known word that ``word`` most likely meant."""
    matches = difflib.get_close_matches(word, list(known), n=1)
    return matches[0] if matches else None


def _example(field: str) -> str:
    schema = field_schema(field)
    if schema.get("default") is not None:
        value = schema["default"]
    elif "examples" in schema:
        value = schema["examples"][0]
    else:
        value = schema["enum"][0]
    return f"{field.rpartition('.')[2]}: {yaml_word(value)}"


def yaml_word(value: object) -> str:
    """Write a scalar the way YAML does; texts keep their quotes only where these matter to the reader."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(yaml_word, value))}]"
    return {True: "true", False: "false"}[value] if isinstance(value, bool) else "null" if value is None else str(value)


def write_reference() -> str:
    """Return the reference of all fields as Markdown."""
    parts = [INTRODUCTION, "`name` (required): " + describe_values("name") + ". " + field_schema("name")["description"]]
    for name, block in BLOCKS.items():
        optional = " (optional)" if name in OPTIONAL_BLOCKS else ""
        rows = ["| field | values | default | |", "| --- | --- | --- | --- |"]
        for key, schema in field_schemas(block).items():
            default = "none" if schema.get("nullable") else "required"
            if schema.get("default") is not None:
                default = f"`{yaml_word(schema['default'])}`"
            values = describe_values(f"{name}.{key}").replace(" | ", ", ")
            rows.append(f"| `{key}` | {values} | {default} | {schema['description']} |")
        parts.append(f"\n## `{name}`{optional}\n\n{inspect.cleandoc(block.__doc__ or '')}\n\n" + "\n".join(rows))
    return "\n".join(parts) + "\n"
