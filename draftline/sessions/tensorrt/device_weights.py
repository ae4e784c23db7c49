"""Weights that are not in a plan, uploaded from the files they lie in; what several plans borrow is there once."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from draftline.errors import ArtifactError
from draftline.sessions.engine_config import PlanFacts
from draftline.sessions.tensorrt.cuda_device import CudaDevice
from draftline.sessions.tensorrt.loading import read_weight_locations

CHUNK_BYTES = 64 << 20


class DeviceWeights:
    """The files of an engine directory, on the device as far as plans asked for them."""

    def __init__(self, device: CudaDevice, directory: Path) -> None:
        self._device, self._directory = device, directory
        self._addresses: dict[tuple[str, int, int], int] = {}

    def addresses(self, plan: PlanFacts) -> dict[str, int]:
        """Return where the weights of ``plan`` are, by input; uploaded if they are not yet.

        Raises: ArtifactError for a file that is too short.
        """
        locations = read_weight_locations(self._directory, plan)
        return {name: self._address(at.file, at.offset, at.num_bytes) for name, at in locations.items()}

    def _address(self, file: str, offset: int, num_bytes: int) -> int:
        key = (file, offset, num_bytes)
        if key not in self._addresses:
            path = self._directory / file
            if path.stat().st_size < offset + num_bytes:
                rule = f"holds {num_bytes} bytes at {offset}"
                raise ArtifactError(path, rule, f"{path.stat().st_size} bytes", "build the engine again")
            address = self._device.allocate("a weight", num_bytes)
            stored = np.memmap(path, np.uint8, "r", offset, num_bytes)
            for first in range(0, num_bytes, CHUNK_BYTES):
                self._device.upload(address + first, stored[first : first + CHUNK_BYTES])
            self._addresses[key] = address
        return self._addresses[key]
