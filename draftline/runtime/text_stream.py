"""The text of one answer as it grows: incremental detokenisation, and stop words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from draftline.errors import RequestError

_REPLACEMENT = "\ufffd"
_MAX_WINDOW_TOKENS = 16
_MAX_UNSETTLED_TOKENS = 64
_MAX_TOKENS_OF_A_CHARACTER = 4


class TextStream:
    """Turn token ids into text, piece by piece, so that the pieces joined are the text of all tokens at once.

    ``decode`` maps token ids to text. It is called on a short window of the newest tokens, never on the whole answer:
    the window starts some tokens before the first one whose text is due, so that decoders which drop the space in front
    of their first token keep the spaces inside the answer.

    ``stop_words``: the answer ends before the first of them that is *completed* as the text grows (of several completed
    by the same character, the longest). This does not depend on how the tokens arrive.

    Raises: RequestError for an empty stop word, which would end every answer before it starts.
    """

    def __init__(self, decode: Callable[[Sequence[int]], str], stop_words: Sequence[str] = ()) -> None:
        if not all(stop_words):
            raise RequestError("stop_words", "every stop word has at least one character", '""', "leave it out")
        self._decode = decode
        self._stop_words = tuple(stop_words)
        self._window: list[int] = []
        self._num_settled = 0  # characters of decode(window) that were already taken
        self._boundary = 0  # tokens of the window up to the last moment when it ended in a whole character
        self._held = ""  # settled text that may be the beginning of a stop word
        self.stopped = False

    def push(self, token_ids: Sequence[int]) -> str:
        """Take the next tokens and return the text that is safe to show.

        Held back until it is decided: an incomplete character at the end (it decodes to U+FFFD), and a suffix that may
        become a stop word. After a stop word, ``stopped`` is True and every further call returns an empty string.
        """
        pieces = []
        for token_id in token_ids:
            if self.stopped:
                break
            pieces.append(self._push(token_id))
        return "".join(pieces)

    def finish(self) -> str:
        """Return what is still held back, characters that stayed incomplete included, up to a stop word."""
        if self.stopped:
            return ""
        piece = self._decode(self._window)[self._num_settled :]
        self._window, self._num_settled, self._boundary = [], 0, 0
        return self._release(piece, is_last=True)

    def _push(self, token_id: int) -> str:
        self._window.append(token_id)
        text = self._decode(self._window)
        whole = text.rstrip(_REPLACEMENT)
        piece = text[self._num_settled : len(whole)]
        self._num_settled = max(self._num_settled, len(whole))
        if len(whole) == len(text):
            self._slide()
        elif len(self._window) > _MAX_UNSETTLED_TOKENS:
            piece += self._settle(text)
        return self._release(piece, is_last=False)

    def _slide(self) -> None:
        """Shorten a window that ends in a whole character; its new start is an earlier such end."""
        if len(self._window) > _MAX_WINDOW_TOKENS and self._boundary > 0:
            kept = self._window[self._boundary :]
            num_characters = len(self._decode(kept))
            # Tokens without text (special ones) would not keep the space of the token after them.
            if num_characters > 0:
                self._window, self._num_settled = kept, num_characters
        self._boundary = len(self._window)

    def _settle(self, text: str) -> str:
        """Take U+FFFD as they are where no later token can change them: bounds the window of an undecodable answer."""
        last = len(self._window) - _MAX_TOKENS_OF_A_CHARACTER
        for split in range(last, last - _MAX_TOKENS_OF_A_CHARACTER, -1):
            head, tail = self._decode(self._window[:split]), self._decode(self._window[split:])
            if head + tail == text:
                piece = head[self._num_settled :]
                self._window = self._window[split:]
                self._num_settled = max(self._num_settled - len(head), 0)
                self._boundary = 0
                return piece
        return ""

    def _release(self, piece: str, *, is_last: bool) -> str:
        if not self._stop_words:
            return piece
        text = self._held + piece
        matches = [(text.find(word) + len(word), text.find(word)) for word in self._stop_words if word in text]
        if matches:
            self.stopped, self._held = True, ""
            return text[: min(matches)[1]]
        num_held = 0 if is_last else self._num_undecided(text)
        self._held = text[len(text) - num_held :]
        return text[: len(text) - num_held]

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest suffix that begins a stop word; ``text`` holds no whole one."""
        longest = min(max(map(len, self._stop_words)) - 1, len(text))
        for length in range(longest, 0, -1):
            suffix = text[len(text) - length :]
            if any(word.startswith(suffix) for word in self._stop_words):
                return length
        return 0
