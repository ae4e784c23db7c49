"""Build the plan of a parsed network: profiles, the GPUs it is for, progress, timing cache."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx

from draftline.errors import BuildError
from draftline.sessions.tensorrt.cuda_driver import load_driver
from draftline.sessions.tensorrt.network import ParsedNetwork
from draftline.sessions.tensorrt.profiles import Profile
from draftline.sessions.tensorrt.vendor import Vendor

Advance = Callable[[int, int], None]
PROGRESS_STEPS = 1000


def choose_architectures(vendor: Vendor, wanted: Sequence[int], compiled_for: Sequence[int]) -> tuple[int, ...]:
    """Return the architectures to build for: those ``wanted``, else all that vendor and kernels have in common.

    TensorRT measures kernels on the GPU that it builds for: there it is that of this machine.

    Raises: BuildError for one that the vendor does not build for (Hopper on TensorRT-RTX), for a GPU without kernels,
    and where ``tensorrt`` finds no GPU.
    """
    where = "engine.compute_capabilities"
    if not vendor.facts.needs_gpu:
        known = vendor.facts.compute_capabilities
        for architecture in wanted:
            if architecture not in known:
                rule = f"{vendor.facts.title} builds for {', '.join(map(str, known))}"
                cure = "set engine.backend to tensorrt, and build on a machine with this GPU"
                raise BuildError(where, rule, architecture, cure)
        return tuple(wanted) or tuple(number for number in known if number in compiled_for)
    driver = load_driver()
    if driver is None:
        rule = f"{vendor.facts.title} measures kernels on the GPU that it builds for"
        cure = "build on a machine with a GPU, or set engine.backend to tensorrt_rtx"
        raise BuildError(f"engine.backend: {vendor.backend}", rule, "no GPU", cure)
    architecture = driver.architecture(0)
    if architecture not in compiled_for:
        rule = f"an engine with these weights runs on {', '.join(map(str, compiled_for))}"
        raise BuildError("this machine's GPU", rule, architecture, "build where there is one of these")
    return (architecture,)


def build_plan(
    network: ParsedNetwork,
    graph: onnx.ModelProto,
    profiles: Mapping[str, Profile],
    architectures: Sequence[int],
    progress: Advance,
    timing_cache: Path | None = None,
) -> bytes:
    """Build the plan of ``network``, which was parsed from ``graph``: for ``profiles``, in this order.

    ``timing_cache``: a file of what the vendor measured, read and written where the vendor measures.

    Raises: BuildError where the vendor gives no plan; why is in its log.
    """
    module, builder = network.vendor.module, network.builder
    config = builder.create_builder_config()
    config.clear_flag(module.BuilderFlag.TF32)  # float32 means float32
    for profile in profiles.values():
        config.add_optimization_profile(_optimization_profile(network, graph, profile))
    if not network.vendor.facts.needs_gpu:
        config.num_compute_capabilities = len(architectures)
        for index, architecture in enumerate(architectures):
            capability = getattr(module.ComputeCapability, f"SM{architecture}")
            if not config.set_compute_capability(capability, index):
                rule = f"{network.vendor.title} takes this compute capability"
                raise BuildError("engine.compute_capabilities", rule, architecture, "leave it out")
    config.progress_monitor = make_progress_monitor(network.vendor, progress)
    cache = _load_timing_cache(network, config, timing_cache)
    plan = builder.build_serialized_network(network.definition, config)
    if plan is None:
        errors = "; ".join(network.errors) or "no reason"
        raise BuildError(graph.graph.name, f"{network.vendor.title} builds the network", errors, "see build.log")
    progress(PROGRESS_STEPS, PROGRESS_STEPS)
    if cache is not None and timing_cache is not None:
        timing_cache.write_bytes(bytes(cache.serialize()))
    return bytes(plan)


def _optimization_profile(network: ParsedNetwork, graph: onnx.ModelProto, profile: Profile) -> Any:
    result = network.builder.create_optimization_profile()
    for value in graph.graph.input:
        sizes = [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        if any(isinstance(size, str) for size in sizes):
            bounds = (
                tuple(profile[size][bound] if isinstance(size, str) else size for size in sizes) for bound in range(3)
            )
            result.set_shape(value.name, *bounds)
    return result


def _load_timing_cache(network: ParsedNetwork, config: Any, path: Path | None) -> Any:
    """Return the vendor's timing cache; None of a vendor that measures nothing."""
    if path is None or not network.vendor.facts.needs_gpu:
        return None
    cache = config.create_timing_cache(path.read_bytes() if path.is_file() else b"")
    config.set_timing_cache(cache, ignore_mismatch=False)
    return cache


def make_progress_monitor(vendor: Vendor, progress: Advance) -> Any:
    """Return a monitor of the vendor's that reports to ``progress``: the share of the outermost phases' steps.

    Phases nest; the share of an inner one counts within the step of the phase around it.
    """
    module = vendor.module

    class Monitor:
        def __init__(self) -> None:
            module.IProgressMonitor.__init__(self)
            self.phases: dict[str, _Phase] = {}
            self.done = 0.0

        def phase_start(self, name: str, parent: str | None, num_steps: int) -> None:
            around = self.phases.get(parent or "")
            low, high = (0.0, 1.0) if around is None else around.share_of_step()
            self.phases[name] = _Phase(low, high, max(1, num_steps))

        def step_complete(self, name: str, step: int) -> bool:
            phase = self.phases[name]
            phase.done = step + 1
            self.done = max(self.done, phase.share_of_step()[0])
            progress(round(PROGRESS_STEPS * self.done), PROGRESS_STEPS)
            return True

        def phase_finish(self, name: str) -> None:
            self.phases.pop(name, None)

    return type("ProgressMonitor", (Monitor, module.IProgressMonitor), {})()


class _Phase:
    """A phase between ``low`` and ``high`` of the whole, of ``num_steps`` steps; ``done`` of them are."""

    def __init__(self, low: float, high: float, num_steps: int) -> None:
        self.low, self.high, self.num_steps, self.done = low, high, num_steps, 0

    def share_of_step(self) -> tuple[float, float]:
        """Return where the next step begins and ends."""
        width = (self.high - self.low) / self.num_steps
        first = self.low + width * min(self.done, self.num_steps)
        return first, min(first + width, self.high)
