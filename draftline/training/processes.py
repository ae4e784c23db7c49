"""Several processes in one training: ``torchrun`` or ``accelerate launch`` start them, ``accelerate`` joins them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Literal

import torch
from accelerate import PartialState
from accelerate.utils import reduce
from torch import Tensor

NATIVE_BFLOAT16 = ("avx512_bf16", "amx_bf16")  # flags of /proc/cpuinfo


class Processes:
    """This process and its peers; alone without a launcher."""

    def __init__(self) -> None:
        self._state = PartialState(cpu=not torch.cuda.is_available())
        self.device: torch.device = self._state.device
        self.index: int = self._state.process_index
        self.count: int = self._state.num_processes

    @property
    def is_main(self) -> bool:
        return self.index == 0

    def sum_numbers(self, numbers: Sequence[float]) -> list[float]:
        """Return each number summed over the processes; all get the same."""
        if self.count == 1:
            return list(numbers)
        summed = reduce(torch.tensor(numbers, dtype=torch.float64, device=self.device), "sum")
        return [float(number) for number in summed]

    def sum_gradients(self, parameters: Iterable[Tensor]) -> None:
        """Replace every gradient by its sum over the processes; a parameter without one counts as zeros."""
        parameters = list(parameters)
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        if self.count == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        summed = reduce(torch.cat([gradient.reshape(-1) for gradient in gradients]), "sum")
        for gradient, part in zip(gradients, summed.split([gradient.numel() for gradient in gradients]), strict=True):
            gradient.copy_(part.view_as(gradient))

    def wait(self) -> None:
        """Return when every process has come here."""
        self._state.wait_for_everyone()

    def leave(self) -> None:
        """End the connection to the other processes, when all have come here; a process joined may not end before."""
        self.wait()
        self._state.destroy_process_group()


def is_main_process() -> bool:
    """Return whether this is the first process of those that a launcher started, without joining them."""
    return int(os.environ.get("RANK", "0")) == 0


def num_launched_processes() -> int:
    """Return how many processes a launcher started, without joining them."""
    return int(os.environ.get("WORLD_SIZE", "1"))


def choose_precision(wanted: Literal["auto", "float32", "bfloat16"], device: torch.device) -> torch.dtype:
    """Return what matrices are multiplied in on ``device``: for ``auto`` bfloat16 where that is native."""
    if wanted != "auto":
        return torch.bfloat16 if wanted == "bfloat16" else torch.float32
    if device.type == "cpu":
        flags = Path("/proc/cpuinfo").read_text(encoding="utf-8").split()
        is_native = any(flag in flags for flag in NATIVE_BFLOAT16)
    else:
        is_native = torch.cuda.is_bf16_supported()
    return torch.bfloat16 if is_native else torch.float32
