"""The source ``python-docs``: what Python's documentation says, turned into questions and tasks."""

from __future__ import annotations

import pydoc_data.topics

from draftline.training.prompts.code import define
from draftline.training.prompts.prompt import Prompt
from draftline.training.prompts.standard_library import Function, documented_modules

_LENGTHS = range(40, 700)  # characters of a docstring that says enough, and not too much, for somebody to write code
_FUNCTION_REQUESTS = (
    "{definition}",
    "Complete this function:\n\n```python\n{definition}```",
    "Write a Python function `{name}{signature}`:\n{description}",
    "What does `{module}.{name}{signature}` do? Its documentation says:\n{description}\nGive an example of its use.",
    "{definition}",
    "Write unit tests for this function.\n\n```python\n{definition}```",
)
_TOPIC_REQUESTS = (
    "Explain {topic} in Python to a beginner, with a short example.",
    "What should a Python programmer know about {topic}?",
    "Give three exercises on {topic} in Python, with solutions.",
)
_MODULE_REQUESTS = (
    "What is the Python module `{module}` for? Show a typical use.",
    "Write a short Python script that uses the module `{module}`.",
)


def python_prompts() -> list[Prompt]:
    """Return requests about the functions and modules of the standard library, and about the language."""
    functions = [function for module in documented_modules() for function in module.functions]
    described = [function for function in functions if len(function.description) in _LENGTHS]
    prompts = [_ask(function, number) for number, function in enumerate(described)]
    for module in documented_modules():
        prompts += [
            Prompt(f"python-docs/module/{module.name}/{number}", request.format(module=module.name))
            for number, request in enumerate(_MODULE_REQUESTS)
            if module.description
        ]
    for topic in sorted(pydoc_data.topics.topics):
        prompts += [
            Prompt(f"python-docs/topic/{topic}/{number}", request.format(topic=f'"{topic.replace("-", " ")}"'))
            for number, request in enumerate(_TOPIC_REQUESTS)
        ]
    return prompts


def _ask(function: Function, number: int) -> Prompt:
    """Ask one thing about a function: all requests take turns."""
    definition = define(function.name, function.signature, function.description.replace('"""', "'''"))
    text = _FUNCTION_REQUESTS[number % len(_FUNCTION_REQUESTS)]
    for field, value in {
        "{definition}": definition,
        "{name}": function.name,
        "{signature}": function.signature,
        "{module}": function.module,
        "{description}": function.description,
    }.items():
        text = text.replace(field, value)
    return Prompt(f"python-docs/function/{function.module}.{function.name}", text)
