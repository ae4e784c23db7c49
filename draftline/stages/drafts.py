"""What a pipeline says about drafts, in the words of the floors below."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from draftline.choices import NAMED_CHOICES
from draftline.config import Pipeline
from draftline.speculation import Acceptance, TreeShape

if TYPE_CHECKING:
    from draftline.sessions.draft_builder import DraftSource


def draft_checkpoint(build_directory: Path, index: int) -> Path:
    """Return where the convert stage leaves the draft ``index``; one without weights leaves nothing."""
    return build_directory / "checkpoint" / draft_folder(index)


def draft_folder(index: int) -> str:
    """Return the folder of the draft ``index`` inside the target's converted checkpoint."""
    return f"draft-{index}"


def draft_sources(pipeline: Pipeline, build_directory: Path) -> list[DraftSource]:
    """Return the drafts as builders of engines take them."""
    from draftline.sessions.draft_builder import DraftSource

    return [
        DraftSource(
            draft.method,
            draft_checkpoint(build_directory, index) if draft.checkpoint else None,
            draft.weights_dtype,
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
    choices = NAMED_CHOICES[tree.choices] if isinstance(tree.choices, str) else tree.choices or ()
    return TreeShape(tree.kind, tree.max_nodes, tree.max_depth, tree.top_k, choices)


def acceptance(pipeline: Pipeline) -> Acceptance:
    """Return the rule of acceptance; the exact one without a draft."""
    block = pipeline.acceptance
    if block is None or block.epsilon is None or block.alpha is None:
        return Acceptance()
    return Acceptance(block.rule, block.epsilon, block.alpha)
