"""A token whose embedding is no number: who meets it ends with an error, the neighbours with their texts."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from draftline.runtime.request import Request
from draftline.sessions.onnxruntime_builder import CHECKPOINT_FILE
from tests.laws.conftest import Engines
from tests.laws.traffic import DYNAMIC, OpenEngine, Said, Traffic, make_request
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session, run_text
from tests.tiny_checkpoints import write_weights

EMBEDDING = "model.embed_tokens.weight"
HUGE = np.float32(3e38)  # its square overflows


def write_with_a_broken_token(directory: Path, target: Path, token_id: int) -> Path:
    shutil.copytree(target, directory)
    tensors = load_file(target / "model.safetensors")
    tensors[EMBEDDING] = tensors[EMBEDDING].copy()
    tensors[EMBEDDING][token_id] = HUGE
    write_weights(directory, tensors, "float32")
    return directory


def put_nan_for_huge(engine: Path) -> Path:
    """Do to a float32 engine what no conversion lets through; its norms would make zeros of what overflows there."""
    file = engine / CHECKPOINT_FILE
    huge, nan = (np.full(64, value, np.float32).tobytes() for value in (HUGE, np.nan))
    weights = file.read_bytes()
    assert weights.count(huge) == 1
    file.write_bytes(weights.replace(huge, nan))
    return engine


def some_requests() -> list[Request]:
    random = Random(5)
    prompts = [[random.randrange(3, 260) for _ in range(random.randint(2, 40))] for _ in range(8)]
    return [make_request(str(index), prompt_ids, 24) for index, prompt_ids in enumerate(prompts)]


def a_token_that_some_meet(requests: list[Request], said: dict[str, Said]) -> int:
    """One that is drawn before the end of an answer, stands in no prompt, and is not drawn in all answers."""
    for request in requests:
        for token_id in said[request.request_id].token_ids[3:-1]:
            is_met = [token_id in one.token_ids for one in said.values()]
            if not all(is_met) and not any(token_id in one.prompt_ids for one in requests):
                return token_id
    raise AssertionError("all answers are alike")


def run_to_errors(traffic: Traffic, requests: list[Request]) -> None:
    for request in requests:
        traffic.add(request)
    while not traffic.core.is_idle:
        for _, output in traffic.core.step():
            traffic.outputs[output.request_id].append(output)
    traffic.core.check_integrity()
    assert traffic.core.statistics().num_blocks_free == traffic.limits.max_blocks


NATIVE: dict[str, Any] = {"kernels": "native"}


@pytest.mark.parametrize(
    ("options", "drafts"),
    [
        (NATIVE, ""),
        (NATIVE | {"weights_dtype": "int8"}, ""),
        (NATIVE | {"weights_dtype": "int4", "pool_dtype": "float16"}, ""),
        (NATIVE, "eagle3"),
        (NATIVE, "medusa"),
        (NATIVE, "nearly+ngram"),
        ({"kernels": "onnxruntime"}, ""),
    ],
)
def test_who_meets_the_token_ends_there_and_nobody_else(
    engines: Engines, tmp_path: Path, options: dict[str, Any], drafts: str
) -> None:
    requests = some_requests()
    said = engines.open("llama", drafts, DYNAMIC if drafts else None, **options).serve().run_all(requests)
    token_id = a_token_that_some_meet(requests, said)
    broken = write_with_a_broken_token(tmp_path / "broken", engines.target("llama"), token_id)
    sources = [engines.draft("llama", name) for name in drafts.split("+") if name]
    tree = DYNAMIC if drafts else None
    built = build_tiny_engine(tmp_path, broken, drafts=sources, tree=tree, **options)
    engine = OpenEngine(put_nan_for_huge(built) if "weights_dtype" not in options else built)
    try:
        traffic = engine.serve(max_batch_size=4, max_num_tokens=32)
        run_to_errors(traffic, requests)
    finally:
        engine.close()
    reasons = set()
    for request in requests:
        sound, found = said[request.request_id], traffic.said(request.request_id)
        reasons.add(found.last.finish_reason)
        if token_id in sound.token_ids[:-1]:
            assert found.last.error is not None
            assert found.last.error.startswith("forward: logits are finite or -inf, one of a row finite; got ")
            assert found.token_ids == sound.token_ids[: sound.token_ids.index(token_id) + 1]
        else:
            assert (found.last.finish_reason, found.last.error) == (sound.last.finish_reason, None)
            assert found.token_ids == sound.token_ids
    assert "error" in reasons
    assert len(reasons) > 1


@pytest.mark.parametrize("target", ["llama", "mixture"])
@pytest.mark.parametrize("kernels", ["native", "onnxruntime"])
def test_logits_are_returned_as_they_are(engines: Engines, tmp_path: Path, kernels: Any, target: str) -> None:
    broken = write_with_a_broken_token(tmp_path / "broken", engines.target(target), 7)
    session = open_tiny_session(put_nan_for_huge(build_tiny_engine(tmp_path, broken, kernels=kernels)))
    logits = run_text(session, Text([3]), [5, 6, 7, 8], chunks=[2, 2])
    assert np.isfinite(logits[:2]).all()
    assert np.isnan(logits[2:]).all()
    result = session.forward(make_batch([Text([1]), Text([2])], [[7, 5], [5, 6]]))
    assert result.sampled_ids.tolist() == [-1, -1, *logits[:2].argmax(axis=1).tolist()]
    session.close()
