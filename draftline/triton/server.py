"""The server process: start, readiness, drain, stop."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from draftline.errors import ArtifactError, ServerError
from draftline.sessions.engine_config import load_engine_config
from draftline.sessions.opening import check_openable
from draftline.triton import cleaner
from draftline.triton.control import ServerControl
from draftline.triton.model_arguments import CONTROL_ID_VARIABLE
from draftline.triton.model_processes import find_model_processes, is_alive
from draftline.triton.repository import SERVE_FILE
from draftline.triton.serve_script import SCRIPT
from draftline.triton.tritonserver import find_tritonserver

CONTROL_KEY = "draftline-control"
RESTRICTED_APIS = "model-repository,trace,logging"


@dataclass(frozen=True)
class Ports:
    http: int
    grpc: int
    metrics: int


class TritonServer:
    """A ``tritonserver`` process over a model repository; a context manager that starts and stops it.

    A cleaner process beside it ends it, its models and their files when this process ends without having stopped it.
    """

    def __init__(self, repository: Path, *, host: str, ports: Ports, log_file: Path) -> None:
        self.host, self.ports, self.log_file = host, ports, log_file
        self._repository = repository
        self._control_id = secrets.token_hex(16)
        self._process: subprocess.Popen[bytes] | None = None
        self._model_processes: dict[str, int] = {}
        self._mark = f"draftline_{os.getpid()}_{secrets.token_hex(4)}_"  # in the command line of every process of ours
        self._cleaner: subprocess.Popen[bytes] | None = None
        self._control = ServerControl(host, ports, CONTROL_KEY, self._control_id)

    def __enter__(self) -> TritonServer:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, timeout_seconds: float = 120.0, interrupted: Callable[[], bool] = lambda: False) -> bool:
        """Start the server and wait until every model answers; False where ``interrupted`` came first.

        **Raises** ServerError where a port is taken, a model does not load, or the server is not ready in time.
        """
        check_ports_differ(self.ports)
        for field, port in vars(self.ports).items():
            check_port_free(self.host, port, f"serve.{field}_port")
        run_directory = Path(tempfile.mkdtemp(prefix="draftline-serve-"))
        command = [sys.executable, "-I", "-S", cleaner.__file__, self._mark, str(run_directory)]
        self._cleaner = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        try:
            self._process = self._launch(run_directory)
            is_ready = self._wait_until_ready(timeout_seconds, interrupted)
        except BaseException:
            self.kill()
            raise
        if not is_ready:
            self.kill()
        else:
            self._model_processes = find_model_processes(self._process.pid)
        return is_ready

    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def check_models(self) -> None:
        """Raise ServerError where a model's process has died: Triton would stay ready and answer errors for ever."""
        for name, pid in self._model_processes.items():
            if not is_alive(pid):
                raise ServerError(name, "must keep running", "a dead process", f"read {self.log_file}")

    def wait_until_idle(self, seconds: float) -> bool:
        """Wait until no request runs; False where one still does after ``seconds``."""
        return self._control.wait_until_idle(seconds, self.is_running)

    def stop(self, drain_seconds: float = 20.0, exit_seconds: float = 10.0) -> int:
        """Stop cleanly and return the exit code of the process.

        New requests are refused; running ones have ``drain_seconds`` to finish, then they end with an error; a process
        that outlasts ``exit_seconds`` more is killed.
        """
        process = self._process
        if process is None:
            return 0
        if process.poll() is None:
            self._control.refuse_requests()
            if not self.wait_until_idle(drain_seconds):
                self._control.end_requests()
                self.wait_until_idle(exit_seconds)
            process.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(exit_seconds)
        self.kill()
        return process.wait()

    def kill(self) -> None:
        """End the server and its models at once, and remove what they leave."""
        process, self._process = self._process, None
        if process is not None:
            process.kill()  # nothing happens where it has ended
            process.wait()
        if self._cleaner is not None:
            self._cleaner.communicate()  # its standard input ends: now it cleans
            self._cleaner = None

    def _launch(self, run_directory: Path) -> subprocess.Popen[bytes]:
        program = find_tritonserver(run_directory)
        secret = f"{CONTROL_KEY}={self._control_id}"
        arguments = [
            *program.arguments,
            f"--model-repository={self._repository.resolve()}",
            # Unloading models is how draining works. Nobody else may (a model is code), nor choose files to write.
            "--model-control-mode=explicit",
            "--load-model=*",
            f"--http-restricted-api={RESTRICTED_APIS}:{secret}",
            f"--grpc-restricted-protocol={RESTRICTED_APIS}:{secret}",
            "--disable-auto-complete-config",
            f"--http-address={self.host}",
            f"--grpc-address={self.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-port={self.ports.metrics}",
            "--allow-gpu-metrics=false",
            "--exit-timeout-secs=5",
            f"--backend-config=python,shm-region-prefix-name={self._mark}",
        ]
        environment = dict(program.environment, **{CONTROL_ID_VARIABLE: self._control_id})
        with self.log_file.open("wb") as log:
            return subprocess.Popen(
                arguments,
                cwd=run_directory,  # models import from it: not the package's source in a checkout without its library
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C in the terminal reaches only us: we drain first
            )

    def _wait_until_ready(self, timeout_seconds: float, interrupted: Callable[[], bool]) -> bool:
        assert self._process is not None
        deadline = time.monotonic() + timeout_seconds
        while not self._control.is_ready():
            if self._process.poll() is not None:
                got = f"exit code {self._process.returncode}: {self._read_problem()}"
                raise ServerError("tritonserver", "must load every model", got, f"read {self.log_file}")
            if interrupted():
                return False
            if time.monotonic() > deadline:
                got = f"{timeout_seconds:.0f} s without: {self._read_problem()}"
                raise ServerError("tritonserver", "must be ready in time", got, f"read {self.log_file}")
            time.sleep(0.05)
        return True

    def _read_problem(self) -> str:
        return find_problem(self.log_file.read_text("utf-8", "replace"))


def find_problem(log: str) -> str:
    """Return the lines of a Triton log that say what went wrong, most telling first, on one line."""
    errors = [line for line in log.splitlines() if line.startswith("E") and line[1:5].isdigit()]
    told = [line.split("] ", 1)[-1].strip('"') for line in errors]
    failures = [line for line in told if "failed to load" in line] or told
    return "; ".join(dict.fromkeys(failures[:3])) or (log.splitlines() or ["no log"])[-1]


def check_ports_differ(ports: Ports) -> None:
    """Raise ServerError where two ports are one."""
    numbers = list(vars(ports).values())
    if len(set(numbers)) < len(numbers):
        raise ServerError("serve", "its three ports must differ", numbers, "choose another port")


def check_port_free(host: str, port: int, field: str) -> None:
    """Raise ServerError where ``port`` is taken."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            cure = f"choose another {field} or stop what listens there"
            raise ServerError(field, f"must be free on {host}", f"{port} ({error.strerror})", cure) from None


def serve(
    build_directory: Path,
    *,
    http_port: int | None = None,
    grpc_port: int | None = None,
    metrics_port: int | None = None,
) -> int:
    """Serve a build in the foreground until SIGTERM or SIGINT; return the exit code.

    Ports default to those of the packaged pipeline.
    """
    own_script = build_directory / "model_repository" / SCRIPT
    if own_script.is_file():
        cure = f"run {own_script} there"
        raise ServerError("serve", "a build for TensorRT-LLM runs where its Triton server is", build_directory, cure)
    engine = build_directory / "engine"
    check_openable(engine, load_engine_config(engine))  # what this version or machine cannot run starts nothing
    repository = build_directory / "model_repository"
    if not (repository / SERVE_FILE).is_file():
        raise ArtifactError(repository, f"must hold {SERVE_FILE}", "no such file", "run the package stage first")
    packaged = json.loads((repository / SERVE_FILE).read_text("utf-8"))
    ports = Ports(
        http=packaged["http_port"] if http_port is None else http_port,
        grpc=packaged["grpc_port"] if grpc_port is None else grpc_port,
        metrics=packaged["metrics_port"] if metrics_port is None else metrics_port,
    )
    log_file = build_directory / f"tritonserver-{ports.http}.log"
    stopped = threading.Event()
    previous = {number: signal.signal(number, lambda *_: stopped.set()) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        server = TritonServer(repository.resolve(), host=packaged["host"], ports=ports, log_file=log_file)
        if not server.start(interrupted=stopped.is_set):
            return 0
        host = packaged["host"]
        print(
            f"{packaged['name']} is ready: http://{host}:{ports.http}/v2/models/ensemble/generate_stream"
            f" grpc {host}:{ports.grpc} metrics http://{host}:{ports.metrics}/metrics",
            flush=True,
        )
        try:
            while server.is_running() and not stopped.wait(0.2):
                server.check_models()
        except ServerError:
            server.kill()  # its requests cannot end: nothing to wait for
            raise
        return _finish(server, asked=stopped.is_set())
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _finish(server: TritonServer, *, asked: bool) -> int:
    exit_code = server.stop()
    if not asked:
        raise ServerError("tritonserver", "must run until stopped", f"exit code {exit_code}", f"read {server.log_file}")
    if exit_code != 0:
        # Every request of ours has ended; Triton keeps some that their clients cancelled at the wrong moment.
        print(f"tritonserver ended with exit code {exit_code}; read {server.log_file}", file=sys.stderr)
    return 0
