"""The exception tree.

DraftlineError (a ValueError)
├── PipelineError        a pipeline file breaks a rule (may carry several problems)
├── CheckpointError      a checkpoint cannot be read or converted
├── BuildError           an engine cannot be built
├── ArtifactError        a build directory is damaged, foreign, or of another version
├── TrainingError        a draft cannot be trained from these data, or its training diverged
├── RequestError         a request that this engine cannot serve
├── ServerError          the Triton server did not start, stop or answer as it should
└── MissingPackageError  an optional package is needed; the message carries the pip line

Every message reads ``<where>: <rule>; got <value>; <cure>`` on one line.
"""

from __future__ import annotations


class DraftlineError(ValueError):
    """An error a user can act on.

    ``where`` names the file, field or request; ``rule`` what must hold; ``got`` what was found; ``cure`` what to do.
    """

    def __init__(self, where: object, rule: str, got: object, cure: str) -> None:
        self.where, self.rule, self.got, self.cure = str(where), rule, got, cure
        super().__init__(f"{where}: {rule}; got {got}; {cure}".replace("\n", " "))

    def __reduce__(self) -> tuple[type[DraftlineError], tuple[str, str, object, str]]:
        return type(self), (self.where, self.rule, self.got, self.cure)


class PipelineError(DraftlineError):
    """One broken rule of a pipeline file; several are carried by ``PipelineErrors``."""


class PipelineErrors(DraftlineError):  # noqa: N818 (several of them)
    """All broken rules of a pipeline file at once, one per line, in file order."""

    def __init__(self, problems: list[PipelineError]) -> None:
        assert problems
        first = problems[0]
        super().__init__(first.where, first.rule, first.got, first.cure)
        self.problems = problems

    def __str__(self) -> str:
        return "\n".join(str(problem) for problem in self.problems)

    def __reduce__(self) -> tuple[type[PipelineErrors], tuple[list[PipelineError]]]:  # type: ignore[override]
        return type(self), (self.problems,)


class CheckpointError(DraftlineError):
    pass


class BuildError(DraftlineError):
    pass


class ArtifactError(DraftlineError):
    pass


class TrainingError(DraftlineError):
    pass


class RequestError(DraftlineError):
    pass


class ServerError(DraftlineError):
    pass


class MissingPackageError(DraftlineError):
    """Raised where an optional dependency is imported: ``where`` is the feature, ``cure`` the pip line."""
