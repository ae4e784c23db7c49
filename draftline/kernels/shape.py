"""What kernels are compiled for: the model's side (``KernelShape``) and the machine's (``KernelConfiguration``)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Literal

from draftline.errors import BuildError

Dtype = Literal["float16", "bfloat16", "float32"]
KvDtype = Literal["float16", "bfloat16", "float32", "float8_e4m3fn"]

KV_DTYPES_OF = {  # pools whose numbers a dtype holds without rounding
    "float32": ("float32", "float16", "float8_e4m3fn"),
    "float16": ("float16", "float8_e4m3fn"),
    "bfloat16": ("bfloat16", "float8_e4m3fn"),
}
DTYPES = tuple(KV_DTYPES_OF)
DTYPE_BYTES = {"float16": 2, "bfloat16": 2, "float32": 4, "float8_e4m3fn": 1}
BLOCK_SIZES = (8, 16, 32, 64, 128)
MAX_HEAD_SIZE = 256
MAX_SOFTCAP = 1e6  # beyond, float32 has no digits for what a limit does to scores
MAX_GROUP = 64  # query heads of one key/value head: a tile of scores has a row for each


@dataclass(frozen=True)
class KernelShape:
    """One TreeAttention of a model.

    - ``num_heads``, ``num_kv_heads``, ``head_size``, ``block_size``, ``window``, ``softcap``: the operator's
      attributes; ``softcap`` is rounded to float32, in which it comes back from a graph or a plan.
    - ``has_sinks``: whether the input ``sinks`` is read; without, all of it is -inf.
    - ``dtype``: of ``q``, ``k_new``, ``v_new`` and ``out``. ``kv_dtype``: of ``kv_pool``; float8_e4m3fn has scales,
      which are arguments of the launch, as ``scale`` is.

    Raises: BuildError where the kernels have no code for it.
    """

    num_heads: int
    num_kv_heads: int
    head_size: int
    block_size: int
    dtype: Dtype = "float16"
    kv_dtype: KvDtype = "float16"
    window: int = 0
    softcap: float = 0.0
    has_sinks: bool = False

    def __post_init__(self) -> None:
        where = "TreeAttention kernel"
        if not 0 <= self.softcap <= MAX_SOFTCAP:
            rule = f"softcap is 0 (none) to {MAX_SOFTCAP:g}"
            raise BuildError(where, rule, self.softcap, "correct the model's attention_logit_softcapping")
        object.__setattr__(self, "softcap", struct.unpack("f", struct.pack("f", self.softcap))[0])
        if self.dtype not in DTYPES:
            raise BuildError(where, f"dtype is one of {', '.join(DTYPES)}", self.dtype, "choose one of them")
        if self.kv_dtype not in KV_DTYPES_OF[self.dtype]:
            rule = f"kv_dtype beside {self.dtype} is one of {', '.join(KV_DTYPES_OF[self.dtype])}"
            raise BuildError(where, rule, self.kv_dtype, "set kv_cache.dtype to one of them")
        if self.block_size not in BLOCK_SIZES:
            rule = f"block_size is one of {', '.join(map(str, BLOCK_SIZES))}"
            raise BuildError(where, rule, self.block_size, "set kv_cache.block_size to one of them")
        if not 8 <= self.head_size <= MAX_HEAD_SIZE or self.head_size % 8:
            rule = f"head_size is a multiple of 8, {MAX_HEAD_SIZE} at most"
            raise BuildError(where, rule, self.head_size, "run this model with engine.backend: onnxruntime")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads or not 1 <= self.group <= MAX_GROUP:
            rule = f"num_heads is 1 to {MAX_GROUP} times num_kv_heads"
            got = f"{self.num_heads} and {self.num_kv_heads}"
            raise BuildError(where, rule, got, "run this model with engine.backend: onnxruntime")

    @property
    def group(self) -> int:
        """Query heads that read one key/value head."""
        return self.num_heads // self.num_kv_heads

    @property
    def padded_head_size(self) -> int:
        """Columns of a tile: the head size, raised to a power of two; what is added is masked, never read."""
        return max(16, 1 << (self.head_size - 1).bit_length())


@dataclass(frozen=True)
class KernelConfiguration:
    """How the kernels cut their work. Bits of a result depend on it; on nothing else but the row's own sequence.

    - ``tile_rows``: rows of a tile of scores, a power of two: ``tile_rows // group`` in-step tokens, ``group`` query
      heads each. ``tile_keys``: committed keys of a tile.
    - A sequence's committed keys are cut into at most ``max_sections`` sections, one program each, merged by the second
      kernel. A section has ``min_section_keys`` or more, and for each in-step token and head of the group
      ``min_keys_per_row`` or more, as every row leaves a partial result of each section. A sequence with more than
      ``max_split_rows`` in-step tokens, a prefill chunk, has one section: its rows are parallel enough.
    - ``num_warps``, ``num_stages``: of the compiler.
    """

    tile_rows: int
    tile_keys: int
    min_section_keys: int
    min_keys_per_row: int
    max_sections: int
    max_split_rows: int
    num_warps: int
    num_stages: int
