"""What Triton's metrics are told."""

from __future__ import annotations

from types import SimpleNamespace

from draftline.runtime.speculation_numbers import NO_SPECULATION, SpeculationNumbers
from draftline.triton.metrics import ACCEPTED_AT, GAUGES, SPECULATION, MetricsReporter

FIRST = SpeculationNumbers(3, 12, 9, 4, 6, 10, 4, histogram=(1, 0, 2))
LATER = SpeculationNumbers(5, 20, 15, 7, 11, 16, 6, histogram=(1, 1, 2, 1))


class FakeMetric:
    def __init__(self, kind):
        self.kind, self.value, self.num_calls = kind, 0.0, 0

    def set(self, value):
        assert self.kind == FakeFamily.GAUGE
        self.value, self.num_calls = value, self.num_calls + 1

    def increment(self, value):
        assert self.kind == FakeFamily.COUNTER
        assert value > 0, "a counter only rises"
        self.value, self.num_calls = self.value + value, self.num_calls + 1


class FakeFamily:
    GAUGE, COUNTER = 1, 2
    metrics: dict

    def __init__(self, name, description, kind):
        self.name, self.kind = name, kind

    def Metric(self, labels):  # noqa: N802  Triton's name
        (label,) = labels.keys() - {"model", "version"}
        metric = self.metrics[self.name, label, labels[label]] = FakeMetric(self.kind)
        return metric


def make_statistics(numbers):
    gauges = {attribute: 0 for _, attributes in GAUGES.values() for attribute in attributes.values()}
    return SimpleNamespace(num_requests_active=0, speculation=numbers, **gauges)


def make_reporter():
    family = type("Family", (FakeFamily,), {"metrics": {}})
    return MetricsReporter(SimpleNamespace(MetricFamily=family)), family.metrics


def test_counters_follow_the_engine_and_answer_the_queries() -> None:
    reporter, metrics = make_reporter()
    for numbers in (NO_SPECULATION, FIRST, LATER, LATER):
        reporter.report_statistics(make_statistics(numbers))
    counted = {value: metric.value for (name, _, value), metric in metrics.items() if name == SPECULATION}
    assert counted == {
        "steps": 5, "drafted": 20, "verified": 15, "accepted": 7, "emitted": 11, "draft_forwards": 16,
        "target_forwards": 6,
    }  # fmt: skip
    assert 1 + counted["accepted"] / counted["steps"] == LATER.acceptance_length
    assert counted["accepted"] / counted["drafted"] == LATER.acceptance_rate
    accepted_at = {int(value): metric.value for (name, _, value), metric in metrics.items() if name == ACCEPTED_AT}
    assert tuple(accepted_at[depth] / counted["steps"] for depth in (1, 2, 3)) == LATER.acceptance_rate_at


def test_what_did_not_change_is_not_told_again() -> None:
    reporter, metrics = make_reporter()
    for _ in range(3):
        reporter.report_statistics(make_statistics(FIRST))
    assert metrics[SPECULATION, "kind", "steps"].num_calls == 1


def test_counters_are_there_before_the_first_request() -> None:
    _, metrics = make_reporter()
    assert metrics[SPECULATION, "kind", "accepted"].value == 0
