"""Prometheus metrics of the engine.

Gauges, under the names TensorRT-LLM's backend gave them: ``GAUGES``. Counters of speculation, by the name of this
project, since the server started (every metric also has the labels ``model`` and ``version``):

| family | label | value |
|---|---|---|
| ``draftline_speculation`` | ``kind="steps"`` | decode steps, summed over requests |
| | ``kind="drafted"`` | tokens the drafters proposed |
| | ``kind="verified"`` | those of them that the target ran |
| | ``kind="accepted"`` | those of them that the target accepted |
| | ``kind="emitted"`` | accepted and bonus tokens that became part of an answer |
| | ``kind="draft_forwards"``, ``kind="target_forwards"`` | forward passes |
| ``draftline_speculation_accepted_at`` | ``depth="1"``, ``"2"``, ... | steps that accepted a token of that depth |

From rates of these: acceptance_length = 1 + accepted / steps, acceptance_rate = accepted / drafted, and
acceptance_rate_at[d] = accepted at depth d / steps.
"""

from __future__ import annotations

from typing import Any, Protocol

from draftline.runtime.speculation_numbers import NO_SPECULATION, SpeculationNumbers


class EngineStatistics(Protocol):
    """The part of ``draftline.runtime.engine.Statistics`` that is reported."""

    @property
    def num_requests_active(self) -> int: ...
    @property
    def speculation(self) -> SpeculationNumbers: ...


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

SPECULATION = "draftline_speculation"
SPECULATION_KINDS = {
    "steps": "num_steps",
    "drafted": "num_drafted_tokens",
    "verified": "num_verified_tokens",
    "accepted": "num_accepted_tokens",
    "emitted": "num_emitted_tokens",
    "draft_forwards": "num_draft_forwards",
    "target_forwards": "num_target_forwards",
}
ACCEPTED_AT = "draftline_speculation_accepted_at"
COUNTER_DESCRIPTIONS = {
    SPECULATION: "steps, tokens and forward passes of speculative decoding",
    ACCEPTED_AT: "steps that accepted a draft token of this depth",
}


class MetricsReporter:
    """Keep Triton's gauges and counters at the engine's statistics."""

    def __init__(self, pb_utils: Any) -> None:
        kinds = pb_utils.MetricFamily
        # A metric dies with its family: both must be kept.
        self._families = {
            name: kinds(name=name, description=description, kind=kind)
            for descriptions, kind in ((DESCRIPTIONS, kinds.GAUGE), (COUNTER_DESCRIPTIONS, kinds.COUNTER))
            for name, description in descriptions.items()
        }
        self._gauges: dict[str, Any] = {}
        self._last: dict[str, int] = {}
        for name, (label, attributes) in GAUGES.items():
            for value, attribute in attributes.items():
                self._gauges[attribute] = self._add_metric(name, label, value)
        self._gauges["active"] = self._add_metric(*ACTIVE_REQUESTS)
        self._counters: dict[tuple[str, str], Any] = {}
        self._counted: dict[tuple[str, str], int] = {}
        self._report_speculation(NO_SPECULATION)  # a counter that was never there cannot be told from a missing one

    def _add_metric(self, family: str, label: str, value: str) -> Any:
        return self._families[family].Metric(labels={"model": "tensorrt_llm", "version": "1", label: value})

    def report_active(self, num_active: int) -> None:
        """Set the number of requests that have no final response yet; draining waits for its zero."""
        self._set("active", num_active)

    def report_statistics(self, statistics: EngineStatistics) -> None:
        """Set the gauges and advance the counters of the engine."""
        for attribute in self._gauges.keys() - {"active"}:
            self._set(attribute, getattr(statistics, attribute))
        self._report_speculation(statistics.speculation)

    def close(self) -> None:
        """Forget every metric: a family that outlives Triton's stub takes the process down with it."""
        self._gauges.clear()
        self._counters.clear()
        self._families.clear()

    def _set(self, key: str, value: int) -> None:
        if self._last.get(key) != value:  # a set is a round trip to the server
            self._gauges[key].set(float(value))
            self._last[key] = value

    def _report_speculation(self, numbers: SpeculationNumbers) -> None:
        for kind, attribute in SPECULATION_KINDS.items():
            self._advance(SPECULATION, "kind", kind, getattr(numbers, attribute))
        for depth in range(1, len(numbers.histogram)):  # as deep as any step accepted so far
            self._advance(ACCEPTED_AT, "depth", str(depth), sum(numbers.histogram[depth:]))

    def _advance(self, family: str, label: str, value: str, total: int) -> None:
        key = family, value
        if key not in self._counters:
            self._counters[key], self._counted[key] = self._add_metric(family, label, value), 0
        if total != self._counted[key]:  # an increment is a round trip to the server
            self._counters[key].increment(float(total - self._counted[key]))
            self._counted[key] = total
