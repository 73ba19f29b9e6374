"""The engine's answers and states are those of the plain model, whatever else runs; an answer ends where it should."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

import steering
from steering import Engine, Request, RequestError, Sampling
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.engine.asking import assert_same, conversations, exact, greedy, run_down, user

# --- the same tokens as generate() -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_alone_and_in_a_ragged_batch_tokens_are_those_of_generate(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    chats = conversations(family)
    answers = [load_plain(family).answer(chat, 6) for chat in chats]
    alone = make_engine(family, slots=1)
    for chat, answer in zip(chats[:2], answers, strict=False):
        assert_same(alone.generate([Request(chat, greedy())])[0].choices[0], answer)
    batch = make_engine(family, slots=8)
    for result, answer in zip(batch.generate([Request(chat, greedy()) for chat in chats]), answers, strict=True):
        assert_same(result.choices[0], answer)
        assert result.prompt_tokens == answer.prompt_length
        assert result.completion_tokens == 6


@pytest.mark.parametrize("family", families.FAMILIES)
def test_requests_join_and_leave_between_steps(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    chats = conversations(family) * 2
    lengths = [(5 * i) % 7 + 1 for i in range(len(chats))]
    engine = make_engine(family, slots=3, prefill_budget=70)
    results = engine.generate(Request(chat, greedy(n)) for chat, n in zip(chats, lengths, strict=True))
    for chat, n, result in zip(chats, lengths, results, strict=True):
        assert_same(result.choices[0], load_plain(family).answer(chat, n))
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


@pytest.mark.parametrize("family", families.FAMILIES)
def test_a_prompt_prefilled_in_chunks_gives_the_same(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    chats = conversations(family)
    engine = make_engine(family, slots=2, prefill_budget=7)
    for chat, result in zip(chats, engine.generate([Request(chat, greedy()) for chat in chats]), strict=True):
        assert_same(result.choices[0], load_plain(family).answer(chat, 6))


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "aya_vision", "mistral3"])
def test_a_long_prompt_does_not_stall_a_running_answer(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, prefill_budget=16)
    short = engine.submit(Request(user("How many?"), greedy(40)))
    engine.step()
    while not short.sequences[0].tokens:
        engine.step()
    chat = conversations(family)[1]
    long = engine.submit(Request(chat, greedy(3)))
    before, steps = len(short.sequences[0].tokens), 0
    while not long.sequences[0].tokens:
        engine.step()
        steps += 1
    assert steps == -(-long.prompt_tokens // 16)
    assert len(short.sequences[0].tokens) - before == steps
    assert_same(run_down(engine, long).choices[0], load_plain(family).answer(chat, 3))
    assert_same(run_down(engine, short).choices[0], load_plain(family).answer(user("How many?"), 40))


def test_short_prompts_are_prefilled_together(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    completions = [engine.submit(Request(chat, greedy(2))) for chat in conversations("qwen2_vl")[:4]]
    engine.step()
    assert [len(completion.sequences[0].tokens) for completion in completions] == [2] * 4


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma2"])
def test_answers_longer_than_a_bucket_of_columns(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    chat = families.example_messages(family, 1)
    result = make_engine(family).generate([Request(chat, greedy(150))])[0]
    assert_same(result.choices[0], load_plain(family).answer(chat, 150))


def test_an_answer_may_fill_the_context_to_the_last_token(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    chat = families.example_messages("qwen2_vl", 1)
    answer = load_plain("qwen2_vl").answer(chat, 20)
    engine = make_engine("qwen2_vl", max_length=answer.prompt_length + 20)
    assert_same(engine.generate([Request(chat, greedy(20))])[0].choices[0], answer)
    open_end = engine.generate([Request(chat, dataclasses.replace(greedy(), max_tokens=None))])[0].choices[0]
    assert_same(open_end, answer)
    assert open_end.finish_reason == "length"


def test_half_precision_follows_the_plain_model_in_half_precision(root: Any, load_plain: LoadPlain) -> None:
    mllm = steering.load(families.checkpoint("qwen2_5_vl", root), device="cpu", dtype="bfloat16")
    chat = families.example_messages("qwen2_5_vl", 2)
    answer = load_plain("qwen2_5_vl").answer(chat, 1)
    choice = Engine(mllm, slots=2, max_length=256).generate([Request(chat, greedy(1), diagnose=steering.Diagnose())])
    assert choice[0].choices[0].logprobs is not None
    best = choice[0].choices[0].logprobs[0]
    assert best.logprob == pytest.approx(float(answer.logprobs[0, best.token_id]), abs=0.1)


# --- the end of an answer --------------------------------------------------------------------------------------------


def test_an_end_token_ends_the_answer_and_is_not_shown(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    chat = families.example_messages("qwen2_vl", 1)
    end = next(iter(engine.mllm.stop_ids))
    forced = Sampling(max_tokens=5, logit_bias={end: 100.0}, logprobs=0)
    choice = engine.generate([Request(chat, forced)])[0].choices[0]
    assert (choice.text, choice.token_ids, choice.finish_reason, choice.logprobs) == ("", (end,), "stop", ())
    ignored = engine.generate([Request(chat, dataclasses.replace(forced, ignore_eos=True))])[0].choices[0]
    assert (ignored.token_ids, ignored.finish_reason) == ((end,) * 5, "length")


def test_a_stop_string_ends_the_answer_before_it(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    chat = families.example_messages("qwen2_vl", 1)
    whole = engine.generate([Request(chat, greedy(20))])[0].choices[0].text
    middle = len(whole) // 2
    stop = whole[middle : middle + 3]
    choice = engine.generate([Request(chat, greedy(20, stop=(stop,)))])[0].choices[0]
    assert choice.finish_reason == "stop"
    assert choice.text == whole[: whole.index(stop)]


@pytest.mark.parametrize("family", families.FAMILIES)
def test_the_text_is_that_of_the_tokens(family: str, make_engine: MakeEngine) -> None:
    """Also where the last token ends inside a character; the bytes of the tokens are the bytes of the text."""
    engine = make_engine(family)
    tokenizer = engine.mllm.tokenizer
    special = {token: -100.0 for token, added in tokenizer.added_tokens_decoder.items()}
    request = Request(
        families.example_messages(family),
        Sampling(max_tokens=25, temperature=1.5, seed=2, logprobs=0, logit_bias=special),
        n=4,
    )
    for choice in engine.generate([request])[0].choices:
        assert choice.finish_reason == "length"
        assert choice.text == tokenizer.decode(choice.token_ids)
        assert choice.logprobs is not None
        assert [token.token_id for token in choice.logprobs] == list(choice.token_ids)
        joined = b"".join(bytes(token.bytes) for token in choice.logprobs)
        assert joined.decode(errors="replace") == choice.text


# --- images ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_cached_images_give_the_same_answers(family: str, make_engine: MakeEngine) -> None:
    chats = [families.example_messages(family, 1), families.example_messages(family, 1, text="How many?")]
    cached, uncached = make_engine(family), make_engine(family, image_cache_bytes=0)
    requests = [Request(chat, greedy()) for chat in [*chats, chats[0]]]
    ours = [exact(cached.generate([request])[0].choices[0]) for request in requests]
    assert ours == [exact(uncached.generate([request])[0].choices[0]) for request in requests]
    pieces = cached.stats()["image_cache_misses"]  # tiles, where a family cuts an image into them
    assert pieces >= 1
    assert cached.stats()["image_cache_hits"] == 2 * pieces
    assert (uncached.stats()["image_cache_hits"], uncached.stats()["image_cache_bytes"]) == (0, 0)


@pytest.mark.parametrize("family", ["qwen2_vl", "llava_next"])
def test_another_image_is_not_taken_for_a_cached_one(family: str, make_engine: MakeEngine) -> None:
    engine = make_engine(family)
    first, second = (Request(families.example_messages(family, 1, seed=seed), greedy()) for seed in (0, 1))
    engine.generate([first])
    fresh = make_engine(family, image_cache_bytes=0).generate([second])[0].choices[0]
    assert exact(engine.generate([second])[0].choices[0]) == exact(fresh)
    assert engine.stats()["image_cache_hits"] == 0


# --- states ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.FAMILIES)
def test_states_are_the_residual_stream_at_the_prompts_last_token(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    chats = conversations(family)
    results = make_engine(family, prefill_budget=300).generate(
        [Request(chat, greedy(1), states=True) for chat in chats]
    )
    chunked = make_engine(family, prefill_budget=9).generate([Request(chats[1], greedy(1), states=True)])
    for chat, result in zip([*chats, chats[1]], [*results, *chunked], strict=True):
        answer = load_plain(family).answer(chat, 1)
        assert result.choices[0].states is not None
        torch.testing.assert_close(result.choices[0].states, answer.hidden[:, -1], rtol=1e-4, atol=1e-4)
        assert result.choices[0].next_logprobs is not None
        torch.testing.assert_close(result.choices[0].next_logprobs, answer.logprobs[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("budget", [300, 9, 1])
def test_states_are_read_at_any_position_counted_from_the_prompts_end(
    budget: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    """Prompts in one batch, each at its own, and a prompt in chunks, whose last one need not hold the token."""
    chats, positions = conversations("qwen2_vl"), (-2, -1, -5, -9, -12)
    asked = [(chat, position) for chat in chats for position in positions]
    results = make_engine("qwen2_vl", prefill_budget=budget).generate(
        [Request(chat, greedy(1), states=True, state_position=position) for chat, position in asked]
    )
    answers = {id(chat): load_plain("qwen2_vl").answer(chat, 1) for chat in chats}
    for (chat, position), result in zip(asked, results, strict=True):
        answer = answers[id(chat)]
        expected = answer.hidden[:, answer.prompt_length + position]
        torch.testing.assert_close(result.choices[0].states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", [0, 1, -100_000])
def test_a_position_outside_the_prompt_is_refused(position: int, make_engine: MakeEngine) -> None:
    request = Request(conversations("qwen2_vl")[0], greedy(1), states=True, state_position=position)
    with pytest.raises(RequestError, match="'state_position' must be from -"):
        make_engine("qwen2_vl").generate([request])
