"""How to speculate: the shape of trees and the rule of acceptance, as every floor above names them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

TreeKind = Literal["chain", "static", "dynamic", "auto"]
AcceptanceRule = Literal["exact", "typical"]


@dataclass(frozen=True)
class TreeShape:
    """The ``tree`` block of a pipeline.

    - ``chain``: one path of ``max_depth`` draft tokens.
    - ``static``: the nodes of ``choices``; each path says which candidate (0 = most probable) of its parent it takes.
    - ``dynamic``: EAGLE-2's: the ``top_k`` best nodes of a depth are expanded to ``top_k`` children each, and the
      ``max_nodes - 1`` best of all are kept.
    - ``auto``: dynamic, and in each step only as many nodes as are expected to pay.

    ``max_nodes`` counts the root.
    """

    kind: TreeKind
    max_nodes: int
    max_depth: int
    top_k: int
    choices: tuple[tuple[int, ...], ...] = ()


@dataclass(frozen=True)
class Acceptance:
    """The ``acceptance`` block of a pipeline.

    ``exact`` is lossless: a draft token is accepted where it equals the token that the target draws there. ``typical``
    (Medusa, section 2.3.1 of its paper) is lossy: a draft token x is accepted where
    ``p(x) > min(epsilon, alpha * exp(-H(p)))``; ``epsilon`` and ``alpha`` are unused by ``exact``.
    """

    rule: AcceptanceRule = "exact"
    epsilon: float = 0.09
    alpha: float = 0.3


EXACT = Acceptance()
