"""The rules of a request that change logits, and the edits they make at every node of a step's trees.

What a rule does depends on the tokens before the one that is drawn: the text of the sequence, and at a draft node also
the tokens on the path from the root to it. So speculation changes nothing: a node is edited as plain decoding would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftline.draft_trees import DraftTrees
from draftline.logit_edits import BANNED, LogitEdits

_COLUMN = np.dtype(  # what every row of a sequence does to one token
    [
        ("token_ids", np.int32),
        ("counts", np.int64),
        ("is_banned", np.bool_),
        ("bias", np.float32),
        ("divisor", np.float32),
        ("offset", np.float32),
    ]
)
_NEUTRAL = np.array((0, 0, False, 0.0, 1.0, 0.0), _COLUMN)
_CAPACITY = 64  # columns to begin with; doubled when full


class LogitRules:
    """The rules of one sequence and what they need to know of its text; ``append`` every token that is kept.

    Source: TensorRT-LLM's ``penaltyKernels.cu`` and ``banBadWords.cu``. As there, the penalties count the tokens of
    prompt and answer, bias comes first, and a bad word may begin in the prompt. Unlike there, penalties come before
    the division by the temperature, as in vLLM and Hugging Face: a presence or frequency penalty x at temperature T
    does what x / T does in TensorRT-LLM. ``min_tokens`` bans all end ids, there the only one.

    - ``repetition_penalty`` > 0, 1 = off: logits of tokens that occur are divided above 0, else multiplied, by it.
    - ``presence_penalty``, ``frequency_penalty``, 0 = off: subtracted from them once, and once per occurrence.
    - ``min_tokens``: ``end_ids`` are banned while the answer has fewer tokens.
    - ``bad_words`` (token ids each): the last token is banned where the others are the last tokens of the text.
    - ``logit_bias`` (token id, bias): added before all of these; biases of the same token add up.

    ``is_neutral``: whether nothing is on, so that None does in place of the rules.
    """

    def __init__(
        self,
        prompt_ids: ArrayLike,
        *,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        min_tokens: int = 0,
        end_ids: Iterable[int] = (),
        bad_words: Iterable[Sequence[int]] = (),
        logit_bias: Iterable[tuple[int, float]] = (),
    ) -> None:
        self._repetition, self._presence, self._frequency = repetition_penalty, presence_penalty, frequency_penalty
        self._has_penalties = repetition_penalty != 1.0 or presence_penalty != 0.0 or frequency_penalty != 0.0
        self._end_ids = sorted(end_ids)
        words = sorted({tuple(word) for word in bad_words})
        self._word_starts, self._word_ends = _reversed_starts([word for word in words if len(word) > 1])
        self._column_of: dict[int, int] = {}
        self._columns = np.full(_CAPACITY, _NEUTRAL)  # the first len(_column_of) are in use

        biases: dict[int, float] = {}
        for token_id, bias in logit_bias:
            biases[token_id] = biases.get(token_id, 0.0) + bias
        biases = {token_id: bias for token_id, bias in biases.items() if bias != 0.0}
        biased = self._columns_of(list(biases))
        self._columns["bias"][biased] = list(biases.values())
        banned = self._columns_of([word[0] for word in words if len(word) == 1])
        self._columns["is_banned"][banned] = True
        self._columns["offset"][banned] = BANNED

        tokens = np.asarray(prompt_ids, np.int32)
        self._num_missing = min_tokens if self._end_ids else 0  # answer tokens until the end ids are free
        self._tail = tokens[len(tokens) - min(len(tokens), self._word_starts.shape[1]) :].tolist()
        self.is_neutral = not (self._has_penalties or self._column_of or self._num_missing or len(self._word_ends))
        if self._has_penalties:
            self._count(tokens.tolist())

    def append(self, token_ids: Sequence[int]) -> None:
        """Note tokens of the answer, in their order."""
        self._num_missing -= len(token_ids)
        if self._word_starts.shape[1]:
            self._tail = [*self._tail, *token_ids][-self._word_starts.shape[1] :]
        if self._has_penalties:
            self._count(token_ids)

    def _columns_of(self, token_ids: Sequence[int]) -> NDArray[np.int64]:
        """Find the column of each token; new ones are neutral."""
        column_of = self._column_of
        first = len(column_of)
        new = [token_id for token_id in dict.fromkeys(token_ids) if token_id not in column_of]
        if new:
            column_of.update(zip(new, range(first, first + len(new)), strict=True))
            missing = len(column_of) - len(self._columns)
            if missing > 0:
                more = np.full(max(missing, len(self._columns)), _NEUTRAL)
                self._columns = np.concatenate([self._columns, more])
            self._columns["token_ids"][first : first + len(new)] = new
        return np.array([column_of[token_id] for token_id in token_ids], np.int64)

    def _count(self, token_ids: Sequence[int]) -> None:
        chosen = self._columns_of(token_ids)
        np.add.at(self._columns["counts"], chosen, 1)
        changed = self._columns[chosen]
        self._columns["divisor"][chosen] = self._repetition
        penalties = self._presence + self._frequency * changed["counts"]
        self._columns["offset"][chosen] = np.where(changed["is_banned"], BANNED, -penalties)

    def plan(self, parents: NDArray[np.int32], token_ids: NDArray[np.int32], depths: NDArray[np.int64]) -> _TreePlan:
        """Decide which tokens are edited at the nodes of one tree, ``[N]`` each; node 0 is the end of the text."""
        banned_nodes, banned_ids = self._path_bans(parents, token_ids, depths)
        drafted = token_ids[1:].tolist() if self._has_penalties else []
        column_of = self._column_of
        added: dict[int, int] = {}
        for token_id in (*drafted, *banned_ids):
            if token_id not in column_of and token_id not in added:
                added[token_id] = len(column_of) + len(added)
        return _TreePlan(
            shared=self._columns[: len(column_of)],
            added_ids=list(added),
            node_columns=[column_of[t] if t in column_of else added[t] for t in drafted],
            banned_nodes=banned_nodes,
            banned_columns=[column_of[t] if t in column_of else added[t] for t in banned_ids],
            penalties=(self._repetition, self._presence, self._frequency),
        )

    def _path_bans(
        self, parents: NDArray[np.int32], token_ids: NDArray[np.int32], depths: NDArray[np.int64]
    ) -> tuple[list[int], list[int]]:
        """Find the nodes, and a token of each, that are banned there by the text and the path."""
        nodes: list[int] = []
        banned: list[int] = []
        if self._num_missing > 0:
            for node in np.flatnonzero(depths < self._num_missing).tolist():
                nodes += [node] * len(self._end_ids)
                banned += self._end_ids
        if len(self._word_ends):
            matched_nodes, words = np.nonzero(self._matches(parents, token_ids))
            nodes += matched_nodes.tolist()
            banned += self._word_ends[words].tolist()
        return nodes, banned

    def _matches(self, parents: NDArray[np.int32], token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Say which bad words lack but their last token: ``[N, words]``."""
        longest = self._word_starts.shape[1]
        # The end of the text in front of the draft nodes, as a chain down to the root: -1 where there is no token.
        end_of_text = [-1] * (longest - len(self._tail)) + self._tail
        tokens = np.concatenate([np.array(end_of_text, np.int32), token_ids[1:]])
        parent_of = np.concatenate([np.arange(-1, longest - 1), parents[1:] + (longest - 1)])
        nodes = np.arange(longest - 1, len(tokens))
        matches = np.ones((len(token_ids), len(self._word_ends)), np.bool_)
        for distance in range(longest):
            wanted = self._word_starts[:, distance]
            matches &= (tokens[nodes][:, None] == wanted) | (wanted == -1)
            nodes = parent_of[nodes]
        return matches


def _reversed_starts(words: Sequence[Sequence[int]]) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """All but the last token of each word, last first, padded with -1: ``[words, longest]``; the last: ``[words]``."""
    starts = np.full((len(words), max((len(word) - 1 for word in words), default=0)), -1, np.int32)
    for row, word in enumerate(words):
        starts[row, : len(word) - 1] = word[-2::-1]
    return starts, np.array([word[-1] for word in words], np.int32)


def build_edits(rules: Sequence[LogitRules | None], trees: DraftTrees | None = None) -> LogitEdits | None:
    """Build the edits of a step that samples every node of every tree, in their order; None if there are none.

    ``rules [B]`` are those of the sampled sequences, None = none; ``trees`` None: each tree is its root alone. The root
    of a tree is the last token that its rules know.
    """
    if all(rule is None for rule in rules):
        return None
    if trees is None:
        parents = token_ids = np.full((len(rules), 1), -1, np.int32)
        num_nodes = np.ones(len(rules), np.int64)
    else:
        parents, token_ids, num_nodes = trees.parents, trees.token_ids, trees.num_nodes
    is_on_path = _paths(parents, num_nodes)
    depths = np.count_nonzero(is_on_path, axis=2)

    plans = []
    chosen = []
    for index, (rule, count) in enumerate(zip(rules, num_nodes.tolist(), strict=True)):
        if rule is not None:
            plan = rule.plan(parents[index, :count], token_ids[index, :count], depths[index, :count])
            if plan.num_columns:
                plans.append(plan)
                chosen.append(index)
    if not plans:
        return None
    num_columns = np.array([plan.num_columns for plan in plans])
    sizes = num_nodes[chosen] * num_columns
    ends = np.cumsum(sizes)
    starts = ends - sizes
    edits = _empty_edits(int(ends[-1]))
    first_rows = np.cumsum(num_nodes) - num_nodes
    for plan, start, end, first_row in zip(plans, starts, ends, first_rows[chosen], strict=True):
        plan.write(LogitEdits(*(column[start:end] for column in vars(edits).values())), int(first_row))

    penalised = [index for index, plan in enumerate(plans) if plan.node_columns]
    if penalised:
        sequences = np.array(chosen)[penalised]
        _penalise_paths(
            edits,
            [plans[index] for index in penalised],
            starts[penalised],
            num_columns[penalised],
            is_on_path[sequences],
            token_ids[sequences],
        )
    for plan, start in zip(plans, starts.tolist(), strict=True):
        if plan.banned_nodes:
            places = start + np.array(plan.banned_nodes) * plan.num_columns + np.array(plan.banned_columns)
            edits.offset[places] = BANNED
    return edits


@dataclass(frozen=True)
class _TreePlan:
    """The edits of one tree, node by node: the ``shared`` columns of its sequence, then those of ``added_ids``.

    ``node_columns [N - 1]``: of the draft nodes' tokens, where penalties are on, else empty.
    """

    shared: NDArray[np.void]
    added_ids: list[int]
    node_columns: list[int]
    banned_nodes: list[int]
    banned_columns: list[int]
    penalties: tuple[float, float, float]

    @property
    def num_columns(self) -> int:
        return len(self.shared) + len(self.added_ids)

    def write(self, edits: LogitEdits, first_row: int) -> None:
        """Fill ``edits`` with what holds at every node."""
        num_shared = len(self.shared)
        by_node = (len(edits.rows) // self.num_columns, self.num_columns)
        edits.rows.reshape(by_node)[:] = np.arange(first_row, first_row + by_node[0], dtype=np.int32)[:, None]
        for name, values in vars(edits).items():
            if name != "rows":
                columns = values.reshape(by_node)
                columns[:, :num_shared] = self.shared[name]
                columns[:, num_shared:] = self.added_ids if name == "token_ids" else _NEUTRAL[name]


def _empty_edits(size: int) -> LogitEdits:
    ids = np.empty((2, size), np.int32)
    values = np.empty((3, size), np.float32)
    return LogitEdits(*ids, *values)


def _paths(parents: NDArray[np.int32], num_nodes: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Say which draft nodes are on the path of a node, itself included, the root not: ``[B, N, N]``, row = node."""
    num_trees, widest = parents.shape
    is_on_path = np.zeros((num_trees, widest, widest), np.bool_)
    nodes = np.arange(widest)
    trees, rows = np.nonzero((nodes > 0) & (nodes < num_nodes[:, None]))
    nodes = rows
    while nodes.size:
        is_on_path[trees, rows, nodes] = True
        nodes = parents[trees, nodes]
        is_draft = nodes > 0
        trees, rows, nodes = trees[is_draft], rows[is_draft], nodes[is_draft]
    return is_on_path


def _penalise_paths(
    edits: LogitEdits,
    plans: Sequence[_TreePlan],
    starts: NDArray[np.int64],
    num_columns: NDArray[np.int64],
    is_on_path: NDArray[np.bool_],
    token_ids: NDArray[np.int32],
) -> None:
    """Set at every node the penalties of the tokens on its path. First axis of all: the trees with penalties."""
    columns = np.zeros(token_ids.shape, np.int64)
    before = np.full(token_ids.shape, _NEUTRAL)  # what the text alone does to each node's token
    for row, plan in enumerate(plans):
        columns[row, 1 : len(plan.node_columns) + 1] = plan.node_columns
        is_shared = columns[row] < len(plan.shared)
        before[row, is_shared] = plan.shared[columns[row, is_shared]]
    is_same = token_ids[:, :, None] == token_ids[:, None, :]
    counts = is_on_path.astype(np.float32) @ is_same.astype(np.float32)  # whole numbers, exact
    trees, nodes, others = np.nonzero(is_on_path)
    total = before["counts"][trees, others] + counts[trees, nodes, others].astype(np.int64)
    repetition, presence, frequency = np.array([plan.penalties for plan in plans])[trees].T
    places = starts[trees] + nodes * num_columns[trees] + columns[trees, others]
    edits.divisor[places] = repetition
    edits.offset[places] = np.where(before["is_banned"][trees, others], BANNED, -(presence + frequency * total))
