"""How a server is reached from its own machine."""

from __future__ import annotations


def local_host(host: str) -> str:
    """Return the address that reaches what listens on ``host``, which may be every interface."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)


def local_address(host: str, port: int) -> str:
    """Return ``host:port`` of ``local_host``, as URLs write it."""
    reached = local_host(host)
    return f"[{reached}]:{port}" if ":" in reached else f"{reached}:{port}"
