"""Sizes that a network is built for: TensorRT's optimisation profiles, of the target and of drafters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

WORD_BITS = 32
PROBED_ROWS = 64  # that are sampled at once where the runtime measures what forwards cost


class Range(NamedTuple):
    """A size of a step: the smallest, the one to be fastest for, the largest."""

    low: int
    best: int
    high: int


Profile = Mapping[str, Range]  # by the dimension's name in the graph


@dataclass(frozen=True)
class StepLimits:
    """What of a pipeline bounds the sizes of a step.

    ``max_nodes``: of a tree, 1 without a draft. Of the nodes that a drafter runs while a tree grows, 0 without one:
    ``frontier_nodes`` of one depth at most, ``grown_nodes`` of all depths.
    """

    max_batch_size: int
    max_seq_len: int
    max_num_tokens: int
    block_size: int
    max_blocks: int
    max_nodes: int = 1
    frontier_nodes: int = 0
    grown_nodes: int = 0

    @property
    def table_columns(self) -> int:
        """Blocks of one sequence at most."""
        return min(self.max_blocks, _ceil(self.max_seq_len, self.block_size))

    @property
    def decode_tokens(self) -> int:
        """Rows of a step in which every request verifies its tree."""
        return min(self.max_num_tokens, self.max_batch_size * self.max_nodes)

    @property
    def sampled_rows(self) -> int:
        """Rows of a step of which logits are asked for: nodes of trees, and the last ones of prompts."""
        return min(self.max_num_tokens, max(self.max_batch_size * self.max_nodes, PROBED_ROWS))

    @property
    def filled_rows(self) -> int:
        """Rows of known tokens that a drafter runs at once: those of a step, of one before that waited, and roots."""
        return 2 * self.max_num_tokens + self.max_batch_size


def target_profiles(limits: StepLimits) -> dict[str, Profile]:
    """Return the profiles ``decode`` (a tree of each request) and ``prefill`` (chunks of prompts, packed with trees).

    Dimensions as in ``build_target_graph``.
    """
    return {
        "decode": _attention(limits, limits.max_nodes)
        | {"T": _up_to(limits.decode_tokens), "R": _up_to(limits.decode_tokens)},
        "prefill": _attention(limits, limits.max_num_tokens)
        | {
            "T": Range(1, limits.max_num_tokens, limits.max_num_tokens),
            "R": Range(1, min(limits.max_batch_size, limits.sampled_rows), limits.sampled_rows),
        },
    }


def draft_profiles(limits: StepLimits) -> dict[str, Profile]:
    """Return the profiles ``fill`` (rows of known tokens, the first forward of a step) and ``tree`` (nodes of one
    depth, which attend to kept rows of the forwards before).

    Dimensions as in the graphs of drafters: N new rows, fed with F rows of the target's features or O rows of the
    head's own; M kept rows, T = M + N.
    """
    known, grown = limits.filled_rows, limits.max_batch_size * max(1, limits.frontier_nodes)
    kept = known + limits.max_batch_size * limits.grown_nodes
    none = Range(0, 0, 0)
    rows = _up_to(grown)
    fill = {"N": Range(1, known, known), "T": Range(1, known, known), "F": Range(1, known, known), "O": none, "M": none}
    tree = {"N": rows, "T": Range(2, rows.best + _ceil(kept, 2), kept + grown), "F": none, "O": rows}
    tree["M"] = Range(1, _ceil(kept, 2), kept)
    return {
        "fill": _attention(limits, known) | fill | {"R": _up_to(min(known, grown))},
        "tree": _attention(limits, known + limits.grown_nodes) | tree | {"R": rows},
    }


def _attention(limits: StepLimits, max_rows: int) -> dict[str, Range]:
    """Sizes that TreeAttention reads where a sequence has up to ``max_rows`` rows in a step."""
    batch, columns = _up_to(limits.max_batch_size), _up_to(limits.table_columns)
    return {
        "B": batch,
        "B_plus_1": Range(*(size + 1 for size in batch)),
        "max_blocks": columns,
        "W": Range(1, 1, _ceil(max_rows, WORD_BITS)),
        "num_blocks": Range(1, limits.max_blocks, limits.max_blocks),
    }


def _up_to(high: int) -> Range:
    return Range(1, _ceil(high, 2), high)


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
