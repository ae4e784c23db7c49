"""The source ``code``: functions to write or to complete, and larger programs (``code_tasks.yaml``)."""

from __future__ import annotations

from draftline.training.prompts.prompt import Prompt
from draftline.training.prompts.resources import load_table


def code_prompts() -> list[Prompt]:
    """Return every request with every task, and the projects."""
    table = load_table("code_tasks.yaml")
    prompts: list[Prompt] = []
    for task in table["tasks"]:
        name, parameters, result, description, arguments, value = task
        definition = define(name, f"({parameters}) -> {result}", description, f"{name}({arguments})", value)
        fields = {"definition": definition, "name": name, "parameters": parameters, "description": description}
        prompts += [
            Prompt(f"code/{name}/{number}", request.format(**fields))
            for number, request in enumerate(table["requests"])
        ]
    prompts += [Prompt(f"code/project/{number}", text) for number, text in enumerate(table["projects"])]
    return prompts


def define(name: str, signature: str, description: str, call: str = "", value: str = "") -> str:
    """Write the head of a function with its docstring, as it stands in a file, for somebody to go on.

    >>> define("half", "(x: int) -> float", "Halve a number.", "half(3)", "1.5").splitlines()[-3:]
    ['    >>> half(3)', '    1.5', '    \"\"\"']
    """
    example = [f">>> {call}", value] if call else []
    lines = ['"""', *description.splitlines(), *example, '"""']
    return "\n".join([f"def {name}{signature}:", *(f"    {line}".rstrip() for line in lines)]) + "\n"
