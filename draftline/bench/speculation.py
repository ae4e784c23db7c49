"""``python -m draftline.bench.speculation BUILD``: does speculation pay, and what does it cost the host."""

from __future__ import annotations

import argparse
import functools
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from draftline.bench.host_overhead import measure_host_overhead
from draftline.bench.machine import describe_machine
from draftline.bench.prompts import prompts_workload, read_prompts, render_prompts
from draftline.bench.report import Report, import_matplotlib, write_report, write_table
from draftline.bench.rounds import Measurement, compute_ratio, measure_rounds
from draftline.bench.systems import InProcessSystem
from draftline.bench.workloads import Workload, decode_workload
from draftline.errors import DraftlineError
from draftline.generation import LoadedEngine, load_engine
from draftline.runtime.speculation_numbers import SpeculationNumbers, sum_numbers
from draftline.sessions.engine_config import load_engine_config
from draftline.speculation import TreeShape

PLAIN = "plain"
SPECULATING = "speculating"
NEVER_LOSES_GOAL = 0.97  # speed over plain decoding, whatever the draft: what probes may cost
HOST_BATCH_SIZE = 16
DYNAMIC, AUTO, CHAIN = TreeShape("dynamic", 32, 5, 4), TreeShape("auto", 32, 5, 4), TreeShape("chain", 6, 5, 1)
HOST_CASES = ((DYNAMIC, False), (CHAIN, False), (DYNAMIC, True), (AUTO, True), (CHAIN, True))  # shape, reads weights

HOW_TO_READ = """\
Both systems are one engine: "plain" asks it not to speculate. Decode speeds leave the prefill out: they count the
tokens of the whole batch from the moment when every answer has its first token until the first answer has its last.
Every round measures both in turn, in a turning order; a ratio divides numbers of the same round. Numbers are the median
over the rounds, with the lowest and the highest in brackets; a goal is met where the median reaches it. Where prompts
are a user's, every round asks others, and the brackets span what they are worth. Decoding is greedy, so both give the
same answers. What the scheduler has learnt stays with the engine, as in a server: the first round, not counted,
is where it learns. Acceptance counts the rounds that count, and that first one.
"host" is the time of a step that passes outside the sessions, at batch 16: scheduling, growing trees, choosing nodes,
building batches, accepting and emitting; an EAGLE head drafts 5 deep. The goal is 1 ms with trees of 32 nodes. Its
sessions are stand-ins that return at once, or that read memory first, as engines read weights, for 10 ms (target) and
0.3 ms (head): what the host touches is then cold in the processor's caches, and the same work takes longer."""


@dataclass(frozen=True)
class Settings:
    num_rounds: int = 7
    num_tokens: int = 128
    batch_sizes: tuple[int, ...] = (1, 4, 16)
    num_host_steps: int = 200


PROMPT_ROUNDS = 16  # every round asks other prompts
QUICK = Settings(num_rounds=2, num_tokens=32, batch_sizes=(1, 4), num_host_steps=30)


def run_speculation_bench(
    build: Path, settings: Settings, say: Callable[[str], None], prompts: Sequence[str] = ()
) -> Report:
    """Measure a complete build directory with a draft, on texts to go on with, or as asked by a user's ``prompts``.

    Raises: DraftlineError for a build without a draft, or with an engine that holds fewer sequences than a batch, and
    whatever loading raises.
    """
    config = load_engine_config(build / "engine")
    if not config.drafts:
        raise DraftlineError(build, "has a draft", "none", "bench a pipeline with a `draft` block")
    if config.max_batch_size < max(settings.batch_sizes):
        rule = f"engine.max_batch_size holds the largest batch, {max(settings.batch_sizes)}"
        raise DraftlineError(build, rule, config.max_batch_size, "build it with a larger engine.max_batch_size")
    machine = describe_machine()
    measurements: list[Measurement] = []
    findings: dict[str, dict[str, float]] = {}
    with load_engine(build / "engine") as loaded:
        rendered = render_prompts(loaded.tokenizer, prompts)
        for batch_size in settings.batch_sizes:
            workload = decode_workload(batch_size, settings.num_tokens)
            if rendered:
                workload = prompts_workload(rendered, batch_size, settings.num_tokens, settings.num_rounds)
            measured, numbers = _measure(loaded, workload, settings.num_rounds, say)
            measurements += measured
            findings[f"acceptance, batch {batch_size}"] = describe_acceptance(numbers)
    workloads = dict.fromkeys(one.workload for one in measurements)
    ratios = [compute_ratio(measurements, workload, SPECULATING, PLAIN, NEVER_LOSES_GOAL) for workload in workloads]
    for shape, reads_weights in HOST_CASES:
        milliseconds = measure_host_overhead(
            shape, batch_size=HOST_BATCH_SIZE, num_steps=settings.num_host_steps, reads_weights=reads_weights
        )
        name = f"{shape.kind} trees of {shape.max_nodes} nodes, {'cold' if reads_weights else 'warm'} caches"
        say(f"host, {name}: {statistics.median(milliseconds):.2f} ms")
        measurements.append(Measurement(name, f"host per step, batch {HOST_BATCH_SIZE}", "ms", tuple(milliseconds)))
    kept = asdict(settings) | {"num_prompts": len(prompts)}
    return Report(machine, kept, tuple(measurements), tuple(ratios), findings, HOW_TO_READ)


def describe_acceptance(numbers: SpeculationNumbers) -> dict[str, float]:
    """Name the numbers a reader asks for."""
    rates = {f"acceptance_rate_at[{depth}]": rate for depth, rate in enumerate(numbers.acceptance_rate_at, start=1)}
    num_steps = max(numbers.num_steps, 1)
    return {
        "acceptance_length": numbers.acceptance_length,
        "acceptance_rate": numbers.acceptance_rate,
        "drafted per step": numbers.num_drafted_tokens / num_steps,
        "verified per step": numbers.num_verified_tokens / num_steps,
        **rates,
    }


def _measure(
    loaded: LoadedEngine, workload: Workload, num_rounds: int, say: Callable[[str], None]
) -> tuple[list[Measurement], SpeculationNumbers]:
    speculating = InProcessSystem(loaded, SPECULATING)
    systems = [InProcessSystem(loaded, PLAIN, speculate=False), speculating]
    measurements = measure_rounds(systems, [workload], num_rounds, say, learns=True)
    return measurements, sum_numbers(speculating.speculation)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark; return 0, or 2 after printing an error."""
    parser = argparse.ArgumentParser(prog="bench_speculation", description=__doc__)
    parser.add_argument("build", type=Path, metavar="BUILD", help="build directory of a pipeline with a draft")
    parser.add_argument("--output", type=Path, required=True, metavar="DIR", help="where bench.json and bench.png go")
    about = "JSON lines with a `prompt` each, asked as a user asks; default: texts to go on with"
    parser.add_argument("--prompts", type=Path, metavar="FILE", help=about)
    parser.add_argument("--quick", action="store_true", help="two short rounds: does it work, roughly how fast")
    options = parser.parse_args(arguments)
    try:
        import_matplotlib()
        prompts = [] if options.prompts is None else read_prompts(options.prompts)
        settings = QUICK if options.quick else Settings(num_rounds=PROMPT_ROUNDS) if prompts else Settings()
        say = functools.partial(print, file=sys.stderr, flush=True)
        report = run_speculation_bench(options.build, settings, say, prompts)
        write_report(report, options.output)
    except DraftlineError as error:
        print(f"bench_speculation: {error}", file=sys.stderr)
        return 2
    print(write_table(report))
    return 0


if __name__ == "__main__":
    sys.exit(main())
