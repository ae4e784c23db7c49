"""Codes out of words, against arithmetic on Python's integers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from draftline.checkpoints.quantized.packing import num_words, unpack_octets, unpack_words
from tests.tiny_packings import pack_string


@settings(max_examples=40, deadline=None)
@given(bits=st.sampled_from([2, 3, 4, 8]), rows=st.integers(1, 3), words=st.integers(1, 3), seed=st.integers(0, 99))
def test_words_are_one_string_of_bits(bits: int, rows: int, words: int, seed: int) -> None:
    num_codes = 32 * words * (3 if bits == 3 else 1) // bits
    codes = np.random.default_rng(seed).integers(0, 2**bits, (rows, num_codes))
    packed = np.stack([pack_string(row, bits) for row in codes])
    for row, row_codes in zip(packed, codes.tolist(), strict=True):
        string = sum(code << bits * place for place, code in enumerate(row_codes))
        assert [int(word) & 0xFFFFFFFF for word in row] == [string >> 32 * k & 0xFFFFFFFF for k in range(len(row))]
    assert packed.shape == (rows, num_words(num_codes, bits))
    np.testing.assert_array_equal(unpack_words(packed, bits), codes)
    np.testing.assert_array_equal(unpack_words(np.asfortranarray(packed), bits), codes)


@given(octets=st.lists(st.integers(0, 255), min_size=1, max_size=8), bits=st.sampled_from([2, 4, 8]))
def test_octets_give_their_low_bits_first(octets: list[int], bits: int) -> None:
    expected = [octet >> shift & (1 << bits) - 1 for octet in octets for shift in range(0, 8, bits)]
    assert unpack_octets(np.array([octets], np.uint8), bits).tolist() == [expected]


@pytest.mark.parametrize(("num_codes", "bits", "words"), [(8, 4, 1), (9, 4, 2), (32, 3, 3), (33, 3, 4), (4, 8, 1)])
def test_words_that_codes_need(num_codes: int, bits: int, words: int) -> None:
    assert num_words(num_codes, bits) == words


def test_negative_words_are_the_same_bits() -> None:
    words: NDArray[Any] = np.array([[-1, -(2**31)]], np.int32)
    assert unpack_words(words, 4).tolist() == [[15] * 8 + [0] * 7 + [8]]
