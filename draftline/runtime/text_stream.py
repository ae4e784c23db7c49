"""Text of one answer as it grows: incremental detokenisation and stop words.

``TextStream(decode, stop_words, prompt_ids)`` where ``decode`` maps token ids to text.
"""

from __future__ import annotations


class TextStream:
    """Placeholder of the agreed interface; filled by the runtime."""
