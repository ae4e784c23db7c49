"""From a pipeline file to a :class:`Pipeline`, or to all of its problems at once."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from draftline.config.block import Block
from draftline.config.choices import show_wrong_choices
from draftline.config.document import Document, read_document
from draftline.config.reference import describe_values, suggest_key, suggest_missing, suggest_value, yaml_word
from draftline.config.rules import broken_rules
from draftline.config.schema import BESIDE_A_DRAFT, BLOCKS, OPTIONAL_BLOCKS, Draft, Name, Pipeline
from draftline.errors import PipelineError, PipelineErrors


def load_pipeline(path: Path, overrides: Sequence[str] = ()) -> Pipeline:
    """Load and check a pipeline file, with ``block.key=value`` overrides laid over it.

    Raises: PipelineErrors with every problem: ``FILE:LINE: block.key: rule; got value; cure`` (``override N: ...``).
    """
    document = read_document(path, overrides)
    values = _check_blocks(document)
    for broken in broken_rules(values):
        document.report(broken.field, broken.rule, broken.got, broken.cure)
    if document.problems:
        raise PipelineErrors(sorted(document.problems, key=_file_order))
    return Pipeline.model_validate(document.values)


def _check_blocks(document: Document) -> dict[str, object]:
    """Report what is wrong inside the blocks; return the good values under dotted names, defaults included."""
    values: dict[str, object] = {}
    for name in document.values:
        if name not in Pipeline.model_fields:
            document.report(name, "is an unknown key", name, suggest_key(name, Pipeline.model_fields))
    _check_name(document)
    for name, block in BLOCKS.items():
        absent = name not in document.values or (name in OPTIONAL_BLOCKS and document.values[name] is None)
        if absent and name in OPTIONAL_BLOCKS:
            values[name] = None
            continue
        given = document.values.get(name, {})
        if absent and Pipeline.model_fields[name].is_required():
            document.report(name, "is required", "nothing", suggest_missing(name))
        else:
            values[name] = given
            if isinstance(given, list) and name == "draft":
                values |= _check_drafts(document, given)
            else:
                values |= _check_block(document, name, block, given)
    if values.get("draft") is not None:
        for name, block in BESIDE_A_DRAFT.items():
            if values.get(name) is None:
                values |= {f"{name}.{key}": field.default for key, field in block.model_fields.items()}
    return values


def _check_drafts(document: Document, given: list[object]) -> dict[str, object]:
    if not given:
        document.report("draft", "lists one draft or more", "an empty list", "remove it for plain decoding")
    values: dict[str, object] = {}
    for index, draft in enumerate(given):
        values |= _check_block(document, f"draft.{index}", Draft, draft)
    return values


def _check_name(document: Document) -> None:
    if "name" not in document.values:
        document.report("name", "is required", "nothing", suggest_missing("name"))
        return
    name = document.values["name"]
    try:
        TypeAdapter(Name).validate_python(name)
    except ValidationError:
        document.report("name", f"is {describe_values('name')}", _show(name), suggest_value("name", name))


def _check_block(document: Document, name: str, block: type[Block], given: object) -> dict[str, object]:
    if not isinstance(given, dict):
        document.report(name, "is a block of keys", _show(given), "indent its keys below it, or remove it")
        return {}
    bad = set()
    try:
        block.model_validate(given)
    except ValidationError as error:
        for problem in error.errors():
            key = str(problem["loc"][0])
            field = f"{name}.{key}"
            if key in bad:
                continue
            bad.add(key)
            if problem["type"] == "extra_forbidden":
                document.report(field, "is an unknown key", key, suggest_key(key, block.model_fields))
            elif problem["type"] == "missing":
                document.report(field, "is required", "nothing", suggest_missing(field))
            else:
                got = given[key]
                is_choices = field == "tree.choices" and isinstance(got, list)
                shown = show_wrong_choices(got) if is_choices else _show(got)
                document.report(field, f"is {describe_values(field)}", shown, suggest_value(field, got))
    defaults = {key: field.default for key, field in block.model_fields.items()} | block.dependent_defaults(given)
    return {f"{name}.{key}": value for key, value in (defaults | given).items() if key not in bad}


def _show(value: object) -> str:
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "a block"
    return f'"{value}"' if isinstance(value, str) else yaml_word(value)


def _file_order(problem: PipelineError) -> tuple[bool, int]:
    """Sort by line, overrides after the file."""
    override = problem.where.startswith("override ")
    number = re.search(r"^override (\d+)" if override else r":(\d+)", problem.where)
    return override, int(number.group(1)) if number else 0
