"""Changes to single logits before sampling: penalties, bias, bad words and minimum lengths, as sparse edits."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

BANNED = -3.0e38


@dataclass(frozen=True)
class LogitEdits:
    """Changes to single logits before sampling, E of them; no (row, token) twice.

    ``edited = repeated(logit + bias) + offset``, where ``repeated(l)`` is ``l / divisor`` above 0 and ``l * divisor``
    otherwise (the repetition penalty). Neutral: bias 0, divisor 1, offset 0. ``offset`` ``BANNED`` bans a token.

    Shapes: ``rows [E] int32``, indices into ``StepBatch.sample_rows``; ``token_ids [E] int32``; the others
    ``[E] float32``.
    """

    rows: NDArray[np.int32]
    token_ids: NDArray[np.int32]
    bias: NDArray[np.float32]
    divisor: NDArray[np.float32]
    offset: NDArray[np.float32]
