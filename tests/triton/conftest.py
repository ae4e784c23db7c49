"""One real server for the whole folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftline.checkpoints.tokenizer import Tokenizer, load_tokenizer
from draftline.triton.client import Client
from draftline.triton.server import TritonServer
from draftline.triton.smoke import find_free_ports
from tests.triton.example import write_build


@pytest.fixture(scope="package")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_build(tmp_path_factory.mktemp("triton") / "build")


@pytest.fixture(scope="package")
def server(build: Path) -> Iterator[TritonServer]:
    ports = find_free_ports()
    with TritonServer(build / "model_repository", host="127.0.0.1", ports=ports, log_file=build / "log") as server:
        yield server
        assert server.stop() == 0


@pytest.fixture(scope="package")
def client(server: TritonServer) -> Iterator[Client]:
    with Client(f"127.0.0.1:{server.ports.grpc}") as client:
        yield client


@pytest.fixture(scope="package")
def tokenizer(build: Path) -> Tokenizer:
    return load_tokenizer(build / "engine")
