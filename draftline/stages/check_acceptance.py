"""Whether a draft does what its checkpoint says: its acceptance at depth 1, and that of what else it could mean.

A wrong layer, a wrong rotary base or another vocabulary raises no error anywhere and changes no text: the server is
healthy and slow. So it is measured, and what measures better than what ``config.json`` says is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from draftline.checkpoints.config import CheckpointConfig
from draftline.checkpoints.draft_config import HeadConfig
from draftline.checkpoints.drafts.head_file import load_head_config
from draftline.checkpoints.tokenizer import Tokenizer
from draftline.config import Draft
from draftline.errors import CheckpointError
from draftline.sessions.batch_split import count_parameters
from draftline.sessions.draft_builder import DraftSource
from draftline.stages.acceptance import SIGMAS, Proposals, gain_in_errors
from draftline.stages.challengers import Challenger, challengers, with_layers
from draftline.stages.draft_probe import DraftProbe, open_probe
from draftline.stages.gpu import is_on_gpu
from draftline.stages.probe_prompts import PROMPTS
from draftline.stages.stage import StageCall

MAX_PARAMETERS = 1_000_000_000  # of a target that is measured unasked
ANSWER_TOKENS = (80, 160, 240)  # of each answer: it goes on while a challenger may be better
MAX_PROMPT_TOKENS = 128
IN_DOUBT = 1.0  # standard errors
_OFF = "set check.acceptance to never if you know better"


@dataclass(frozen=True)
class Measured:
    """``acceptance_rate``: the share, 0..1, of positions where the draft's best token is the target's choice.
    ``overlap``: of its distribution with the target's, on average. ``gain_in_errors``: by how many standard errors that
    is more than what the draft's checkpoint says has, 0 for that itself."""

    acceptance_rate: float
    overlap: float
    gain_in_errors: float = 0.0

    @classmethod
    def of(cls, found: Proposals, gain: float = 0.0) -> Measured:
        """Round to what two machines agree about."""
        return cls(round(found.acceptance_rate, 4), round(float(found.overlap.mean()), 4), round(gain, 1))


@dataclass(frozen=True)
class AcceptanceReport:
    """Of ``num_positions`` of answers to fixed prompts. ``chance``: the rate of the same proposals at random places.

    ``captured_layers``: those it was measured with, chosen where the checkpoint leaves them open; ``others``: what else
    was measured, by name. ``is_judged``: False where the target itself guesses no token of text, as random weights.
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

    Raises: CheckpointError where acceptance is near chance, or is better with other layers, another rotary base, or
    ``d2t`` read in the other convention.
    """
    draft = call.pipeline.draft[index]
    head = None if draft.method == "draft_model" else load_head_config(draft_folder)
    if not _is_wanted(call, draft, head, count_parameters(target)):
        return None
    limit = min(call.pipeline.engine.max_seq_len, num_positions or MAX_PROMPT_TOKENS + max(ANSWER_TOKENS))
    readings = [] if head is None else [with_layers(head, layers) for layers in head.captured_layer_readings] or [head]
    others = [] if head is None else challengers(readings, draft_folder, target)
    with open_probe(
        checkpoint,
        DraftSource(draft.method, draft_folder, "float32"),
        _prompts(tokenizer, max(2, min(MAX_PROMPT_TOKENS, limit // 2))),
        target.eos_token_ids,
        min(limit, MAX_PROMPT_TOKENS + max(ANSWER_TOKENS)),
        call.destination,
        readings=[*readings, *(other.head for other in others)],
        kernels="auto" if is_on_gpu(call.pipeline) else call.pipeline.engine.kernels,
        num_threads=call.pipeline.engine.num_threads,
    ) as probe:
        if probe.guesses().is_near_chance():
            call.say(f"{draft.method}: acceptance says nothing, the target itself guesses no token of a text")
            return _report(probe.measure(head), head, {}, is_judged=False)
        return _judge(call, draft, probe, readings, others)


def _judge(
    call: StageCall, draft: Draft, probe: DraftProbe, readings: list[HeadConfig], others: list[Challenger]
) -> AcceptanceReport:
    where, head, compared = draft.checkpoint or draft.method, readings[0] if readings else None, {}
    if len(readings) > 1:
        named = {f"layers {list(reading.captured_layers)}": reading for reading in readings}
        # The layers that nearly every head was trained with are asked too, where the first reading is refuted.
        usual = [other for other in others if other.is_default]
        asked = [Challenger(name, reading) for name, reading in named.items()][1:] + usual
        ours, found = _compare(probe, readings[0], asked)
        compared = {name: Measured.of(*measured) for name, measured in found.items()}
        overlaps = {name: measured.overlap.mean() for name, (measured, gain) in found.items() if gain > SIGMAS}
        best = max(overlaps, key=lambda name: overlaps[name], default=next(iter(named)))
        if best not in named:
            raise _refusal(where, usual[0], ours, *found[best])
        head = named[best]
        _say_choice(call, head, ours, found, is_first=head is readings[0])
    rivals = [other for other in others if head is not None and other.stands_beside(head)]
    ours, found = _compare(probe, head, rivals)
    compared |= {name: Measured.of(*measured) for name, measured in found.items()}
    count = len(ours.choices)
    call.say(f"{draft.method}: {ours.acceptance_rate:.1%} of {count} tokens accepted at depth 1")
    for other in rivals:
        measured, gain = found[other.name]
        call.say(f"{draft.method}: {measured.acceptance_rate:.1%} with {other.name}, {gain:+.1f} standard errors")
    better = [other for other in rivals if found[other.name][1] > SIGMAS]
    if better:
        most = max(better, key=lambda other: float(found[other.name][0].overlap.mean()))
        raise _refusal(where, most, ours, *found[most.name])
    if ours.is_near_chance():
        rule = f"a draft is accepted more often than by chance ({ours.chance:.1%} at depth 1)"
        cure = f"choose the draft that was trained for this target, or {_OFF}"
        raise CheckpointError(where, rule, f"{ours.acceptance_rate:.1%} of {count} tokens", cure)
    return _report(ours, head, compared, is_judged=True)


def _refusal(where: str, better: Challenger, ours: Proposals, measured: Proposals, gain: float) -> CheckpointError:
    rule = f"no other {better.kind} is accepted more often than what the draft's checkpoint says"
    got = f"{ours} at depth 1, and {measured} with {better.name}, {gain:.1f} standard errors more"
    return CheckpointError(where, rule, got, f"{better.cure}, or {_OFF}")


def _compare(
    probe: DraftProbe, head: HeadConfig | None, others: list[Challenger]
) -> tuple[Proposals, dict[str, tuple[Proposals, float]]]:
    """Measure ``head``, and others by name, with their gains, over answers that go on while one is in doubt."""
    found: dict[str, tuple[Proposals, float]] = {}
    in_doubt = others
    for num_tokens in ANSWER_TOKENS:
        probe.go_on(num_tokens)
        ours = probe.measure(head)
        for other in in_doubt:
            measured = probe.measure(other.head, has_ids=other.has_ids)
            found[other.name] = measured, gain_in_errors(measured, ours)
        in_doubt = [other for other in in_doubt if found[other.name][1] > IN_DOUBT]
        if not in_doubt or any(gain > SIGMAS for _, gain in found.values()):
            break
    return ours, found


def _prompts(tokenizer: Tokenizer, max_tokens: int) -> list[list[int]]:
    """Return the prompts as chats, or as they are for a target without a template."""
    prompts = []
    for text in PROMPTS:
        if tokenizer.chat_template is None:
            ids = tokenizer.encode(text)
        else:
            chat = tokenizer.render_chat([{"role": "user", "content": text}])
            ids = tokenizer.encode(chat, add_special_tokens=False)
        prompts.append(ids[-max_tokens:])
    return prompts


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


def _say_choice(
    call: StageCall,
    head: HeadConfig,
    first: Proposals,
    found: Mapping[str, tuple[Proposals, float]],
    *,
    is_first: bool,
) -> None:
    rates = ", ".join(f"{name.removeprefix('layers ')} {measured}" for name, (measured, _) in found.items())
    why = "none is better" if is_first else "better than what stands first"
    call.say(f"captured layers {list(head.captured_layers)}, {why}; accepted at depth 1: first {first}, {rates}")


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
