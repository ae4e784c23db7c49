"""Passages of prose, and functions of the standard library."""

from __future__ import annotations

from draftline.training.prompts.standard_library import documented_modules
from draftline.training.prompts.texts import passages_of

PROSE = "It is " + "very " * 48 + "long."


def test_passages_are_paragraphs_of_prose() -> None:
    text = (
        f"{PROSE}\n\nshort\n\n    {PROSE}\n\n* {PROSE}\n\n{'word ' * 500}\n\n{PROSE.replace(' ', chr(10))}\n\n{PROSE}"
    )
    assert passages_of(text) == [PROSE, PROSE]


def test_functions_have_no_self() -> None:
    functions = {f"{module.name}.{one.name}": one for module in documented_modules() for one in module.functions}
    assert functions["textwrap.fill"].signature == "(text, width=70, **kwargs)"
    assert functions["json.encoder.iterencode"].signature == "(o, _one_shot=False)"
    assert functions["textwrap.dedent"].description.startswith("Remove any common leading whitespace")
    assert not [name for name in functions if "._" in name or ".tests." in name]
