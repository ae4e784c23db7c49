"""Forwards of a GPU's session by hand: graphs, failures, threads, and rows that only the GPU sees."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from draftline.errors import DraftlineError
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from draftline.sessions.opening import open_draft_sessions
from draftline.sessions.tensorrt import plan_runner
from draftline.sessions.tensorrt.session import TensorRtSession
from draftline.speculation import TreeShape
from tests.sessions.tensorrt.fake_engines import FakeMachine, build_fake_engine, on_machine
from tests.sessions.tensorrt.fake_vendor import FakeContext
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch
from tests.tiny_checkpoints import write_tiny_checkpoint
from tests.tiny_drafts import write_tiny_eagle1

TREE = TreeShape("dynamic", max_nodes=8, max_depth=3, top_k=2)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """The engine of a fake GPU, and that of a CPU, of one checkpoint."""
    directory = tmp_path_factory.mktemp("engine")
    checkpoint = write_tiny_checkpoint(directory / "checkpoint")
    drafts: Any = [("eagle1", write_tiny_eagle1(directory / "head", checkpoint))]
    with on_machine(FakeMachine()) as machine:
        on_gpu = build_fake_engine(machine, directory, checkpoint, drafts=drafts, tree=TREE)
    return on_gpu, build_tiny_engine(directory, checkpoint, kernels="onnxruntime")


@pytest.fixture
def machine() -> Iterator[FakeMachine]:
    with on_machine(FakeMachine()) as machine:
        yield machine


@pytest.fixture
def session(machine: FakeMachine, folders: tuple[Path, Path]) -> Iterator[TensorRtSession]:
    session = TensorRtSession(folders[0], load_engine_config(folders[0]))
    yield session
    session.close()
    assert machine.cuda.is_empty


@pytest.fixture
def reference(folders: tuple[Path, Path]) -> Iterator[OnnxRuntimeSession]:
    session = OnnxRuntimeSession(folders[1], load_engine_config(folders[1]))
    yield session
    session.close()


def test_a_shape_is_run_then_captured_then_replayed(session: TensorRtSession, machine: FakeMachine) -> None:
    calls, texts = machine.cuda.calls, [Text([0]), Text([1])]
    first = session.forward(make_batch(texts, [[5, 6], [7]]))
    assert (calls.count("cuStreamBeginCapture_v2"), calls.count("cuGraphLaunch")) == (1, 0)
    again = session.forward(make_batch(texts, [[5, 6], [7]]))
    assert (calls.count("cuStreamBeginCapture_v2"), calls.count("cuGraphLaunch")) == (1, 1)
    np.testing.assert_array_equal(first.sampled_ids, again.sampled_ids)
    other = session.forward(make_batch(texts[:1], [[5, 6, 7, 8]]))  # as many rows, in one sequence
    assert calls.count("cuGraphLaunch") == 2
    assert len(other.sampled_ids) == 4
    session.forward(make_batch(texts[:1], [[5, 6, 7, 8, 9]]))  # more rows than the bucket has
    assert calls.count("cuStreamBeginCapture_v2") == 2


def test_prompts_run_without_graphs(session: TensorRtSession, machine: FakeMachine) -> None:
    session.forward(make_batch([Text([0, 1, 2])], [list(range(3, 43))]))
    assert "cuStreamBeginCapture_v2" not in machine.cuda.calls


def test_only_so_many_shapes_are_captured(
    session: TensorRtSession, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_runner, "MAX_GRAPHS", 2)
    for count in (1, 2, 4, 8, 4, 8):
        session.forward(make_batch([Text([0])], [list(range(3, 3 + count))]))
    assert machine.cuda.calls.count("cuStreamBeginCapture_v2") == 2
    assert len(machine.module().contexts) == 4 + 2


def test_logits_are_those_of_the_cpu(session: TensorRtSession, reference: OnnxRuntimeSession) -> None:
    """Prompt, commit, then a tree behind what was committed, with a row that is not sampled."""
    texts, other = [Text([3, 1]), Text([2])], [Text([3, 1]), Text([2])]
    for ids, trees in (([list(range(5, 25)), [9, 8]], None), ([[7, 8, 9, 10], [4]], [[-1, 0, 0, 1], None])):
        batch = replace(make_batch(texts, ids, trees), wants_logits=True)
        batch = replace(batch, **{name: getattr(batch, name)[1:] for name in SAMPLED})
        expected, got = reference.forward(batch), session.forward(batch)
        assert got.logits is not None
        assert expected.logits is not None
        np.testing.assert_allclose(got.logits, expected.logits, rtol=0, atol=2e-5)
        np.testing.assert_array_equal(got.sampled_ids, expected.sampled_ids)
        counts = [len(own) for own in ids]
        slots = np.concatenate(
            [text.slots(text.num_committed, count) for text, count in zip(texts, counts, strict=True)]
        )
        for opened in (session, reference):
            opened.commit(np.arange(sum(counts)), slots)
        for text, count in zip([*texts, *other], counts * 2, strict=True):
            text.num_committed += count


SAMPLED = ("sample_rows", "temperature", "top_k", "top_p", "uniform")


@pytest.mark.parametrize("count", [3, 40])
def test_a_step_that_samples_nothing(session: TensorRtSession, count: int) -> None:
    batch = make_batch([Text([0, 1, 2])], [list(range(3, 3 + count))])
    batch = replace(batch, **{name: getattr(batch, name)[:0] for name in SAMPLED}, wants_logits=True)
    result = session.forward(batch)
    assert result.sampled_ids.shape == (0,)
    assert result.logits is not None
    assert result.logits.shape == (0, 320)
    session.commit(np.arange(0), np.arange(0))


def test_logits_are_read_where_they_are_asked_for(session: TensorRtSession, machine: FakeMachine) -> None:
    """Of greedy rows none; of sampled ones those rows."""
    batch = make_batch([Text([0])], [[5, 6, 7, 8, 9]])
    session.forward(batch)
    before = machine.cuda.calls.count("cuMemcpyDtoHAsync_v2")
    session.forward(batch)
    assert machine.cuda.calls.count("cuMemcpyDtoHAsync_v2") == before, "the graph's own alone"
    temperature = np.array([0, 1, 1, 0, 1], np.float32)
    session.forward(replace(batch, temperature=temperature))
    assert machine.cuda.calls.count("cuMemcpyDtoHAsync_v2") == before + 2, "rows 1 and 2 are one copy"


def test_too_many_rows_are_refused_and_nothing_breaks(session: TensorRtSession) -> None:
    with pytest.raises(DraftlineError, match="forward: T is at most 64 in the engine's profile; got 65; "):
        session.forward(make_batch([Text(list(range(5)))], [list(range(3, 68))]))
    with pytest.raises(AssertionError, match="rows are those of the last forward"):
        session.commit(np.array([0]), np.array([0]))
    assert len(session.forward(make_batch([Text([0])], [[5]])).sampled_ids) == 1


def test_a_capture_that_the_vendor_refuses_names_the_setting(
    session: TensorRtSession, machine: FakeMachine, monkeypatch: pytest.MonkeyPatch
) -> None:
    execute = FakeContext.execute_async_v3
    monkeypatch.setattr(
        FakeContext,
        "execute_async_v3",
        lambda self, stream_handle: not machine.cuda.is_capturing and execute(self, stream_handle),
    )
    with pytest.raises(
        RuntimeError, match=r"model\.plan: execute_async_v3 of TensorRT-RTX .* engine.cuda_graphs=false"
    ):
        session.forward(make_batch([Text([0])], [[5]]))
    assert not machine.cuda.is_capturing


def test_another_thread_may_run_forwards(session: TensorRtSession) -> None:
    """The runtime's steps run in a thread of their own."""
    batch, results = make_batch([Text([0])], [[5, 6]]), []
    expected = session.forward(batch).sampled_ids

    def work() -> None:
        results.append(session.forward(batch).sampled_ids)
        session.commit(np.arange(2), np.arange(2))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    np.testing.assert_array_equal(results[0], expected)


def test_two_commits_in_a_row_are_both_made(session: TensorRtSession, reference: OnnxRuntimeSession) -> None:
    """The indices of the first are still in host memory when the second comes."""
    batch = make_batch([Text([0])], [[5, 6, 7]])
    after = make_batch([Text([0], num_committed=3)], [[8]])
    for opened in (session, reference):
        opened.forward(batch)
        opened.commit(np.array([2]), np.array([2]))
        opened.commit(np.array([0, 1, 1]), np.array([0, 1, 40]))
    expected = reference.forward_logits(after)
    got = session.forward(replace(after, wants_logits=True)).logits
    assert got is not None
    np.testing.assert_allclose(got, expected, rtol=0, atol=2e-5)


def test_features_are_kept_in_so_many_places(session: TensorRtSession, folders: tuple[Path, Path]) -> None:
    (draft,) = open_draft_sessions(folders[0], load_engine_config(folders[0]), session)
    assert draft is not None
    session.forward(make_batch([Text([0])], [[5, 6, 7]]))
    draft.keep_features(np.array([0, 2]), np.array([0, 143]))
    with pytest.raises(DraftlineError, match="features are kept in 144 places; got 144; "):
        draft.keep_features(np.array([0]), np.array([144]))
    draft.close()
