"""Execution contexts of a plan, which all work in one piece of memory."""

from __future__ import annotations

from typing import Any

from draftline.errors import ArtifactError
from draftline.sessions.tensorrt.vendor import Vendor


class ContextMaker:
    """Makes contexts of ``engine`` that work in the ``num_bytes`` at ``scratch``.

    A captured graph belongs to the shapes of a context, which nobody may change while the graph lives: each has a
    context of its own, as NVIDIA's guide asks ("CUDA Graphs", TensorRT developer guide).

    TensorRT-RTX compiles kernels when a context first runs a shape. Where one shape is captured they are made for it
    at once, so that the graph holds them; where shapes change with every step there are none, for compiling in the
    background would change a row's bits from one step to another.
    """

    def __init__(self, vendor: Vendor, engine: Any, scratch: int, num_bytes: int) -> None:
        self._vendor, self._engine = vendor, engine
        self._scratch, self._num_bytes = scratch, num_bytes
        self._cache: Any = None  # of compiled kernels, for all contexts

    def make(self, *, is_captured: bool) -> Any:
        """Return a new context. Raises: ArtifactError where the vendor makes none."""
        module = self._vendor.module
        strategy = module.ExecutionContextAllocationStrategy.USER_MANAGED
        if self._vendor.facts.compiles_at_run_time:
            config = self._engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(strategy)
            kinds = module.DynamicShapesKernelSpecializationStrategy
            config.dynamic_shapes_kernel_specialization_strategy = kinds.EAGER if is_captured else kinds.NONE
            if self._cache is None:
                self._cache = config.create_runtime_cache()
            config.set_runtime_cache(self._cache)
            context = self._engine.create_execution_context(config)
        else:
            context = self._engine.create_execution_context(strategy)
        if context is None:
            rule = f"{self._vendor.title} makes an execution context"
            raise ArtifactError("engine", rule, "none", "see what else takes the GPU's memory")
        context.set_device_memory(self._scratch, self._num_bytes)
        return context
