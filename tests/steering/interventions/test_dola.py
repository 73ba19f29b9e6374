"""DoLa against a version written by hand over the hidden states of plain transformers, a token and a layer at a time."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import steering
from steering.grammar.grammar import Grammar
from steering.interventions.dola import Dola, DolaSlots, bucket
from steering.interventions.look_at import LookAt
from tests import families
from tests.steering.conftest import OF_EACH_KIND, LoadPlain, MakeEngine
from tests.steering.interventions.pushes import by_hand, chat, make_vector
from tests.steering.interventions.references import (
    SAMPLING,
    assert_as_near_as_plain,
    assert_chosen_by,
    only,
    rounding,
    states_along,
    states_changed,
)
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Messages, Plain

IMPOSSIBLE = -math.inf


def final_norm(plain: Plain) -> nn.Module:
    """Return the final norm, which has the same name in every family."""
    norm: nn.Module = plain.model.get_decoder().norm
    return norm


def by_definition(
    plain: Plain,
    logits: torch.Tensor,
    states: torch.Tensor,
    candidates: Sequence[int],
    dola: Dola,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, list[int]]:
    """Log-probabilities (steps, vocabulary) of the contrast, and the state that was chosen at each step.

    logits: (steps, vocabulary). states: (steps, layers + 1, d), the embeddings first. allowed: (steps, vocabulary) bool.
    """
    head = plain.model.get_output_embeddings()
    cap = getattr(plain.model.config.get_text_config(), "final_logit_softcapping", None)
    out, chosen = [], []
    for step, (last, early) in enumerate(zip(logits, states, strict=True)):
        considered = torch.ones(len(last), dtype=torch.bool) if allowed is None else allowed[step]
        p = last[considered].double().softmax(-1)
        best: tuple[float, int, torch.Tensor] | None = None
        for candidate in candidates:
            state = early[candidate]
            with torch.inference_mode():
                exits = head(final_norm(plain)(state[None])[0] if dola.normalise else state)
            if cap is not None:  # which is part of the head
                exits = torch.tanh(exits / cap) * cap
            q = exits.float()[considered].double().softmax(-1)
            middle = (p + q) / 2
            if dola.divergence == "released":  # kl_div(log x, y) is KL(y || x)
                far = sum(float(F.kl_div(distribution.log(), middle, reduction="sum")) for distribution in (p, q)) / 2
            else:
                far = sum(float(F.kl_div(middle.log(), distribution, reduction="sum")) for distribution in (p, q)) / 2
            if best is None or far > best[0]:
                best = (far, candidate, q)
        assert best is not None
        _, candidate, q = best
        ratio = p.log() - q.log()
        ratio[p < dola.relative_top * p.max()] = IMPOSSIBLE
        contrasted = torch.full((len(last),), IMPOSSIBLE, dtype=torch.float64)
        contrasted[considered] = ratio
        out.append(contrasted.log_softmax(-1).float())
        chosen.append(candidate)
    return torch.stack(out), chosen


def check(choice: steering.Choice, plain: Plain, messages: Messages, candidates: Sequence[int], dola: Dola) -> None:
    """Check that an answer's tokens, log-probabilities and report are those by definition."""
    expected, chosen = by_definition(plain, *states_along(plain, messages, choice.token_ids), candidates, dola)
    assert_chosen_by(choice, expected)
    assert choice.applied is not None
    counts = {str(state): chosen.count(state) for state in candidates}
    assert choice.applied["dola"] == {**dola.settings(), "premature": list(candidates), "chosen": counts}


@pytest.mark.parametrize("family", [*OF_EACH_KIND, "gemma4_large"])
def test_dola_is_exact_in_every_kind_of_family(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    plain, messages = load_plain(family), chat(family, 1)
    dola = Dola(premature=[0, 1, 2])
    for engine in (make_engine(family), make_engine(family, prefill_budget=11)):
        check(only(engine, messages, dola), plain, messages, [0, 1, 2], dola)


def test_the_final_norm_is_known_beside_one_of_another_width(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """The small Gemma 4's decoder has a norm of its layers' further embeddings."""
    messages, dola = chat("gemma4", 1), Dola(premature=[0, 1, 2], normalise=True)
    check(only(make_engine("gemma4"), messages, dola), load_plain("gemma4"), messages, [0, 1, 2], dola)


@pytest.mark.parametrize(
    ("dola", "candidates"),
    [
        (Dola(), [2]),  # the head is the embedding matrix, and of two early states one is left
        (Dola(bucket="high"), [1]),
        (Dola(premature=[2, 0]), [0, 2]),
        (Dola(premature=[0, 1, 2], relative_top=0.0), [0, 1, 2]),
        (Dola(premature=[0, 1, 2], relative_top=0.6), [0, 1, 2]),
        (Dola(premature=[0, 1, 2], normalise=True), [0, 1, 2]),
        (Dola(premature=[0, 1, 2], divergence="paper"), [0, 1, 2]),
        (Dola(premature=[1, 2], normalise=True, divergence="paper"), [1, 2]),
    ],
)
def test_every_option_is_exact(
    dola: Dola, candidates: list[int], make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine("qwen2_vl"), load_plain("qwen2_vl")
    if dola.premature is None:
        candidates = bucket(dola.bucket, engine.mllm.num_layers, plain.model.config.tie_word_embeddings)
    check(only(engine, chat("qwen2_vl"), dola), plain, chat("qwen2_vl"), candidates, dola)


def test_each_row_chooses_its_layer_and_neighbours_keep_every_bit(
    make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine("qwen2_vl"), load_plain("qwen2_vl")
    messages, other_chat = chat("qwen2_vl"), families.example_messages("qwen2_vl", 1, text="How many?")
    two_layers, more = Dola(premature=[0, 2]), Dola(premature=[1], relative_top=0.3, normalise=True, divergence="paper")

    def answers(first: tuple[Any, ...], second: tuple[Any, ...]) -> list[steering.Choice]:
        requests = [
            steering.Request(messages, SAMPLING, first),
            steering.Request(messages, SAMPLING),
            steering.Request(other_chat, SAMPLING, second),
        ]
        return [result.choices[0] for result in engine.generate(requests)]

    first, beside, second = answers((two_layers,), (more,))
    assert beside.logprobs == answers((), ())[1].logprobs
    check(first, plain, messages, [0, 2], two_layers)
    check(second, plain, other_chat, [1], more)


def test_states_are_those_that_other_interventions_leave(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain, messages = make_engine("qwen2_vl"), load_plain("qwen2_vl"), chat("qwen2_vl")
    vector, dola = make_vector(engine.mllm), Dola(premature=[1, 2])
    choice = only(engine, messages, dola, steering.Steer(vector, 2.0))
    delta = by_hand(vector, 2.0, (0, 2))
    states: list[list[torch.Tensor]] = [[] for _ in plain.layers]

    def change(layer: int, hidden: torch.Tensor, start: int) -> torch.Tensor:
        hidden = hidden + delta[layer]
        states[layer].append(hidden[0, -1])
        return hidden

    with states_changed(plain, change):
        logits, _ = states_along(plain, messages, choice.token_ids)
    steered = torch.stack([torch.stack(steps) for steps in states], 1)
    padded = torch.cat([torch.zeros_like(steered[:, :1]), steered], 1)  # nobody asks for the embeddings
    assert_chosen_by(choice, by_definition(plain, logits, padded, [1, 2], dola)[0])


def test_copied_and_cached_prompts_give_the_same_answers(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    messages = families.example_messages("qwen2_vl", 1, text="How many? " * 20)
    engine, plain = make_engine("qwen2_vl", slots=6, prefix_cache_bytes=2**24), load_plain("qwen2_vl")
    dola = Dola(premature=[0, 1, 2])
    baseline = only(make_engine("qwen2_vl"), messages)
    engine.generate([steering.Request(messages, SAMPLING)])
    result = engine.generate([steering.Request(messages, SAMPLING, dola, n=2, baseline=True)])[0]
    assert result.cached_tokens > 0  # it does nothing to the prompt
    for choice in result.choices:
        check(choice, plain, messages, [0, 1, 2], dola)
        assert choice.baseline is not None
        assert choice.baseline.token_ids == baseline.token_ids


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> dict[int, torch.Tensor]:
    """Return, by token of the answer with DoLa, the last logits (vocabulary,) that DoLa received for it."""
    logits_of: dict[int, torch.Tensor] = {}
    real = DolaSlots.logits

    def noted(self: DolaSlots, sequences: Any, slots: Any, logits: torch.Tensor) -> torch.Tensor:
        for row, sequence in enumerate(sequences):
            if "dola" in sequence.spec.asked and not sequence.is_twin:
                logits_of[len(sequence.tokens)] = logits[row].clone()
        return real(self, sequences, slots, logits)

    monkeypatch.setattr(DolaSlots, "logits", noted)
    return logits_of


def check_given(choice: steering.Choice, given: dict[int, torch.Tensor], plain: Plain, messages: Messages) -> None:
    """Check the answer by definition, from the logits that DoLa received and the plain model's early states."""
    logits = torch.stack([given[step] for step in range(len(choice.token_ids))])
    _, states = states_along(plain, messages, choice.token_ids)
    expected, _ = by_definition(plain, logits, states, [0, 1, 2], Dola(), logits > IMPOSSIBLE)
    assert_chosen_by(choice, expected)


@pytest.mark.parametrize("contrast", [steering.Icd(), steering.Icd(beta=0.0), steering.Vcd(), steering.Generate()])
def test_a_twins_contrast_comes_first(
    contrast: steering.Options, make_engine: MakeEngine, load_plain: LoadPlain, given: dict[int, torch.Tensor]
) -> None:
    """The result of the contrast is p, also for the first token, for which the leader has waited."""
    engine, plain, messages = make_engine("qwen2_vl"), load_plain("qwen2_vl"), chat("qwen2_vl")
    request = steering.Request(messages, SAMPLING, (contrast, Dola(premature=[0, 1, 2])))
    check_given(contrasted_choice := engine.generate([request])[0].choices[0], given, plain, messages)
    alone = engine.generate([replace(request, interventions=contrast, forced=contrasted_choice.token_ids)])[0].choices[
        0
    ]
    for step, token in enumerate(alone.logprobs or ()):
        contrasted = given[step].log_softmax(-1)
        assert token.logprob == pytest.approx(float(contrasted[token.token_id]), abs=1e-4)


def test_a_renewed_twin_finds_the_states_that_its_leader_had(make_engine: MakeEngine) -> None:
    """A leader that waits for another twin decodes for nothing meanwhile, which must not be what is contrasted."""
    engine, messages, dola = make_engine("qwen2_vl", slots=6), chat("qwen2_vl"), Dola(premature=[0, 1, 2])
    longer = replace(SAMPLING, max_tokens=8)
    interventions = (steering.Generate(refresh=2, weight=0.0), dola)  # of which a twin changes nothing
    waiting, plain = (
        engine.generate([steering.Request(messages, longer, options), steering.Request(messages, longer)])[0].choices[0]
        for options in (interventions, (dola,))
    )
    assert waiting.token_ids == plain.token_ids
    assert waiting.applied is not None
    assert plain.applied is not None
    assert waiting.applied["dola"] == plain.applied["dola"]
    for waiting_token, two in zip(waiting.logprobs or (), plain.logprobs or (), strict=True):
        assert waiting_token.logprob == pytest.approx(two.logprob, abs=1e-4)


def test_a_grammar_masks_first(make_engine: MakeEngine, load_plain: LoadPlain, given: dict[int, torch.Tensor]) -> None:
    """Distributions are those of the tokens that it allows, so that something plausible is always among these."""
    engine, plain, messages = make_engine("qwen2_vl"), load_plain("qwen2_vl"), chat("qwen2_vl")
    sampling = replace(SAMPLING, ignore_eos=False)
    request = steering.Request(messages, sampling, Dola(premature=[0, 1, 2]), grammar=Grammar.regex("[0-9]{9}"))
    choice = engine.generate([request])[0].choices[0]
    assert choice.text.isdigit()
    check_given(choice, given, plain, messages)
    logits, _ = states_along(plain, messages, choice.token_ids)
    for step, masked in given.items():
        allowed = masked > IMPOSSIBLE
        assert 0 < int(allowed.sum()) < len(allowed) / 2
        torch.testing.assert_close(masked[allowed], logits[step][allowed], rtol=0, atol=1e-4)


def test_forced_tokens_penalties_and_seeds_apply_to_contrasted_logits(
    make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain, messages = make_engine("qwen2_vl"), load_plain("qwen2_vl"), chat("qwen2_vl")
    dola, forced = Dola(premature=[0, 1, 2], relative_top=0.0), (7, 8, 9, 10)
    choice = only(engine, messages, dola, forced=forced)
    expected, _ = by_definition(plain, *states_along(plain, messages, forced), [0, 1, 2], dola)
    assert [step.logprob for step in choice.logprobs or ()] == [
        pytest.approx(float(row[token]), abs=1e-4) for row, token in zip(expected, forced, strict=True)
    ]
    best = only(engine, messages, dola).token_ids[0]
    biased = replace(SAMPLING, max_tokens=1, logit_bias={best: -100})
    biased_choice = engine.generate([steering.Request(messages, biased, dola)])[0].choices[0]
    assert biased_choice.token_ids[0] == int(expected[0].scatter(0, torch.tensor(best), IMPOSSIBLE).argmax())
    drawn = replace(SAMPLING, temperature=2.0, seed=5)
    requests = [steering.Request(messages, drawn, dola), steering.Request(messages, drawn, (dola, LookAt(bias=0.0)))]
    assert len({result.choices[0].token_ids for result in engine.generate(requests)}) == 1


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_rounding_alone(dtype: str, root: Path, load_plain: LoadPlain) -> None:
    engine, half = rounding(families.checkpoint("qwen2_vl", root), dtype)
    messages, dola = chat("qwen2_vl"), Dola(premature=[1], relative_top=0.0)
    choice = only(engine, messages, dola)
    answers = [
        by_definition(plain, *states_along(plain, messages, choice.token_ids), [1], dola)[0]
        for plain in (load_plain("qwen2_vl"), half)
    ]
    assert_as_near_as_plain(choice, *answers)


@pytest.mark.parametrize(
    ("name", "layers", "tied", "expected"),
    [
        ("low", 32, False, [*range(0, 16, 2)]),
        ("high", 32, False, [*range(16, 32, 2)]),
        ("low", 28, True, [*range(2, 14, 2)]),
        ("low", 80, False, [*range(0, 20, 2)]),
        ("high", 80, False, [*range(60, 80, 2)]),
        ("low", 2, True, [1]),
        ("low", 1, True, [0]),
        ("low", 4, True, [2]),
    ],
)
def test_buckets_are_those_of_transformers(name: str, layers: int, tied: bool, expected: list[int]) -> None:
    assert bucket(name, layers, tied) == expected


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Dola(bucket="middle"), "dola.bucket"),
        (lambda: Dola(relative_top=1.1), "dola.relative_top"),
        (lambda: Dola(premature=[-1]), "dola.premature[0]"),
    ],
)
def test_wrong_settings_name_their_field(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


@pytest.mark.parametrize("premature", [[], [99], [1, 1]])
def test_states_that_the_model_does_not_have_are_refused(premature: list[int], make_engine: MakeEngine) -> None:
    with pytest.raises(steering.RequestError) as refused:
        only(make_engine("qwen2_vl"), chat("qwen2_vl"), Dola(premature=premature))
    assert refused.value.param == "dola.premature"
