"""What every block of a pipeline file is."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict, model_validator


class Block(BaseModel):
    """A block of a pipeline file: strict types, unknown keys are errors, values never change."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @classmethod
    def dependent_defaults(cls, given: Mapping[str, object]) -> dict[str, object]:
        """Return the defaults that follow from the ``given`` values, instead of those of the fields."""
        return {}

    @model_validator(mode="before")
    @classmethod
    def _resolve_dependent_defaults(cls, data: object) -> object:
        return {**cls.dependent_defaults(data), **data} if isinstance(data, dict) else data
