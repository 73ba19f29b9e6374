"""The engine's answers and states are those of the plain model, whatever else runs; an answer ends where it should."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import pytest
import torch

import steering
from steering import Choice, Engine, Request, RequestError, Sampling
from steering.runner.columns import BUCKET
from tests import families
from tests.steering.conftest import OF_EACH_KIND, LoadPlain, MakeEngine
from tests.steering.front.asking import assert_same, conversations, exact, greedy, run_down, user
from tests.steering.front.conftest import LONGEST, PlainAnswer
from tests.steering.inside import sequences
from tests.steering.plain import Answer

# --- the same tokens as generate() -----------------------------------------------------------------------------------


@pytest.mark.parametrize("family", families.ANSWERING)
def test_alone_and_in_a_ragged_batch_tokens_and_states_are_those_of_generate(
    family: str, make_engine: MakeEngine, plain_answer: PlainAnswer
) -> None:
    chats = conversations(family)
    alone = make_engine(family, slots=1).generate([Request(chats[1], greedy(3))])[0]
    assert_same(alone.choices[0], plain_answer(family, 1, 3))
    batch = make_engine(family, slots=8).generate([Request(chat, greedy(3), states=True) for chat in chats])
    for number, result in enumerate(batch):
        answer = plain_answer(family, number, 3)
        assert_same(result.choices[0], answer)
        assert_states(result.choices[0], answer)
        assert result.prompt_tokens == answer.prompt_length
        assert result.completion_tokens == 3


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_requests_join_and_leave_between_steps(family: str, make_engine: MakeEngine, plain_answer: PlainAnswer) -> None:
    chats = conversations(family)
    lengths = [(5 * i) % LONGEST + 1 for i in range(len(chats))]
    engine = make_engine(family, slots=3, prefill_budget=70)
    results = engine.generate(Request(chat, greedy(n)) for chat, n in zip(chats, lengths, strict=True))
    for number, (n, result) in enumerate(zip(lengths, results, strict=True)):
        assert_same(result.choices[0], plain_answer(family, number, n))
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_a_prompt_prefilled_in_chunks_gives_the_same(
    family: str, make_engine: MakeEngine, plain_answer: PlainAnswer
) -> None:
    """Cover pictures and texts of every kind in three families; in others a long prompt and several turns.

    The three have positions of three axes, pictures that are read whole, and pictures that are cut into tiles with layers
    that see a window.
    """
    chats = conversations(family)
    asked = range(len(chats)) if family in ("qwen2_vl", "gemma3", "aya_vision") else (1, 3)
    engine = make_engine(family, slots=2, prefill_budget=7)
    results = engine.generate([Request(chats[number], greedy(3), states=True) for number in asked])
    for number, result in zip(asked, results, strict=True):
        assert_same(result.choices[0], plain_answer(family, number, 3))
        assert_states(result.choices[0], plain_answer(family, number, 3))


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "aya_vision", "mistral3"])
def test_a_long_prompt_does_not_stall_a_running_answer(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain, plain_answer: PlainAnswer
) -> None:
    engine = make_engine(family, prefill_budget=16)
    short = engine.submit(Request(user("How many?"), greedy(20)))
    engine.step()
    while not sequences(short)[0].tokens:
        engine.step()
    chat = conversations(family)[1]
    long = engine.submit(Request(chat, greedy(3)))
    before, steps = len(sequences(short)[0].tokens), 0
    while not sequences(long)[0].tokens:
        engine.step()
        steps += 1
    assert steps == -(-long.prompt_tokens // 16)
    assert len(sequences(short)[0].tokens) - before == steps
    assert_same(run_down(engine, long).choices[0], plain_answer(family, 1, 3))
    assert_same(run_down(engine, short).choices[0], load_plain(family).answer(user("How many?"), 20))


def test_short_prompts_are_prefilled_together(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    completions = [engine.submit(Request(chat, greedy(2))) for chat in conversations("qwen2_vl")[:4]]
    engine.step()
    assert [len(sequences(completion)[0].tokens) for completion in completions] == [2] * 4


@pytest.mark.parametrize("family", ["qwen2_5_vl", "gemma3", "paligemma2"])
def test_answers_longer_than_a_bucket_of_columns(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    chat, steps = families.example_messages(family, 1), 2 * BUCKET["cpu"] + 1
    result = make_engine(family).generate([Request(chat, greedy(steps))])[0]
    assert_same(result.choices[0], load_plain(family).answer(chat, steps))


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
        Sampling(max_tokens=12, temperature=1.5, seed=2, logprobs=0, logit_bias=special),
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


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_cached_images_give_the_same_answers(family: str, make_engine: MakeEngine) -> None:
    chats = [families.example_messages(family, 1), families.example_messages(family, 1, text="How many?")]
    cached, uncached = make_engine(family), make_engine(family, image_cache_bytes=0)
    first, second = (Request(chat, greedy(2)) for chat in chats)
    expected = [exact(uncached.generate([request])[0].choices[0]) for request in (first, second)]
    ours = [exact(cached.generate([request])[0].choices[0]) for request in (first, second, first)]
    assert ours == [*expected, expected[0]]
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


def assert_states(choice: Choice, answer: Answer) -> None:
    """Check the residual stream at the prompt's last token, and the model's prediction there."""
    assert choice.states is not None
    expected = answer.hidden[:, answer.prompt_length - 1]
    torch.testing.assert_close(choice.states, expected, rtol=1e-4, atol=5e-4)  # processors round recurrent states apart
    assert choice.next_logprobs is not None
    torch.testing.assert_close(choice.next_logprobs, answer.logprobs[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize(("budget", "numbers"), [(300, range(6)), (9, (0, 1, 4)), (1, (4,))])
def test_states_are_read_at_any_position_counted_from_the_prompts_end(
    budget: int, numbers: Iterable[int], make_engine: MakeEngine, plain_answer: PlainAnswer
) -> None:
    """Prompts in one batch, each at its own, and a prompt in chunks, whose last one need not hold the token."""
    chats = conversations("qwen2_vl")
    asked = [(number, position) for number in numbers for position in (-2, -1, -5, -9, -12)]
    results = make_engine("qwen2_vl", prefill_budget=budget).generate(
        [Request(chats[number], greedy(1), states=True, state_position=position) for number, position in asked]
    )
    for (number, position), result in zip(asked, results, strict=True):
        answer = plain_answer("qwen2_vl", number, 1)
        expected = answer.hidden[:, answer.prompt_length + position]
        torch.testing.assert_close(result.choices[0].states, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("position", [0, 1, -100_000])
def test_a_position_outside_the_prompt_is_refused(position: int, make_engine: MakeEngine) -> None:
    request = Request(conversations("qwen2_vl")[0], greedy(1), states=True, state_position=position)
    with pytest.raises(RequestError, match="'state_position' must be from -"):
        make_engine("qwen2_vl").generate([request])
