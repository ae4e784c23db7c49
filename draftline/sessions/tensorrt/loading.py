"""Load the plans of an engine directory: only what this vendor release, plugin and version built."""

from __future__ import annotations

import json
import mmap
from pathlib import Path
from typing import Any, NamedTuple

from draftline.errors import ArtifactError
from draftline.graphs.onnx_graph import TensorLocation
from draftline.sessions.engine_config import EngineConfig, PlanFacts, TensorRtFacts
from draftline.sessions.tensorrt.network import make_logger
from draftline.sessions.tensorrt.plugin import plugin_sha256, register_plugin
from draftline.sessions.tensorrt.vendor import Vendor

WEIGHTS_LIST = "weights.json"
_AGAIN = "run `draftline run` again"


def check_loadable(vendor: Vendor, directory: Path, config: EngineConfig) -> TensorRtFacts:
    """Return what ``config.json`` says of the plans in ``directory``.

    Raises: ArtifactError, by name, where another backend, another release of the vendor or another plugin built them,
    and where a plan does not hold the kernels it was built with.
    """
    where = directory / "config.json"
    if config.backend != vendor.backend or config.tensorrt is None:
        raise ArtifactError(f"{where}: backend", f"is {vendor.backend}", config.backend, _AGAIN)
    facts = config.tensorrt
    if facts.vendor_version != vendor.version:
        rule = f"{vendor.facts.title} loads the plans of its own release, {vendor.version}"
        cure = f"{_AGAIN}, or install {vendor.facts.package}=={facts.vendor_version}"
        raise ArtifactError(f"{where}: vendor_version", rule, facts.vendor_version, cure)
    if facts.plugin_sha256 != plugin_sha256():
        rule = f"the plugin TreeAttention is the one it was built with, {plugin_sha256()[:12]} here"
        raise ArtifactError(f"{where}: plugin_sha256", rule, facts.plugin_sha256[:12], _AGAIN)
    for plan in facts.plans:
        for sha256 in plan.kernels_sha256 if facts.plugin == "runtime" else ():
            if not _holds(directory / plan.file, bytes.fromhex(sha256)):
                rule = f"holds the kernels {sha256[:12]}"
                raise ArtifactError(directory / plan.file, rule, "a plan without them", _AGAIN)
    return facts


def _holds(path: Path, content: bytes) -> bool:
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        return mapped.find(content) >= 0


class LoadedPlan(NamedTuple):
    """The vendor's ``engine``, and its ``runtime``, which must live as long. ``errors``: lines it logged as errors."""

    runtime: Any
    engine: Any
    errors: list[str]


def load_plan(vendor: Vendor, directory: Path, plan: PlanFacts) -> LoadedPlan:
    """Deserialise a plan, its plugin registered.

    Raises: ArtifactError where the vendor does not load it: there is no GPU here, or not one that it was built for.
    """
    register_plugin(vendor)
    errors: list[str] = []
    logger = make_logger(vendor, lambda line: None, errors)
    runtime = vendor.module.Runtime(logger)
    path = directory / plan.file
    engine = runtime.deserialize_cuda_engine(path.read_bytes())
    if engine is None:
        rule = "loads on a GPU that it was built for"
        raise ArtifactError(path, rule, "; ".join(errors) or "no reason", "see engine.compute_capabilities")
    return LoadedPlan(runtime, engine, errors)


def read_weight_locations(directory: Path, plan: PlanFacts) -> dict[str, TensorLocation]:
    """Return where the external weights of a plan lie in the files beside it, by the input's name."""
    entries = json.loads((directory / WEIGHTS_LIST).read_text(encoding="utf-8"))[plan.file]
    return {name: TensorLocation(**(entry | {"shape": tuple(entry["shape"])})) for name, entry in entries.items()}
