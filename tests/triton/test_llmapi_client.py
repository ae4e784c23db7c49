"""What the client of the llmapi model says where no answer comes; answers are in ``test_llmapi_repository``."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import numpy as np
import pytest

from draftline.triton import llmapi_client
from draftline.triton.addresses import local_address
from draftline.triton.llmapi_client import LlmapiClient, LlmapiError
from draftline.triton.smoke import find_free_ports

INPUTS = {"text_input": np.array([b"hi"], np.object_), "sampling_param_max_tokens": np.array([2], np.int32)}


def test_nobody_answers() -> None:
    client = LlmapiClient(f"127.0.0.1:{find_free_ports().http}")
    said = r"server: tensorrt_llm must answer at 127\.0\.0\.1:\d+; got ConnectionRefused.*; read the server's log"
    with pytest.raises(LlmapiError, match=said):
        next(client.stream("an id", INPUTS))
    client.stop("an id")  # nothing is left to end


class BreaksOff(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        event = b'data: {"model_name":"tensorrt_llm","text_output":"h"}\n\n'
        self.wfile.write(b"%x\r\n%s\r\n" % (len(event), event))

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def breaking_server() -> Iterator[HTTPServer]:
    with HTTPServer(("127.0.0.1", 0), BreaksOff) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_an_answer_that_breaks_off_is_no_whole_one(breaking_server: HTTPServer) -> None:
    answers = LlmapiClient(f"127.0.0.1:{breaking_server.server_port}").stream("an id", INPUTS)
    assert next(answers)["text_output"].tolist() == ["h"]
    with pytest.raises(LlmapiError, match=r"must answer at .*; got IncompleteRead"):
        next(answers)


def test_a_stop_that_nobody_answers_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(llmapi_client, "STOP_SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        LlmapiClient(f"127.0.0.1:{silent.getsockname()[1]}").stop("an id")


@pytest.mark.parametrize(
    ("host", "address"),
    [("0.0.0.0", "127.0.0.1:8000"), ("::", "[::1]:8000"), ("10.0.0.5", "10.0.0.5:8000"), ("name", "name:8000")],
)
def test_a_server_is_reached_where_it_listens(host: str, address: str) -> None:
    assert local_address(host, 8000) == address
