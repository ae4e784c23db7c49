from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from draftline.errors import RequestError
from draftline.runtime.text_stream import TextStream
from tests.tiny_checkpoints import write_tiny_tokenizer


def cut(text: str, stop_words: Sequence[str]) -> str:
    """Cut before the stop word that is completed first; of several completed together, the longest."""
    for end in range(1, len(text) + 1):
        starts = [end - len(word) for word in stop_words if text[:end].endswith(word)]
        if starts:
            return text[: min(starts)]
    return text


class ByteLevel:
    """A byte-level vocabulary: token i is ``pieces[i]``; counts how many tokens it was asked to decode at once."""

    def __init__(self, pieces: list[bytes]) -> None:
        self.pieces = pieces
        self.longest = 0

    def decode(self, token_ids: Sequence[int]) -> str:
        self.longest = max(self.longest, len(token_ids))
        return b"".join(self.pieces[token_id] for token_id in token_ids).decode("utf-8", errors="replace")


def decode_metaspace(token_ids: Sequence[int]) -> str:
    """SentencePiece's rule: the space in front of the first word is dropped."""
    words = ["\u2581the", "\u2581cat", "s", "\u2581", ""]
    return "".join(words[token_id] for token_id in token_ids).replace("\u2581", " ").removeprefix(" ")


def stream_all(stream: TextStream, chunks: Sequence[Sequence[int]]) -> str:
    pieces = []
    for chunk in chunks:
        pieces.append(stream.push(chunk))
        if stream.stopped:
            break
    return "".join(pieces) + stream.finish()


texts = st.text(st.sampled_from("ab \ufffdéß中😀\u200d\n"), max_size=60) | st.text(max_size=30)
stop_word_lists = st.lists(st.text(st.sampled_from("ab é😀\ufffd"), min_size=1, max_size=4), max_size=3)


@st.composite
def chunked_pieces(draw: st.DrawFn, data: st.SearchStrategy[bytes]) -> tuple[bytes, list[bytes], list[list[int]]]:
    content = draw(data)
    cuts = sorted(draw(st.sets(st.integers(1, max(1, len(content) - 1)))))
    pieces = [content[first:last] for first, last in zip([0, *cuts], [*cuts, len(content)], strict=True)]
    ends = sorted(draw(st.sets(st.integers(0, len(pieces)))))
    chunks = [list(range(first, last)) for first, last in zip([0, *ends], [*ends, len(pieces)], strict=True)]
    return content, pieces, chunks


utf8 = texts.map(lambda text: text.encode("utf-8"))
any_bytes = st.binary(max_size=80) | st.lists(st.sampled_from([b"\xe4", b"\xb8", b"\xf0", b"a"]), max_size=120).map(
    b"".join
)


@settings(max_examples=300, deadline=None)
@given(chunked_pieces(utf8 | any_bytes), stop_word_lists)
def test_the_pieces_joined_are_the_text_decoded_at_once(
    case: tuple[bytes, list[bytes], list[list[int]]], stop_words: list[str]
) -> None:
    content, pieces, chunks = case
    stream = TextStream(ByteLevel(pieces).decode, stop_words)
    expected = cut(content.decode("utf-8", errors="replace"), stop_words)
    assert stream_all(stream, chunks) == expected


@pytest.mark.parametrize("torn", [b"\xe4", b"\xe4\xb8", b"\xf0\x9f\x98", b"\xe4\xb8\xf0\x9f", "\ufffd".encode()])
@pytest.mark.parametrize("num_bytes", range(200, 206))
def test_long_undecodable_answers_one_byte_at_a_time(torn: bytes, num_bytes: int) -> None:
    content = "中".encode() + (torn * num_bytes)[:num_bytes] + "中 and more".encode()
    decoder = ByteLevel([bytes([octet]) for octet in content])
    text = stream_all(TextStream(decoder.decode), [[index] for index in range(len(content))])
    assert text == content.decode("utf-8", errors="replace")
    assert decoder.longest <= 70


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), max_size=80) | st.lists(st.sampled_from([4, 4, 4, 4, 4, 4, 1]), max_size=150))
def test_spaces_inside_survive_a_decoder_that_drops_the_first(token_ids: list[int]) -> None:
    stream = TextStream(decode_metaspace)
    assert stream_all(stream, [[token_id] for token_id in token_ids]) == decode_metaspace(token_ids)


def test_an_incomplete_character_is_held_until_it_is_whole() -> None:
    stream = TextStream(ByteLevel([b"a\xf0\x9f", b"\x98", b"\x80b"]).decode)
    assert [stream.push([0]), stream.push([1]), stream.push([2]), stream.finish()] == ["a", "", "😀b", ""]


def test_a_possible_stop_word_is_held_and_released() -> None:
    stream = TextStream(ByteLevel([b"x</", b"s", b"y", b"</s", b">z"]).decode, ["</s>"])
    assert [stream.push([token_id]) for token_id in range(4)] == ["x", "", "</sy", ""]
    assert not stream.stopped
    assert stream.push([4]) == ""
    assert stream.stopped
    assert stream.push([2]) == stream.finish() == ""


def test_a_stop_word_stops_at_once_though_an_incomplete_character_follows() -> None:
    stream = TextStream(ByteLevel([b"one END\xe4"]).decode, ["END"])
    assert stream.push([0]) == "one "
    assert stream.stopped


def test_the_window_of_ordinary_text_is_short() -> None:
    decoder = ByteLevel([b"a"])
    stream = TextStream(decoder.decode, ["never"])
    assert "".join(stream.push([0]) for _ in range(1000)) + stream.finish() == "a" * 1000
    assert decoder.longest <= 18


def test_a_long_chunk_that_ends_within_a_character() -> None:
    content = ("a" * 89 + "中").encode() * 3
    stream = TextStream(ByteLevel([bytes([octet]) for octet in content]).decode)
    assert stream_all(stream, [range(90), range(90, 200), range(200, len(content))]) == content.decode()


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    directory = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(directory)
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


@settings(deadline=None)
@given(texts, st.lists(st.integers(0, 2**31), max_size=60), st.booleans())
def test_a_real_byte_level_tokenizer(tokenizer: Tokenizer, text: str, draws: list[int], is_text: bool) -> None:
    """Texts, and any ids at all: incomplete characters and special tokens in every place."""
    token_ids = tokenizer.encode(text).ids if is_text else [draw % tokenizer.get_vocab_size() for draw in draws]
    stream = TextStream(tokenizer.decode)
    assert stream_all(stream, [[token_id] for token_id in token_ids]) == tokenizer.decode(token_ids)


@settings(deadline=None)
@given(st.text(st.sampled_from("ab 中😀é"), max_size=120))
def test_a_real_decoder_with_byte_fallback(text: str) -> None:
    """The decoder of Llama 2 and Mistral: a whole run of byte tokens is U+FFFD until its last character is complete."""
    decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    words = ("\u2581" + text.replace(" ", "\u2581")) if text else ""
    pieces: list[str] = []
    for character in words:
        is_plain = character == "\u2581" or character.isascii()
        pieces += [character] if is_plain else [f"<0x{octet:02X}>" for octet in character.encode()]

    def decode(token_ids: Sequence[int]) -> str:
        return str(decoder.decode([pieces[token_id] for token_id in token_ids]))

    assert stream_all(TextStream(decode), [[index] for index in range(len(pieces))]) == text


def test_an_empty_stop_word_is_refused() -> None:
    with pytest.raises(RequestError, match=r'^stop_words: .*; got ""; leave it out$'):
        TextStream(decode_metaspace, ["a", ""])


def test_special_tokens_do_not_cost_a_space() -> None:
    stream = TextStream(decode_metaspace)
    token_ids = [0, 2] + [4] * 40 + [1] + [4] * 40 + [1]
    assert stream_all(stream, [[token_id] for token_id in token_ids]) == "thes cat cat"
