"""Snapshots of recurrent states in the prefix cache: where they are taken, how long they live, and how much they take."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import steering
from steering import Diagnose, Request, Sampling
from steering.prompt.layout import build_prompt
from steering.recurrent.states import GRAIN, snapshot_bytes
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.references import assert_chosen_by, logprobs_along
from tests.steering.parallel.asking import chat, picture

FAMILY, ROOM = "qwen3_5", 2**26
SYSTEM = {"role": "system", "content": [{"type": "text", "text": "The star is red, the circle is green. " * 5}]}
RED = picture(200, 30, 40)
SAMPLING = Sampling(max_tokens=3, logprobs=3, ignore_eos=True)
FIRST, SECOND, THIRD = ("Is the circle red? " * 12, "Where is the heart? " * 12, "Why is it so? " * 12)


def asking(question: str, **more: Any) -> Request:
    return Request([SYSTEM, *chat(RED, text=question)], SAMPLING, **more)


def cached(engine: steering.Engine, question: str, **more: Any) -> int:
    """Return how many of the prompt's tokens came from the cache."""
    return engine.generate([asking(question, **more)])[0].cached_tokens


def one_snapshot(engine: steering.Engine) -> int:
    """Return the bytes of the states of all layers behind one token, by the model's config."""
    config = engine.mllm.text_config
    keys, values = (
        config.linear_num_key_heads * config.linear_key_head_dim,
        config.linear_num_value_heads * config.linear_value_head_dim,
    )
    inputs = (2 * keys + values) * (config.linear_conv_kernel_dim - 1)
    matrices = config.linear_num_value_heads * config.linear_key_head_dim * config.linear_value_head_dim
    return config.layer_types.count("linear_attention") * 4 * (inputs + matrices)


def of_length(engine: steering.Engine, tokens: int) -> list[dict[str, Any]]:
    """Return a chat whose prompt has so many tokens."""
    for letters in range(4 * tokens):
        messages = chat(text="z" * letters)
        if len(build_prompt(engine.mllm, messages).layout.spans) == tokens:
            return messages
    raise AssertionError("no text has so many tokens")


@pytest.mark.parametrize("tokens", [GRAIN, GRAIN + 1, 2 * GRAIN, 2 * GRAIN + 1])
def test_prompts_that_end_where_states_are_kept(tokens: int, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """States behind the last token are of no use: it must run, because it gives the answer's first token."""
    engine, plain = make_engine(FAMILY, prefix_cache_bytes=ROOM), load_plain(FAMILY)
    messages = of_length(engine, tokens)
    for known in (0, (tokens - 1) // GRAIN * GRAIN):
        (result,) = engine.generate([Request(messages, SAMPLING)])
        assert (result.prompt_tokens, result.cached_tokens) == (tokens, known)
        choice = result.choices[0]
        assert_chosen_by(choice, logprobs_along(plain, messages, choice.token_ids), atol=2e-4)


def test_a_running_answer_holds_no_snapshots(make_engine: MakeEngine) -> None:
    """Those that the cache let go of would otherwise take memory as long as the answer runs, which nothing counts."""
    engine = make_engine(FAMILY, prefix_cache_bytes=ROOM)
    completion = engine.submit(asking(FIRST))
    engine.step()
    (sequence,) = engine.core.steps.alive
    assert sequence.sampled
    assert sequence.prefill.wanted
    assert sequence.prefill.states == {}
    completion.cancel()


def test_a_cache_too_small_for_a_state_is_none(make_engine: MakeEngine, caplog: pytest.LogCaptureFixture) -> None:
    size = one_snapshot(make_engine(FAMILY))
    small = make_engine(FAMILY, prefix_cache_bytes=2 * size - 1)
    assert f"take {size} bytes" in caplog.text
    assert [cached(small, FIRST) for _ in range(3)] == [0, 0, 0]
    assert (small.stats()["prefix_cache_bytes"], small.stats()["prefix_cache_queries"]) == (0, 0)


def test_states_and_blocks_stay_within_their_halves(make_engine: MakeEngine) -> None:
    """With room for three states, the least recently used are let go of, and what hits is as without a cache."""
    cold, room, hits = make_engine(FAMILY), 500_000, 0
    warm = make_engine(FAMILY, prefix_cache_bytes=room)
    prefixes, most = warm.core.runner.prefixes, 3 * one_snapshot(cold)
    prefixes._snapshots.capacity = most  # blocks of this model are larger than its states
    for question in (FIRST, FIRST, SECOND, THIRD, SECOND, FIRST, "Ha? " * 70, THIRD, FIRST, FIRST):
        expected, got = (engine.generate([asking(question)])[0] for engine in (cold, warm))
        for one, other in zip(got.choices[0].logprobs or (), expected.choices[0].logprobs or (), strict=True):
            assert one.logprob == pytest.approx(other.logprob, abs=2e-4)
        hits += bool(got.cached_tokens)
        kept = prefixes._snapshots
        assert sum(map(snapshot_bytes, kept._entries.values())) == kept.bytes <= most
        assert kept._entries.keys() <= prefixes._blocks.keys()
        assert warm.stats()["prefix_cache_bytes"] <= room
    assert 0 < hits < 9


def test_states_stay_where_blocks_are_measured_anew(make_engine: MakeEngine) -> None:
    """A readout needs states of the prompt: its blocks are replaced, but not what was kept where others depart."""
    engine = make_engine(FAMILY, prefix_cache_bytes=ROOM)
    cached(engine, FIRST)
    cached(engine, SECOND)
    departs = cached(engine, THIRD)
    assert departs
    assert cached(engine, FIRST, diagnose=Diagnose({"tam"})) == 0
    assert cached(engine, "Ha? " * 70) == departs


def test_a_prompt_that_is_read_again_goes_on_before_the_rows_that_are_read(make_engine: MakeEngine) -> None:
    engine = make_engine(FAMILY, prefix_cache_bytes=ROOM)
    focus = Diagnose({"focus"})
    assert cached(engine, FIRST, diagnose=focus) == 0
    layout = build_prompt(engine.mllm, asking(FIRST).messages).layout
    before = int(layout.image_columns.max()) // GRAIN * GRAIN
    assert cached(engine, FIRST, diagnose=focus) == before > 0


def test_the_snapshot_of_each_prompt_of_a_batch_is_its_own(make_engine: MakeEngine) -> None:
    """Prompts of different lengths are padded, and wanted at different places."""
    cold, warm = make_engine(FAMILY), make_engine(FAMILY, prefix_cache_bytes=ROOM)
    batch = [asking(FIRST), asking("Ha? " * 50), Request(chat(text="Short. " * 15), SAMPLING)]
    warm.generate(batch)
    for request in batch:
        expected, got = (engine.generate([request])[0] for engine in (cold, warm))
        assert got.cached_tokens == (got.prompt_tokens - 1) // GRAIN * GRAIN
        assert got.choices[0].token_ids == expected.choices[0].token_ids
        scores = (torch.tensor([one.logprob for one in of.choices[0].logprobs or ()]) for of in (got, expected))
        torch.testing.assert_close(*scores, rtol=0, atol=2e-4)
