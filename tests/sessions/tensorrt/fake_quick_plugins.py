"""A stand-in for ``tensorrt.plugin``: it refuses what that refuses by NVIDIA's pages, and evaluates launches.

Source: the pages of ``tensorrt.plugin`` (TensorRT 11): signatures of registered functions, expressions of sizes,
``KernelLaunchParams``, ``SymIntExprs``.
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args, get_origin


class ShapeExpr:
    """An expression of sizes: sums, differences, products and floored quotients with integers and with each other."""

    def __init__(self, evaluate: Callable[[Mapping[str, int]], int]) -> None:
        self.evaluate = evaluate

    def _with(self, other: object, operate: Callable[[int, int], int]) -> ShapeExpr:
        if not isinstance(other, (int, ShapeExpr)) or isinstance(other, bool):
            raise TypeError(f"an expression meets {type(other).__name__}")
        return ShapeExpr(lambda sizes: operate(self.evaluate(sizes), evaluate(other, sizes)))

    def __add__(self, other: object) -> ShapeExpr:
        return self._with(other, lambda a, b: a + b)

    def __sub__(self, other: object) -> ShapeExpr:
        return self._with(other, lambda a, b: a - b)

    def __mul__(self, other: object) -> ShapeExpr:
        return self._with(other, lambda a, b: a * b)

    def __floordiv__(self, other: object) -> ShapeExpr:
        return self._with(other, lambda a, b: a // b)

    def __bool__(self) -> bool:
        raise TypeError("an expression is neither true nor false while a network is built")


def evaluate(value: int | ShapeExpr, sizes: Mapping[str, int]) -> int:
    return value.evaluate(sizes) if isinstance(value, ShapeExpr) else value


@dataclass
class TensorDesc:
    shape_expr: tuple[ShapeExpr | int, ...]
    dtype: str


class KernelLaunchParams:
    __slots__ = ("block_x", "block_y", "block_z", "grid_x", "grid_y", "grid_z", "shared_mem")

    def __init__(self) -> None:
        self.grid_x: Any = 1
        self.grid_y: Any = 1
        self.grid_z: Any = 1
        self.block_x = self.block_y = self.block_z = 1
        self.shared_mem = 0


class SymInt32:
    def __init__(self, value: int | ShapeExpr) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, ShapeExpr)):
            raise TypeError(f"SymInt32 of {type(value).__name__}")
        if isinstance(value, int) and not -(2**31) <= value < 2**31:
            raise ValueError(f"{value} is no int32")
        self.value = value


class SymExprs:
    def __init__(self, length: int) -> None:
        self.values: list[SymInt32 | None] = [None] * length

    def __setitem__(self, index: int, value: SymInt32) -> None:
        assert isinstance(value, SymInt32)
        self.values[index] = value


class SymIntExprs(SymExprs):
    pass


@dataclass
class Definition:
    """What was registered under an id: ``tensors`` and ``attributes`` in order, the two functions."""

    described: Callable[..., Any]
    tensors: tuple[str, ...]
    attributes: dict[str, type]
    launched: Callable[..., Any] | None = None

    def build(self, sizes: Mapping[str, tuple[str, ...]], attributes: Mapping[str, Any]) -> Any:
        """Call both functions as a build does: ``sizes`` names the sizes of each input. Returns output and launch."""
        assert dict.fromkeys(attributes) == dict.fromkeys(self.attributes), "the attributes of the node"
        given = [self.attributes[name](value) for name, value in attributes.items()]
        named = dict(zip(self.attributes, given, strict=True))
        inputs = [
            TensorDesc(tuple(size_expr(size) for size in sizes[name]), f"type of {name}") for name in self.tensors
        ]
        output = self.described(*inputs, **named)
        assert self.launched is not None
        return output, self.launched(*inputs, *given, (output,), 0)


def size_expr(name: str) -> ShapeExpr:
    return ShapeExpr(lambda sizes: sizes[name])


@dataclass
class FakeQuickPlugins:
    """The module. ``definitions``: by id."""

    definitions: dict[str, Definition] = field(default_factory=dict)
    TensorDesc = TensorDesc
    KernelLaunchParams = KernelLaunchParams
    SymInt32 = SymInt32
    SymIntExprs = SymIntExprs

    def from_shape_expr(self, shape_expr: tuple[ShapeExpr | int, ...], dtype: str) -> TensorDesc:
        return TensorDesc(shape_expr, dtype)

    def register(self, plugin_id: str) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            namespace, name = plugin_id.split("::")
            assert namespace not in ("", "trt", "tensorrt", "std"), "reserved"
            assert "." not in namespace + name
            assert plugin_id not in self.definitions, "registered once"
            signature = inspect.signature(function)
            kinds = {name: own.annotation for name, own in signature.parameters.items()}
            tensors = tuple(name for name, kind in kinds.items() if issubclass(kind, TensorDesc))
            attributes = {name: kind for name, kind in kinds.items() if name not in tensors}
            assert list(kinds) == [*tensors, *attributes], "tensors come first"
            assert all(kind in (int, float, bytes, bool, str) for kind in attributes.values())
            assert not {"outputs", "stream", "tactic"} & set(attributes)
            assert issubclass(signature.return_annotation, TensorDesc)
            self.definitions[plugin_id] = Definition(function, tensors, attributes)
            return function

        return decorate

    def aot_impl(self, plugin_id: str) -> Callable[[Any], Any]:
        def decorate(function: Any) -> Any:
            definition = self.definitions[plugin_id]
            signature = inspect.signature(function)
            expected = [*definition.tensors, *definition.attributes, "outputs", "tactic"]
            assert list(signature.parameters) == expected
            for name, own in signature.parameters.items():
                if name in definition.attributes:
                    assert own.annotation == definition.attributes[name]
            assert get_origin(signature.parameters["outputs"].annotation) is tuple
            assert issubclass(signature.parameters["tactic"].annotation, int)
            name, code, parameters, arguments = get_args(signature.return_annotation)
            for text in (name, code):
                assert isinstance(text, types.UnionType)
                assert set(get_args(text)) <= {str, bytes}
            assert issubclass(parameters, KernelLaunchParams)
            assert issubclass(arguments, SymExprs)
            definition.launched = function
            return function

        return decorate
