"""A toy whose options follow from what the model says first: any intervention may have requests that run before its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

import steering
from steering import Prelude, Request, RequestError, Sampling, decide, decide_next
from steering.protocol import intervention
from steering.protocol.intervention import Rounds
from tests import families
from tests.steering.conftest import MakeEngine
from tests.toys.nudge import Nudge, NudgeSlots

FAMILY = "qwen2_vl"
CHAT = families.example_messages(FAMILY, 1)
SAMPLING = Sampling(max_tokens=3, logprobs=5, ignore_eos=True)


class Avoid(Prelude):
    """Keeps the answer from beginning as it would, nor as it would then, `times` in a row."""

    path = ("nudge",)

    def __init__(self, times: int):
        self.times = times
        self.asked: list[list[int]] = []

    def rounds(self, mllm: steering.MLLM, request: Request) -> Rounds:
        if not request.messages:
            raise RequestError("'nudge' needs messages.", param="nudge")
        bias: dict[int, float] = {}
        for _ in range(self.times):
            short = Sampling(max_tokens=1, ignore_eos=True, logit_bias=bias)
            results = yield [Request(request.chat, short), Request(request.chat, short)]
            self.asked.append([result.choices[0].token_ids[0] for result in results])
            bias |= {self.asked[-1][0]: -100.0}
        return Nudge(token=self.asked[-1][0], by=-100.0)


@pytest.fixture(scope="module")
def engine(make_engine: MakeEngine) -> Iterator[steering.Engine]:
    before = dict(intervention.REGISTRY)
    intervention.register(Nudge, NudgeSlots)
    try:
        yield make_engine(FAMILY)
    finally:
        intervention.REGISTRY.clear()
        intervention.REGISTRY.update(before)


def test_a_prelude_is_replaced_by_its_result(engine: steering.Engine) -> None:
    (plain,) = engine.generate([Request(CHAT, SAMPLING)])[0].choices
    likeliest = (plain.logprobs or ())[0].top
    avoid, think = Avoid(2), steering.Think(threshold=1e9)
    decided = decide(engine, Request(CHAT, SAMPLING, (avoid, think)))
    assert avoid.asked == [[likeliest[0].token_id] * 2, [likeliest[1].token_id] * 2], "the second round saw the first"
    assert decided.asked == {"nudge": Nudge(token=likeliest[1].token_id, by=-100.0), "sage.think": think}
    (choice,) = engine.generate([decided])[0].choices
    assert choice.token_ids[0] == likeliest[0].token_id
    assert choice.applied is not None
    assert choice.applied["nudge"] == {"token": likeliest[1].token_id, "by": -100.0}


def test_a_turn_runs_the_prelude_and_reports_all_its_requests(engine: steering.Engine) -> None:
    begun: list[Any] = []
    with engine.turn() as turn:
        decided = decide_next(turn, Request(CHAT, SAMPLING, Avoid(3)), begun.append)
    assert len(begun) == 6
    assert isinstance(decided.asked["nudge"], Nudge)
    assert decide_next(engine, decided) is decided


def test_a_cancelled_prelude_is_a_fault(engine: steering.Engine) -> None:
    with pytest.raises(steering.Fault):
        decide(engine, Request(CHAT, SAMPLING, Avoid(1)), lambda completion: completion.cancel())


def test_a_prelude_refuses_before_anything_runs(engine: steering.Engine) -> None:
    before = engine.stats()["generated_tokens"]
    with pytest.raises(RequestError, match="needs messages"):
        decide(engine, Request([], SAMPLING, Avoid(1)))
    assert engine.stats()["generated_tokens"] == before


def test_an_engine_takes_no_request_whose_prelude_did_not_run(engine: steering.Engine) -> None:
    with pytest.raises(RequestError, match="follows from other requests") as refused:
        engine.generate([Request(CHAT, SAMPLING, Avoid(1))])
    assert refused.value.param == "nudge"
