"""Steps of a draft session written by hand: several sequences, forwards of known tokens, then nodes by depth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from draftline.sessions.protocol import DraftBatch, DraftResult, DraftSession
from draftline.tree import pack_mask
from tests.sessions.tiny_engines import Text


@dataclass
class InStep:
    """In-step rows of one sequence: ids, the parents of each among them (-1 = committed context), depths."""

    ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)

    def add(self, row_id: int, parent: int) -> None:
        self.ids.append(row_id)
        self.parents.append(parent)
        self.depths.append(0 if parent < 0 else self.depths[parent] + 1)

    def mask(self) -> NDArray[np.bool_]:
        mask = np.eye(len(self.ids), dtype=np.bool_)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                mask[node] |= mask[parent]
        return mask


class DraftSteps:
    """Drives ``session`` over ``texts``, whose ``num_committed`` counts rows of the drafter's pool."""

    def __init__(self, session: DraftSession, texts: Sequence[Text], is_head: bool = True) -> None:
        self.session, self.texts, self.is_head = session, texts, is_head
        self.in_step = [InStep() for _ in texts]
        self.num_rows = 0
        self.batch_of_last_forward: DraftBatch | None = None

    def first(
        self, tokens: Sequence[Sequence[int]], feature_rows: Sequence[Sequence[int]], with_candidates: bool = True
    ) -> DraftResult:
        """Run chains of known tokens, packed in order, without a mask; candidates behind the last of each.

        ``feature_rows``: of the target's last forward, for heads; they are kept in other places first.
        """
        self.in_step, self.num_rows = [InStep() for _ in self.texts], 0
        for in_step, chain in zip(self.in_step, tokens, strict=True):
            for index in range(len(chain)):
                in_step.add(self.num_rows, index - 1)
                self.num_rows += 1
        lasts = np.cumsum([len(chain) for chain in tokens]) - 1
        places = np.arange(self.num_rows)[::-1]
        if self.is_head:
            self.session.keep_features(np.concatenate([np.array(rows, np.int64) for rows in feature_rows]), places)
        positions = [text.num_committed + np.arange(len(c)) for text, c in zip(self.texts, tokens, strict=True)]
        return self.session.forward(
            self._batch(
                np.concatenate([np.array(chain, np.int32) for chain in tokens]),
                np.concatenate(positions).astype(np.int32),
                places.astype(np.int32),
                lasts if with_candidates else np.empty(0, np.int32),
                is_first=True,
            )
        )

    def commit(self, counts: Sequence[int], block_size: int = 16) -> None:
        """Commit the first ``counts[b]`` in-step rows of each sequence, and forget that they are in-step rows."""
        ids: list[int] = []
        slots: list[NDArray[np.int64]] = []
        for text, in_step, count in zip(self.texts, self.in_step, counts, strict=True):
            ids += in_step.ids[:count]
            slots.append(text.slots(text.num_committed, count, block_size))
            text.num_committed += count
            del in_step.ids[:count], in_step.depths[:count]
            in_step.parents = [max(parent - count, -1) for parent in in_step.parents[count:]]
            assert not in_step.ids or count == 0 or in_step.parents[0] == -1
            in_step.depths = [depth - count for depth in in_step.depths]
        self.session.commit(np.array(ids, np.int64), np.concatenate(slots))

    def later(self, nodes: Sequence[Sequence[tuple[int, int, int]]]) -> DraftResult:
        """Run new nodes (token, parent among the sequence's in-step rows, id of the row whose output feeds it).

        Ids go from the last sequence to the first, so that packed order and the order of ids differ. Candidates come
        for every node, in the order of ids.
        """
        first_id, tokens, positions, fed = self.num_rows, [], [], []
        for text, in_step, new in reversed(list(zip(self.texts, self.in_step, nodes, strict=True))):
            for token, parent, feature_id in new:
                in_step.add(self.num_rows, parent)
                self.num_rows += 1
                tokens.append(token)
                positions.append(text.num_committed + in_step.depths[-1])
                fed.append(-1 - feature_id)
        candidate_rows = np.arange(self.num_rows - first_id)
        arrays = [np.array(values, np.int32) for values in (tokens, positions, fed, candidate_rows)]
        return self.session.forward(self._batch(*arrays, is_first=False))

    def _batch(
        self,
        input_ids: NDArray[np.int32],
        position_ids: NDArray[np.int32],
        feature_rows: NDArray[np.int32],
        candidate_rows: NDArray[np.int32],
        *,
        is_first: bool,
    ) -> DraftBatch:
        lengths = [len(in_step.ids) for in_step in self.in_step]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        mask = np.zeros((starts[-1], -(-max(lengths) // 32)), np.int32)
        for start, in_step in zip(starts, self.in_step, strict=False):
            packed = pack_mask(in_step.mask())
            mask[start : start + len(packed), : packed.shape[1]] = packed
        table = np.full((len(self.texts), max(len(text.blocks) for text in self.texts)), -1, np.int32)
        for row, text in enumerate(self.texts):
            table[row, : len(text.blocks)] = text.blocks
        num_candidates = len(candidate_rows)
        self.batch_of_last_forward = DraftBatch(
            is_first=is_first,
            input_ids=input_ids,
            position_ids=position_ids,
            feature_rows=feature_rows,
            sequence_starts=starts,
            row_ids=np.concatenate([np.array(in_step.ids, np.int32) for in_step in self.in_step]),
            context_lengths=np.array([text.num_committed for text in self.texts], np.int32),
            block_table=table,
            candidate_rows=candidate_rows.astype(np.int32),
            temperature=np.zeros(num_candidates, np.float32),
            top_k=np.zeros(num_candidates, np.int32),
            top_p=np.ones(num_candidates, np.float32),
            uniform=np.zeros(num_candidates, np.float32),
            packed_mask=None if is_first else mask,
        )
        return self.batch_of_last_forward
