"""The client's own rules, and the terminal's answer."""

from __future__ import annotations

import doctest
import io
import re

import pytest

from draftline.errors import RequestError, ServerError
from draftline.triton import generate as generate_module
from draftline.triton import preprocessing
from draftline.triton.chat import ChatTemplate, publish_chat_template
from draftline.triton.chunk import Piece
from draftline.triton.client import Client, _read_error
from draftline.triton.generate import allows_colour, describe_speed, generate, mark_drafted
from draftline.triton.smoke import find_free_ports

LLAMA = {
    "chat_template": "{{ bos_token }}{% for message in messages %}[{{ message['content'] }}]{% endfor %}",
    "adds_bos_token": "true",
    "bos_token": "<s>",
    "eos_token": "</s>",
    "pad_token": "",
}


def test_the_first_token_is_not_put_twice() -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert ChatTemplate.from_parameters(LLAMA).render(messages) == "[hi]"
    assert ChatTemplate.from_parameters({**LLAMA, "adds_bos_token": "false"}).render(messages) == "<s>[hi]"


def test_a_model_without_a_template_says_so() -> None:
    with pytest.raises(RequestError, match="chat template"):
        ChatTemplate.from_parameters({**LLAMA, "chat_template": ""}).render([])


def test_what_is_published_is_what_the_client_renders(tokenizer) -> None:
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "你好"}]
    template = ChatTemplate.from_parameters(publish_chat_template(tokenizer))
    assert template.render(messages) == tokenizer.render_chat(messages)


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("in ensemble 'ensemble', a: b; got c; d", RequestError, "a: b; got c; d"),
        ("max_tokens: must be >= 1; got -1; send more", RequestError, "max_tokens: must be >= 1; got -1; send more"),
        ("server: must run; got a shutdown; later", ServerError, "server: must run; got a shutdown; later"),
        ("Stub process is not healthy", ServerError, "Stub process is not healthy"),
    ],
)
def test_messages_become_errors_again(message, kind, text) -> None:
    error = _read_error(message)
    assert type(error) is kind
    assert text in str(error)


def test_without_a_server_the_error_names_the_address() -> None:
    url = f"127.0.0.1:{find_free_ports().grpc}"
    with Client(url) as client:
        assert not client.ready()
        with pytest.raises(ServerError, match=rf"^{url}: must answer; got UNAVAILABLE"):
            client.generate("hello", max_tokens=1)


@pytest.mark.parametrize(
    ("option", "value", "datatype"), [("seed", -1, "UINT64"), ("max_draft_tokens", 2**31, "INT32")]
)
def test_numbers_that_no_input_holds_are_refused_here(option, value, datatype) -> None:
    message = rf"^{option}: is a number that {datatype} holds; got {value}; "
    with Client("127.0.0.1:1") as client, pytest.raises(RequestError, match=message):
        client.generate("hello", max_tokens=1, **{option: value})


def test_a_timeout_ends_the_request_in_the_engine_too(server, client) -> None:
    with pytest.raises(ServerError, match="DEADLINE_EXCEEDED"):
        client.generate("hello", max_tokens=1900, timeout_seconds=0.5)
    assert server.wait_until_idle(3)


@pytest.mark.parametrize("raw", [True, False])
def test_the_terminal_gets_the_answer_and_stderr_the_speed(server, client, capsys, raw) -> None:
    prompt = "hello" if raw else client.render_chat([{"role": "user", "content": "hello"}])
    out = io.StringIO()
    url = f"127.0.0.1:{server.ports.grpc}"
    assert generate("hello", url=url, raw=raw, show_acceptance=False, use_colour=False, out=out, max_tokens=30) == 0
    assert out.getvalue() == client.generate(prompt, max_tokens=30) + "\n"
    assert capsys.readouterr().err.startswith("30 tokens, ")


def test_the_terminal_shows_what_was_drafted(server, client, capsys) -> None:
    out = io.StringIO()
    url = f"127.0.0.1:{server.ports.grpc}"
    assert generate("hello", url=url, raw=True, show_acceptance=True, use_colour=False, out=out, max_tokens=150) == 0
    shown = out.getvalue()
    assert shown.count("⟦") == shown.count("⟧") > 20
    assert shown.replace("⟦", "").replace("⟧", "") == client.generate("hello", max_tokens=150) + "\n"
    speed, numbers = capsys.readouterr().err.splitlines()
    assert speed.startswith("150 tokens, ")
    assert re.fullmatch(
        r"steps \d+, drafted \d+, accepted \d+, acceptance_length \d\.\d\d, acceptance_rate [01]\.\d\d, "
        r"acceptance_rate_at( [01]\.\d\d){4}",
        numbers,
    )


def test_speed_of_short_answers() -> None:
    assert describe_speed(0.0, []) == "0 tokens"
    assert describe_speed(0.0, [(0.25, 1)]) == "1 tokens at 250 ms"


def test_drafted_tokens_are_green_and_empty_ones_unmarked() -> None:
    pieces = [Piece("a", False), Piece(" b", True), Piece("", True)]
    assert mark_drafted(pieces, use_colour=True) == "a\x1b[32m b\x1b[0m"
    assert mark_drafted(pieces, use_colour=False) == "a⟦ b⟧"


@pytest.mark.parametrize(
    ("is_terminal", "environment", "expected"),
    [
        (True, {"TERM": "xterm"}, True),
        (True, {"TERM": "xterm", "NO_COLOR": ""}, True),
        (True, {"TERM": "xterm", "NO_COLOR": "1"}, False),
        (True, {"TERM": "dumb"}, False),
        (True, {}, False),
        (False, {"TERM": "xterm"}, False),
    ],
)
def test_colour_needs_a_terminal_and_consent(is_terminal, environment, expected) -> None:
    out = io.StringIO()
    out.isatty = lambda: is_terminal
    assert allows_colour(out, environment) is expected


@pytest.mark.parametrize("module", [preprocessing, generate_module])
def test_docstrings(module) -> None:
    results = doctest.testmod(module)
    assert results.attempted > 0
    assert results.failed == 0
