"""Requests as callers of the library make them: what is taken, and one sentence for everything else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import steering
from steering import Diagnose, Generate, Request, RequestError, Sage, Sampling, See, Steer, Steering, Think

CHAT = [{"role": "user", "content": "hi"}]
VECTOR = steering.SteeringVector("a", torch.ones(4, 8), torch.ones(4), torch.ones(4), torch.ones(4), (1,), "f")


@pytest.mark.parametrize(
    ("given", "asked"),
    [
        (Steer(VECTOR, 1.0), [Steering((Steer(VECTOR, 1.0),))]),
        ([Steer(VECTOR, 1.0), Steer(VECTOR, 2.0)], [Steering((Steer(VECTOR, 1.0), Steer(VECTOR, 2.0)))]),
        (See(), [See()]),
        ([Sage(See(), Think()), None, [Generate()]], [See(), Think(), Generate()]),
        (Sage(think=Think()), [Think()]),
        ((one for one in [See()]), [See()]),
        (None, []),
        ((), []),
    ],
)
def test_interventions_come_alone_or_together(given: Any, asked: list[Any]) -> None:
    request = Request(CHAT, interventions=given)
    assert list(request.asked.values()) == asked
    assert list(replace(request, n=2).asked.values()) == asked


@pytest.mark.parametrize(
    ("given", "readouts"),
    [
        (True, Diagnose()),
        (False, None),
        (None, None),
        (["focus"], Diagnose(frozenset({"focus"}))),
        (("focus", "decay"), Diagnose(frozenset({"focus", "decay"}))),
        ([], Diagnose(frozenset())),
        (Diagnose(["focus"], layers=[1, 2]), Diagnose(frozenset({"focus"}), layers=(1, 2))),
    ],
)
def test_readouts_are_asked_for_by_name_or_all_at_once(given: Any, readouts: Diagnose | None) -> None:
    request = Request(CHAT, diagnose=given)
    assert request.readouts == request.diagnose == readouts
    assert replace(request, n=2).readouts == readouts


def test_a_stop_string_is_one_of_them() -> None:
    assert Sampling(stop="END").stop == Sampling(stop=["END"]).stop == ("END",)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("make", "param", "said"),
    [
        (lambda: Request(CHAT, {"max_tokens": 3}), "sampling", "be a Sampling; got {'max_tokens': 3}"),
        (lambda: Request(CHAT, interventions="see"), "interventions", "Steer, See or Sage; got 'see'"),
        (lambda: Request(CHAT, interventions={"sage": True}), "interventions", "got {'sage': True}"),
        (lambda: Request(CHAT, interventions=[See(), 3]), "interventions", "got 3"),
        (lambda: Request(CHAT, interventions=See), "interventions", "the class See, of which one is made by See(...)"),
        (lambda: Request(CHAT, interventions=[See(), See()]), "sage.see", "once"),
        (lambda: Request(CHAT, diagnose="focus"), "diagnose", "True, a list of readouts or a Diagnose; got 'focus'"),
        (lambda: Request(CHAT, diagnose=3), "diagnose", "got 3"),
        (lambda: Request(CHAT, diagnose=["charm"]), "diagnostics.include", "does not know charm; allowed: focus, "),
        (lambda: Request(CHAT, diagnose=[["focus"]]), "diagnostics.include", "a list of names of readouts"),
        (lambda: Diagnose("focus"), "diagnostics.include", "got 'focus'"),
        (lambda: Diagnose(layers=3), "diagnostics.layers", "a list of whole numbers; got 3"),
        (lambda: Diagnose(layers=[1.5]), "diagnostics.layers", "got [1.5]"),
        (lambda: Diagnose(last_layers="2"), "diagnostics.layers.last", "a whole number; got '2'"),
        (lambda: Diagnose(target_image=True), "diagnostics.target_image", "a whole number; got True"),
        (lambda: Diagnose(spans=3), "diagnostics.spans", "one of whole, content; got 3"),
        (lambda: Request(CHAT, n="2"), "n", "a whole number; got '2'"),
        (lambda: Request(CHAT, state_position=None), "state_position", "a whole number"),
        (lambda: Request(CHAT, forced=[1.5]), "forced", "a list of whole numbers; got [1.5]"),
        (lambda: Request(CHAT, reply=3), "reply", "a string; got 3"),
        (lambda: Sampling(temperature="hot"), "temperature", "a number; got 'hot'"),
        (lambda: Sampling(temperature=None), "temperature", "a number; got None"),
        (lambda: Sampling(top_p=0), "top_p", "above 0.0 and at most 1.0; got 0"),
        (lambda: Sampling(max_tokens=2.5), "max_tokens", "a whole number; got 2.5"),
        (lambda: Sampling(logprobs=True), "top_logprobs", "a whole number; got True"),
        (lambda: Sampling(seed="1"), "seed", "a whole number; got '1'"),
        (lambda: Sampling(stop=3), "stop", "a string or several of them; got 3"),
        (lambda: Sampling(stop=[3]), "stop", "got [3]"),
        (lambda: Sampling(logit_bias=[1]), "logit_bias", "a dict from numbers of tokens"),
        (lambda: Sampling(logit_bias={"a": 1}), "logit_bias", "got {'a': 1}"),
        (lambda: Sampling(logit_bias={1: "a"}), "logit_bias", "a number; got 'a'"),
        (lambda: Steer("modality-preference", 1.0), "steering.vector", "VectorStore.get and SteeringVector.load return"),
        (lambda: Steer.to("modality-preference", "text"), "steering.vector", "must be a SteeringVector"),
        (lambda: Steer.to(VECTOR, "left"), "steering.toward", "vision, text; got 'left'"),
        (lambda: Steer.to(VECTOR, "text", "1"), "steering.strength", "of at least 0; got '1'"),
        (lambda: Steer(VECTOR, "1"), "steering.scale", "a finite number; got '1'"),
        (lambda: Steer(VECTOR, 1.0, layers=2), "steering.layers", "a list of whole numbers; got 2"),
        (lambda: Steer(VECTOR, 1.0, tokens=["all"]), "steering.apply.tokens", "got ['all']"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(make: Callable[[], Any], param: str, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        make()
    assert caught.value.param == param
    assert said in str(caught.value)


def test_an_engine_names_what_is_no_request(make_engine: Callable[..., steering.Engine]) -> None:
    engine = make_engine("qwen2_vl")
    for asked, said in (
        (Request(CHAT), "a list of them; got a single Request"),
        ([CHAT], "be steering.Request objects; got [{'role'"),
        ("hi", "got 'h'"),
    ):
        with pytest.raises(RequestError, match="'requests'") as caught:
            engine.generate(asked)  # type: ignore[arg-type]
        assert said in str(caught.value)
    with pytest.raises(RequestError, match=r"be steering\.Request objects; got 'hi'"):
        engine.submit("hi")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"the model that steering\.load returns; got 'demo/checkpoint'"):
        steering.Engine("demo/checkpoint")  # type: ignore[arg-type]
