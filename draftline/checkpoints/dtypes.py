"""Element types of checkpoint tensors: our names, safetensors' codes, numpy's types."""

from __future__ import annotations

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from draftline.errors import CheckpointError

# safetensors code -> our name (numpy's spelling); every type whose elements are whole bytes.
SAFETENSORS_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U64": "uint64",
    "U32": "uint32",
    "U16": "uint16",
    "U8": "uint8",
    "BOOL": "bool",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
}
SAFETENSORS_CODES = {name: code for code, name in SAFETENSORS_NAMES.items()}

# The dtypes a converted checkpoint may have, with the bits of the exponent: all set means infinity or NaN.
EXPONENT_BITS: dict[str, tuple[type[np.unsignedinteger], int]] = {  # type: ignore[type-arg]
    "float32": (np.uint32, 0x7F800000),
    "float16": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
}


def numpy_dtype(name: str) -> np.dtype[np.generic]:
    """Return numpy's dtype for one of our names, little-endian; bfloat16 and float8 are of ``ml_dtypes``."""
    if name in ("bfloat16", "float8_e4m3fn", "float8_e8m0fnu"):
        return np.dtype(getattr(ml_dtypes, name))
    return np.dtype(name).newbyteorder("<")


def is_finite(values: NDArray[np.generic], dtype: str) -> bool:
    """Tell whether no element is infinite or NaN; ``dtype`` is one of ``EXPONENT_BITS``.

    Looks at the exponent bits alone, which is several times faster than ``np.isfinite`` on 16-bit types.

    >>> is_finite(np.array([1.0, -65504.0], np.float16), "float16")
    True
    >>> is_finite(np.array([1.0, np.nan], np.float32), "float32")
    False
    """
    bits_type, exponent = EXPONENT_BITS[dtype]
    bits = values.view(bits_type)
    return bits.size == 0 or int((bits & bits_type(exponent)).max()) != exponent


def check_convertible_dtype(dtype: str, where: object) -> None:
    """Raise CheckpointError unless ``dtype`` is one a converted checkpoint may have."""
    if dtype not in EXPONENT_BITS:
        raise CheckpointError(where, f"dtype is one of {', '.join(EXPONENT_BITS)}", dtype, "choose one of these")
