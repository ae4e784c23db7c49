"""What a graph keeps from step to step: its inputs' places, and nothing of its outputs."""

from __future__ import annotations

import numpy as np
import pytest

from draftline.sessions.onnxruntime_session import OnnxRuntimeSession
from tests.sessions.tiny_engines import Text, build_tiny_engine, make_batch, open_tiny_session
from tests.tiny_checkpoints import write_tiny_checkpoint


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory) -> OnnxRuntimeSession:
    directory = tmp_path_factory.mktemp("graph")
    return open_tiny_session(build_tiny_engine(directory, write_tiny_checkpoint(directory / "tiny"), kernels="native"))


def test_arrays_that_are_changed_in_place_are_read_anew(session: OnnxRuntimeSession) -> None:
    batch, other = make_batch([Text([0])], [[5, 6]]), make_batch([Text([0])], [[7, 8]])
    before, wanted = session.forward_logits(batch), session.forward_logits(other)
    batch.input_ids[:] = other.input_ids
    found = session.forward_logits(batch)
    np.testing.assert_array_equal(found, wanted)
    assert not np.array_equal(before, wanted)


def test_logits_outlive_later_steps(session: OnnxRuntimeSession) -> None:
    batches = [make_batch([Text([0])], [[token]]) for token in (5, 6, 7)]
    logits = [session.forward_logits(batch) for batch in batches]
    copies = [values.copy() for values in logits]
    for batch in batches[::-1]:
        session.forward_logits(batch)
    np.testing.assert_array_equal(logits, copies)
