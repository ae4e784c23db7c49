"""A session on TensorRT or TensorRT-RTX: the target's plan on a GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.engine_config import EngineConfig
from draftline.sessions.protocol import StepBatch, StepResult
from draftline.sessions.tensorrt.cuda_device import Rows
from draftline.sessions.tensorrt.device_engine import TARGET_PLAN, open_device_engine
from draftline.sessions.tensorrt.host_sampler import HostSampler
from draftline.sessions.tensorrt.step_shapes import check_fits, fits, padded_sizes, target_feeds, target_sizes


class TensorRtSession:
    """Implements ``Session``. Keys, values, logits and features stay on the GPU; ids and a few numbers leave it.

    A step that fits in the profile ``decode`` is padded to a bucket and replayed as a CUDA graph, others run as they
    are. It opens the drafters' plans as well: all pools have as many blocks.
    """

    key_chunk = 0  # trees are no worse than chains

    def __init__(self, directory: Path, config: EngineConfig) -> None:
        """Raises: as ``open_device_engine``."""
        self.engine = open_device_engine(directory, config)
        self.num_blocks = self.engine.num_blocks
        self._plan = self.engine.plans[TARGET_PLAN]
        self._sampler = HostSampler(config.model.vocab_size, config.num_threads)
        self._logits = self._plan.runner.logits_reader()
        self._num_rows = 0  # of the last forward

    @property
    def features(self) -> Rows:
        """What EAGLE heads read of the last forward, on the device; only of engines whose config ``has_features``."""
        return self._plan.runner.output("features").rows

    def forward(self, batch: StepBatch) -> StepResult:
        engine, runner = self.engine, self._plan.runner
        engine.device.activate()
        self._num_rows = 0
        sizes = target_sizes(batch)
        profile = "decode" if fits(sizes, runner.profiles["decode"]) else "prefill"
        bounds = runner.profiles[profile]
        check_fits(sizes, bounds)
        captures = engine.captures and profile == "decode"
        padded = padded_sizes(sizes, bounds, leader="T" if captures else None)
        outputs = runner.run(profile, target_feeds(batch, padded), num_results=padded["R"], captures=captures)
        self._num_rows = sizes["T"]
        results = {name: values[: sizes["R"]].copy() for name, values in outputs.items()}
        logits = None
        if batch.wants_logits:
            logits = self._logits.read(np.arange(sizes["R"])).copy()
        read = self._logits.read if logits is None else logits.__getitem__
        sampled = self._sampler.draw(results["greedy_ids"], read, batch, batch.edits)
        head_ids = results.get("head_ids")
        return StepResult(
            sampled,
            logits,
            None if head_ids is None else head_ids.astype(np.int32),
            results.get("head_log_probs"),
        )

    def commit(self, rows: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        assert rows.max(initial=-1) < self._num_rows, "rows are those of the last forward"
        self.engine.device.activate()
        self._plan.write_rows(self._plan.runner.output("kv_rows").address, rows, slots)

    def close(self) -> None:
        """Release the engine, its drafters' plans included."""
        self.engine.close()
