"""Requests as bytes: what is read is what was written, and nothing but data is made of what comes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import BaseModel

import steering
from steering import Diagnose, Earlier, Request, RequestError, Sampling, Tools
from steering.model.images import Picture
from steering.protocol import intervention
from steering.protocol.request import TokenLogprob
from steering.relay import relay
from steering.vectors.vector import SteeringVector
from tests.steering.parallel.asking import chat, picture, requests
from tests.toys.nudge import Nudge


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal part by part, tensors and pictures included."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, Image.Image):
        return one.mode == other.mode and one.convert("RGBA").tobytes() == other.convert("RGBA").tobytes()
    if isinstance(one, BaseModel) or is_dataclass(one):
        names = type(one).model_fields if isinstance(one, BaseModel) else [field.name for field in fields(one)]
        return type(one) is type(other) and all(same(getattr(one, name), getattr(other, name)) for name in names)
    if isinstance(one, Mapping):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    if isinstance(one, Sequence) and not isinstance(one, str | bytes):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def test_every_request_is_read_as_it_was_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(intervention.REGISTRY, "nudge", (Nudge, None))
    function = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    more = {
        "tools": Request(chat(), Sampling(logit_bias={3: -1.5}, stop=("a", "b")), tools=Tools([function])),
        "earlier": Request(chat(), diagnose=Diagnose(["drift"], earlier=Earlier("before", torch.rand(2, 8, 192)))),
        "toy": Request(chat(), interventions=Nudge(token=9, by=2.5)),
        "palette": Request(chat(picture(1, 2, 3).convert("P"), picture(1, 2, 3).convert("LA"))),
    }
    for name, request in {**requests(steering.load(device="cpu")), **more}.items():
        assert same(request, relay.read(relay.written(request))), name
    assert not same(more["tools"], more["palette"])


def test_log_probabilities_of_many_tokens_are_read_as_they_were_written() -> None:
    """To the bit, whatever they are; each token is told once, and what it is, by its number and text and bytes."""

    def token(number: int, logprob: float, *top: TokenLogprob) -> TokenLogprob:
        return TokenLogprob(number % 7, f"t{number % 5}\ud800", (number % 3, 255), logprob, top)

    told = tuple(token(one, -one / 3, *(token(one + at, -at - 0.1) for at in range(one % 4))) for one in range(200))
    odd = (token(1, -torch.inf, token(2, -0.0)), token(3, 1e-300))
    for tokens in (told, odd, ()):
        (found,) = relay.read(relay.written([tokens]))
        assert found == tokens
        assert repr(found) == repr(tokens)
    assert len(relay.written(told)) < 20_000


def message(value: Any) -> bytes:
    head = json.dumps([value, []]).encode()
    return len(head).to_bytes(8, "big") + head


@pytest.mark.parametrize(
    "value",
    [
        {"made": "os:system", "of": {"command": "true"}},
        {"made": "builtins:eval", "of": {}},
        {"made": "steering.protocol.request:Request.__init__", "of": {}},
        {"made": "steering.protocol.request:Path", "of": {}},
        {"pickle": "gASVAAAA"},
    ],
)
def test_nothing_but_parts_of_requests_is_made(value: Any) -> None:
    with pytest.raises(ValueError, match="no part of a request"):
        relay.read(message(value))


def test_what_is_made_is_checked() -> None:
    with pytest.raises(RequestError, match="'temperature' must be"):
        relay.read(message({"made": "steering.protocol.request:Sampling", "of": {"temperature": 9.0}}))


def test_what_cannot_be_sent_is_refused() -> None:
    @dataclass(frozen=True)
    class Own:
        number: int

    with pytest.raises(RequestError, match="Own cannot be sent"):
        relay.written((1, Own(2)))


def vector(seed: int) -> SteeringVector:
    direction = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
    return SteeringVector(f"v{seed}", direction, torch.ones(2), torch.ones(2), torch.ones(2), (0, 1), "of a model")


def test_a_stream_tells_a_vector_once() -> None:
    here, there, one = relay.Shared(), relay.Shared(), vector(1)
    sent = [b"".join(relay.parts(["submit", one, one], shared=here)) for _ in range(2)]
    heard = [told for each in sent for told in relay.read(each, shared=there)[1:]]
    assert same(heard[0], one)
    assert all(told is heard[0] for told in heard)
    assert len(sent[1]) < 100 < len(sent[0])


def test_both_ends_let_go_of_the_same_vectors() -> None:
    here, there = relay.Shared(), relay.Shared()
    vectors = [vector(seed) for seed in range(relay.Shared.MOST + 8)]
    for one in (*vectors, vectors[0], *vectors[-relay.Shared.MOST :], *vectors):
        assert same(relay.read(b"".join(relay.parts(one, shared=here)), shared=there), one)
    assert len(there.heard) == len(here._told) == relay.Shared.MOST


def processed(seed: int, tokens: int = 4) -> Picture:
    pixels = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(seed))
    return Picture.of({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, tokens // 2]])})


def test_a_stream_tells_a_picture_once_and_keeps_no_more_than_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay.Shared, "BYTES", 4 * 200)
    here, there = relay.Shared(), relay.Shared()

    def sent(one: Any) -> tuple[Any, int]:
        written = b"".join(relay.parts(["submit", one], (Picture,), here))
        return relay.read(written, (Picture,), there)[1], len(written)

    small = [processed(seed) for seed in range(12)]  # of 120 bytes
    for one in (*small, small[11], small[0], small[6]):
        heard, _ = sent(one)
        assert heard.key == one.key
        assert torch.equal(heard.tensors["pixel_values"], one.tensors["pixel_values"])
        assert here._bytes == sum(map(relay._bytes, there.heard.values())) <= 800
    assert sent(small[11])[1] < sent(processed(12))[1] / 2
    with pytest.raises(RequestError, match="cannot be sent"):
        relay.parts([processed(13), object()], (Picture,), here)
    assert sent(small[11])[0].key == small[11].key
    assert [*there.heard] == [told.number for told in here._told.values()]  # and nothing that was told before
    photo = Image.new("RGB", (10, 10), "red")  # of 400 bytes
    for _ in range(2):
        heard, size = sent(photo)
        assert heard.tobytes() == photo.tobytes()
    assert size < 100
    large = processed(14, 40)
    assert sent(large)[0].key == large.key
    assert len(there.heard) == 2


def test_what_was_not_sent_after_all_is_told_again() -> None:
    here, one = relay.Shared(), vector(1)
    with pytest.raises(RequestError, match="cannot be sent"):
        relay.parts([one, object()], shared=here)
    assert same(relay.read(b"".join(relay.parts(one, shared=here)), shared=relay.Shared()), one)
    with pytest.raises(ValueError, match="no part of a request"):
        relay.read(b"".join(relay.parts(one, shared=here)), shared=relay.Shared())  # which has not heard of it
