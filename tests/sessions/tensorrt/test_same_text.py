"""Generation on a GPU's sessions, with a fake vendor and a fake GPU, equals that of the CPU engine in float32."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest

from draftline.runtime.request import Request, SamplingParameters
from draftline.sessions.tensorrt.session import TensorRtSession
from tests.laws.conftest import Engines
from tests.laws.test_sampled_text import edited_sampling
from tests.laws.traffic import AUTO, CHAIN, DYNAMIC, STATIC, OpenEngine, Said, assert_said_plainly, make_requests
from tests.sessions.tensorrt.fake_engines import FakeMachine, build_fake_engine, on_machine

LIMITS = {"max_seq_len": 320, "max_num_tokens": 128, "max_blocks": 160}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engines]:
    made = Engines(tmp_path_factory.mktemp("checkpoints"))
    yield made
    made.close()


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    with on_machine(FakeMachine()) as machine:
        yield machine


def requests_of(number: int) -> list[Request]:
    """Requests with samplings of all sorts, which share prefixes and end in many ways."""
    sampling = [*edited_sampling(0.8), SamplingParameters(), SamplingParameters(1.1, seed=11)]
    return make_requests(
        Random(number), len(sampling), max_prompt=130, max_tokens=24, sampling=lambda index: sampling[index]
    )


@pytest.fixture(scope="module")
def plain(checkpoints: Engines) -> dict[str, Said]:
    """What the CPU engine says, with the operators that the fake vendor runs as well."""
    return checkpoints.open(kernels="onnxruntime").serve().run_all(requests_of(3))


def open_engine(
    machine: FakeMachine,
    checkpoints: Engines,
    directory: Path,
    drafts: str,
    tree: Any,
    target: str = "llama",
    **options: Any,
) -> OpenEngine:
    sources = [checkpoints.draft(target, name) for name in drafts.split("+") if name]
    limits = LIMITS | options
    return OpenEngine(
        build_fake_engine(machine, directory, checkpoints.target(target), drafts=sources, tree=tree, **limits)
    )


@pytest.mark.parametrize(
    ("drafts", "tree", "options"),
    [
        ("", None, {"weights": "external", "backend": "tensorrt"}),
        ("eagle3", DYNAMIC, {}),
        ("eagle3", DYNAMIC, {"cuda_graphs": False, "weights": "external"}),
        ("nearly", STATIC, {"backend": "tensorrt"}),
        ("medusa", DYNAMIC, {}),
        ("ngram+eagle1+eagle3+nearly", AUTO, {}),
    ],
)
def test_the_same_text_as_on_a_cpu(
    machine: FakeMachine,
    checkpoints: Engines,
    plain: dict[str, Said],
    tmp_path: Path,
    drafts: str,
    tree: Any,
    options: dict[str, Any],
) -> None:
    """In traffic: chunked prompts, prefix cache, preemption, cancelling, seeds, edits of logits, trees."""
    opened = open_engine(machine, checkpoints, tmp_path, drafts, tree, **options)
    traffic = opened.serve(max_num_tokens=64, max_blocks=40)
    statistics = traffic.run_jostling(requests_of(3), Random(5), cancelling=0.1)
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    assert statistics.num_cached_tokens > 0
    assert (statistics.speculation.num_accepted_tokens > 0) == bool(drafts)
    num_replayed = machine.cuda.calls.count("cuGraphLaunch")
    assert (num_replayed > 20) == options.get("cuda_graphs", True)
    opened.close()
    assert machine.cuda.is_empty, "everything is released"


@pytest.mark.parametrize(
    ("target", "options"),
    [("gemma3", {}), ("many_experts", {"weights": "external"}), ("sinks", {})],
    ids=["kernels of two windows", "experts", "sinks"],
)
def test_the_same_text_of_other_networks(
    machine: FakeMachine, checkpoints: Engines, tmp_path: Path, target: str, options: dict[str, Any]
) -> None:
    requests = requests_of(7)
    plain = checkpoints.open(target, kernels="onnxruntime").serve().run_all(requests)
    opened = open_engine(machine, checkpoints, tmp_path, "eagle3+nearly", DYNAMIC, target=target, **options)
    traffic = opened.serve(max_num_tokens=64, max_blocks=40)
    statistics = traffic.run_jostling(requests, Random(5), cancelling=0.1)
    for name, expected in plain.items():
        assert_said_plainly(traffic.said(name), expected)
    assert statistics.speculation.num_accepted_tokens > 0
    opened.close()
    assert machine.cuda.is_empty, "everything is released"


@pytest.mark.parametrize(("drafts", "tree"), [("eagle3", DYNAMIC), ("nearly", CHAIN)])
def test_drafts_are_those_of_a_cpu(
    machine: FakeMachine, checkpoints: Engines, tmp_path: Path, drafts: str, tree: Any
) -> None:
    """As many nodes are accepted in every step: candidates, trees and the drafters' pools are the same."""
    on_cpu = checkpoints.open("llama", drafts, tree, kernels="onnxruntime")
    on_gpu = open_engine(machine, checkpoints, tmp_path, drafts, tree)
    on_gpu.session.key_chunk = on_cpu.session.key_chunk  # else it drafts over multiples of it
    numbers = []
    for opened in (on_cpu, on_gpu):
        traffic = opened.serve()
        traffic.run_jostling(requests_of(4), Random(6))
        numbers.append(traffic.core.statistics().speculation)
    assert numbers[0] == numbers[1]
    assert numbers[0].num_accepted_tokens > 20
    on_gpu.close()


def test_log_probabilities_are_those_of_a_cpu(machine: FakeMachine, checkpoints: Engines, tmp_path: Path) -> None:
    on_cpu, on_gpu = (
        checkpoints.open(kernels="onnxruntime"),
        open_engine(machine, checkpoints, tmp_path, "", None),
    )
    assert isinstance(on_gpu.session, TensorRtSession)
    said = []
    for opened in (on_cpu, on_gpu):
        requests = [
            Request(str(index), [5, 6, 7 + index], 6, lambda output: None, return_log_probs=True) for index in range(3)
        ]
        said.append(opened.serve().run_all(requests))
    for name, expected in said[0].items():
        got = said[1][name]
        assert got.token_ids == expected.token_ids
        for one, other in zip(got.outputs, expected.outputs, strict=True):
            assert one.log_probs == pytest.approx(other.log_probs, abs=1e-4)
    on_gpu.close()
