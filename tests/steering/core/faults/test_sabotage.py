"""A fault in one request ends that request alone; the others get their undisturbed answers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest
import torch

import steering
from steering import Completion, Fault, Request
from tests.steering.conftest import OF_EACH_KIND, LoadPlain, MakeEngine
from tests.steering.front.asking import assert_same, conversations, greedy, run_down, sigma
from tests.steering.inside import sequences


class _Sabotage:
    """Breaks what the wrapper gives to the decoder for prompts that hold a certain token."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, mllm: steering.MLLM, damage: Callable[[torch.Tensor], object]):
        real = mllm.embed
        self.marked: set[bytes] = set()

        def embed(inputs: Any, *beside: Any) -> Any:
            embedded = real(inputs, *beside)
            if inputs["input_ids"].numpy().tobytes() in self.marked:
                embedded = dataclasses.replace(embedded, embeds=embedded.embeds.clone())
                damage(embedded.embeds)
            return embedded

        monkeypatch.setattr(mllm, "embed", embed)

    def mark(self, completion: Completion) -> Completion:
        self.marked.add(sequences(completion)[0].prompt.ids[None].numpy().tobytes())
        return completion


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_nan_in_one_request_ends_it_alone_and_leaves_a_clean_slot(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(family, slots=2)
    sabotage = _Sabotage(monkeypatch, engine.mllm, lambda embeds: embeds[:, 2].fill_(torch.nan))
    chats = conversations(family)
    healthy = engine.submit(Request(chats[0], greedy(4)))
    broken = sabotage.mark(engine.submit(Request(chats[2], greedy(4))))
    successor = engine.submit(Request(chats[3], greedy(4)))
    with pytest.raises(Fault, match="not finite"):
        run_down(engine, broken)
    sabotage.marked.clear()
    assert_same(run_down(engine, healthy).choices[0], load_plain(family).answer(chats[0], 4))
    assert_same(run_down(engine, successor).choices[0], load_plain(family).answer(chats[3], 4))
    again = engine.submit(Request(chats[2], greedy(4)))
    assert_same(run_down(engine, again).choices[0], load_plain(family).answer(chats[2], 4))
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
    """A prompt makes the common prefill fail; only it ends, and the others' readouts are not counted twice."""
    engine = make_engine("qwen2_vl", slots=4)
    chats = conversations("qwen2_vl")
    nothing = torch.zeros(engine.mllm.num_layers)
    direction = torch.ones(engine.mllm.num_layers, engine.mllm.hidden_size)
    vector = steering.SteeringVector("v", direction, nothing, nothing, nothing, (1,), engine.mllm.fingerprint)
    steer = steering.Steer(dataclasses.replace(vector, weight=nothing + 1e-6), 1.0)  # measured, but too weak to matter
    requests = [Request(chat, greedy(), (steer,), diagnose=steering.Diagnose()) for chat in chats[:3]]
    expected = make_engine("qwen2_vl").generate(requests)
    completions = [engine.submit(request) for request in requests]
    guilty = sequences(completions[1])[0]
    real = engine.core.runner.next_tokens

    def next_tokens(sequences: Any, logits: torch.Tensor) -> Any:
        if guilty in sequences:
            raise RuntimeError("out of luck")
        return real(sequences, logits)

    monkeypatch.setattr(engine.core.runner, "next_tokens", next_tokens)
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
        patch.setattr(engine.core.runner, "decode", lambda *_: 1 / 0)
        engine.step()
    for completion in completions[:2]:
        with pytest.raises(Fault, match="division by zero"):
            run_down(engine, completion)
    assert_same(run_down(engine, completions[2]).choices[0], load_plain("qwen2_vl").answer(chats[2], 6))
