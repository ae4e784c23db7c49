"""The stored tensors of one matrix, and what is said where one is missing or not as it should be."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from draftline.checkpoints.dtypes import EXPONENT_BITS
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError

USE_ORIGINAL = "use the checkpoint it was quantised from; engine.weights_dtype quantises"
FETCH_AGAIN = "fetch the checkpoint again, or " + USE_ORIGINAL


@dataclass(frozen=True)
class Parts:
    """The stored tensors of one matrix: ``name`` is the layer's, the keys are what follows it."""

    name: str
    tensors: Mapping[str, SourceTensor]
    separator: str = "."

    def tensor(self, key: str, dtypes: Sequence[str], shape: Sequence[int | None] | None = None) -> SourceTensor:
        """Return a part of one of ``dtypes`` and of ``shape``, in which None is any size; by default of any shape.

        Raises: CheckpointError where it is missing, or of another dtype or shape.
        """
        if key not in self.tensors:
            where = next(iter(self.tensors.values())).where
            got = f"only {', '.join(sorted(self.tensors))}"
            raise CheckpointError(where, f"{self.name} has a tensor {key}", got, FETCH_AGAIN)
        tensor = self.tensors[key]
        if tensor.dtype not in dtypes:
            raise self.error(key, f"is of dtype {' or '.join(dtypes)}", tensor.dtype)
        if shape is not None and not _fits(tensor.shape, shape):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            raise self.error(key, f"has shape [{wanted}]", list(tensor.shape))
        return tensor

    def optional(self, key: str, dtypes: Sequence[str], shape: Sequence[int | None]) -> SourceTensor | None:
        """Return a part as ``tensor`` does, or None where there is none."""
        return self.tensor(key, dtypes, shape) if key in self.tensors else None

    def error(self, key: str, rule: str, got: object, cure: str = FETCH_AGAIN) -> CheckpointError:
        where = self.tensors[key].where
        return CheckpointError(where, f"tensor {self.name}{self.separator}{key} {rule}", got, cure)


def is_float(tensor: SourceTensor) -> bool:
    """Whether the tensor's elements are weights as they are, of a dtype that conversion reads."""
    return tensor.dtype in EXPONENT_BITS


def _fits(shape: Sequence[int], wanted: Sequence[int | None]) -> bool:
    return len(shape) == len(wanted) and all(
        size == want or (want is None and size > 0) for size, want in zip(shape, wanted, strict=True)
    )
