"""What a layout is, and how plain tensors take the place of the stored ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass

from draftline.checkpoints.quantized.parts import USE_ORIGINAL, Parts, is_float
from draftline.checkpoints.quantized.stored import read_whole
from draftline.checkpoints.source_tensor import SourceTensor
from draftline.errors import CheckpointError

CACHE_NOTE = "keys and values were to be quantised, too: here kv_cache.dtype decides that"
WEIGHT, BIAS, ZERO_BIAS = "weight", "bias", "bias of zeros"


@dataclass(frozen=True)
class Layout:
    """How a checkpoint stores matrices.

    ``title``: for users. ``parts``: the last words of the names of the tensors that make up a matrix. ``unused``: those
    of tensors that only engines of other arithmetic read, such as scales of activations. ``open_matrix`` checks headers
    and returns the plain tensor. ``notes``: what else whoever converts is to know. ``excluded``: layers that the
    configuration names as stored plain. ``separator``: between a matrix's name and those last words. ``plain``: what
    follows the name where the matrix is stored plain.
    """

    title: str
    parts: frozenset[str]
    unused: frozenset[str]
    open_matrix: Callable[[Parts], SourceTensor]
    notes: tuple[str, ...] = ()
    excluded: frozenset[str] = frozenset()
    separator: str = "."
    plain: str = f".{WEIGHT}"


@dataclass(frozen=True)
class Quantization:
    """What was found of a layout: its matrices, by name, and how many tensors of each name were left out."""

    layout: Layout
    matrices: tuple[str, ...]
    num_unused: Mapping[str, int]

    def describe(self) -> Iterator[str]:
        yield f"quantised: {self.layout.title}; {len(self.matrices)} matrices"
        yield (
            "each weight is read as its code times its scale, in float32, then rounded to target.dtype, "
            "and in the engine to the grid of engine.weights_dtype"
        )
        if self.num_unused:
            names = ", ".join(f"{count} {name}" for name, count in sorted(self.num_unused.items()))
            yield f"left out, as draftline computes without them: {names}"
        yield from self.layout.notes


def dequantize(
    layout: Layout, tensors: Mapping[str, SourceTensor], where: object, wanted: Collection[str]
) -> tuple[dict[str, SourceTensor], Quantization]:
    """Return plain tensors for the stored ones; those of no matrix stay as they are.

    ``wanted``: the tensors that the network has. Early versions of AutoGPTQ wrote a bias of zeros beside every matrix:
    one that the network has not is left out.

    Raises:
        CheckpointError: there is no matrix of the layout, or one lacks a part or has others, of another dtype or shape.
    """
    plain: dict[str, SourceTensor] = {}
    matrices: dict[str, dict[str, SourceTensor]] = {}
    unused: Counter[str] = Counter()
    for full_name, tensor in tensors.items():
        name, _, key = full_name.rpartition(layout.separator)
        if key in layout.unused:
            unused[key] += 1
        elif key in layout.parts - {WEIGHT} or (key == WEIGHT and not is_float(tensor)):
            matrices.setdefault(name, {})[key] = tensor
        else:
            plain[full_name] = tensor
    if not matrices:
        got = f"tensors of {', '.join(sorted({tensor.dtype for tensor in tensors.values()}))} and none of it"
        raise CheckpointError(
            where, f"the checkpoint holds what its configuration says, {layout.title}", got, USE_ORIGINAL
        )
    layers = {(name + layout.plain).rpartition(".")[0] for name in matrices}
    if contradicting := sorted(layout.excluded & layers):
        rule = "layers that the configuration leaves out of quantisation are stored plain"
        raise CheckpointError(where, rule, f"{', '.join(contradicting)} in codes", USE_ORIGINAL)
    for name, parts in matrices.items():
        weight = name + layout.plain
        if weight in plain:
            parts[WEIGHT] = plain.pop(weight)
        if unknown := sorted(set(parts) - layout.parts):
            rule = f"{name} is stored in one layout, as {', '.join(sorted(layout.parts))}"
            raise CheckpointError(parts[unknown[0]].where, rule, ", ".join(sorted(parts)), USE_ORIGINAL)
        plain[weight] = layout.open_matrix(Parts(name, parts, layout.separator))
        bias = f"{name}.{BIAS}"
        if bias in plain and bias not in wanted and not read_whole(plain[bias]).any():
            del plain[bias]
            unused[ZERO_BIAS] += 1
    return plain, Quantization(layout, tuple(matrices), dict(unused))
