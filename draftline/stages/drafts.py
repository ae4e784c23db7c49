"""What a pipeline says about drafts, in the words of the floors below."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

from draftline.choices import NAMED_CHOICES
from draftline.config import Pipeline
from draftline.speculation import Acceptance, TreeShape

if TYPE_CHECKING:
    from draftline.sessions.draft_builder import DraftSource


CAPTURED_LAYERS_FILE = "captured_layers.json"  # of the check stage, for the build stage


def draft_checkpoint(build_directory: Path, index: int) -> Path:
    """Return where the convert stage leaves the draft ``index``; one without weights leaves nothing."""
    return build_directory / "checkpoint" / draft_folder(index)


def draft_folder(index: int) -> str:
    """Return the folder of the draft ``index`` inside the target's converted checkpoint."""
    return f"draft-{index}"


def draft_sources(pipeline: Pipeline, build_directory: Path, chosen: Path | None = None) -> list[DraftSource]:
    """Return the drafts as builders of engines take them.

    ``chosen``: the check stage's file of the captured layers it measured, None = as the converted checkpoints say.
    """
    from draftline.sessions.draft_builder import DraftSource

    layers = json.loads(chosen.read_text("utf-8")) if chosen else {}

    return [
        DraftSource(
            draft.method,
            draft_checkpoint(build_directory, index) if draft.checkpoint else None,
            draft.weights_dtype,
            tuple(layers.get(str(index), ())),
        )
        for index, draft in enumerate(pipeline.draft)
    ]


def tree_shape(pipeline: Pipeline) -> TreeShape | None:
    """Return the shape of the trees; None without a draft."""
    tree = pipeline.tree
    if tree is None:
        return None
    if tree.kind == "chain":
        return TreeShape("chain", tree.max_depth + 1, tree.max_depth, 1)
    return TreeShape(tree.kind, tree.max_nodes, tree.max_depth, tree.top_k, _choices(tree.choices))


def static_choices(pipeline: Pipeline) -> tuple[tuple[int, ...], ...]:
    """Return the paths of a static tree or a chain, for engines that are built for one tree."""
    tree = pipeline.tree
    assert tree is not None, "a pipeline with a draft has a tree"
    if tree.kind == "chain":
        return tuple((0,) * depth for depth in range(1, tree.max_depth + 1))
    return _choices(tree.choices)


def _choices(given: object) -> tuple[tuple[int, ...], ...]:
    return NAMED_CHOICES[given] if isinstance(given, str) else given or ()  # type: ignore[return-value]


def acceptance(pipeline: Pipeline) -> Acceptance:
    """Return the rule of acceptance; the exact one without a draft."""
    block = pipeline.acceptance
    if block is None or block.epsilon is None or block.alpha is None:
        return Acceptance()
    return Acceptance(block.rule, block.epsilon, block.alpha)
