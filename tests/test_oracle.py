from __future__ import annotations

import doctest
import math

import numpy as np

import draftline.oracle
from draftline.oracle import tree_attention
from draftline.tree import build_tree_mask, pack_mask


def test_examples() -> None:
    assert doctest.testmod(draftline.oracle).failed == 0


def test_a_branching_tree_by_hand() -> None:
    """One committed token and the tree 0 -> (1, 2): node 2 sees the committed token, the root, itself."""
    pool = np.full((3, 2, 1, 8, 2), np.nan)
    pool[2, 0, 0, 0], pool[2, 1, 0, 0] = [1.0, 0.0], [1.0, 0.0]
    k_new = np.array([[0.0, 0.0], [9.0, 9.0], [2.0, 0.0]])[:, None]
    v_new = np.array([[0.0, 1.0], [7.0, 7.0], [3.0, 3.0]])[:, None]
    q = np.array([[1.0, 0.0]] * 3)[:, None]
    out = tree_attention(
        q,
        k_new,
        v_new,
        pool,
        np.array([[2]], np.int32),
        np.array([1], np.int32),
        np.array([0, 3], np.int32),
        pack_mask(build_tree_mask([-1, 0, 0])),
        scale=math.log(2.0),
        window=0,
    )
    # Node 2 attends to keys with scores 1, 0, 2, hence weights 2 : 1 : 4.
    assert np.allclose(out[2], [(2 * 1 + 4 * 3) / 7, (1 * 1 + 4 * 3) / 7], rtol=0, atol=1e-15)
    assert np.allclose(out[0], [2 / 3, 1 / 3], rtol=0, atol=1e-15)


def test_query_heads_share_key_heads_in_order() -> None:
    """With one key each, the output of a head is the value of its key/value head."""
    v_new = np.array([[[1.0], [2.0]]])
    tables = [np.zeros((1, 1), np.int32), np.zeros(1, np.int32), np.array([0, 1], np.int32), np.ones((1, 1), np.int32)]
    pool = np.zeros((1, 2, 2, 8, 1))
    out = tree_attention(np.ones((1, 4, 1)), v_new, v_new, pool, *tables, scale=1.0, window=0)
    assert out.tolist() == [[1.0, 1.0, 2.0, 2.0]]
