"""An ONNX graph as the vendor's network, its TreeAttention nodes replaced by the plugin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftline.errors import BuildError
from draftline.sessions.engine_config import PluginForm
from draftline.sessions.tensorrt.plugin import NAME, register_plugin
from draftline.sessions.tensorrt.plugin_kernels import PluginKernels
from draftline.sessions.tensorrt.quick_plugin import name_quick_plugin, register_quick_plugin
from draftline.sessions.tensorrt.vendor import Vendor

Say = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class ParsedNetwork:
    """``definition`` is the vendor's INetworkDefinition; ``builder``, ``parser`` and ``logger`` live as long.

    ``errors``: lines that the vendor logged as errors.
    """

    vendor: Vendor
    builder: Any
    definition: Any
    parser: Any
    logger: Any
    errors: list[str]


def parse_network(
    vendor: Vendor,
    model: Path,
    kernels: Sequence[PluginKernels],
    log: Say,
    opened: ExitStack,
    plugin: PluginForm = "runtime",
) -> ParsedNetwork:
    """Parse the graph in ``model``, whose weights lie beside it. ``opened`` keeps the kernels, one for each window that
    its layers have, with the plugin.

    ``plugin``: which form of it; a ``quick`` one is named in the graph, which is changed in place.

    Raises: BuildError with what the parser refuses.
    """
    module = vendor.module
    if plugin == "quick":
        opened.enter_context(register_quick_plugin(vendor).building(kernels))
        name_quick_plugin(model)
    else:
        opened.enter_context(register_plugin(vendor).building(kernels))
    errors: list[str] = []
    logger = make_logger(vendor, log, errors)
    builder = module.Builder(logger)
    flags = 1 << int(module.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    definition = builder.create_network(flags)
    parser = module.OnnxParser(definition, logger)
    parser.set_flag(module.OnnxParserFlag.ENABLE_PLUGIN_OVERRIDE)
    if not parser.parse_from_file(str(model)):
        refused = [parser.get_error(index) for index in range(parser.num_errors)]
        got = "; ".join(f"node {error.node_name()}: {error.desc()}" for error in refused) or "no reason"
        raise BuildError(model.name, f"{vendor.title} parses the graph", got, "report this graph and this message")
    network = ParsedNetwork(vendor, builder, definition, parser, logger, errors)
    if not any(kind.startswith("PLUGIN") for kind, _ in layers_of(network)):
        rule = f"the parser takes the plugin for {NAME}"
        raise BuildError(model.name, rule, "a network without plugins", f"update {vendor.facts.package}")
    return network


def layers_of(network: ParsedNetwork) -> list[tuple[str, Any]]:
    """Return the layers with the names of their LayerType, in the order in which the parser added them.

    A layer comes as ``ILayer``, which hides its attributes; here it is an object of its own class (ELEMENTWISE of
    ``IElementWiseLayer``), whose ``type`` may be another one (SIGMOID of an activation).
    """
    definition, module = network.definition, network.vendor.module
    names = [name for name in dir(module) if name.startswith("I") and name.endswith("Layer")]
    classes = {name[1:-5].lower(): getattr(module, name) for name in names}
    layers = []
    for index in range(definition.num_layers):
        layer = definition.get_layer(index)
        kind = layer.type.name
        layer.__class__ = classes.get(kind.replace("_", "").lower(), module.ILayer)
        layers.append((kind, layer))
    return layers


def make_logger(vendor: Vendor, log: Say, errors: list[str]) -> Any:
    """Return a logger of the vendor's that hands every line to ``log``, and keeps errors in ``errors``."""
    module = vendor.module

    def __init__(self: Any) -> None:  # noqa: N807
        module.ILogger.__init__(self)

    def write(self: Any, severity: Any, message: str) -> None:
        name = severity.name.lower()
        log(f"[{name}] {message}")
        if "error" in name:
            errors.append(message)

    return type("Log", (module.ILogger,), {"__init__": __init__, "log": write})()
