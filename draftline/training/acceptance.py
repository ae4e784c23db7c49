"""``python -m draftline.training.acceptance BUILD...``: how much of what drafts propose the target accepts.

Held-out prompts, greedy, a chain of draft tokens in every step, through the engines that serve; beside n-gram lookup.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from draftline.bench.machine import describe_machine
from draftline.bench.report import import_matplotlib
from draftline.errors import DraftlineError
from draftline.generation import Answer, LoadedEngine, open_engine
from draftline.runtime.speculation_numbers import sum_numbers
from draftline.sessions.engine_config import DraftConfig, EngineConfig, load_engine_config
from draftline.speculation import TreeShape
from draftline.training.acceptance_report import Acceptance, AcceptanceReport, write_report, write_table
from draftline.training.prompts.held_out import PACKAGES, HeldOut, load_held_out
from draftline.training.prompts.prompt import Prompt
from draftline.training.turns import Turns

NGRAM = "n-gram lookup"
Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """``num_prompts`` of each held-out set, spread over it; None = all. ``max_depth``: draft tokens of a step."""

    held_out: tuple[HeldOut, ...] = ("mt-bench", "human-eval")
    num_prompts: int | None = None
    max_tokens: int = 128
    max_depth: int = 5

    def __post_init__(self) -> None:
        for name in ("num_prompts", "max_tokens", "max_depth"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise DraftlineError(name, "is at least 1", value, "raise it")


def measure_acceptance(engines: Mapping[str, Path], settings: Settings, say: Say) -> AcceptanceReport:
    """Measure the draft of each engine directory, by the name it gets in the report, and n-gram lookup in one of them.

    The trees of an engine do not matter: every step drafts a chain, Medusa's no longer than it has heads, and the
    target verifies all of it, so that no estimate of what pays is part of the numbers. Prompts are rendered and encoded
    as a client and the server do.

    Raises: DraftlineError for engines that have another number of drafts than one, trees that are not as deep, or
    texts that differ from each other, as those of unlike targets do; MissingPackageError without the held-out prompts.
    """
    assert engines
    configs = {name: _chain(directory, load_engine_config(directory), settings) for name, directory in engines.items()}
    prompts = {name: _spread(load_held_out(name), settings.num_prompts) for name in settings.held_out}
    first = next(iter(engines))
    deepest = max(configs, key=lambda name: configs[name].tree.max_depth)  # type: ignore[union-attr]
    ngram = replace(configs[deepest], drafts=(DraftConfig("ngram"),))
    runs = [(name, engines[name], config) for name, config in configs.items() if not _is_ngram(config)]
    runs.append((NGRAM, engines[deepest], ngram))
    machine = describe_machine()
    found: list[Acceptance] = []
    texts: dict[HeldOut, list[tuple[int, ...]]] = {}
    for name, directory, config in runs:
        with open_engine(directory, config) as loaded:
            for held_out, asked in prompts.items():
                answers = _answer(loaded, asked, settings, lambda line, name=name: say(f"{name}: {line}"))  # type: ignore[misc]
                tokens = [answer.token_ids for answer in answers]
                _check_texts(name, first, tokens, texts.setdefault(held_out, tokens), asked)
                numbers = sum_numbers(answer.metrics.speculation for answer in answers)
                if not _is_ngram(config):
                    _check_drafted(name, config, answers, settings.max_depth)
                found.append(
                    Acceptance(
                        draft=name,
                        method=config.drafts[0].method,
                        held_out=held_out,
                        num_prompts=len(asked),
                        num_tokens=sum(map(len, tokens)),
                        num_steps=numbers.num_steps,
                        acceptance_length=numbers.acceptance_length,
                        acceptance_rate=numbers.acceptance_rate,
                        acceptance_rate_at=_pad(numbers.acceptance_rate_at, settings.max_depth),
                        drafted_per_step=numbers.num_drafted_tokens / max(numbers.num_steps, 1),
                    )
                )
                say(f"{name}: {held_out} acceptance_length {numbers.acceptance_length:.3f}")
    kept = asdict(settings) | {"weights_dtype": configs[first].weights_dtype, "temperature": 0}
    return AcceptanceReport(machine, kept, tuple(found))


def _chain(directory: Path, config: EngineConfig, settings: Settings) -> EngineConfig:
    if len(config.drafts) != 1 or config.tree is None:
        cure = "measure a pipeline with one `draft`; n-gram lookup is measured beside it anyway"
        raise DraftlineError(directory, "has one draft", len(config.drafts) or "none", cure)
    depth = _depth(config, settings.max_depth)
    if config.tree.max_depth < depth:
        rule, cure = f"drafts {depth} tokens deep", f"build it with tree.max_depth={depth}"
        raise DraftlineError(directory, rule, f"tree.max_depth {config.tree.max_depth}", cure)
    return replace(config, tree=TreeShape("chain", depth + 1, depth, 1))


def _depth(config: EngineConfig, max_depth: int) -> int:
    """Return how deep an engine's draft is asked to draft: Medusa's no deeper than it has heads."""
    return min(max_depth, config.drafts[0].num_heads or max_depth)


def _is_ngram(config: EngineConfig) -> bool:
    return config.drafts[0].method == "ngram"


def _spread(prompts: list[Prompt], count: int | None) -> list[Prompt]:
    """Take so many prompts at even distances: MT-bench's categories stand one behind another.

    >>> [prompt.name for prompt in _spread([Prompt(name, "") for name in "abcdefgh"], 3)]
    ['a', 'c', 'f']
    """
    if count is None or count >= len(prompts):
        return prompts
    return [prompts[place * len(prompts) // count] for place in range(count)]


def _answer(loaded: LoadedEngine, prompts: Sequence[Prompt], settings: Settings, say: Say) -> list[Answer]:
    """Answer the prompts, so many at a time that the chains of all fit into a step beside others' prefill."""
    turns = Turns(loaded.tokenizer)
    asked = [turns.asking(prompt.text) for prompt in prompts]
    half = loaded.config.max_num_tokens // 2
    num_at_once = max(min(half // (settings.max_depth + 1), loaded.config.max_batch_size), 1)
    answers: list[Answer] = []
    for begun in range(0, len(asked), num_at_once):
        answers += loaded.generate(asked[begun : begun + num_at_once], settings.max_tokens)
        say(f"{prompts[begun].name.split('/')[0]} {len(answers)}/{len(asked)} prompts")
    return answers


def _check_texts(
    name: str,
    first: str,
    tokens: Sequence[tuple[int, ...]],
    expected: Sequence[tuple[int, ...]],
    prompts: Sequence[Prompt],
) -> None:
    """Raise unless the answers are the same: greedy answers depend on the target alone."""
    for prompt, here, there in zip(prompts, tokens, expected, strict=True):
        if here != there:
            rule, got = f"answers as {first} does", f"another answer to {prompt.name}"
            raise DraftlineError(name, rule, got, "measure builds of one target with one engine.weights_dtype")


def _check_drafted(name: str, config: EngineConfig, answers: Sequence[Answer], max_depth: int) -> None:
    """Raise where something was not drafted to its end or not verified: the numbers would not be those of the draft.

    Steps are shorter only where an answer has less left to emit than a chain: at most ``max_depth`` steps of each.
    """
    depth = _depth(config, max_depth)
    for answer in answers:
        numbers = answer.metrics.speculation
        least = depth * max(numbers.num_steps - max_depth, 0)
        if numbers.num_verified_tokens < numbers.num_drafted_tokens or numbers.num_drafted_tokens < least:
            got = f"{numbers.num_verified_tokens} of {numbers.num_drafted_tokens} in {numbers.num_steps} steps"
            cure = "build it with more kv_cache.max_blocks and engine.max_num_tokens, and a draft for all positions"
            raise DraftlineError(name, f"drafts {depth} tokens in every step and verifies them", got, cure)


def _pad(rates: Sequence[float], max_depth: int) -> tuple[float, ...]:
    return (*rates, *[0.0] * (max_depth - len(rates)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, write ``acceptance.json`` and ``acceptance.png``, print a table; return 0, or 2 after an error."""
    parser = argparse.ArgumentParser(prog="bench_acceptance", description=__doc__)
    parser.add_argument("builds", type=Path, nargs="+", metavar="BUILD", help="build directories with a draft")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    parser.add_argument("--prompts", type=int, metavar="N", help="of each held-out set (default: all)")
    parser.add_argument("--tokens", type=int, default=128, metavar="N", help="of an answer at most (default: 128)")
    parser.add_argument(
        "--held-out", choices=[*PACKAGES], action="append", help="a set (default: all; may be repeated)"
    )
    options = parser.parse_args(arguments)
    try:
        import_matplotlib()
        settings = Settings(tuple(options.held_out or PACKAGES), options.prompts, options.tokens)
        names = [build.resolve().name for build in options.builds]
        if len(set(names)) < len(names):
            raise DraftlineError("BUILD", "build directories have names of their own", ", ".join(names), "rename one")
        engines = {name: build / "engine" for name, build in zip(names, options.builds, strict=True)}
        report = measure_acceptance(engines, settings, lambda line: print(line, file=sys.stderr, flush=True))
        write_report(report, options.output)
    except DraftlineError as error:
        print(f"bench_acceptance: {error}", file=sys.stderr)
        return 2
    print(write_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
