"""A drafter on TensorRT or TensorRT-RTX, beside the target session whose features it reads."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.protocol import DraftBatch, DraftResult
from draftline.sessions.tensorrt.device_engine import TARGET_PLAN, draft_plan_file
from draftline.sessions.tensorrt.host_sampler import HostSampler
from draftline.sessions.tensorrt.plan_runner import LOGITS, Resident
from draftline.sessions.tensorrt.session import TensorRtSession
from draftline.sessions.tensorrt.step_shapes import Sizes, check_fits, draft_feeds, draft_sizes, padded_sizes


class TensorRtDraftSession:
    """Implements ``DraftSession``: drafter ``index`` of the engine, an EAGLE head or a draft model.

    The rows of a step stay on the GPU, in the order of their ids: keys and values, which every later forward of the
    step is given whole, and a head's outputs, of which it is fed with those of the parents. The first forward runs in
    the profile ``fill``, later ones in ``tree``. Those of no more rows than a decoding target has are padded to a
    bucket and replayed as CUDA graphs.
    """

    def __init__(self, index: int, target_session: TensorRtSession) -> None:
        engine = target_session.engine
        self._target, self._device, self._captures = target_session, engine.device, engine.captures
        self._plan = engine.plans[draft_plan_file(index)]
        rows = self._plan.draft_rows
        assert rows is not None, "plans of drafters have them"
        self._rows = rows
        self._num_rows = 0  # of this step
        self._few_rows = engine.plans[TARGET_PLAN].runner.profiles["decode"]["T"][2]
        if not rows.is_head:
            (vocab_size,) = self._plan.runner.output(LOGITS).shape
            self._sampler = HostSampler(vocab_size, engine.config.num_threads)
            self._logits = self._plan.runner.logits_reader()

    def keep_features(self, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        self._device.activate()
        self._rows.keep_features(self._target.features, rows, places)

    def forward(self, batch: DraftBatch) -> DraftResult:
        self._device.activate()
        if batch.is_first:
            self._num_rows = 0
        runner, num_kept = self._plan.runner, self._num_rows
        profile = "fill" if batch.is_first else "tree"
        bounds, sizes = runner.profiles[profile], draft_sizes(batch, num_kept)
        check_fits(sizes, bounds)
        captures = self._captures and (not batch.is_first or sizes["N"] <= self._few_rows)
        padded = padded_sizes(sizes, bounds, leader="N" if captures else None)
        feeds, resident = draft_feeds(batch, padded, num_kept), self._resident(batch, padded, captures=captures)
        outputs = runner.run(profile, feeds, resident, num_results=padded["R"], captures=captures)
        self._rows.append(num_kept, sizes["N"])
        self._num_rows += sizes["N"]
        results = {name: values[: sizes["R"]].copy() for name, values in outputs.items()}
        sampled = None
        if not self._rows.is_head:
            sampled = self._sampler.draw(results["greedy_ids"], self._logits.read, batch)
        return DraftResult(results["candidate_ids"].astype(np.int32), results["candidate_log_probs"], sampled)

    def commit(self, row_ids: NDArray[np.int64], slots: NDArray[np.int64]) -> None:
        assert row_ids.max(initial=-1) < self._num_rows, "rows are those of this step"
        self._device.activate()
        self._plan.write_rows(self._rows.kv_rows.address, row_ids, slots)

    def close(self) -> None:
        """Nothing: the target's session releases the engine."""

    def _resident(self, batch: DraftBatch, sizes: Sizes, *, captures: bool) -> dict[str, Resident]:
        """Return the inputs that are on the device: kept rows, and of a head the features or outputs it is fed with."""
        kept, rows = self._rows.kept_kv(sizes["M"]), batch.feature_rows.astype(np.int64)
        if not self._rows.is_head:
            return kept
        if batch.is_first:
            return kept | self._rows.features(rows, sizes["N"], in_one_place=captures)
        return kept | self._rows.outputs(-1 - rows, sizes["N"])
