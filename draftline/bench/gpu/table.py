"""The parts of the check, in order, and their shares of the time."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import cast

from draftline.bench.gpu.findings import PartCall


@dataclass(frozen=True)
class Part:
    """``share``: of the time, in relation to those of the other parts. ``needs``: the part that must have ended.

    Its function is ``check_NAME`` of ``module``, a module of this package.
    """

    name: str
    title: str
    module: str
    share: float
    needs: str | None = None

    def load(self) -> Callable[[PartCall], None]:
        module = importlib.import_module(f"draftline.bench.gpu.{self.module}")
        return cast(Callable[[PartCall], None], getattr(module, f"check_{self.name}"))


PARTS = (
    Part("kernels", "Kernels against the oracle", "kernels", 24),
    Part("commit", "The commit kernel against the oracle", "kernels", 4),
    Part("plugin", "The plugin in an engine against the oracle", "plugin", 8),
    Part("engines", "Engines of SmolLM2-135M, built here", "engines", 20),
    Part("logits", "Logits of the sessions against ONNX Runtime", "logits", 8, needs="engines"),
    Part("texts", "Greedy texts against the CPU engine", "texts", 14, needs="engines"),
    Part("bandwidth", "Bandwidth of decoding attention", "bandwidth", 8),
    Part("speed", "Tokens per second", "speed", 8, needs="engines"),
    Part("tuning", "Configurations of the kernels", "configurations", 6),
)
