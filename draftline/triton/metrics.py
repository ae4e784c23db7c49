"""Prometheus metrics of the engine, under the names TensorRT-LLM's backend gave them."""

from __future__ import annotations

from typing import Any, Protocol


class EngineStatistics(Protocol):
    """The part of ``draftline.runtime.engine.Statistics`` that is reported."""

    @property
    def num_requests_active(self) -> int: ...


# TensorRT-LLM's metric family -> label -> label value -> attribute of the engine's statistics.
GAUGES: dict[str, tuple[str, dict[str, str]]] = {
    "nv_trt_llm_request_metrics": (
        "request_type",
        {"waiting": "num_requests_waiting", "scheduled": "num_requests_running"},
    ),
    "nv_trt_llm_kv_cache_block_metrics": (
        "kv_cache_block_type",
        {"max": "num_blocks_total", "free": "num_blocks_free", "used": "num_blocks_used"},
    ),
    "nv_trt_llm_general_metrics": (
        "general_type",
        {"iteration_counter": "num_steps", "generated_tokens": "num_generated_tokens"},
    ),
}
DESCRIPTIONS = {
    "nv_trt_llm_request_metrics": "requests of the engine",
    "nv_trt_llm_kv_cache_block_metrics": "KV cache blocks of the engine",
    "nv_trt_llm_general_metrics": "steps and tokens of the engine",
}
ACTIVE_REQUESTS = "nv_trt_llm_request_metrics", "request_type", "active"


class MetricsReporter:
    """Keep Triton's gauges at the engine's statistics."""

    def __init__(self, pb_utils: Any) -> None:
        # A metric dies with its family: both must be kept.
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=description, kind=pb_utils.MetricFamily.GAUGE)
            for name, description in DESCRIPTIONS.items()
        }
        self._gauges: dict[str, Any] = {}
        self._last: dict[str, int] = {}
        for name, (label, attributes) in GAUGES.items():
            for value, attribute in attributes.items():
                self._gauges[attribute] = self._add_gauge(name, label, value)
        self._gauges["active"] = self._add_gauge(*ACTIVE_REQUESTS)

    def _add_gauge(self, family: str, label: str, value: str) -> Any:
        return self._families[family].Metric(labels={"model": "tensorrt_llm", "version": "1", label: value})

    def report_active(self, num_active: int) -> None:
        """Set the number of requests that have no final response yet; draining waits for its zero."""
        self._set("active", num_active)

    def report_statistics(self, statistics: EngineStatistics) -> None:
        """Set the gauges of the engine."""
        for attribute in self._gauges.keys() - {"active"}:
            self._set(attribute, getattr(statistics, attribute))

    def _set(self, key: str, value: int) -> None:
        if self._last.get(key) != value:  # a set is a round trip to the server
            self._gauges[key].set(float(value))
            self._last[key] = value
