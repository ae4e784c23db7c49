"""Where a drafter's rows lie on the GPU: those of a step, one behind the other, and what a head is fed with."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from draftline.errors import DraftlineError
from draftline.sessions.engine_config import DraftConfig
from draftline.sessions.tensorrt.cuda_device import CudaDevice, Rows
from draftline.sessions.tensorrt.plan_runner import PlanRunner, Resident


class DraftRows:
    """Memory for the largest step of a drafter.

    Row ``id`` of a step is row ``id`` of ``kv_rows`` and, of a head, of its outputs. Features of the target that a head
    will be fed with lie in places, until others are put there.
    """

    def __init__(self, device: CudaDevice, runner: PlanRunner, draft: DraftConfig) -> None:
        self._device, self._runner, self._draft = device, runner, draft
        self.is_head = draft.feature_size > 0
        fill, tree = ({name: sizes[2] for name, sizes in runner.profiles[key].items()} for key in ("fill", "tree"))
        num_rows = tree["M"] + max(fill["N"], tree["N"])  # the last forward's rows are kept for nobody, but committed
        self._kv = runner.output("kv_rows")
        self.kv_rows = self._allocate(num_rows, self._kv.row_bytes)
        if self.is_head:
            hidden = runner.output("hidden")
            feature_bytes, self._first_byte = (
                hidden.dtype.itemsize * count for count in (draft.feature_size, draft.feature_start)
            )
            self.num_places = fill["F"]
            self._hidden = self._allocate(num_rows, hidden.row_bytes)
            self._parents = self._allocate(tree["N"], hidden.row_bytes)
            self._kept = self._allocate(self.num_places, feature_bytes)
            self._fed = self._allocate(self.num_places, feature_bytes)

    def _allocate(self, num_rows: int, row_bytes: int) -> Rows:
        return Rows(self._device.allocate("rows of a drafter", num_rows * row_bytes), row_bytes)

    def keep_features(self, features: Rows, rows: NDArray[np.int64], places: NDArray[np.int64]) -> None:
        """Copy the drafter's columns of ``rows`` of the target's features to ``places``."""
        if places.max(initial=-1) >= self.num_places:
            rule, cure = f"features are kept in {self.num_places} places", "build the engine for larger steps"
            raise DraftlineError("forward", rule, int(places.max()), cure)
        self._device.copy_rows(self._kept, places, features, rows, first_byte=self._first_byte)

    def append(self, first_id: int, count: int) -> None:
        """Keep the rows that the last forward ran, under the ids from ``first_id`` on."""
        rows, ids = np.arange(count), np.arange(first_id, first_id + count)
        self._device.copy_rows(self.kv_rows, ids, self._runner.output("kv_rows").rows, rows)
        if self.is_head:
            self._device.copy_rows(self._hidden, ids, self._runner.output("hidden").rows, rows)

    def kept_kv(self, num_rows: int) -> dict[str, Resident]:
        """Return the input of a forward that is given the first ``num_rows`` rows of the step."""
        return {"kept_kv": Resident(self.kv_rows.address, (num_rows, *self._kv.shape))}

    def features(self, places: NDArray[np.int64], num_rows: int, *, in_one_place: bool) -> dict[str, Resident]:
        """Return a head's inputs: features from ``places``, padded to ``num_rows``. Those in order are read where they
        are, unless a graph reads them, ``in_one_place`` always."""
        source, order = self._kept, np.arange(len(places))
        if in_one_place or not np.array_equal(places, order):
            self._device.copy_rows(self._fed, order, self._kept, places)
            source = self._fed
        return self._head_inputs(source, num_rows, 0)

    def outputs(self, row_ids: NDArray[np.int64], num_rows: int) -> dict[str, Resident]:
        """Return a head's inputs: its own outputs at ``row_ids`` of this step, padded to ``num_rows``."""
        self._device.copy_rows(self._parents, np.arange(len(row_ids)), self._hidden, row_ids)
        return self._head_inputs(self._kept, 0, num_rows)

    def _head_inputs(self, features: Rows, num_features: int, num_outputs: int) -> dict[str, Resident]:
        return {
            "target_features": Resident(features.address, (num_features, self._draft.feature_size)),
            "own_features": Resident(self._parents.address, (num_outputs, self._draft.hidden_size)),
        }
