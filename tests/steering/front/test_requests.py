"""Requests are cancelled at any time, wait in a queue that has an end, and are refused by the name of the wrong field."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

import steering
from steering import Busy, ContextOverflow, Fault, Request, RequestError, Sampling
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.front.asking import assert_same, conversations, greedy, run_down
from tests.steering.front.conftest import PlainAnswer
from tests.steering.inside import sequences


def test_cancelling_frees_the_slot_at_the_next_step(make_engine: MakeEngine, plain_answer: PlainAnswer) -> None:
    engine = make_engine("qwen2_vl", slots=2)
    chats = conversations("qwen2_vl")
    left = engine.submit(Request(chats[0], greedy(100)))
    stays = engine.submit(Request(chats[1], greedy(7)))
    waits = engine.submit(Request(chats[2], greedy()))
    engine.step()
    assert engine.stats()["running"] == 2
    left.cancel()
    engine.step()
    assert sequences(left)[0].slot == -1
    assert sequences(waits)[0].tokens
    assert_same(run_down(engine, stays).choices[0], plain_answer("qwen2_vl", 1, 7))
    assert_same(run_down(engine, waits).choices[0], plain_answer("qwen2_vl", 2, 6))
    assert engine.stats()["cancelled"] == 1


def test_the_result_of_a_cancelled_request_is_a_fault(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    completion = engine.submit(Request(conversations("qwen2_vl")[0], greedy(100)))
    engine.step()
    completion.cancel()
    engine.step()
    with pytest.raises(Fault, match="cancelled"):
        completion.result()


def test_the_stream_of_a_cancelled_request_just_ends(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    completion = engine.submit(Request(conversations("qwen2_vl")[0], greedy(100)))
    engine.step()
    completion.cancel()
    engine.step()
    assert all(chunk.choice is None for chunk in completion)


@pytest.mark.parametrize("family", ["qwen2_vl", "llava"])
def test_cancelling_while_waiting_and_in_the_middle_of_a_prefill(
    family: str, make_engine: MakeEngine, plain_answer: PlainAnswer
) -> None:
    engine = make_engine(family, slots=1, prefill_budget=8)
    chats = conversations(family)
    half, waiting, last = (engine.submit(Request(chat, greedy())) for chat in chats[:3])
    engine.step()
    assert 0 < sequences(half)[0].computed < half.prompt_tokens
    half.cancel()
    waiting.cancel()
    engine.step()
    assert sequences(half)[0].slot == sequences(waiting)[0].slot == -1
    assert_same(run_down(engine, last).choices[0], plain_answer(family, 2, 6))


def test_cancelling_a_finished_request_changes_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    completion = engine.submit(Request(conversations("qwen2_vl")[0], greedy(2)))
    while not completion.done:
        engine.step()
    completion.cancel()
    assert len(completion.result().choices[0].token_ids) == 2


def test_a_full_queue_refuses_and_says_when_to_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", slots=2, max_waiting=1)
    request = Request(conversations("qwen2_vl")[0], greedy(2))
    accepted = [engine.submit(request) for _ in range(3)]
    with pytest.raises(Busy, match="at capacity") as refused:
        engine.submit(request)
    assert refused.value.retry_after > 0
    for completion in accepted:
        assert len(run_down(engine, completion).choices) == 1
    assert run_down(engine, engine.submit(request)).choices


def test_too_long_a_request_is_refused_in_the_words_of_openai(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", max_length=60)
    chat = [{"role": "user", "content": "What is there, and what is not?"}]  # pictures would be scaled down
    length = engine.submit(Request(chat, greedy(1))).prompt_tokens
    with pytest.raises(ContextOverflow) as refused:
        engine.submit(Request(chat, greedy(61 - length)))
    assert str(refused.value).startswith(
        f"This model's maximum context length is 60 tokens. However, you requested 61 tokens ({length} in the messages, "
        f"{61 - length} in the completion)."
    )
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert engine.submit(Request(chat, greedy(60 - length)))


def test_too_long_an_answer_may_be_cut_to_what_fits(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", max_length=60)
    chat = conversations("qwen2_vl")[0]
    endless = dataclasses.replace(greedy(1000), ignore_eos=True)
    cut = engine.submit(Request(chat, endless, clamp=True))
    assert cut.prompt_tokens + cut.max_tokens == 60
    assert run_down(engine, cut).completion_tokens == cut.max_tokens
    assert engine.submit(Request(chat, greedy(1), clamp=True)).max_tokens == 1
    with pytest.raises(ContextOverflow):  # what is given is read whole or not at all
        engine.submit(Request(chat, endless, forced=(5,) * 60, clamp=True))


def test_what_needs_more_slots_than_there_are_is_named(make_engine: MakeEngine) -> None:
    request = Request(conversations("qwen2_vl")[0], greedy())
    contrast = dataclasses.replace(request, interventions=(steering.Icd(),))
    engine = make_engine("qwen2_vl", slots=1)
    for asked, param, needed in (
        (contrast, "contrast", "'contrast' needs 2 slots"),
        (dataclasses.replace(request, baseline=True), "baseline", "'baseline' needs 2 slots"),
        (dataclasses.replace(contrast, baseline=True), "contrast", "'contrast' and 'baseline' need 3 slots"),
    ):
        with pytest.raises(RequestError, match=f"^{needed}, .* has 1.$") as refused:
            engine.submit(asked)
        assert refused.value.param == param


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"n": 9}, "n"),
        ({"n": 0}, "n"),
        ({"n": 3, "baseline": True}, "n"),
        ({"sampling": Sampling(logit_bias={10**6: 1.0})}, "logit_bias"),
        ({"sampling": Sampling(logit_bias={-1: 1.0})}, "logit_bias"),
        ({"diagnose": steering.Diagnose(target_image=2)}, "diagnostics.target_image"),
        ({"messages": families.example_messages("qwen2_vl", 3)}, "messages"),
        ({"messages": []}, "messages"),
    ],
)
def test_impossible_requests_name_the_field(change: dict[str, Any], param: str, make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", max_images=2)
    request = dataclasses.replace(Request(conversations("qwen2_vl")[0], greedy()), **change)
    with pytest.raises(RequestError) as refused:
        engine.submit(request)
    assert refused.value.param == param
    assert engine.stats()["waiting"] == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("temperature", value) for value in (-0.1, 2.1, float("nan"))),
        *(("top_p", value) for value in (0.0, 1.1)),
        *(("min_p", value) for value in (-0.1, 1.1)),
        *(("frequency_penalty", value) for value in (-2.1, 2.1)),
        *(("presence_penalty", value) for value in (-2.1, float("inf"))),
        *(("repetition_penalty", value) for value in (0.0, 1e-45, 0.009, 2.1)),
        ("top_k", -2),
        ("max_tokens", 0),
        ("seed", 2**63),
        ("stop", ("",)),
        ("logit_bias", {1: 101.0}),
    ],
)
def test_sampling_settings_out_of_range_are_refused(field: str, value: Any) -> None:
    with pytest.raises(RequestError, match=field) as refused:
        Sampling(**{field: value})
    assert refused.value.param == field
