"""The rules of a request that change logits, and the edits they make at every node of a step's trees.

What a rule does depends on the tokens before the one that is drawn: the text of the sequence, and at a draft node also
the tokens on the path from the root to it. So speculation changes nothing: a node is edited as plain decoding would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from draftline.draft_trees import DraftTrees
from draftline.logit_edits import BANNED, LogitEdits

_COLUMN = np.dtype(  # what every row of a sequence does to one token
    [
        ("token_id", np.int32),
        ("count", np.int64),
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
        for token_id, bias in biases.items():
            if bias != 0.0:
                self._columns["bias"][self._column(token_id)] = bias
        for word in words:
            if len(word) == 1:
                column = self._column(word[0])
                self._columns["is_banned"][column], self._columns["offset"][column] = True, BANNED

        tokens = np.asarray(prompt_ids, np.int32)
        self._num_missing = min_tokens if self._end_ids else 0  # answer tokens until the end ids are free
        self._tail = tokens[len(tokens) - min(len(tokens), self._word_starts.shape[1]) :].tolist()
        self.is_neutral = not (self._has_penalties or self._column_of or self._num_missing or len(self._word_ends))
        if self._has_penalties:
            distinct, counts = np.unique(tokens, return_counts=True)
            for token_id, count in zip(distinct.tolist(), counts.tolist(), strict=True):
                self._count(token_id, count)

    def append(self, token_ids: Sequence[int]) -> None:
        """Note tokens of the answer, in their order."""
        self._num_missing -= len(token_ids)
        if self._word_starts.shape[1]:
            self._tail = [*self._tail, *token_ids][-self._word_starts.shape[1] :]
        if self._has_penalties:
            for token_id in token_ids:
                self._count(token_id, 1)

    def edit_tree(self, parents: NDArray[np.int32], token_ids: NDArray[np.int32], first_row: int) -> LogitEdits | None:
        """Build the edits of every node; node n is sampled row ``first_row + n``.

        Shapes: ``parents``, ``token_ids [N]`` as in ``draftline.tree``; the root is the last token of the text.
        """
        num_nodes = len(token_ids)
        banned_nodes, banned_ids = self._path_bans(parents, token_ids)
        drafted = token_ids[1:].tolist() if self._has_penalties else []
        num_shared = len(self._column_of)
        added: dict[int, int] = {}  # tokens that are edited at some nodes only
        for token_id in (*drafted, *banned_ids):
            if token_id not in self._column_of and token_id not in added:
                added[token_id] = num_shared + len(added)
        num_columns = num_shared + len(added)
        if not num_columns:
            return None

        edits = LogitEdits(
            rows=np.repeat(np.arange(first_row, first_row + num_nodes, dtype=np.int32), num_columns),
            token_ids=np.empty(num_nodes * num_columns, np.int32),
            bias=np.empty(num_nodes * num_columns, np.float32),
            divisor=np.empty(num_nodes * num_columns, np.float32),
            offset=np.empty(num_nodes * num_columns, np.float32),
        )
        by_node = (num_nodes, num_columns)
        shared = self._columns[:num_shared]
        token_columns = edits.token_ids.reshape(by_node)
        token_columns[:, :num_shared] = shared["token_id"]
        token_columns[:, num_shared:] = list(added)
        divisor, offset = edits.divisor.reshape(by_node), edits.offset.reshape(by_node)
        for name, values in (("bias", edits.bias.reshape(by_node)), ("divisor", divisor), ("offset", offset)):
            values[:, :num_shared] = shared[name]
            values[:, num_shared:] = _NEUTRAL[name]
        if drafted:
            columns = np.array([self._column_of.get(t, added.get(t, -1)) for t in drafted], np.int64)
            self._count_paths(parents, columns, divisor, offset)
        if banned_ids:
            offset[banned_nodes, [self._column_of.get(t, added.get(t, -1)) for t in banned_ids]] = BANNED
        return edits

    def _column(self, token_id: int) -> int:
        """Find the column of a token; a new one is neutral."""
        column = self._column_of.get(token_id)
        if column is None:
            column = self._column_of[token_id] = len(self._column_of)
            if column == len(self._columns):
                self._columns = np.concatenate([self._columns, np.full(column, _NEUTRAL)])
            self._columns["token_id"][column] = token_id
        return column

    def _count(self, token_id: int, count: int) -> None:
        column = self._column(token_id)
        columns = self._columns
        columns["count"][column] += count
        columns["divisor"][column] = self._repetition
        if not columns["is_banned"][column]:
            columns["offset"][column] = -(self._presence + self._frequency * columns["count"][column])

    def _count_paths(
        self,
        parents: NDArray[np.int32],
        columns: NDArray[np.int64],
        divisor: NDArray[np.float32],
        offset: NDArray[np.float32],
    ) -> None:
        """Edit at every node the tokens on its path; ``columns [N - 1]`` are those of the nodes 1, 2, ..."""
        distinct, place = np.unique(columns, return_inverse=True)
        counts = np.zeros((len(parents), len(distinct)), np.int64)
        nodes = ancestors = np.arange(1, len(parents))
        while nodes.size:
            counts[nodes, place[ancestors - 1]] += 1  # a node has one ancestor at each distance
            ancestors = parents[ancestors]
            is_draft = ancestors > 0
            nodes, ancestors = nodes[is_draft], ancestors[is_draft]
        nodes, places = np.nonzero(counts)
        changed = distinct[places]
        shared = np.full(len(distinct), _NEUTRAL)
        is_shared = distinct < len(self._column_of)
        shared[is_shared] = self._columns[distinct[is_shared]]
        total = counts[nodes, places] + shared["count"][places]
        divisor[nodes, changed] = self._repetition
        values = -(self._presence + self._frequency * total)
        offset[nodes, changed] = np.where(shared["is_banned"][places], BANNED, values)

    def _path_bans(self, parents: NDArray[np.int32], token_ids: NDArray[np.int32]) -> tuple[list[int], list[int]]:
        """Find the nodes, and a token of each, that are banned there by the text and the path."""
        nodes: list[int] = []
        banned: list[int] = []
        if self._num_missing > 0:
            depths = [0]
            for parent in parents[1:].tolist():
                depths.append(depths[parent] + 1)
            for node, depth in enumerate(depths):
                if depth < self._num_missing:
                    nodes += [node] * len(self._end_ids)
                    banned += self._end_ids
        if len(self._word_ends):
            matched_nodes, words = np.nonzero(self._matches(parents, token_ids))
            nodes += matched_nodes.tolist()
            banned += self._word_ends[words].tolist()
        return nodes, banned

    def _matches(self, parents: NDArray[np.int32], token_ids: NDArray[np.int32]) -> NDArray[np.bool_]:
        """Say which bad words need but their last token: ``[N, words] bool``."""
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

    ``rules [B]`` are those of the sampled sequences, None = none; ``trees`` None: each tree is its root alone. Every
    text must end with the root of its tree.
    """
    if all(rule is None for rule in rules):
        return None
    parts = []
    row = 0
    root_parents, root_ids = np.array([-1], np.int32), np.array([-1], np.int32)
    for index, rule in enumerate(rules):
        num_nodes = 1 if trees is None else int(trees.num_nodes[index])
        if rule is not None:
            if trees is None:
                part = rule.edit_tree(root_parents, root_ids, row)
            else:
                part = rule.edit_tree(trees.parents[index, :num_nodes], trees.token_ids[index, :num_nodes], row)
            if part is not None:
                parts.append(part)
        row += num_nodes
    if not parts:
        return None
    return LogitEdits(
        *(np.concatenate(columns) for columns in zip(*(vars(part).values() for part in parts), strict=True))
    )


def edit_logits_reference(
    logits: ArrayLike,
    token_ids: Sequence[int],
    num_prompt_tokens: int,
    *,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
    min_tokens: int = 0,
    end_ids: Iterable[int] = (),
    bad_words: Iterable[Sequence[int]] = (),
    logit_bias: Iterable[tuple[int, float]] = (),
) -> NDArray[np.float32]:
    """Edit the logits of one position, given all tokens before it: the oracle of ``LogitRules`` and of the graph.

    Shapes: ``logits [V]`` -> ``[V] float32``. Numerics: float32 in the graph's order, so equal to the last bit.

    >>> edit_logits_reference([2.0, -2.0, 2.0], [0, 1, 0], 2, repetition_penalty=2.0, frequency_penalty=0.5).tolist()
    [0.0, -4.5, 2.0]
    """
    edited = np.array(logits, np.float32)
    biases: dict[int, float] = {}
    for token_id, bias in logit_bias:
        biases[token_id] = biases.get(token_id, 0.0) + bias
    for token_id, bias in biases.items():
        edited[token_id] += np.float32(bias)
    for token_id in set(token_ids):
        logit, penalty = edited[token_id], np.float32(repetition_penalty)
        logit = logit / penalty if logit > 0 else logit * penalty
        edited[token_id] = logit + np.float32(-(presence_penalty + frequency_penalty * list(token_ids).count(token_id)))
    if len(token_ids) - num_prompt_tokens < min_tokens:
        for token_id in end_ids:
            edited[token_id] = BANNED
    for word in bad_words:
        num_before = len(word) - 1
        if num_before <= len(token_ids) and list(word[:-1]) == list(token_ids[len(token_ids) - num_before :]):
            edited[word[-1]] = BANNED
    return np.maximum(edited, np.float32(BANNED))
