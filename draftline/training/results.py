"""Several trainings, their course and their acceptance, as they are published."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from draftline.errors import ArtifactError
from draftline.training.acceptance_report import Acceptance, AcceptanceReport

TREND_SHARE = 0.25  # of the tokens: a trend is that of what comes behind
LEAST_POINTS = 3  # of a trend
FURTHER = 10  # times the tokens that a trend is asked for


@dataclass(frozen=True)
class Point:
    """A validation: ``acceptance[d - 1]`` is the share of held-back positions whose chain is right up to depth d."""

    tokens: int
    seconds: float
    loss: float
    acceptance: tuple[float, ...]

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.acceptance)


@dataclass(frozen=True)
class Trend:
    """``acceptance_length = at_one_token + per_tenfold * log10(tokens)``, by least squares over ``num_points``.

    ``largest_error``: of a point it was fitted to.
    """

    per_tenfold: float
    at_one_token: float
    first_tokens: int
    num_points: int
    largest_error: float

    def at(self, tokens: float) -> float:
        return float(self.at_one_token + self.per_tenfold * np.log10(tokens))


@dataclass(frozen=True)
class Training:
    """``draft``: its name in the acceptance report. ``num_bytes``: of its weights on disk."""

    draft: str
    provenance: Mapping[str, Any]
    num_bytes: int
    curve: tuple[Point, ...]


@dataclass(frozen=True)
class Results:
    acceptance: AcceptanceReport
    trainings: tuple[Training, ...]

    def acceptances_of(self, draft: str) -> list[Acceptance]:
        return [entry for entry in self.acceptance.acceptances if entry.draft == draft]


def fit_trend(curve: Sequence[Point]) -> Trend | None:
    """Return the trend of the last three quarters of a curve's tokens; None where they have few points.

    >>> curve = [Point(tokens, 0.0, 0.0, (0.1 * log,)) for log, tokens in enumerate((1, 10, 100, 1000))]
    >>> fit_trend(curve)
    >>> trend = fit_trend([*curve, Point(10**3 * 2, 0, 0, (0.3301,)), Point(10**3 * 4, 0, 0, (0.3602,))])
    >>> round(trend.per_tenfold, 3), round(trend.at(10**5), 3), trend.num_points
    (0.1, 1.5, 3)
    """
    points = [point for point in curve if point.tokens > 0 and point.tokens >= TREND_SHARE * curve[-1].tokens]
    if len(points) < LEAST_POINTS:
        return None
    logs = np.log10([point.tokens for point in points])
    lengths = np.array([point.acceptance_length for point in points])
    design = np.stack([logs, np.ones_like(logs)], axis=1)
    (slope, intercept), *_ = np.linalg.lstsq(design, lengths, rcond=None)
    errors = np.abs(design @ np.array([slope, intercept]) - lengths)
    return Trend(float(slope), float(intercept), points[0].tokens, len(points), float(errors.max()))


def load_results(path: Path) -> Results:
    """Read what ``draftline.training.collect`` wrote to the JSON file ``path``.

    Raises: ArtifactError where there is none.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        acceptance = document["acceptance"]
        acceptances = tuple(
            Acceptance(**entry | {"acceptance_rate_at": tuple(entry["acceptance_rate_at"])})
            for entry in acceptance["acceptances"]
        )
        trainings = tuple(
            Training(**entry | {"curve": tuple(as_point(point) for point in entry["curve"])})
            for entry in document["trainings"]
        )
        return Results(AcceptanceReport(acceptance["machine"], acceptance["settings"], acceptances), trainings)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ArtifactError(path, "is the training.json of trainings", repr(error), "collect it again") from error


def as_point(entry: Mapping[str, Any]) -> Point:
    """Return what a log or a file says of a validation."""
    return Point(entry["tokens"], entry["seconds"], entry["loss"], tuple(entry["acceptance"]))
