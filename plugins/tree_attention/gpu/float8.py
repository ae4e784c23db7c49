"""float8_e4m3fn in integer and float32 arithmetic: the same on every architecture, and in the interpreter.

Source: OCP 8-bit floating point specification, E4M3: bias 7, largest number 448, no infinity, 0x7F is not a number.
"""

import triton
import triton.language as tl


@triton.jit
def decode_float8(codes, DTYPE: tl.constexpr):
    """Return the numbers of uint8 ``codes``: their bits as those of a float16, whose exponent is 8 greater."""
    bits = codes.to(tl.uint16)
    halves = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), halves).to(DTYPE)


@triton.jit
def round_float8(x):
    """Return float32 ``x`` rounded to the nearest number of float8, ties to even, beyond 448 to 448."""
    x = tl.where(x > 448.0, 448.0, tl.where(x < -448.0, -448.0, x))
    exponent = (x.to(tl.int32, bitcast=True) >> 23) & 0xFF
    # The distance of neighbours is 2 ** -3 of the power of two below, which is 2 ** -6 (121) to 2 ** 8 (135). A number
    # 1.5 * 2 ** 23 times as large has just that distance from the next float32, so adding it rounds.
    exponent = tl.minimum(tl.maximum(exponent, 121), 135)
    distance = ((exponent - 3) << 23).to(tl.float32, bitcast=True)
    return (x + distance * 12582912.0) - distance * 12582912.0


@triton.jit
def encode_float8(x):
    """Return the uint8 codes of float32 ``x``, rounded as by ``round_float8``."""
    rounded = round_float8(x)
    bits = rounded.to(tl.int32, bitcast=True)
    normal = ((bits >> 20) & 0x7FF) - ((127 - 7) << 3)
    is_subnormal = tl.abs(rounded) < 0.015625
    subnormal = (tl.where(is_subnormal, tl.abs(rounded), 0.0) * 512.0).to(tl.int32)
    code = tl.where(is_subnormal, subnormal, normal)
    code = tl.where(rounded != rounded, 0x7F, code)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 0x80  # rounding loses that of 0
    return (code | sign).to(tl.uint8)
