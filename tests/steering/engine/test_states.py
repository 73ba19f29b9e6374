"""The residual stream of a prompt is read at any of its tokens."""

from __future__ import annotations

import pytest
import torch

from steering import Request, RequestError
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.engine.asking import conversations, greedy


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
