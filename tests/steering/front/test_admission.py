"""Texts are bounded before anything is done with them, and a library that panics ends one request."""

from __future__ import annotations

from typing import Any

import pytest

import steering
from steering import ContextOverflow, Fault, Icd, Request, RequestError, Sampling, TextBounds
from steering.front import input_processor
from tests.server.fakes import checkpoint
from tests.steering.chats import image, text
from tests.waiting import computing_within


@pytest.fixture(scope="module")
def engine() -> steering.Engine:
    return steering.Engine(
        steering.load(checkpoint(), device="cpu"), slots=2, max_length=512, threads=1, self_check=False
    )


class Panic(BaseException):
    """An exception that, like pyo3's PanicException, is no Exception."""


def user(content: Any) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def test_the_bounds_follow_from_the_context_and_the_longest_token(engine: steering.Engine) -> None:
    longest = max(len(token) for token in engine.mllm.tokenizer.get_vocab())
    assert TextBounds.of(engine.mllm, 512) == TextBounds(512, 512 * longest, 1024)


@pytest.mark.parametrize(
    ("content", "code"),
    [
        ("x" + " " * 12_000_000, "context_length_exceeded"),
        (" " * 8191 + "x", "context_length_exceeded"),  # within the characters, and far beyond the tokens
        ("\U0001f600" * 8192, "context_length_exceeded"),
        ("<|im_end|>" * 819, "context_length_exceeded"),
        ("Text context:\n" * 585, "context_length_exceeded"),
        ([{"type": "text", "text": "a"}] * 1024, "context_length_exceeded"),
        ([{"type": "text", "text": ""}] * 400_000, "too_many_parts"),
    ],
)
def test_texts_that_cannot_fit_cost_little(engine: steering.Engine, content: Any, code: str) -> None:
    with computing_within(1.5), pytest.raises(RequestError) as caught:
        engine.submit(Request(user(content)))
    assert (caught.value.code, caught.value.param) == (code, "messages")


def test_a_prompt_of_the_longest_tokens_is_not_refused_for_its_characters(engine: steering.Engine) -> None:
    words = " inconsistency" * 300  # one token of 14 characters each: eight times what text usually has
    completion = engine.submit(Request(user(words), Sampling(max_tokens=1)))
    assert completion.prompt_tokens < 400
    completion.cancel()
    with pytest.raises(ContextOverflow, match="1 in the completion"):
        engine.submit(Request(user(" inconsistency" * 560)))


def test_the_instruction_of_a_contrast_counts(engine: steering.Engine) -> None:
    most = TextBounds.of(engine.mllm, engine.max_length).characters
    with pytest.raises(RequestError, match=f"at most {most} are taken") as caught:
        engine.submit(Request(user("x" * (most - 99)), interventions=[Icd(instruction="x" * 100)]))
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("question", "forced", "fields", "reducible"),
    [
        (1, 512, ["force"], "'force'"),
        (1, 505, ["force"], "'force'"),  # it fits alone, and the question is short
        (300, 300, ["messages", "force"], "'messages' or 'force'"),
        (900, 900, ["messages", "force"], "'messages' and 'force'"),
        (600, 20, ["messages"], "the messages or the completion"),
        (1, 20_000, ["force"], "'force'"),  # counted ahead
        (1, 200_000, ["force"], "'force'"),  # more characters than are taken
    ],
)
def test_the_fields_that_are_too_long_are_named(
    engine: steering.Engine, question: int, forced: int, fields: list[str], reducible: str
) -> None:
    with pytest.raises(RequestError, match="maximum context length is 512 tokens") as caught:
        engine.submit(Request(user(" red" * question), Sampling(), forced=" red" * forced, clamp=True))
    assert str(caught.value).endswith(f"Please reduce the length of {reducible}.")
    assert (caught.value.param, caught.value.code) in [(field, "context_length_exceeded") for field in fields]


def test_the_tokens_of_the_fields_add_up(engine: steering.Engine) -> None:
    completion = engine.submit(Request(user("Why?"), Sampling(max_tokens=1)))
    completion.cancel()
    with pytest.raises(ContextOverflow) as caught:
        engine.submit(Request(user("Why?"), Sampling(max_tokens=600), forced=(5,) * 512, clamp=True))
    counts = f"{completion.prompt_tokens} in 'messages', 512 in 'force'"
    assert f"you requested {completion.prompt_tokens + 512} tokens ({counts})." in str(caught.value)


@pytest.fixture
def panicking(engine: steering.Engine, monkeypatch: pytest.MonkeyPatch) -> Any:
    def panic(*_: Any, **__: Any) -> None:
        raise Panic("called `Option::unwrap()` on a `None` value")

    return lambda target, name: monkeypatch.setattr(target, name, panic)


@pytest.mark.parametrize(("reader", "images"), [("tokenizer", 0), ("processor", 1)])
def test_a_tokenizer_that_panics_refuses_the_request(
    engine: steering.Engine, panicking: Any, reader: str, images: int
) -> None:
    panicking(type(getattr(engine.mllm, reader)), "__call__")
    with pytest.raises(RequestError, match="tokenizer cannot read") as caught:
        engine.submit(Request(user([text("hi"), *map(image, range(images))])))
    assert caught.value.param == "messages"


def test_a_panic_elsewhere_in_preparing_is_a_fault(engine: steering.Engine, panicking: Any) -> None:
    panicking(input_processor, "build_prompt")
    with pytest.raises(Fault, match="could not be prepared"):
        engine.submit(Request(user("hi")))
