"""An answer that is given: its tokens, log-probabilities and readouts are those of the answer as the model generates it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from PIL import Image

import steering
from steering import ContextOverflow, Diagnose, Engine, Generate, Request, RequestError, Sampling, See, Think
from steering.prompt.forced import forced_tokens
from tests import families
from tests.steering.plain import Plain

MakeEngine = Callable[..., Engine]
LoadPlain = Callable[[str], Plain]
ANSWER = "The ball is red, not blue."


@pytest.mark.parametrize("family", families.FAMILIES)
def test_its_tokens_are_the_templates(make_engine: MakeEngine, family: str) -> None:
    """Rendered as a turn of the assistant, an answer is these tokens and the one that ends it."""
    mllm = make_engine(family).mllm
    *tokens, end = forced_tokens(mllm, ANSWER)
    assert mllm.tokenizer.decode(tokens, skip_special_tokens=True).strip() == ANSWER
    assert end in mllm.stop_ids
    asked = [{"role": "user", "content": [{"type": "text", "text": "?"}]}]
    said = {"role": "assistant", "content": [{"type": "text", "text": "x"}]}
    rendered = mllm.processor.apply_chat_template([*asked, said], tokenize=False)
    behind = mllm.tokenizer(rendered.rpartition("x")[2], add_special_tokens=False).input_ids
    stops = [token for token in behind if token in mllm.stop_ids]
    assert stops[:1] in ([], [end])


def test_its_log_probabilities_are_the_plain_models(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, chat = make_engine("qwen2_vl"), families.example_messages("qwen2_vl", 2)
    request = Request(chat, Sampling(logprobs=0, temperature=1.0), forced=ANSWER)
    choice = engine.generate([request])[0].choices[0]
    tokens = forced_tokens(engine.mllm, ANSWER)
    assert (choice.text, choice.finish_reason, choice.token_ids) == (ANSWER, "stop", tokens)
    expected = load_plain("qwen2_vl").answer(chat, len(tokens), forced=tokens).logprobs
    assert choice.logprobs is not None
    assert len(choice.logprobs) == len(tokens) - 1  # the one that ends the answer is none of it
    for one, row in zip(choice.logprobs, expected, strict=False):
        assert one.logprob == pytest.approx(float(row[one.token_id]), abs=1e-4)


def test_penalties_count_forced_tokens(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, chat = make_engine("qwen2_vl"), families.example_messages("qwen2_vl", 2)
    first = engine.generate([Request(chat, Sampling(max_tokens=4, ignore_eos=True))])[0].choices[0].token_ids
    for forced in ((first[1],), (first[1], first[2], first[1])):
        sampling = Sampling(max_tokens=len(forced) + 4, frequency_penalty=-2.0, ignore_eos=True)
        tokens = engine.generate([Request(chat, sampling, forced=forced)])[0].choices[0].token_ids
        plain = load_plain("qwen2_vl").answer(chat, len(tokens), forced=tokens).logprobs
        for number in range(len(forced), len(tokens)):
            counts = torch.bincount(torch.tensor(tokens[:number]), minlength=plain.shape[-1])
            assert tokens[number] == int((plain[number] + 2.0 * counts).argmax())


@pytest.mark.parametrize("interventions", [(), (See(), Think(), Generate())])
def test_a_models_own_answer_forced_is_read_as_it_was(interventions: tuple[steering.Options, ...]) -> None:
    """On the embedded model, whose answers end by themselves and are what their texts are encoded to."""
    engine = Engine(steering.load(), slots=4, self_check=False)
    picture = {"type": "image", "image": Image.linear_gradient("L").convert("RGB")}
    chat = [{"role": "user", "content": [picture, {"type": "text", "text": "What is in the picture?"}]}]
    asked = Diagnose(frozenset({"focus", "modality", "decay", "residual", "tam"}))
    sampling = Sampling(max_tokens=40, logprobs=0)
    said = engine.generate([Request(chat, sampling, interventions, asked)])[0].choices[0]
    again = engine.generate([Request(chat, sampling, interventions, asked, forced=said.text)])[0].choices[0]
    assert said.finish_reason == "stop"
    assert (again.text, again.token_ids) == (said.text, said.token_ids)
    assert again.diagnostics == said.diagnostics
    assert again.logprobs == said.logprobs


def test_it_may_be_empty_and_cut(make_engine: MakeEngine) -> None:
    engine, chat = make_engine("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    empty, cut = engine.generate(
        [Request(chat, forced=""), Request(chat, Sampling(max_tokens=3), forced=ANSWER)],
    )
    assert (empty.choices[0].text, empty.choices[0].finish_reason) == ("", "stop")
    assert cut.choices[0].token_ids == forced_tokens(engine.mllm, ANSWER)[:3]
    assert cut.choices[0].finish_reason == "length"


def test_what_cannot_be_an_answer_is_refused(make_engine: MakeEngine) -> None:
    engine, chat = make_engine("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    with pytest.raises(RequestError, match=r"special tokens; this one holds '<\|im_end\|>'") as refused:
        engine.generate([Request(chat, forced="red<|im_end|>")])
    assert refused.value.param == "force"
    with pytest.raises(ContextOverflow):
        engine.generate([Request(chat, forced="red " * 400)])
    with pytest.raises(RequestError, match="'forced' must be"):
        Request(chat, forced=3)  # type: ignore[arg-type]


def test_it_is_the_same_in_a_batch(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    chats = [families.example_messages("qwen2_vl", count) for count in (1, 2)]
    sampling = Sampling(logprobs=0)
    asked = [Request(chat, sampling, forced=text) for chat in chats for text in (ANSWER, "No.")]
    free = Request(chats[0], Sampling(max_tokens=12, ignore_eos=True, logprobs=0))
    together = engine.generate([*asked, free])
    for request, result in zip([*asked, free], together, strict=True):
        alone = engine.generate([request])[0].choices[0]
        assert alone.token_ids == result.choices[0].token_ids
        pairs = zip(alone.logprobs or (), result.choices[0].logprobs or (), strict=True)
        torch.testing.assert_close(*torch.tensor([[a.logprob, b.logprob] for a, b in pairs]).unbind(1))
