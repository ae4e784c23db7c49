"""Codes of a few bits out of the words that hold several of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WORD_BITS = 32


def unpack_words(words: NDArray[Any], bits: int) -> NDArray[np.uint8]:
    """Read each row as one string of bits, the least significant first, and cut it into codes.

    Shapes: ``words [n, k] int32`` -> ``[n, floor(32 k / bits)] uint8``, ``bits`` 2, 3, 4 or 8.

    >>> unpack_words(np.array([[0x76543210]], np.int32), 4).tolist()
    [[0, 1, 2, 3, 4, 5, 6, 7]]
    """
    octets = np.ascontiguousarray(words).view(np.uint8)
    if 8 % bits:
        digits = np.unpackbits(octets, axis=1, bitorder="little")
        whole = digits[:, : digits.shape[1] // bits * bits].reshape(len(octets), -1, bits)
        return np.packbits(whole, axis=2, bitorder="little")[..., 0]
    return unpack_octets(octets, bits)


def unpack_octets(octets: NDArray[np.uint8], bits: int) -> NDArray[np.uint8]:
    """Cut ``octets [n, k]`` into codes ``[n, 8 k / bits]``, the low bits first; ``bits`` divides 8.

    >>> unpack_octets(np.array([[0x21, 0x43]], np.uint8), 4).tolist()
    [[1, 2, 3, 4]]
    """
    codes = np.empty((*octets.shape, 8 // bits), np.uint8)
    for place in range(8 // bits):  # 13 times as fast as one operation with an axis of a few elements
        codes[..., place] = octets >> np.uint8(place * bits) & np.uint8((1 << bits) - 1)
    return codes.reshape(len(octets), -1)


def num_words(num_codes: int, bits: int) -> int:
    """Return how many words of 32 bits hold that many codes."""
    return -(-num_codes * bits // WORD_BITS)
