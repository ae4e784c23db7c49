"""``draftline serve`` ends cleanly while it answers."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from draftline.errors import ServerError
from draftline.triton.client import Client
from draftline.triton.smoke import find_free_ports
from tests.end_to_end.processes import traces_of

pytestmark = pytest.mark.end_to_end

NUM_STREAMS = 8


@pytest.mark.parametrize("max_tokens", [96, 4000])
def test_sigterm_while_eight_streams_run(build_of: Callable[[str], Path], max_tokens: int) -> None:
    """Short answers come whole; those that outlast the grace end with an error. Nothing is left of the server."""
    ports = find_free_ports()
    command = [sys.executable, "-m", "draftline", "serve", str(build_of("int8"))]
    command += [f"--{name}-port={number}" for name, number in vars(ports).items()]
    outcomes: list[str] = []
    started = threading.Semaphore(0)

    def stream(number: int) -> None:
        text = ""
        try:
            for chunk in client.stream(f"{number} reasons to travel:\n1.", max_tokens=max_tokens):
                if not text:
                    started.release()
                text += chunk
            outcomes.append("whole")
        except ServerError as error:
            outcomes.append(str(error))

    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
        Client(f"127.0.0.1:{ports.grpc}") as client,
    ):
        assert process.stdout is not None
        assert "is ready" in process.stdout.readline()
        assert traces_of(process.pid)
        threads = [threading.Thread(target=stream, args=[number]) for number in range(NUM_STREAMS)]
        for thread in threads:
            thread.start()
        assert all(started.acquire(timeout=60) for _ in threads)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        for thread in threads:
            thread.join(10)
    assert len(outcomes) == NUM_STREAMS
    assert all(outcome == "whole" or "shutdown" in outcome for outcome in outcomes), outcomes
    assert traces_of(process.pid) == []
    for port in vars(ports).values():
        with socket.create_server(("127.0.0.1", port)):
            pass
