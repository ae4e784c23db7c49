"""Steady decoding on the CPU: this engine, others, and the floor that memory sets, in interleaved rounds."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftline.bench.cpu_bandwidth import ReadBandwidth
from draftline.bench.cpu_engines import Precision
from draftline.bench.cpu_systems import Prompts, TokenSystem
from draftline.bench.rounds import SETTLE_SECONDS, Measurement, Ratio, compute_ratio
from draftline.bench.timeline import decode_tokens_per_second

DRAFTLINE, OPENVINO, TRANSFORMERS = "draftline", "openvino-genai", "transformers float32"
FLOOR_GOALS: dict[Precision, float] = {"float32": 0.8, "int8": 0.6}  # speed over the floor's, at batch 1
OPENVINO_GOAL, OPENVINO_BATCH_SIZES = 1.1, (1, 8, 16)
TRANSFORMERS_GOAL = 2.0
BANDWIDTH = "read bandwidth"

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """``batch_size`` sequences decode ``num_tokens`` tokens each behind ``context`` tokens."""

    batch_size: int
    context: int
    num_tokens: int

    @property
    def name(self) -> str:
        return f"decode, batch {self.batch_size}, context {self.context}"

    @property
    def num_context_tokens(self) -> int:
        return self.batch_size * self.context


@dataclass(frozen=True)
class Floor:
    """Bytes that every step reads of weights, and of every live token's keys and values."""

    precision: Precision
    weight_bytes: int
    kv_bytes: int

    @property
    def name(self) -> str:
        return f"floor {self.precision}"

    def tokens_per_second(self, case: Case, bytes_per_second: float) -> float:
        """Return the speed at which memory alone lets a batch decode.

        >>> Floor("float32", 1000, 10).tokens_per_second(Case(2, 20, 1), 7000.0)
        10.0
        """
        live_tokens = case.batch_size * (case.context + (case.num_tokens - 1) / 2)
        return case.batch_size * bytes_per_second / (self.weight_bytes + live_tokens * self.kv_bytes)


def write_prompts(num_prompts: int, num_tokens: int, vocab_size: int) -> list[list[int]]:
    """Write different prompts of random tokens; the same ones every time."""
    random = np.random.default_rng(0)
    ids: list[list[int]] = random.integers(vocab_size, size=(num_prompts, num_tokens)).tolist()
    return ids


def measure_decoding(
    systems: Sequence[TokenSystem],
    floors: Sequence[Floor],
    cases: Sequence[Case],
    prompts: Prompts,
    num_rounds: int,
    say: Say,
) -> list[Measurement]:
    """Measure every system in every case that is not cut for it, once a round.

    The bandwidth is measured right before and right after this engine's turns, and the floor of a precision is of the
    mean of the two: on some machines it changes within seconds. The prompts of a case are the beginnings of the first
    ``prompts``; they are prefilled before the first round.
    """
    bandwidth = ReadBandwidth()
    for system in systems:
        mine = [case for case in cases if case.num_context_tokens <= system.max_context_tokens]
        started = time.perf_counter()
        system.prefill(_longest_prompts(mine, prompts))
        say(f"prefill: {system.name} took {time.perf_counter() - started:.0f} s")
    floor_of = {f"{DRAFTLINE} {floor.precision}": floor for floor in floors}
    values: dict[tuple[str, str], list[float]] = {}
    for number in range(num_rounds):
        for case in cases:
            turn = number % len(systems)
            for system in [*systems[turn:], *systems[:turn]]:
                if case.num_context_tokens > system.max_context_tokens:
                    continue
                asked = [prompt[: case.context] for prompt in prompts[: case.batch_size]]
                time.sleep(SETTLE_SECONDS)
                floor = floor_of.get(system.name)
                before = bandwidth.measure() if floor else 0.0
                timelines, _ = system.answer(asked, case.num_tokens)
                speed = decode_tokens_per_second(timelines)
                values.setdefault((system.name, case.name), []).append(speed)
                line = f"round {number + 1}/{num_rounds} {case.name}: {system.name} {speed:.1f} tokens/s"
                if floor:
                    time.sleep(SETTLE_SECONDS)
                    rate = (before + bandwidth.measure()) / 2
                    values.setdefault((floor.name, case.name), []).append(floor.tokens_per_second(case, rate))
                    values.setdefault((f"{BANDWIDTH}, {floor.precision}", case.name), []).append(rate / 1e9)
                    line += f", at {rate / 1e9:.1f} GB/s"
                say(line)
    return [
        Measurement(name, case, "GB/s" if name.startswith(BANDWIDTH) else "tokens/s", tuple(numbers))
        for (name, case), numbers in values.items()
    ]


def compare_decoding(measurements: Sequence[Measurement], cases: Sequence[Case]) -> list[Ratio]:
    """Divide this engine's speeds by the floor's and by those of the others, where both were measured."""
    have = {(one.system, one.workload) for one in measurements}
    ratios = []
    for case in cases:
        for precision, floor_goal in FLOOR_GOALS.items():
            mine = f"{DRAFTLINE} {precision}"
            goals = {
                f"floor {precision}": floor_goal if case.batch_size == 1 else None,
                f"{OPENVINO} {precision}": OPENVINO_GOAL if case.batch_size in OPENVINO_BATCH_SIZES else None,
                TRANSFORMERS: TRANSFORMERS_GOAL,
            }
            for reference, goal in goals.items():
                if {(mine, case.name), (reference, case.name)} <= have:
                    ratios.append(compute_ratio(measurements, case.name, mine, reference, goal))
    return ratios


def compare_answers(
    systems: Sequence[TokenSystem], prompts: Prompts, num_tokens: int, reference: str
) -> dict[str, float]:
    """Return, by system, the share of the tokens that are the reference's up to the first that is not."""
    answers = {system.name: [system.answer([prompt], num_tokens)[1][0] for prompt in prompts] for system in systems}
    expected = answers.pop(reference)
    return {name: sum(map(_num_equal, given, expected)) / sum(map(len, expected)) for name, given in answers.items()}


def _num_equal(given: Sequence[int], expected: Sequence[int]) -> int:
    pairs = zip(given, expected, strict=True)
    return next((place for place, (one, other) in enumerate(pairs) if one != other), len(expected))


def _longest_prompts(cases: Sequence[Case], prompts: Prompts) -> list[Sequence[int]]:
    """Of every prompt, as much as the longest case reads that has it."""
    lengths = [
        max((case.context for case in cases if case.batch_size > place), default=0) for place in range(len(prompts))
    ]
    return [prompt[:length] for prompt, length in zip(prompts, lengths, strict=True) if length]
