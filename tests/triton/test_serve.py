"""``serve`` as a process: readiness, clean stops, clear failures."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import draftline
from draftline.errors import ArtifactError, MissingPackageError, ServerError
from draftline.triton import tritonserver
from draftline.triton.client import Client
from draftline.triton.model_processes import find_model_processes, is_alive
from draftline.triton.server import Ports, TritonServer, check_port_free, find_problem, serve
from draftline.triton.smoke import find_free_ports, smoke_test
from tests.triton.example import CHECKOUT, make_pipeline, write_build


def start_serving(build: Path, ports: Ports) -> subprocess.Popen:
    code = (
        "import sys; from pathlib import Path; from draftline.triton.server import serve; "
        f"sys.exit(serve(Path({str(build)!r}), http_port={ports.http}, grpc_port={ports.grpc}, "
        f"metrics_port={ports.metrics}))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=CHECKOUT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert "is ready: http://127.0.0.1" in process.stdout.readline()
    return process


def tritonserver_pids(ports: Ports) -> list[int]:
    wanted = f"--http-port={ports.http}".encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            if wanted in entry.read_bytes().split(b"\0"):
                found.append(int(entry.parent.name))
        except OSError:  # it ended while we looked
            continue
    return found


def test_sigterm_lets_requests_in_flight_finish(build) -> None:
    ports = find_free_ports()
    process = start_serving(build, ports)
    answers: list[str] = []
    with process, Client(f"127.0.0.1:{ports.grpc}") as client:
        threads = [
            threading.Thread(target=lambda: answers.append(client.generate("hello", max_tokens=400))) for _ in range(3)
        ]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        process.send_signal(signal.SIGTERM)
        for thread in threads:
            thread.join(20)
        assert process.wait(20) == 0
        assert len(set(answers)) == 1
        assert len(answers) == 3
        assert not client.ready(1.0)
    assert not what_is_left(ports, {}, process.pid)


def test_requests_that_outlast_the_grace_end_with_an_error(build) -> None:
    ports = find_free_ports()
    server = TritonServer(build / "model_repository", host="127.0.0.1", ports=ports, log_file=build / "grace.log")
    server.start()
    errors: list[ServerError] = []

    def ask() -> None:
        try:
            client.generate("hello", max_tokens=1900, speculate=False)
        except ServerError as error:
            errors.append(error)

    with Client(f"127.0.0.1:{ports.grpc}") as client:
        thread = threading.Thread(target=ask)
        thread.start()
        time.sleep(0.4)
        started = time.monotonic()
        assert server.stop(drain_seconds=0.5) == 0
        assert time.monotonic() - started < 8
        thread.join(5)
    assert [error.where for error in errors] == ["server"]
    assert "shutdown" in str(errors[0])


def test_no_server_survives_a_killed_parent(build) -> None:
    ports = find_free_ports()
    process = start_serving(build, ports)
    with process, Client(f"127.0.0.1:{ports.grpc}") as client:
        models = find_model_processes(*tritonserver_pids(ports))
        stream = client.stream("hello", max_tokens=1900, speculate=False)
        next(stream)
        process.kill()
        with pytest.raises(ServerError, match=r"must answer; got UNAVAILABLE"):
            list(stream)
    assert len(models) == 3
    deadline = time.monotonic() + 5
    while (left := what_is_left(ports, models, process.pid)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not left


def test_models_run_outside_the_folder_of_the_user(server) -> None:
    """Python imports from the working directory first: there, a checkout would hide the installed package."""
    models = find_model_processes(*tritonserver_pids(server.ports))
    assert len(models) == 3
    for pid in models.values():
        assert not (Path(f"/proc/{pid}/cwd").resolve() / "draftline").exists()


def what_is_left(ports: Ports, models: dict[str, int], serving_pid: int) -> list:
    servers = tritonserver_pids(ports)
    stubs = [name for name, pid in models.items() if is_alive(pid)]
    return servers + stubs + list(shared_memory_of(serving_pid))


def test_serving_ends_with_a_model_that_died(build) -> None:
    ports = find_free_ports()
    process = start_serving(build, ports)
    with process:
        (server_pid,) = tritonserver_pids(ports)
        models = find_model_processes(server_pid)
        assert sorted(models) == ["postprocessing", "preprocessing", "tensorrt_llm"]
        os.kill(models["tensorrt_llm"], signal.SIGKILL)
        assert process.wait(10) == 1
        assert "tensorrt_llm: must keep running; got a dead process" in process.stderr.read()
    assert not what_is_left(ports, models, process.pid)


def test_a_stop_before_readiness_is_clean(build) -> None:
    server = TritonServer(
        build / "model_repository", host="127.0.0.1", ports=find_free_ports(), log_file=build / "early.log"
    )
    assert not server.start(interrupted=lambda: True)
    assert not server.is_running()
    assert server.stop() == 0


def test_a_tritonserver_on_path_is_taken_as_it_is(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tritonserver.shutil, "which", lambda name: f"/opt/tritonserver/bin/{name}")
    program = tritonserver.find_tritonserver(tmp_path)
    assert program.arguments == ["/opt/tritonserver/bin/tritonserver"]
    assert program.environment["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
    assert not list(tmp_path.iterdir())


def test_a_model_that_does_not_load_is_named_with_its_reason(tmp_path) -> None:
    build = write_build(tmp_path)
    (build / "engine" / "tokenizer.json").unlink()
    server = TritonServer(
        build / "model_repository", host="127.0.0.1", ports=find_free_ports(), log_file=tmp_path / "log"
    )
    with pytest.raises(ServerError, match=r"must load every model; got exit code 1: .*tokenizer\.json"):
        server.start()
    assert not server.is_running()


def test_a_port_in_use_is_named_with_its_field(build) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ServerError, match=rf"^serve\.grpc_port: must be free on 127\.0\.0\.1; got {port}"):
            serve(build, grpc_port=port)
        with pytest.raises(ServerError, match=r"^serve\.http_port"):
            check_port_free("127.0.0.1", port, "serve.http_port")


def test_two_equal_ports_are_refused(build) -> None:
    with pytest.raises(ServerError, match="ports must differ"):
        serve(build, http_port=9001, grpc_port=9001)


def test_an_engine_of_another_version_is_refused_by_name(build, tmp_path) -> None:
    shutil.copytree(build / "engine", tmp_path / "engine")
    config = tmp_path / "engine" / "config.json"
    config.write_text(config.read_text().replace(f'"{draftline.__version__}"', '"0.0.7"'))
    with pytest.raises(ArtifactError, match=r"0\.0\.7"):
        serve(tmp_path)


def test_an_unpackaged_build_is_refused(build, tmp_path) -> None:
    shutil.copytree(build / "engine", tmp_path / "engine")
    with pytest.raises(ArtifactError, match=r"model_repository: must hold serve\.json"):
        serve(tmp_path)


def test_without_a_server_program_the_cure_is_a_pip_line(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tritonserver.shutil, "which", lambda name: None)
    monkeypatch.setattr(tritonserver.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingPackageError, match=r"pip install 'draftline\[triton\]'"):
        tritonserver.find_tritonserver(tmp_path)


def test_a_python_without_its_shared_library_is_refused_before_the_start(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tritonserver.shutil, "which", lambda name: None)
    monkeypatch.setattr(tritonserver.sysconfig, "get_config_var", lambda name: str(tmp_path))
    monkeypatch.setattr(tritonserver.sys, "base_prefix", str(tmp_path))
    monkeypatch.setattr(tritonserver.ctypes.util, "find_library", lambda name: None)
    with pytest.raises(ServerError, match=r"needs Python's shared library; .*--enable-shared"):
        tritonserver.find_tritonserver(tmp_path)


def test_numpy_2_is_refused_before_the_start(monkeypatch, tmp_path) -> None:
    monkeypatch.setattr(tritonserver.shutil, "which", lambda name: None)
    monkeypatch.setattr(tritonserver.importlib.metadata, "version", lambda name: "2.1.0")
    with pytest.raises(ServerError, match=r"needs numpy < 2; got 2\.1\.0"):
        tritonserver.find_tritonserver(tmp_path)


def test_the_problem_of_a_log_is_one_line() -> None:
    log = 'I1129 x.cc:1] "fine"\nE1129 y.cc:2] "failed to load \'m\' version 1: Internal: no"\nE1129 z.cc:3] "later"\n'
    assert find_problem(log) == "failed to load 'm' version 1: Internal: no"
    assert find_problem("cannot execute") == "cannot execute"
    assert find_problem("") == "no log"


def shared_memory_of(pid: int) -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.startswith(f"draftline_{pid}_")}


def test_smoke_asks_both_protocols_and_leaves_nothing(build) -> None:
    before = shared_memory_of(os.getpid())
    report = smoke_test(build / "model_repository", make_pipeline(), "hello")
    assert report["num_output_tokens"] == 16
    assert report["text"]
    assert report["ready_ms"] > 0
    json.dumps(report)
    assert shared_memory_of(os.getpid()) == before
    assert not (build / "smoke-tritonserver.log").exists()
