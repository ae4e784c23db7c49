"""An engine directory on the GPU: all plans that its sessions run, and their pools of equally many blocks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from draftline.errors import ArtifactError, DraftlineError
from draftline.kernels.shape import DTYPE_BYTES
from draftline.sessions.engine_config import (
    METHODS_WITH_SESSIONS,
    DraftConfig,
    EngineConfig,
    PlanFacts,
    TensorRtFacts,
)
from draftline.sessions.tensorrt.commit_kernel import CommitKernel, commit_file
from draftline.sessions.tensorrt.cuda_device import ALIGNMENT, CudaDevice, aligned
from draftline.sessions.tensorrt.cuda_driver import CudaDriver, load_driver
from draftline.sessions.tensorrt.device_weights import DeviceWeights
from draftline.sessions.tensorrt.draft_rows import DraftRows
from draftline.sessions.tensorrt.loading import check_loadable
from draftline.sessions.tensorrt.plan_runner import PlanRunner, Resident
from draftline.sessions.tensorrt.vendor import Backend, Vendor, import_vendor

TARGET_PLAN = "model.plan"


class PoolShape(NamedTuple):
    """The pool of one plan: ``[num_layers, num_blocks, 2, K, S, D]``."""

    num_layers: int
    num_kv_heads: int
    block_size: int
    head_size: int
    dtype: str

    @property
    def block_shape(self) -> tuple[int, ...]:
        return (2, self.num_kv_heads, self.block_size, self.head_size)

    @property
    def block_bytes(self) -> int:
        """Of one layer."""
        return math.prod(self.block_shape) * DTYPE_BYTES[self.dtype]

    def layer_bytes(self, num_blocks: int) -> int:
        """Of one layer's blocks, which begin at a multiple of what addresses are aligned to."""
        return aligned(num_blocks * self.block_bytes)


class PlanOnDevice(NamedTuple):
    """A plan with its pool at ``pool``, the kernel that commits to it, and of a drafter where its rows lie."""

    runner: PlanRunner
    shape: PoolShape
    commit: CommitKernel
    draft_rows: DraftRows | None
    pool: int = 0
    layer_stride: int = 0  # elements

    def write_rows(self, kv_rows: int, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        """Enqueue the commit of rows ``rows[i]`` of the array at ``kv_rows`` to ``slots[i]`` of the pool."""
        if len(rows):
            self.commit.enqueue(kv_rows, rows, slots, self.pool, self.shape.num_layers, self.layer_stride)


def require_driver(where: object) -> CudaDriver:
    """Return the driver of this machine. Raises: ArtifactError where there is no GPU."""
    driver = load_driver()
    if driver is None:
        cure = "serve it where there is one, or build with engine.backend=onnxruntime"
        raise ArtifactError(where, "runs on a GPU", "none", cure)
    return driver


def check_openable(directory: Path, config: EngineConfig) -> tuple[Vendor, TensorRtFacts, CudaDriver]:
    """Return what opening an engine directory needs, before anything is loaded.

    Raises: ArtifactError where there is no GPU, or another release or plugin built the engine; MissingPackageError
    without the vendor's package.
    """
    driver = require_driver(directory)
    vendor = import_vendor(cast(Backend, config.backend))
    return vendor, check_loadable(vendor, directory, config), driver


class DeviceEngine:
    """What the sessions of one engine share. ``plans``: by file, those that ``config`` has a use for.

    ``num_blocks``: of each pool, as many as ``config.max_blocks`` where the share ``free_gpu_memory_fraction`` of the
    memory that is free after loading has room for them.
    """

    def __init__(
        self, directory: Path, config: EngineConfig, vendor: Vendor, facts: TensorRtFacts, device: CudaDevice
    ) -> None:
        """Load it on ``device``, which is closed with it, or where that fails. Raises: as ``open_device_engine``."""
        self.device, self.config, self.captures = device, config, facts.cuda_graphs
        weights = DeviceWeights(device, directory) if facts.weights == "external" else None
        with ExitStack() as opened:
            opened.callback(device.close)
            loaded = {}
            for wanted in _wanted(config, facts.plans):
                plan, file = wanted.plan, wanted.plan.file
                own = {} if weights is None else weights.addresses(plan)
                runner = PlanRunner(vendor, device, directory, plan, own, wanted.resident)
                opened.callback(runner.close)
                max_rows = max(bounds["T"][2] for bounds in plan.profiles.values())
                commit = CommitKernel(device, directory / commit_file(file), max_rows, plan.pool_scales)
                rows = None if wanted.draft is None else DraftRows(device, runner, wanted.draft)
                loaded[file] = PlanOnDevice(runner, wanted.pool, commit, rows)
            num_bytes = max(plan.runner.scratch_bytes for plan in loaded.values())
            scratch = Resident(device.allocate("scratch memory", num_bytes), (num_bytes,))
            for each in loaded.values():
                each.runner.prepare(scratch)
            self.num_blocks = count_blocks(config, [each.shape for each in loaded.values()], device.free_bytes())
            self.plans = {file: self._with_pool(each) for file, each in loaded.items()}
            self._opened = opened.pop_all()

    def _with_pool(self, plan: PlanOnDevice) -> PlanOnDevice:
        shape, layer_bytes = plan.shape, plan.shape.layer_bytes(self.num_blocks)
        pool = self.device.allocate("the pool of keys and values", shape.num_layers * layer_bytes)
        layers = [
            Resident(pool + layer * layer_bytes, (self.num_blocks, *shape.block_shape))
            for layer in range(shape.num_layers)
        ]
        plan.runner.bind_pools(layers)
        return plan._replace(pool=pool, layer_stride=layer_bytes // DTYPE_BYTES[shape.dtype])

    def close(self) -> None:
        """Wait for the stream and release everything."""
        self.device.activate()
        self.device.synchronize()
        self._opened.close()


def open_device_engine(directory: Path, config: EngineConfig) -> DeviceEngine:
    """Load an engine directory on the GPU of this machine.

    Raises: as ``check_openable``; ArtifactError where the engine does not load on this GPU; DraftlineError where the
    GPU's memory does not hold it.
    """
    vendor, facts, driver = check_openable(directory, config)
    return DeviceEngine(directory, config, vendor, facts, CudaDevice(driver))


def draft_plan_file(index: int) -> str:
    """Name the plan of drafter ``index``."""
    return f"draft-{index}.plan"


def count_blocks(config: EngineConfig, shapes: list[PoolShape], free_bytes: int) -> int:
    """Return the blocks of each pool, which have equally many.

    Raises: DraftlineError, with the numbers, where one sequence of ``max_seq_len`` tokens does not fit.
    """
    assert config.tensorrt is not None
    fraction = config.tensorrt.free_gpu_memory_fraction
    of_block = sum(shape.num_layers * shape.block_bytes for shape in shapes)
    spare = sum(shape.num_layers * ALIGNMENT for shape in shapes)  # what rounding the layers takes
    num_blocks = min(config.max_blocks, (int(free_bytes * fraction) - spare) // of_block)
    needed = -(-config.max_seq_len // config.block_size)
    if num_blocks < needed:
        where = "kv_cache.free_gpu_memory_fraction"
        rule = f"one sequence of engine.max_seq_len {config.max_seq_len} takes {needed} blocks of {of_block:,} bytes"
        got = f"{max(num_blocks, 0)} blocks in {fraction:g} of {free_bytes:,} free bytes"
        raise DraftlineError(where, rule, got, "lower engine.max_seq_len, or end what else runs on the GPU")
    return num_blocks


class _Wanted(NamedTuple):
    plan: PlanFacts
    pool: PoolShape
    resident: tuple[str, ...] = ()
    draft: DraftConfig | None = None


def _wanted(config: EngineConfig, plans: tuple[PlanFacts, ...]) -> Iterator[_Wanted]:
    """Yield the plans of the target and of the drafters of ``config``, and which of their inputs are resident."""
    by_file, model = {plan.file: plan for plan in plans}, config.model
    target, layers = by_file[TARGET_PLAN], (model.num_hidden_layers, model.num_key_value_heads)
    yield _Wanted(target, PoolShape(*layers, config.block_size, model.head_size, target.pool_dtype))
    for index, draft in enumerate(config.drafts):
        if draft.method in METHODS_WITH_SESSIONS:
            plan, layers = by_file[draft_plan_file(index)], (draft.num_layers, draft.num_key_value_heads)
            resident = ("kept_kv", "target_features", "own_features") if draft.feature_size else ("kept_kv",)
            pool = PoolShape(*layers, config.block_size, draft.head_size, plan.pool_dtype)
            yield _Wanted(plan, pool, resident, draft)
