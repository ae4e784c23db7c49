"""The decode benchmark: this engine against transformers, and the served ensemble against the engine in process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from draftline.bench.machine import describe_machine
from draftline.bench.report import Report
from draftline.bench.rounds import Measurement, Ratio, compute_ratio, measure_rounds
from draftline.bench.systems import GrpcSystem, InProcessSystem, System, TransformersSystem
from draftline.bench.workloads import Workload, decode_workload, first_token_workload
from draftline.checkpoints.tokenizer import Tokenizer
from draftline.errors import DraftlineError
from draftline.generation import load_engine
from draftline.sessions.engine_config import load_engine_config
from draftline.triton.client import Client
from draftline.triton.server import TritonServer
from draftline.triton.smoke import find_free_ports

REFERENCE = "transformers float32"
GOALS = {"float32": 2.0, "int8": 4.0}  # decode speed at batch 1, over transformers
GRPC_GOAL = 0.9  # decode speed at batch 1 over gRPC, over the engine's in process

Say = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """How much to measure; ``num_prompt_tokens`` is the length of the prompt before a first token."""

    num_rounds: int = 7
    num_tokens: int = 96
    batch_sizes: tuple[int, ...] = (1, 8, 16)
    grpc_batch_sizes: tuple[int, ...] = (1, 8)
    num_prompt_tokens: int = 512


QUICK = Settings(num_rounds=2, num_tokens=16, batch_sizes=(1, 8), grpc_batch_sizes=(1,), num_prompt_tokens=128)


def run_decode_bench(builds: Sequence[Path], settings: Settings, say: Say, log_directory: Path) -> Report:
    """Measure complete build directories of one and the same target, one per ``engine.weights_dtype``.

    First all engines and transformers in this process, then per build the real server beside its engine.

    Raises: DraftlineError for builds of one dtype, for an engine that holds fewer sequences than a batch, and whatever
    loading and serving raise.
    """
    names = _check_builds(builds, settings)
    machine = describe_machine()
    measurements = _measure_in_process(builds, settings, say)
    ratios = compute_ratios(measurements, REFERENCE, {f"draftline {name}": goal for name, goal in GOALS.items()})
    for build, name in zip(builds, names, strict=True):
        served = _measure_served(build, name, settings, say, log_directory)
        ratios += compute_ratios(served, _beside_server(name), {_over_grpc(name): GRPC_GOAL})
        measurements += served
    return Report(machine, asdict(settings), tuple(measurements), tuple(ratios))


def compute_ratios(measurements: Sequence[Measurement], reference: str, goals: Mapping[str, float]) -> list[Ratio]:
    """Divide every system's numbers by the reference's; ``goals`` by system are for decoding at batch 1."""
    return [
        compute_ratio(
            measurements,
            one.workload,
            one.system,
            reference,
            goals.get(one.system) if one.workload == decode_workload(1, 0).name else None,
        )
        for one in measurements
        if one.system != reference
    ]


def _over_grpc(name: str) -> str:
    return f"draftline {name} over gRPC"


def _beside_server(name: str) -> str:
    return f"draftline {name} beside its server"


def _check_builds(builds: Sequence[Path], settings: Settings) -> list[str]:
    configs = [load_engine_config(build / "engine") for build in builds]
    names = [config.weights_dtype for config in configs]
    if len(set(names)) < len(names):
        raise DraftlineError("bench", "every build has another engine.weights_dtype", ", ".join(names), "leave one out")
    for build, config in zip(builds, configs, strict=True):
        if config.max_batch_size < max(settings.batch_sizes):
            rule = f"engine.max_batch_size holds the largest batch, {max(settings.batch_sizes)}"
            raise DraftlineError(build, rule, config.max_batch_size, "build it with a larger engine.max_batch_size")
    return names


def _measure_in_process(builds: Sequence[Path], settings: Settings, say: Say) -> list[Measurement]:
    with ExitStack() as stack:
        engines = [stack.enter_context(load_engine(build / "engine")) for build in builds]
        tokenizer = engines[0].tokenizer
        systems: list[System] = [TransformersSystem(builds[0] / "checkpoint", tokenizer, REFERENCE)]
        systems += [InProcessSystem(engine, f"draftline {engine.config.weights_dtype}") for engine in engines]
        workloads = _list_workloads(settings.batch_sizes, settings, tokenizer)
        return measure_rounds(systems, workloads, settings.num_rounds, say)


def _measure_served(build: Path, name: str, settings: Settings, say: Say, log_directory: Path) -> list[Measurement]:
    log_file = log_directory / f"tritonserver-{name}.log"
    repository = (build / "model_repository").resolve()
    server = TritonServer(repository, host="127.0.0.1", ports=find_free_ports(), log_file=log_file)
    with load_engine(build / "engine") as engine, server, Client(f"127.0.0.1:{server.ports.grpc}") as client:
        systems: list[System] = [
            InProcessSystem(engine, _beside_server(name)),
            GrpcSystem(client, _over_grpc(name)),
        ]
        workloads = _list_workloads(settings.grpc_batch_sizes, settings, engine.tokenizer)
        return measure_rounds(systems, workloads, settings.num_rounds, say)


def _list_workloads(batch_sizes: Sequence[int], settings: Settings, tokenizer: Tokenizer) -> list[Workload]:
    workloads = [decode_workload(size, settings.num_tokens) for size in batch_sizes]
    workloads.append(first_token_workload(settings.num_prompt_tokens, lambda text: len(tokenizer.encode(text))))
    return workloads
