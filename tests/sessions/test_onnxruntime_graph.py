"""What a graph keeps from step to step: its inputs' places, and nothing of its outputs."""

from __future__ import annotations

import ctypes

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


class _HeapNumbers(ctypes.Structure):
    """``struct mallinfo2`` of glibc."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def heap_bytes() -> int:
    """Return the bytes that are in use and those that are mapped by themselves."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _HeapNumbers
    numbers = mallinfo2()
    return int(numbers.uordblks + numbers.hblkhd)


def test_steps_leave_no_memory_behind(session: OnnxRuntimeSession) -> None:
    """Once each shape was seen, hundreds of steps of them hold nothing more, but for what Python keeps for itself."""
    texts = [Text(list(range(8 * index, 8 * index + 8)), 100) for index in range(8)]
    batches = [make_batch(texts[:count], [[5] * rows] * count) for count in (1, 3, 8) for rows in (1, 2, 20)]

    def run_all() -> None:
        for batch in batches:
            session.forward(batch)
            session.commit(np.arange(len(batch.input_ids)), np.arange(len(batch.input_ids)))

    for _ in range(5):
        run_all()
    before = heap_bytes()
    for _ in range(100):
        run_all()
    assert heap_bytes() - before < 64 * 1024  # logits of a row alone are 1.25 KiB, of a step of 160 rows 200 KiB
