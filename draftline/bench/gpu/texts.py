"""Part ``texts``: greedy answers of engines on this GPU against the CPU engine's, token by token."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from draftline.bench.gpu.engines import ENGINES, REFERENCE, engine_path
from draftline.bench.gpu.findings import Finding, PartCall
from draftline.bench.gpu.logits import make_batch
from draftline.bench.workloads import PROMPTS
from draftline.checkpoints.tokenizer import load_tokenizer
from draftline.generation import load_engine, open_engine
from draftline.graphs.tensorrt_operators import NetworkDtype
from draftline.sessions.engine_config import EngineConfig, load_engine_config
from draftline.sessions.opening import open_session
from draftline.sessions.tensorrt.check_steps import Sequences
from draftline.sessions.tensorrt.network_check import TOLERANCES
from draftline.tree import chain_parents

NUM_PROMPTS, NUM_TOKENS = 8, 64
Tokens = tuple[int, ...]


def check_texts(call: PartCall) -> None:
    """With CUDA graphs and without, with speculation and without, where there is a draft."""
    reference = engine_path(call.output, REFERENCE)
    prompts = [load_tokenizer(reference).encode(text) for text in PROMPTS[:NUM_PROMPTS]]
    with load_engine(reference) as loaded:
        expected = [answer.token_ids for answer in loaded.generate(prompts, NUM_TOKENS)]
    runs = [(engine, has_graphs) for has_graphs in (True, False) for engine in ENGINES]
    with Reference(reference) as asked:
        for done, (engine, has_graphs) in enumerate(runs):
            if call.is_over:
                call.tell_left_out(len(runs) - done, "engines, with CUDA graphs or without,")
                return
            directory = engine_path(call.output, engine.name)
            config = with_cuda_graphs(load_engine_config(directory), has_graphs)
            with open_engine(directory, config) as loaded:
                for speculate in (False, True) if config.drafts else (False,):
                    found = [a.token_ids for a in loaded.generate(prompts, NUM_TOKENS, speculate=speculate)]
                    what = f"{engine.name}: {'EAGLE-3' if speculate else 'plain'}"
                    what += ", CUDA graphs" if has_graphs else ", no CUDA graphs"
                    call.tell(compare_texts(asked, prompts, expected, found, what, engine.dtype))


def with_cuda_graphs(config: EngineConfig, has_graphs: bool) -> EngineConfig:
    """Return the config of the same engine with CUDA graphs on or off."""
    assert config.tensorrt is not None, "asked of engines on a GPU"
    return dataclasses.replace(config, tensorrt=dataclasses.replace(config.tensorrt, cuda_graphs=has_graphs))


class FirstDifference(NamedTuple):
    """The place of the first other token of an answer, and how much the reference prefers its own: a share of the
    largest of its logits there."""

    prompt: int
    place: int
    margin: float


def compare_texts(
    reference: Reference,
    prompts: Sequence[Sequence[int]],
    expected: Sequence[Tokens],
    found: Sequence[Tokens],
    what: str,
    dtype: NetworkDtype,
) -> Finding:
    """Compare answers. A first difference is explained where the margin is within twice the tolerance of logits: those
    of both tokens may be off by it. What comes behind it are other texts.
    """
    differences = []
    for index, (prompt, own, other) in enumerate(zip(prompts, expected, found, strict=True)):
        place = find_difference(own, other)
        if place is not None:
            margin = reference.margin([*prompt, *own[:place]], own[place : place + 1], other[place : place + 1])
            differences.append(FirstDifference(index, place, margin))
    same = f"{len(prompts) - len(differences)} of {len(prompts)} answers of {NUM_TOKENS} tokens are the same"
    notes = [
        f"answer {each.prompt} differs from token {each.place} on, margin {each.margin:.1e}" for each in differences
    ]
    largest = max((each.margin for each in differences), default=0.0)
    return Finding(
        what, largest, "largest margin at a first difference", 2 * TOLERANCES[dtype], "; ".join([same, *notes])
    )


def find_difference(own: Tokens, other: Tokens) -> int | None:
    """Return the first place where the answers differ, one that only one of them has included; None where none does.

    >>> find_difference((5, 6, 7), (5, 6, 8)), find_difference((5, 6), (5, 6, 8)), find_difference((5,), (5,))
    (2, 2, None)
    """
    for place, (one, another) in enumerate(zip(own, other, strict=False)):
        if one != another:
            return place
    return None if len(own) == len(other) else min(len(own), len(other))


class Reference:
    """The reference engine's session, asked for logits. A context manager."""

    def __init__(self, directory: Path) -> None:
        config = load_engine_config(directory)
        self._block_size, self._session = config.block_size, open_session(directory, config)

    def margin(self, before: Sequence[int], own: Tokens, other: Tokens) -> float:
        """Return by how much the logit after ``before`` of ``own`` is above that of ``other``, as a share of the
        largest.

        An answer that ended there has no token; the end id is then taken to be the one of the two most probable that
        the other answer does not have.
        """
        logits = self._next_logits(before)
        best, second = np.argsort(-logits)[:2].tolist()
        one = own[0] if own else best
        another = other[0] if other else (second if one == best else best)
        return float((logits[one] - logits[another]) / np.abs(logits).max())

    def _next_logits(self, token_ids: Sequence[int]) -> NDArray[np.float32]:
        """Return the logits ``[V]`` behind ``token_ids``, which run as one prefill in the first blocks of the pool."""
        count, size = len(token_ids), self._block_size
        text = Sequences((0,), (chain_parents(count),), (np.arange(-(-count // size), dtype=np.int32),))
        result = self._session.forward(make_batch(text, np.array(token_ids, np.int32), size, only_last=True))
        assert result.logits is not None, "they were asked for"
        logits: NDArray[np.float32] = result.logits[0]
        return logits

    def __enter__(self) -> Reference:
        return self

    def __exit__(self, *error: object) -> None:
        self._session.close()
