"""The smoke test: one request over HTTP and one over gRPC to the real server."""

from __future__ import annotations

import http.client
import json
import socket
import time
from pathlib import Path
from typing import Any

from draftline.errors import ServerError
from draftline.triton.client import Client
from draftline.triton.server import Ports, TritonServer

MAX_TOKENS = 16


def smoke_test(repository: Path, pipeline: Any, prompt: str) -> dict[str, Any]:
    """Serve ``repository`` on free local ports, ask the same of both protocols, stop; return what was seen.

    The prompt is sent as it is.

    Raises: ServerError where the server does not start, answer or stop cleanly, or where the two answers differ.
    """
    log_file = repository.parent / "smoke-tritonserver.log"
    server = TritonServer(repository.resolve(), host="127.0.0.1", ports=find_free_ports(), log_file=log_file)
    started = time.perf_counter()
    with server:
        ready_ms = round((time.perf_counter() - started) * 1000)
        whole = _ask_http(server, prompt)
        with Client(f"127.0.0.1:{server.ports.grpc}") as client:
            chunks = list(client.stream_chunks(prompt, max_tokens=MAX_TOKENS))
        exit_code = server.stop()
    streamed = "".join(chunk.text for chunk in chunks)
    if streamed != whole:
        where, rule = f"smoke of {pipeline.name}", "the streamed answer must equal the whole one"
        raise ServerError(where, rule, f"{streamed!r} and {whole!r}", "report it")
    if exit_code != 0:
        raise ServerError(f"smoke of {pipeline.name}", "must stop with exit code 0", exit_code, "report it")
    log_file.unlink()  # it stays where something went wrong
    return {
        "prompt": prompt,
        "text": whole,
        "num_output_tokens": chunks[-1].num_output_tokens,
        "num_stream_responses": len(chunks),
        "ready_ms": ready_ms,
    }


def find_free_ports() -> Ports:
    """Return three different ports that nothing listens on."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(3)]
    ports = [opened.getsockname()[1] for opened in sockets]
    for opened in sockets:
        opened.close()
    return Ports(*ports)


def _ask_http(server: TritonServer, prompt: str) -> str:
    body = {"text_input": prompt, "max_tokens": MAX_TOKENS, "exclude_input_in_output": True}
    connection = http.client.HTTPConnection("127.0.0.1", server.ports.http, timeout=120)
    try:
        connection.request("POST", "/v2/models/ensemble/generate", json.dumps(body))
        answer = json.loads(connection.getresponse().read())
    finally:
        connection.close()
    if "text_output" not in answer:
        raise ServerError("ensemble", "must answer", answer, "read the error")
    text: str = answer["text_output"]
    return text
