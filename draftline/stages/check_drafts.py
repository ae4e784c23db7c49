"""What converted drafts must be beside their target."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.head_file import load_head_config
from draftline.checkpoints.drafts.vocabulary import check_same_vocabulary
from draftline.checkpoints.known_positions import known_positions
from draftline.checkpoints.tokenizer import Tokenizer
from draftline.checkpoints.trtllm import load_checkpoint_config
from draftline.config import Draft
from draftline.errors import CheckpointError
from draftline.stages.check_acceptance import AcceptanceReport, check_acceptance
from draftline.stages.drafts import CAPTURED_LAYERS_FILE, draft_folder
from draftline.stages.stage import StageCall


@dataclass(frozen=True)
class DraftReport:
    """``max_position_embeddings``: where the draft ends, None = nowhere.

    ``drafts_to_the_end``: whether a request of ``engine.max_seq_len`` tokens is drafted for to its last one. Behind the
    draft's last position decoding goes on without it. ``acceptance``: None where it is not measured.
    """

    method: str
    max_position_embeddings: int | None
    drafts_to_the_end: bool
    acceptance: AcceptanceReport | None


def check_drafts(
    call: StageCall, checkpoint: Path, target: CheckpointConfig, tokenizer: Tokenizer
) -> tuple[DraftReport, ...]:
    """Check the drafts that the folder ``checkpoint`` of the converted target holds, and write what was chosen.

    Raises: CheckpointError where a draft model has another vocabulary, a tree is deeper than any draft, or a draft does
    not do what its checkpoint says.
    """
    pipeline = call.pipeline
    limits = [
        _limits(draft, checkpoint, checkpoint / draft_folder(index), target)
        for index, draft in enumerate(pipeline.draft)
    ]
    if pipeline.tree is not None:
        check_depth([depth for _, depth in limits], pipeline.tree.max_depth)
    reports = []
    for index, (draft, (positions, _)) in enumerate(zip(pipeline.draft, limits, strict=True)):
        to_the_end = positions is None or positions >= pipeline.engine.max_seq_len
        found = None
        if draft.method != "ngram":
            folder = checkpoint / draft_folder(index)
            found = check_acceptance(call, index, checkpoint, folder, target, tokenizer, positions)
        reports.append(DraftReport(draft.method, positions, to_the_end, found))
    _write_captured_layers(call.destination / CAPTURED_LAYERS_FILE, reports)
    return tuple(reports)


def write_no_choice(call: StageCall) -> None:
    """Write that no captured layers were chosen here."""
    _write_captured_layers(call.destination / CAPTURED_LAYERS_FILE, ())


def _write_captured_layers(path: Path, reports: Sequence[DraftReport]) -> None:
    """What the build stage reads of this one, by index of the draft: a new report alone builds no new engine."""
    layers: Mapping[int, list[int]] = {
        index: list(report.acceptance.captured_layers)
        for index, report in enumerate(reports)
        if report.acceptance and report.acceptance.captured_layers
    }
    path.write_text(json.dumps(layers) + "\n", "utf-8")


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
