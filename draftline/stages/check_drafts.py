"""What converted drafts must be beside their target."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.head_file import load_head_config
from draftline.checkpoints.drafts.vocabulary import check_same_vocabulary
from draftline.checkpoints.known_positions import known_positions
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.config import Draft, Pipeline
from draftline.errors import CheckpointError
from draftline.stages.drafts import draft_folder


@dataclass(frozen=True)
class DraftReport:
    """``max_position_embeddings``: where the draft ends, None = nowhere.

    ``drafts_to_the_end``: whether a request of ``engine.max_seq_len`` tokens is drafted for to its last one. Behind the
    draft's last position decoding goes on without it.
    """

    method: str
    max_position_embeddings: int | None
    drafts_to_the_end: bool


def check_drafts(pipeline: Pipeline, checkpoint: Path, target: CheckpointConfig) -> tuple[DraftReport, ...]:
    """Check the drafts that the folder ``checkpoint`` of the converted target holds.

    Raises: CheckpointError where a draft model has another vocabulary, or a tree is deeper than any draft.
    """
    reports, depths = [], []
    for index, draft in enumerate(pipeline.draft):
        positions, depth = _limits(draft, checkpoint, checkpoint / draft_folder(index), target)
        depths.append(depth)
        to_the_end = positions is None or positions >= pipeline.engine.max_seq_len
        reports.append(DraftReport(draft.method, positions, to_the_end))
    if pipeline.tree is not None:
        check_depth(depths, pipeline.tree.max_depth)
    return tuple(reports)


def check_depth(depths: list[int | None], max_depth: int) -> None:
    """Raise CheckpointError where no draft reaches ``max_depth``; the depth None has no limit."""
    limits = [depth for depth in depths if depth is not None]
    if len(limits) == len(depths) and max_depth > max(limits):
        rule = f"the heads draft {max(limits)} tokens, one each"
        cure = f"set tree.max_depth to {max(limits)}, or choices of that depth"
        raise CheckpointError("tree.max_depth", rule, max_depth, cure)


def _limits(draft: Draft, checkpoint: Path, directory: Path, target: CheckpointConfig) -> tuple[int | None, int | None]:
    """Return the positions that a draft knows, and how deep it drafts; None = without limit."""
    if draft.method == "ngram":
        return None, None
    if draft.method == "draft_model":
        model = load_checkpoint_config(directory)
        check_same_vocabulary(checkpoint, directory, target, model)
        return known_positions(model.max_position_embeddings, model.rotary_scaling), None
    head: HeadConfig = load_head_config(directory)
    if head.method == "medusa":
        return None, head.num_heads
    if head.max_position_embeddings == 0:
        return None, None
    return known_positions(head.max_position_embeddings, head.rotary_scaling), None
