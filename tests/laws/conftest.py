"""Tiny engines of every kind, built once."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from draftline.sessions.engine_config import DraftMethod
from draftline.speculation import TreeShape
from tests.laws.likely_models import (
    write_likely_eagle1,
    write_likely_eagle3,
    write_likely_medusa,
    write_murmuring_target,
    write_perturbed,
)
from tests.laws.traffic import OpenEngine
from tests.sessions.tiny_engines import build_tiny_engine

TARGETS: dict[str, dict[str, Any]] = {
    "llama": {"loudness": 0.25},
    "qwen2": {"architecture": "qwen2", "seed": 2, "loudness": 0.3},
    "window": {"architecture": "mistral", "seed": 3, "loudness": 0.4, "extra_config": {"sliding_window": 24}},
    "gemma3": {"architecture": "gemma3", "seed": 6, "loudness": 0.3},
    "mha": {"kv_heads": 4, "seed": 4, "loudness": 0.4},
    "mixture": {"architecture": "mixtral", "seed": 6, "loudness": 0.4},
    "many_experts": {"architecture": "qwen3_moe", "head_dim": 16, "seed": 7, "loudness": 0.4},
    "sinks": {"architecture": "gpt_oss", "seed": 8, "loudness": 0.4},
    "few_tokens": {"vocab_size": 6, "seed": 5, "loudness": 1.0},
}


class Engines:
    """Checkpoints by name, and engines by target, drafts and tree; each is made when it is first asked for."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._opened: dict[Any, OpenEngine] = {}

    def target(self, name: str) -> Path:
        directory = self._directory / name / "target"
        return directory if directory.exists() else write_murmuring_target(directory, **TARGETS[name])

    def draft(self, target: str, name: str) -> tuple[DraftMethod, Path | None]:
        """``ngram``, ``itself``, ``nearly`` (draft models), ``eagle1``, ``eagle3``, ``medusa``."""
        checkpoint, directory = self.target(target), self._directory / target / name
        is_there = directory.exists()
        if name == "ngram":
            return "ngram", None
        if name == "itself":
            return "draft_model", checkpoint
        if name == "nearly":
            return "draft_model", directory if is_there else write_perturbed(directory, checkpoint, noise=0.15)
        if name == "eagle1":
            return "eagle1", directory if is_there else write_likely_eagle1(directory, checkpoint)
        if name == "eagle3":
            return "eagle3", directory if is_there else write_likely_eagle3(directory, checkpoint)
        assert name == "medusa"
        return "medusa", directory if is_there else write_likely_medusa(directory, checkpoint)

    def open(
        self,
        target: str = "llama",
        drafts: str = "",
        tree: TreeShape | None = None,
        *,
        extra: tuple[tuple[DraftMethod, Path | None], ...] = (),
        **options: Any,
    ) -> OpenEngine:
        """Open an engine; ``drafts`` are names joined by ``+``, or checkpoints in ``extra``."""
        key = (target, drafts, tree, extra, tuple(sorted(options.items())))
        if key not in self._opened:
            directory = self._directory / f"engine-{len(self._opened)}"
            directory.mkdir()
            sources = [self.draft(target, name) for name in drafts.split("+") if name] + list(extra)
            engine = build_tiny_engine(
                directory,
                self.target(target),
                drafts=sources,
                tree=tree,
                **{"max_num_tokens": 128, "max_seq_len": 320, "max_blocks": 160, **options},
            )
            self._opened[key] = OpenEngine(engine)
        return self._opened[key]

    def close(self) -> None:
        for engine in self._opened.values():
            engine.close()


@pytest.fixture(scope="session")
def engines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("laws"))
    yield made
    made.close()
