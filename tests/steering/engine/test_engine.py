"""The engine's answers are those of plain `generate()`, whatever else runs; requests live and die alone."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import steering
from steering import Busy, Choice, Completion, ContextOverflow, Engine, Fault, Request, RequestError, Sampling
from steering.protocol.request import Result
from steering.protocol.sequence import Sequence
from steering.runner.sampler import uniform
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.plain import Answer, Messages, Plain

LoadPlain = Callable[[str], Plain]
IMAGE_ONLY = ("paligemma", "paligemma2")  # their processors refuse a chat without images
TEXT_FAMILIES = tuple(family for family in families.FAMILIES if family not in IMAGE_ONLY)
LONG = "Look at the image and think step by step. How many people are in the second image? " * 4


def user(text: str) -> Messages:
    return [{"role": "user", "content": [{"type": "text", "text": text}]}]


def conversations(family: str) -> list[Messages]:
    """Ragged: no, one, two and three images, short and long texts, a system prompt, several turns."""
    example = families.example_messages
    chats = [
        example(family, 1),
        example(family, 2, text=LONG, system="Answer with one word."),
        example(family, 3, text="Why?", seed=1),
        [
            *example(family, 1, seed=2),
            {"role": "assistant", "content": [{"type": "text", "text": "It is red."}]},
            *user("Are you sure? There are two balls."),
        ],
    ]
    return chats if family in IMAGE_ONLY else [*chats, user("How many people are there?"), user(LONG)]


def greedy(steps: int = 6, **options: Any) -> Sampling:
    return Sampling(max_tokens=steps, logprobs=20, ignore_eos=True, **options)


def assert_same(choice: Choice, answer: Answer) -> None:
    """Same tokens, and the log-probabilities of each one's twenty best alternatives within 1e-4."""
    assert list(choice.token_ids) == answer.tokens
    assert choice.logprobs is not None
    for row, token in zip(answer.logprobs, choice.logprobs, strict=True):
        best = row.topk(20)
        reported = torch.tensor([alternative.logprob for alternative in token.top])
        torch.testing.assert_close(reported, best.values, rtol=0, atol=1e-4)
        torch.testing.assert_close(row[[other.token_id for other in token.top]], reported, rtol=0, atol=1e-4)
        assert token.logprob == pytest.approx(float(row[token.token_id]), abs=1e-4)


def exact(choice: Choice) -> tuple[Any, ...]:
    """Everything of a choice that must not depend on its neighbours, log-probabilities to the last bit."""
    return choice.text, choice.token_ids, choice.finish_reason, choice.logprobs, choice.applied, choice.diagnostics


def sigma(choice: Choice) -> torch.Tensor:
    assert choice.diagnostics is not None
    return torch.tensor(choice.diagnostics["focus"]["sigma"])


def run_down(engine: Engine, completion: Completion) -> Result:
    """Step until a request is done."""
    while not completion.done:
        engine.step()
    return completion.result()


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


# --- n, seeds, baselines ---------------------------------------------------------------------------------------------

SAMPLED = Sampling(max_tokens=8, temperature=1.5, seed=11, logprobs=2, ignore_eos=True)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "gemma3", "idefics3"])
def test_each_of_n_answers_equals_its_own_prefill(
    family: str, make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(conversations(family)[1], SAMPLED, n=4, diagnose=steering.Diagnose(), states=True)
    forked = make_engine(family).generate([request])[0]
    monkeypatch.setattr(Sequence, "can_fork", False)
    prefilled = make_engine(family).generate([request])[0]
    assert len({choice.token_ids for choice in forked.choices}) == 4
    for one, other in zip(forked.choices, prefilled.choices, strict=True):
        assert one.token_ids == other.token_ids
        assert one.logprobs is not None
        assert other.logprobs is not None
        for ours, theirs in zip(one.logprobs, other.logprobs, strict=True):
            assert ours.logprob == pytest.approx(theirs.logprob, abs=1e-4)
        torch.testing.assert_close(sigma(one), sigma(other), rtol=0, atol=1e-6)
        assert one.states is not None
        assert other.states is not None
        torch.testing.assert_close(one.states, other.states, rtol=0, atol=1e-4)
    assert forked.completion_tokens == 4 * 8


def test_the_first_of_n_answers_is_the_only_one_of_the_same_seed(make_engine: MakeEngine) -> None:
    chat = families.example_messages("llava", 1)
    one = make_engine("llava").generate([Request(chat, SAMPLED)])[0].choices[0]
    first = make_engine("llava").generate([Request(chat, SAMPLED, n=3)])[0].choices[0]
    assert first.token_ids == one.token_ids


def test_a_seed_fixes_the_answer_whatever_else_runs(make_engine: MakeEngine) -> None:
    chats = conversations("qwen2_vl")
    alone = make_engine("qwen2_vl", slots=1).generate([Request(chats[0], SAMPLED)])[0].choices[0]
    others = [
        Sampling(max_tokens=3, temperature=2.0, top_p=0.7),
        Sampling(max_tokens=9, frequency_penalty=1.0, logit_bias={5: -100.0}),
        Sampling(max_tokens=5, temperature=0.5, top_k=3, min_p=0.1, repetition_penalty=1.3),
    ]
    requests = [Request(chat, sampling) for chat, sampling in zip(chats[1:4], others, strict=True)]
    engine = make_engine("qwen2_vl", slots=3, prefill_budget=30)
    result = engine.generate([*requests[:2], Request(chats[0], SAMPLED), requests[2]])[2]
    assert result.choices[0].token_ids == alone.token_ids
    assert result.choices[0].text == alone.text


def test_other_seeds_and_no_seed_give_other_answers(make_engine: MakeEngine) -> None:
    chat = families.example_messages("qwen2_vl", 1)
    seeds = [0, 1, 2, -1, 2**63 - 1, None, None]
    requests = [Request(chat, dataclasses.replace(SAMPLED, seed=seed)) for seed in seeds]
    answers = [result.choices[0].token_ids for result in make_engine("qwen2_vl").generate(requests)]
    assert len(set(answers)) == len(seeds)


def test_the_n_answers_draw_unrelated_numbers(make_engine: MakeEngine) -> None:
    """No answer repeats another one's random numbers, not even a few tokens later."""
    request = Request(families.example_messages("qwen2_vl", 1), SAMPLED, n=4)
    seeds = [sequence.spec.seed for sequence in make_engine("qwen2_vl").submit(request).sequences]
    positions = torch.arange(2000)
    numbers = torch.cat([uniform(torch.tensor(seed), positions) for seed in seeds])
    assert len(numbers.unique()) == len(numbers)


# --- streaming -------------------------------------------------------------------------------------------------------


def test_chunks_of_a_stream_add_up_to_the_result(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    request = Request(conversations("qwen2_vl")[0], dataclasses.replace(SAMPLED, max_tokens=30), n=2)
    expected = engine.generate([request])[0]
    completion = engine.submit(request)
    while not completion.done:
        engine.step()
    chunks = list(completion)
    for choice in expected.choices:
        own = [chunk for chunk in chunks if chunk.index == choice.index]
        assert "".join(chunk.text for chunk in own) == choice.text
        assert tuple(token for chunk in own for token in chunk.logprobs) == choice.logprobs
        assert [chunk.choice is not None for chunk in own] == [False] * (len(own) - 1) + [True]
        assert own[-1].choice == choice
    assert completion.result().choices == expected.choices


# --- faults ----------------------------------------------------------------------------------------------------------


class _Sabotage:
    """Breaks what the wrapper gives to the decoder for prompts that hold a certain token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mllm: steering.MLLM, damage: Callable[[torch.Tensor], object]):
        real = mllm.embed
        self.marked: set[bytes] = set()

        def embed(inputs: Any, features: Any = None) -> Any:
            embedded = real(inputs, features)
            if inputs["input_ids"].numpy().tobytes() in self.marked:
                embedded = dataclasses.replace(embedded, embeds=embedded.embeds.clone())
                damage(embedded.embeds)
            return embedded

        monkeypatch.setattr(mllm, "embed", embed)

    def mark(self, completion: Completion) -> Completion:
        self.marked.add(completion.sequences[0].prompt.ids[None].numpy().tobytes())
        return completion


@pytest.mark.parametrize("family", families.FAMILIES)
def test_nan_in_one_request_ends_it_alone_and_leaves_a_clean_slot(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(family, slots=2)
    sabotage = _Sabotage(monkeypatch, engine.mllm, lambda embeds: embeds[:, 2].fill_(torch.nan))
    chats = conversations(family)
    healthy = engine.submit(Request(chats[0], greedy()))
    broken = sabotage.mark(engine.submit(Request(chats[2], greedy())))
    successor = engine.submit(Request(chats[3], greedy()))
    with pytest.raises(Fault, match="not finite"):
        run_down(engine, broken)
    sabotage.marked.clear()
    assert_same(run_down(engine, healthy).choices[0], load_plain(family).answer(chats[0], 6))
    assert_same(run_down(engine, successor).choices[0], load_plain(family).answer(chats[3], 6))
    again = engine.submit(Request(chats[2], greedy()))
    assert_same(run_down(engine, again).choices[0], load_plain(family).answer(chats[2], 6))
    assert engine.stats()["faults"] == 1


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "llava"])
def test_an_image_that_cannot_be_encoded_fails_its_request_alone(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(family)

    def explode(embeds: torch.Tensor) -> None:
        raise RuntimeError("no such picture")

    sabotage = _Sabotage(monkeypatch, engine.mllm, explode)
    chats = conversations(family)
    completions = [engine.submit(Request(chat, greedy())) for chat in chats[:4]]
    sabotage.mark(completions[1])
    with pytest.raises(Fault, match="no such picture"):
        run_down(engine, completions[1])
    for number in (0, 2, 3):
        assert_same(run_down(engine, completions[number]).choices[0], load_plain(family).answer(chats[number], 6))


def test_a_step_that_fails_for_a_batch_is_tried_again_one_by_one(
    make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One prompt makes the common prefill fail; only that one ends, the others' readings are not counted twice."""
    engine = make_engine("qwen2_vl", slots=4)
    chats = conversations("qwen2_vl")
    nothing = torch.zeros(engine.mllm.num_layers)
    direction = torch.ones(engine.mllm.num_layers, engine.mllm.hidden_size)
    vector = steering.SteeringVector("v", direction, nothing, nothing, nothing, (1,), engine.mllm.fingerprint)
    steer = steering.Steer(dataclasses.replace(vector, weight=nothing + 1e-6), 1.0)  # measured, but too weak to matter
    requests = [Request(chat, greedy(), (steer,), diagnose=steering.Diagnose()) for chat in chats[:3]]
    expected = make_engine("qwen2_vl").generate(requests)
    completions = [engine.submit(request) for request in requests]
    guilty = completions[1].sequences[0]
    real = engine._runner.next_tokens

    def next_tokens(sequences: Any, logits: torch.Tensor) -> Any:
        if guilty in sequences:
            raise RuntimeError("out of luck")
        return real(sequences, logits)

    monkeypatch.setattr(engine._runner, "next_tokens", next_tokens)
    with pytest.raises(Fault, match="out of luck"):
        run_down(engine, completions[1])
    for number in (0, 2):
        choice, wanted = run_down(engine, completions[number]).choices[0], expected[number].choices[0]
        assert_same(choice, load_plain("qwen2_vl").answer(chats[number], 6))
        torch.testing.assert_close(sigma(choice), sigma(wanted), rtol=1e-4, atol=1e-6)
        assert choice.applied is not None
        assert wanted.applied is not None
        dose = wanted.applied["steering"][0]["dose"]
        assert choice.applied["steering"][0]["dose"] == pytest.approx(dose, rel=1e-4)
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_a_decoding_step_that_raises_twice_ends_what_ran_and_the_engine_goes_on(
    make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2_vl", slots=2)
    chats = conversations("qwen2_vl")
    completions = [engine.submit(Request(chat, greedy())) for chat in chats[:3]]
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "decode", lambda *_: 1 / 0)
        engine.step()
    for completion in completions[:2]:
        with pytest.raises(Fault, match="division by zero"):
            run_down(engine, completion)
    assert_same(run_down(engine, completions[2]).choices[0], load_plain("qwen2_vl").answer(chats[2], 6))


# --- cancelling, bounds ----------------------------------------------------------------------------------------------


def test_cancelling_frees_the_slot_at_the_next_step(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine = make_engine("qwen2_vl", slots=2)
    chats = conversations("qwen2_vl")
    left = engine.submit(Request(chats[0], greedy(100)))
    stays = engine.submit(Request(chats[1], greedy(8)))
    waits = engine.submit(Request(chats[2], greedy()))
    engine.step()
    assert engine.stats()["running"] == 2
    left.cancel()
    engine.step()
    assert left.sequences[0].slot == -1
    assert waits.sequences[0].tokens
    assert_same(run_down(engine, stays).choices[0], load_plain("qwen2_vl").answer(chats[1], 8))
    assert_same(run_down(engine, waits).choices[0], load_plain("qwen2_vl").answer(chats[2], 6))
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
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine = make_engine(family, slots=1, prefill_budget=8)
    chats = conversations(family)
    half, waiting, last = (engine.submit(Request(chat, greedy())) for chat in chats[:3])
    engine.step()
    assert 0 < half.sequences[0].computed < half.prompt_tokens
    half.cancel()
    waiting.cancel()
    engine.step()
    assert half.sequences[0].slot == waiting.sequences[0].slot == -1
    assert_same(run_down(engine, last).choices[0], load_plain(family).answer(chats[2], 6))


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
    chat = conversations("qwen2_vl")[0]
    length = engine.submit(Request(chat, greedy(1))).prompt_tokens
    with pytest.raises(ContextOverflow) as refused:
        engine.submit(Request(chat, greedy(61 - length)))
    assert str(refused.value).startswith(
        f"This model's maximum context length is 60 tokens. However, you requested 61 tokens ({length} in the messages, "
        f"{61 - length} in the completion)."
    )
    assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
    assert engine.submit(Request(chat, greedy(60 - length)))


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
        ("top_k", -1),
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


# --- threads ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def running(make_engine: MakeEngine) -> Iterator[Engine]:
    engine = make_engine("qwen2_vl", slots=3, max_waiting=64)
    engine.start()
    yield engine
    engine.stop()


def test_an_engine_is_started_once(running: Engine) -> None:
    with pytest.raises(RuntimeError, match="started before"):
        running.start()


def test_many_threads_may_submit_at_once(running: Engine, load_plain: LoadPlain) -> None:
    chats = conversations("qwen2_vl")
    answers = [load_plain("qwen2_vl").answer(chat, 5) for chat in chats]
    results: dict[int, Result] = {}

    def client(number: int) -> None:
        results[number] = running.submit(Request(chats[number % len(chats)], greedy(5))).result()

    threads = [threading.Thread(target=client, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    for number in range(24):
        assert_same(results[number].choices[0], answers[number % len(chats)])


def test_a_list_of_requests_may_be_larger_than_the_queue(running: Engine) -> None:
    chats = conversations("qwen2_vl")
    results = running.generate(Request(chats[i % 3], greedy(2)) for i in range(80))
    assert [result.choices[0].token_ids for result in results[:3]] == [
        result.choices[0].token_ids for result in results[3:6]
    ]
    assert len(results) == 80


def test_tokens_of_a_stream_arrive_while_it_runs(running: Engine) -> None:
    completion = running.submit(Request(conversations("qwen2_vl")[0], greedy(400)))
    next(iter(completion))
    assert not completion.done
    completion.cancel()
    deadline = time.monotonic() + 10
    while running.stats()["running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    assert running.stats()["running"] == 0


def test_stopping_lets_running_answers_finish_and_refuses_new_ones(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    engine.start()
    assert engine.healthy
    completion = engine.submit(Request(conversations("qwen2_vl")[0], greedy(50)))
    engine.stop(drain=30)
    assert not engine.healthy
    assert len(completion.result().choices[0].token_ids) == 50
    with pytest.raises(Fault, match="shutting down"):
        engine.submit(Request(conversations("qwen2_vl")[0], greedy()))
    with pytest.raises(Fault, match="shutting down"):
        engine.generate([Request(conversations("qwen2_vl")[0], greedy())] * 9)


def test_stopping_without_patience_ends_running_and_waiting_requests(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", slots=1)
    engine.start()
    completions = [engine.submit(Request(conversations("qwen2_vl")[0], greedy(400))) for _ in range(2)]
    engine.stop()
    for completion in completions:
        with pytest.raises(Fault, match="shutting down"):
            completion.result()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0


def test_stopping_ends_even_what_is_just_being_prefilled(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine("qwen2_vl", max_length=1024)
    entered, go_on = threading.Event(), threading.Event()
    real = engine._runner.prefill

    def prefill(*arguments: Any) -> Any:
        entered.set()
        assert go_on.wait(timeout=30)
        return real(*arguments)

    monkeypatch.setattr(engine._runner, "prefill", prefill)
    completions = [engine.submit(Request(chat, greedy(400))) for chat in conversations("qwen2_vl")[:3]]
    engine.start()
    assert entered.wait(timeout=30)
    stopping = threading.Thread(target=engine.stop)
    stopping.start()
    time.sleep(0.1)
    go_on.set()
    stopping.join(timeout=30)
    for completion in completions:
        with pytest.raises(Fault, match="shutting down"):
            completion.result()
        assert len(completion.sequences[0].tokens) <= 2


def test_an_engine_that_dies_tells_everyone_who_waits(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen2_vl", slots=1)
    completions = [engine.submit(Request(conversations("qwen2_vl")[0], greedy(400))) for _ in range(2)]
    monkeypatch.setattr(engine._scheduler, "next_forks", lambda: 1 / 0)
    engine.start()
    for completion in completions:
        with pytest.raises(Fault, match="engine died"):
            completion.result()
    assert not engine.healthy
    with pytest.raises(Fault):
        engine.submit(Request(conversations("qwen2_vl")[0], greedy()))
    engine.stop()


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


def test_results_are_handed_over_as_they_come_and_the_rest_is_cancelled(make_engine: MakeEngine) -> None:
    engine, asked = make_engine("qwen2_vl", slots=2), []

    def requests() -> Iterator[Request]:
        for chat in conversations("qwen2_vl") * 10:
            asked.append(chat)
            yield Request(chat, greedy(2))

    stream = engine.stream(requests())
    first = next(stream)
    assert len(first.choices[0].token_ids) == 2
    assert len(asked) < 10
    stream.close()
    engine.step()
    assert engine.stats()["running"] == engine.stats()["waiting"] == 0
