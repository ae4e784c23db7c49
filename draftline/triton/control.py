"""What the server process says to its server over HTTP: is it ready, is it idle, refuse and end requests."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Callable
from typing import Protocol

from draftline.triton.addresses import local_host
from draftline.triton.metrics import ACTIVE_REQUESTS


class ServerPorts(Protocol):
    @property
    def http(self) -> int: ...
    @property
    def metrics(self) -> int: ...


class ServerControl:
    """``key: secret`` is the header of the restricted model-repository API; the secret ends requests as well."""

    def __init__(self, host: str, ports: ServerPorts, key: str, secret: str) -> None:
        self._host = local_host(host)
        self._ports = ports
        self._key, self._secret = key, secret

    def is_ready(self) -> bool:
        """Return whether every model is loaded."""
        status, _ = self._ask(self._ports.http, "GET", "/v2/health/ready")
        return status == 200

    def refuse_requests(self) -> None:
        """Unload the ensemble: new requests are refused, running ones go on, as its steps stay loaded."""
        self._ask(self._ports.http, "POST", "/v2/repository/models/ensemble/unload", {}, {self._key: self._secret})

    def end_requests(self) -> None:
        """End every running request: the secret as the request id of a stop request stands for all of them."""
        one = {"input_ids": [1], "input_lengths": 1, "request_output_len": 1}
        self._ask(
            self._ports.http, "POST", "/v2/models/tensorrt_llm/generate", {"id": self._secret, "stop": True, **one}
        )

    def wait_until_idle(self, seconds: float, is_running: Callable[[], bool]) -> bool:
        """Wait until the engine has no request or its server is gone; False where neither is so after ``seconds``.

        The gauge follows the engine by up to its reporting period, so idle means twice zero, a while apart.
        """
        deadline = time.monotonic() + seconds
        num_idle = 0
        while num_idle < 2 and is_running():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.2)
            num_idle = num_idle + 1 if self._num_active_requests() == 0 else 0
        return True

    def _num_active_requests(self) -> int:
        status, body = self._ask(self._ports.metrics, "GET", "/metrics")
        family, label, value = ACTIVE_REQUESTS
        for line in body.splitlines():
            if line.startswith(f"{family}{{") and f'{label}="{value}"' in line:
                return int(float(line.rsplit(" ", 1)[1]))
        return 0 if status == 200 else -1

    def _ask(
        self,
        port: int,
        method: str,
        path: str,
        body: object = None,
        headers: dict[str, str] | None = None,
    ) -> tuple[int, str]:
        """Return status and body; status 0 where nothing listens (yet, or any more)."""
        connection = http.client.HTTPConnection(self._host, port, timeout=5)
        try:
            connection.request(method, path, None if body is None else json.dumps(body), headers or {})
            response = connection.getresponse()
            return response.status, response.read().decode("utf-8", "replace")
        except (OSError, http.client.HTTPException):
            return 0, ""
        finally:
            connection.close()
