"""Whether a draft does what its checkpoint says: its acceptance at depth 1, and that of what else it could mean.

A wrong layer, a wrong rotary base or another vocabulary raises no error anywhere and changes no text: the server is
healthy and slow. So it is measured, and what measures better than what ``config.json`` says is an error.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.captured_layers import default_layers
from draftline.checkpoints.drafts.head_file import load_head_config
from draftline.checkpoints.tokenizer import Tokenizer
from draftline.config import Draft
from draftline.errors import CheckpointError
from draftline.sessions.batch_split import count_parameters
from draftline.sessions.draft_builder import DraftSource
from draftline.stages.acceptance import Proposals, is_better
from draftline.stages.draft_probe import probe_draft
from draftline.stages.gpu import is_on_gpu
from draftline.stages.perplexity_text import PASSAGES
from draftline.stages.stage import StageCall

MAX_PARAMETERS = 1_000_000_000  # of a target that is measured unasked
MAX_PASSAGE_TOKENS = 256
UNSTATED_BASE = 10000.0  # what heads were trained with whose configuration names no base, and some that name one
_OFF = "set check.acceptance to never if you know better"


@dataclass(frozen=True)
class Measured:
    """``acceptance_rate``: the share, 0..1, of positions where the draft's best token is the target's choice.
    ``confidence``: the probability that the draft gives to that choice, on average."""

    acceptance_rate: float
    confidence: float

    @classmethod
    def of(cls, found: Proposals) -> Measured:
        """Round to what two machines agree about."""
        return cls(round(found.acceptance_rate, 4), round(float(found.confidence.mean()), 4))


@dataclass(frozen=True)
class AcceptanceReport:
    """Of ``num_positions`` of a fixed text. ``chance``: the rate that the same proposals would have at random places.

    ``captured_layers``: those it was measured with, chosen where the checkpoint leaves them open; ``others``: what else
    was measured, by name. ``is_judged``: False where the target itself guesses no token of the text, as random weights.
    """

    num_positions: int
    measured: Measured
    chance: float
    captured_layers: tuple[int, ...]
    others: dict[str, Measured]
    is_judged: bool


def check_acceptance(
    call: StageCall,
    index: int,
    checkpoint: Path,
    draft_folder: Path,
    target: CheckpointConfig,
    tokenizer: Tokenizer,
    num_positions: int | None,
) -> AcceptanceReport | None:
    """Measure draft ``index`` of the pipeline, converted into ``draft_folder``; None where that is not asked for.

    ``num_positions``: those that the draft knows, None = without limit.

    Raises: CheckpointError where acceptance is near chance, or is better with other layers or another rotary base.
    """
    draft = call.pipeline.draft[index]
    head = None if draft.method == "draft_model" else load_head_config(draft_folder)
    if not _is_wanted(call, draft, head, count_parameters(target)):
        return None
    limit = min(call.pipeline.engine.max_seq_len, MAX_PASSAGE_TOKENS, num_positions or MAX_PASSAGE_TOKENS)
    passages = [ids for text in PASSAGES if len(ids := tokenizer.encode(text)[:limit]) > 2]
    source = DraftSource(draft.method, draft_folder, "float32")
    engine = call.pipeline.engine

    def measure(variant: HeadConfig | None) -> tuple[Proposals, Proposals]:
        return probe_draft(
            checkpoint,
            source,
            passages,
            call.destination,
            head=variant,
            kernels="auto" if is_on_gpu(call.pipeline) else engine.kernels,
            num_threads=engine.num_threads,
        )

    ours, of_text = measure(head)
    others: dict[str, Measured] = {}
    if of_text.is_near_chance():
        call.say(f"{draft.method}: acceptance says nothing, the target itself guesses no token of the text")
        return _report(ours, head, others, is_judged=False)
    if head is not None and head.captured_layer_readings:
        measured = {reading: measure(_with_layers(head, reading))[0] for reading in head.captured_layer_readings[1:]}
        others = {f"layers {list(layers)}": Measured.of(found) for layers, found in measured.items()}
        head, ours = _choose(call, head, {head.captured_layers: ours, **measured})
    where = draft.checkpoint or draft.method
    call.say(f"{draft.method}: {ours.acceptance_rate:.1%} of {len(ours.choices)} tokens accepted at depth 1")
    if ours.is_near_chance():
        rule = f"a draft is accepted more often than by chance ({ours.chance:.1%} at depth 1)"
        cure = f"choose the draft that was trained for this target, or {_OFF}"
        raise CheckpointError(where, rule, f"{ours.acceptance_rate:.1%} of {len(ours.choices)} tokens", cure)
    for what, variant in _challengers(head, target) if head else ():
        found, _ = measure(variant)
        others[what] = Measured.of(found)
        if is_better(found, ours):
            rule = f"no other {what.split()[0]} is accepted more often than what config.json says"
            got = f"{ours} at depth 1, and {found} with {what}"
            raise CheckpointError(where, rule, got, f"write {what} into it, or {_OFF}")
    return _report(ours, head, others, is_judged=True)


def _is_wanted(call: StageCall, draft: Draft, head: HeadConfig | None, num_parameters: int) -> bool:
    wanted = call.pipeline.check.acceptance
    if wanted == "always" or (wanted == "auto" and num_parameters <= MAX_PARAMETERS):
        return True
    if wanted == "auto":
        size = f"{num_parameters / 1e9:.1f} billion parameters"
        call.say(f"acceptance is not measured unasked of {size}; check.acceptance=always asks for it")
    if head is not None and head.captured_layer_readings:
        others = " or ".join(str(list(layers)) for layers in head.captured_layer_readings[1:])
        call.say(f"{draft.method}: layers {list(head.captured_layers)} are not measured; they may mean {others}")
    return False


def _choose(
    call: StageCall, head: HeadConfig, measured: dict[tuple[int, ...], Proposals]
) -> tuple[HeadConfig, Proposals]:
    """Take the first reading, unless others are better; then the best of them."""
    first = measured[head.captured_layers]
    better = [layers for layers, found in measured.items() if is_better(found, first)]
    layers = max(better, key=lambda reading: measured[reading].confidence.mean(), default=head.captured_layers)
    rates = ", ".join(f"{list(reading)} {found}" for reading, found in measured.items())
    why = "better than what stands first" if better else "none is better"
    call.say(f"captured layers {list(layers)}, {why}; accepted at depth 1: {rates}")
    return _with_layers(head, layers), measured[layers]


def _with_layers(head: HeadConfig, layers: tuple[int, ...]) -> HeadConfig:
    return replace(head, captured_layers=layers)


def _challengers(head: HeadConfig, target: CheckpointConfig) -> Iterator[tuple[str, HeadConfig]]:
    """Yield what the head may have been trained with against what its configuration says, by the words to write."""
    default = default_layers(target.num_hidden_layers)
    known: Sequence[tuple[int, ...]] = head.captured_layer_readings or (head.captured_layers,)
    if default is not None and len(head.captured_layers) == len(default) and default not in known:
        yield f"layers {list(default)}", _with_layers(head, default)
    if head.method == "medusa":
        return
    tried = [(head.rotary_base, head.rotary_scaling)]
    for base, scaling in ((target.rotary_base, target.rotary_scaling), (UNSTATED_BASE, None)):
        if (base, scaling) not in tried:
            tried.append((base, scaling))
            scaled = "" if scaling is None else f" with rope_scaling {scaling}"
            yield f"rope_theta {base:g}{scaled}", replace(head, rotary_base=base, rotary_scaling=scaling)


def _report(
    ours: Proposals, head: HeadConfig | None, others: dict[str, Measured], *, is_judged: bool
) -> AcceptanceReport:
    return AcceptanceReport(
        num_positions=len(ours.choices),
        measured=Measured.of(ours),
        chance=round(ours.chance, 4),
        captured_layers=head.captured_layers if head else (),
        others=others,
        is_judged=is_judged,
    )
