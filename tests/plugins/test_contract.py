"""``plugins/tree_attention/contract.yaml`` against the function, the graphs, the kernels, and the README's tables."""

from __future__ import annotations

import re
from typing import Any

import onnx
import pytest

from draftline.graphs.onnx_graph import DRAFTLINE
from draftline.graphs.tree_attention import load_tree_attention_function
from draftline.kernels import shape as kernel_shape
from draftline.kernels.arguments import ARGUMENT_TYPES, SIGNATURES, constants
from draftline.kernels.cases import load_contract
from draftline.kernels.configurations import default_configuration
from draftline.kernels.devices import ARCHITECTURES
from draftline.kernels.shape import KernelShape
from draftline.kernels.source import MODULES, source_path
from draftline.share import share_path
from tests.tree_attention_cases import HALF_TOLERANCE, TOLERANCE, Shape, attention_model

README = (share_path("plugins") / "tree_attention" / "README.md").read_text(encoding="utf-8")
CONTRACT = load_contract()
GPU = CONTRACT["implementations"]["gpu"]
NAMES = {kind: [entry["name"] for entry in CONTRACT[kind]] for kind in ("inputs", "outputs", "attributes")}


def test_the_function_has_the_inputs_outputs_and_attributes() -> None:
    function = load_tree_attention_function()
    assert (
        (function.domain, function.name) == (CONTRACT["domain"], CONTRACT["operator"]) == (DRAFTLINE, "TreeAttention")
    )
    assert list(function.input) == NAMES["inputs"]
    assert list(function.output) == NAMES["outputs"]
    assert list(function.attribute) == NAMES["attributes"]


def test_graphs_give_the_attributes_in_their_types() -> None:
    (node,) = attention_model(Shape(4, 2, 16, 8), []).graph.node
    kinds = {"int": onnx.AttributeProto.INT, "float": onnx.AttributeProto.FLOAT}
    assert {attribute.name: attribute.type for attribute in node.attribute} == {
        entry["name"]: kinds[entry["type"]] for entry in CONTRACT["attributes"]
    }
    assert len(node.input) == len(NAMES["inputs"])


def table(heading: str) -> list[list[str]]:
    """Return the cells of the README's table whose first column is called ``heading``."""
    lines = README[README.index(f"| {heading} |") :].split("\n\n")[0].splitlines()[2:]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


@pytest.mark.parametrize("heading", ["input", "output"])
def test_the_readme_has_the_same_tensors(heading: str) -> None:
    expected = [
        (entry["name"], f"`[{', '.join(map(str, entry['shape']))}]` {entry['dtype']}")
        for entry in CONTRACT[f"{heading}s"]
    ]
    assert [(name, kind) for names, kind, *_ in table(heading) for name in re.findall(r"`(\w+)`", names)] == expected


def test_the_readme_has_the_same_attributes_and_dtypes() -> None:
    names = [name for cells in table("attribute") for name in re.findall(r"`(\w+)`", cells[0])]
    assert names == NAMES["attributes"]
    rows = {cells[0]: cells[1:] for cells in table("implementation")}
    for name, implementation in CONTRACT["implementations"].items():
        pairs = "; ".join(f"{model}: {', '.join(pools)}" for model, pools in implementation["pairs"].items())
        tolerances = ", ".join(f"{value:g}" for value in implementation["tolerances"].values())
        assert rows[name] == [pairs, tolerances]
        assert set(implementation["pairs"]) <= set(CONTRACT["dtypes"]["model"])
        assert set(implementation["tolerances"]) == set(implementation["pairs"])


def test_tolerance_of_the_other_implementations_is_that_of_their_tests() -> None:
    tolerances = {name: CONTRACT["implementations"][name]["tolerances"] for name in ("function", "cpu")}
    assert tolerances == {"function": {"float32": TOLERANCE, "float16": HALF_TOLERANCE}, "cpu": {"float32": TOLERANCE}}


def test_the_kernels_take_what_the_contract_says() -> None:
    assert {model: list(pools) for model, pools in kernel_shape.KV_DTYPES_OF.items()} == GPU["pairs"]
    assert list(ARCHITECTURES) == GPU["architectures"]
    assert GPU["head_size"] == {"min": 8, "max": kernel_shape.MAX_HEAD_SIZE, "multiple_of": 8}
    assert GPU["group"] == {"max": kernel_shape.MAX_GROUP}
    (block_size,) = (entry for entry in CONTRACT["attributes"] if entry["name"] == "block_size")
    assert list(kernel_shape.BLOCK_SIZES) == block_size["values"]


@pytest.mark.parametrize("name", list(MODULES))
def test_kernels_have_the_arguments_in_this_order(name: str) -> None:
    """In the table that launches them, and in their source, where constants follow."""
    declared: list[dict[str, Any]] = CONTRACT["kernels"][name]
    kinds = {
        argument: "pointer" if kind.startswith("*") else ARGUMENT_TYPES[kind]
        for argument, kind in SIGNATURES[name].items()
    }
    assert list(kinds.items()) == [(argument["name"], argument["type"]) for argument in declared]
    source = (source_path() / f"{MODULES[name]}.py").read_text(encoding="utf-8")
    (parameters,) = re.findall(rf"^def {name}\((.*?)\):$", source, re.DOTALL | re.MULTILINE)
    names = re.findall(r"(\w+)(?:: tl\.constexpr)?,", parameters)
    shape = KernelShape(32, 8, 64, 16)
    fixed = list(constants(name, shape, default_configuration(shape, 80)))
    assert names[: len(kinds)] == list(kinds)
    assert sorted(names[len(kinds) :]) == sorted(fixed)
    tensors = {entry["name"]: entry for entry in (*CONTRACT["inputs"], *CONTRACT["outputs"])}
    for argument in declared:
        if argument["type"] == "pointer":
            assert {"dtype"} <= (argument.keys() | tensors.get(argument["name"], {}).keys())
