"""Requests as bytes: what is read is what was written, and nothing but data is made of what comes."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass
from typing import Any

import pytest
import torch
from PIL import Image
from pydantic import BaseModel

import steering
from steering import Diagnose, Earlier, Request, RequestError, Sampling, Tools
from steering.front.input_processor import InputProcessor, Limits
from steering.logprobs import TopLogprobs
from steering.messages import serialization
from steering.messages.messages import Ended, Output
from steering.model.images import Picture
from steering.protocol import intervention
from steering.protocol.intervention import next_prelude
from steering.protocol.signals import Signal
from steering.recorders.attention import RowCounts
from steering.timing import Timing
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
    more = {
        "sampling": Request(chat(), Sampling(logit_bias={3: -1.5}, stop=("a", "b"))),
        "earlier": Request(chat(), diagnose=Diagnose(["drift"], earlier=Earlier("before", torch.rand(2, 8, 192)))),
        "toy": Request(chat(), interventions=Nudge(token=9, by=2.5)),
    }
    mllm = steering.load(device="cpu")
    processor = InputProcessor(mllm, Limits(512, 4, 2, 4))
    added = [
        processor.prepare(request, number)[0]
        for number, request in enumerate({**requests(mllm), **more}.values())
        if next_prelude(request) is None
    ]
    for add in added:
        read = serialization.read(serialization.written(add))
        assert same(read, add)
        assert read.spec.signals == add.spec.signals
    assert not same(added[0], added[1])


def test_requests_themselves_are_read_as_they_were_written() -> None:
    function = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    asked = Request(chat(picture(1, 2, 3).convert("P"), picture(1, 2, 3).convert("LA")), tools=Tools([function]))
    assert same(serialization.read(serialization.written(asked, (Tools,)), (Tools,)), asked)


def test_measurements_are_read_as_they_were_written() -> None:
    """To the bit, whatever they are: arrays of log-probabilities, named tuples, members of enums, sets of them."""
    logprobs = TopLogprobs()
    for token in range(200):
        logprobs.append(-token / 3, [(token + at, -at - 0.1) for at in range(token % 4)])
    logprobs.append(-math.inf, [(1, -0.0), (3, 1e-300), (4, -math.inf)])
    counts = RowCounts(1, 2, 3)
    ended = Ended(
        "stop", None, Timing(1.0, 2.0, 3.0, 4.5), {"a": (torch.rand(2, 3), torch.zeros(0, 4), {4: counts})}, [0.5], 3
    )
    output = Output(7, 1, [4, 5], logprobs, 2.5, 2, ended)
    read = serialization.read(serialization.written([output, frozenset(Signal)]))
    assert same(read[0], output)
    assert read[1] == frozenset(Signal)
    assert list(read[0].logprobs) == list(logprobs)
    assert type(read[0].ended.taken["a"][2][4]) is RowCounts
    assert len(serialization.written(logprobs)) < 20_000


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
        serialization.read(message(value))


def test_what_is_made_is_checked() -> None:
    with pytest.raises(RequestError, match="'temperature' must be"):
        serialization.read(message({"made": "steering.protocol.request:Sampling", "of": {"temperature": 9.0}}))


def test_what_cannot_be_sent_is_refused() -> None:
    @dataclass(frozen=True)
    class Own:
        number: int

    with pytest.raises(RequestError, match="Own cannot be sent"):
        serialization.written((1, Own(2)))


def vector(seed: int) -> SteeringVector:
    direction = torch.randn(2, 8, generator=torch.Generator().manual_seed(seed))
    return SteeringVector(f"v{seed}", direction, torch.ones(2), torch.ones(2), torch.ones(2), (0, 1), "of a model")


def test_a_stream_tells_a_vector_once() -> None:
    here, there, one = serialization.Shared(), serialization.Shared(), vector(1)
    sent = [b"".join(serialization.parts(["submit", one, one], shared=here)) for _ in range(2)]
    received = [told for each in sent for told in serialization.read(each, shared=there)[1:]]
    assert same(received[0], one)
    assert all(told is received[0] for told in received)
    assert len(sent[1]) < 100 < len(sent[0])


def test_both_ends_let_go_of_the_same_vectors() -> None:
    here, there = serialization.Shared(), serialization.Shared()
    vectors = [vector(seed) for seed in range(serialization.Shared.MOST + 8)]
    for one in (*vectors, vectors[0], *vectors[-serialization.Shared.MOST :], *vectors):
        assert same(serialization.read(b"".join(serialization.parts(one, shared=here)), shared=there), one)
    assert len(there.received) == len(here._sent) == serialization.Shared.MOST


def processed(seed: int, tokens: int = 4) -> Picture:
    pixels = torch.randn(tokens, 6, generator=torch.Generator().manual_seed(seed))
    return Picture.of({"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, tokens // 2]])})


def test_a_stream_tells_a_picture_once_and_keeps_no_more_than_so_many_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization.Shared, "BYTES", 4 * 200)
    here, there = serialization.Shared(), serialization.Shared()

    def sent(one: Any) -> tuple[Any, int]:
        written = b"".join(serialization.parts(["submit", one], (Picture,), here))
        return serialization.read(written, (Picture,), there)[1], len(written)

    small = [processed(seed) for seed in range(12)]  # of 120 bytes
    for one in (*small, small[11], small[0], small[6]):
        received, _ = sent(one)
        assert received.key == one.key
        assert torch.equal(received.tensors["pixel_values"], one.tensors["pixel_values"])
        assert here._bytes == sum(map(serialization._bytes, there.received.values())) <= 800
    assert sent(small[11])[1] < sent(processed(12))[1] / 2
    with pytest.raises(RequestError, match="cannot be sent"):
        serialization.parts([processed(13), object()], (Picture,), here)
    assert sent(small[11])[0].key == small[11].key
    assert [*there.received] == [value.number for value in here._sent.values()]  # and nothing that was told before
    photo = Image.new("RGB", (10, 10), "red")  # of 400 bytes
    for _ in range(2):
        received, size = sent(photo)
        assert received.tobytes() == photo.tobytes()
    assert size < 100
    large = processed(14, 40)
    assert sent(large)[0].key == large.key
    assert len(there.received) == 2


def test_what_was_not_sent_after_all_is_told_again() -> None:
    here, one = serialization.Shared(), vector(1)
    with pytest.raises(RequestError, match="cannot be sent"):
        serialization.parts([one, object()], shared=here)
    assert same(serialization.read(b"".join(serialization.parts(one, shared=here)), shared=serialization.Shared()), one)
    with pytest.raises(ValueError, match="no part of a request"):
        serialization.read(
            b"".join(serialization.parts(one, shared=here)), shared=serialization.Shared()
        )  # which has not heard of it
