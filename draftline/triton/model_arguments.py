"""What Triton tells a model at its start: the parameters of its ``config.pbtxt``."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

from draftline.errors import ArtifactError

# Set by the server process for its models; see ``GenerationService``.
CONTROL_ID_VARIABLE = "DRAFTLINE_CONTROL_ID"


class ModelArguments:
    """The ``args`` of ``TritonPythonModel.initialize``; paths are relative to the model repository."""

    def __init__(self, args: Mapping[str, str]) -> None:
        self._model_name = args["model_name"]
        self._repository = Path(args["model_repository"]).parent
        self._parameters: dict[str, dict[str, str]] = json.loads(args["model_config"]).get("parameters", {})
        self.control_id = os.environ.get(CONTROL_ID_VARIABLE)

    def text(self, key: str) -> str:
        """Return a parameter. Raises ArtifactError where the configuration has none of that name."""
        if key not in self._parameters:
            where = f"{self._model_name}/config.pbtxt"
            raise ArtifactError(where, f"must have the parameter {key}", sorted(self._parameters), "package again")
        return self._parameters[key]["string_value"]

    def flag(self, key: str) -> bool:
        """Return a parameter that is ``true`` or ``false``."""
        value = self.text(key)
        if value not in ("true", "false"):
            raise ArtifactError(f"{self._model_name}/config.pbtxt", f"{key} must be true or false", value, "correct it")
        return value == "true"

    def integer(self, key: str) -> int:
        """Return a parameter that is a whole number."""
        value = self.text(key)
        if not value.isdecimal():
            raise ArtifactError(
                f"{self._model_name}/config.pbtxt", f"{key} must be a whole number", value, "correct it"
            )
        return int(value)

    def path(self, key: str) -> Path:
        """Return a parameter that is a path."""
        return (self._repository / self.text(key)).resolve()
