"""OPERA against the authors' loop with one beam, written anew: whole attention matrices, and answers that are really cut."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import Grammar
from steering.interventions.published.opera import Opera, Retrospection
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.published.twins import nearly
from tests.steering.interventions.pushes import by_hand, chat, make_vector
from tests.steering.interventions.references import (
    SAMPLING,
    assert_as_near_as_plain,
    rounding,
    scores_changed,
    states_changed,
)
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Messages, Plain, uncached

LONG = replace(SAMPLING, max_tokens=20, logprobs=3)


def answer(
    engine: steering.Engine, messages: Messages, *asked: Any, sampling: steering.Sampling = SAMPLING, **more: Any
) -> steering.Choice:
    request = steering.decide(engine, steering.Request(messages, sampling, asked, **more))
    return engine.generate([request])[0].choices[0]


Follows = Callable[[tuple[int, ...]], torch.Tensor]
"""Returns which tokens (vocabulary,) may come behind these."""


class Reference:
    """One answer, a token at a time; `attention` returns the last layer's matrix for the prompt and tokens behind it."""

    def __init__(self, plain: Plain, messages: Messages, options: Opera, follows: Follows | None = None):
        self.plain, self.options, self.follows = plain, options, follows
        self.inputs = plain.inputs(messages)
        ids = self.inputs["input_ids"][0].tolist()
        self.start = len(ids)
        self.images = [column for column, token in enumerate(ids) if token == plain.model.config.image_token_id]
        self.run = functools.cache(self._run)

    @torch.inference_mode()
    def _run(self, tokens: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        out = uncached(self.plain.model, self.inputs, tokens, output_attentions=True)
        matrix = out.attentions[-1][0].float().amax(0)
        logits = out.logits[0, -1].float()
        if self.follows is not None:
            logits = logits.masked_fill(~self.follows(tokens), -torch.inf)
        return logits, matrix / matrix.sum(-1, keepdim=True)

    def step(self, tokens: tuple[int, ...]) -> tuple[torch.Tensor, int]:
        """Return the logits (vocabulary,) of the next token, and the token that is trusted most."""
        full, _ = self.run(tokens)
        best = full.topk(min(self.options.candidates, int((full > -torch.inf).sum())))
        logits, places = torch.full_like(full, -torch.inf), []
        for score, token in zip(best.values, best.indices.tolist(), strict=True):
            _, matrix = self.run((*tokens, token))
            local = self.options.scale * matrix[self.start :, self.start :].double()
            trust = [self.rounded(1e-7 * float(local[j:, j].prod())) for j in range(len(local))]
            places.append(max(range(len(trust)), key=trust.__getitem__))
            penalty = max(trust) if len(local) > 10 else -float(matrix[-1, self.images].sum())
            logits[token] = score - self.options.penalty * penalty
        return logits, min(places, key=lambda place: (-places.count(place), place))

    def rounded(self, trust: float) -> float:
        return trust

    def others(self, tokens: list[int], rejected: list[int]) -> bool:
        """Return whether a token is left behind these once the chosen one is rejected, too."""
        possible = {token for token, score in enumerate(self.run(tuple(tokens))[0].tolist()) if score > -math.inf}
        return len(possible - {*rejected}) > 1

    def answer(self, steps: int) -> tuple[tuple[int, ...], torch.Tensor, list[int], dict[int, list[int]]]:
        """Return the tokens, their log-probabilities, the trusted tokens, and what was rejected where."""
        tokens: list[int] = []
        rows: list[torch.Tensor] = []
        trusted: list[int] = []
        rejected: dict[int, list[int]] = {}
        times: dict[int, int] = {}
        rollbacks = 0
        while len(tokens) < steps:
            logits, place = self.step(tuple(tokens))
            trusted.append(place)
            if rollbacks < self.options.rollbacks and place >= 10:
                targets = [
                    at
                    for at in (place + 1, place)
                    if times.get(at, 0) < self.options.candidates
                    and (at >= len(tokens) or self.others(tokens[:at], rejected.get(at, [])))
                ]
                if trusted.count(place) > self.options.threshold and targets and targets[0] < len(tokens):
                    target, rollbacks = targets[0], rollbacks + 1
                    times[target] = times.get(target, 0) + 1
                    rejected = {at: some for at, some in rejected.items() if at <= target}
                    rejected.setdefault(target, []).append(tokens[target])
                    del tokens[target:], rows[target:], trusted[target + 1 :]
                    logits = self.run(tuple(tokens))[0].clone()
                    logits[rejected[target]] = -torch.inf
            rows.append(logits.log_softmax(-1))
            tokens.append(int(logits.argmax()))
        return tuple(tokens), torch.stack(rows), trusted, rejected


class OfHalf(Reference):
    """The same with trust in float16, as the authors' code keeps it."""

    def rounded(self, trust: float) -> float:
        return float(torch.tensor(trust, dtype=torch.float16))


def check(choice: steering.Choice, reference: Reference, steps: int) -> dict[int, list[int]]:
    tokens, rows, trusted, rejected = reference.answer(steps)
    assert choice.token_ids == tokens
    assert choice.applied is not None
    report = choice.applied["opera"]
    assert report["trusted"] == trusted
    assert report["rolled_back"] == [{"token": at, "rejected": some} for at, some in sorted(rejected.items())]
    assert report["changed"] == sum(
        token != int(reference.run(tokens[:at])[0].argmax()) for at, token in enumerate(tokens)
    )
    for row, step in zip(rows, choice.logprobs or (), strict=True):
        for token in (step, *step.top):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=5e-4, rel=3e-5)
    return rejected


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "llava", "gemma3", "idefics3", "latent", "gpt_oss"])
def test_penalties_are_exact_in_every_kind_of_family(
    family: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    messages, options = chat(family, 2), Opera(rollbacks=0, penalty=3.0)
    for engine in (make_engine(family), make_engine(family, prefill_budget=11)):
        choice = answer(engine, messages, options, sampling=replace(SAMPLING, max_tokens=6))
        check(choice, Reference(load_plain(family), messages, options), 6)


@pytest.mark.parametrize(
    "options",
    [
        Opera(rollbacks=0),
        Opera(rollbacks=0, scale=150.0, penalty=2.0, candidates=3),
        Opera(rollbacks=0, scale=100.0, candidates=8),
        Opera(rollbacks=0, penalty=0.0, candidates=1),
    ],
)
def test_products_of_long_answers_are_exact(options: Opera, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    messages = families.example_messages("qwen2_vl", 1)
    choice = answer(make_engine("qwen2_vl"), messages, options, sampling=LONG)
    check(choice, Reference(load_plain("qwen2_vl"), messages, options), 20)


def test_the_greatest_product_is_trusted_however_small_it_is(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """The authors' code rounds products below .3 to 0, and then trusts the first token."""
    messages, options = families.example_messages("qwen2_vl", 1), Opera(rollbacks=0, scale=10.0)
    choice = answer(make_engine("qwen2_vl"), messages, options, sampling=LONG)
    check(choice, Reference(load_plain("qwen2_vl"), messages, options), 20)
    tokens, _, of_half, _ = OfHalf(load_plain("qwen2_vl"), messages, options).answer(20)
    assert tokens == choice.token_ids
    assert choice.applied is not None
    trusted = choice.applied["opera"]["trusted"]
    assert {half for half, place in zip(of_half, trusted, strict=True) if half != place} == {0}


@pytest.mark.parametrize("rollbacks", [1, 2, 6])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_an_answer_returns_where_one_that_is_cut_does(
    seed: int, rollbacks: int, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    messages = families.example_messages("qwen2_vl", 1, seed=seed)
    options = Opera(threshold=1, rollbacks=rollbacks, candidates=2)
    choice = answer(make_engine("qwen2_vl"), messages, options, sampling=LONG)
    rejected = check(choice, Reference(load_plain("qwen2_vl"), messages, options), 20)
    assert rejected, "the case returns somewhere"


LETTERS = "([a-c]{1,3} xyxyxyxy )+"


def follows(engine: steering.Engine, grammar: Grammar) -> Follows:
    """Return a grammar's masks, of a matcher that reads each text from its beginning."""

    def mask(tokens: tuple[int, ...]) -> torch.Tensor:
        matcher = engine.core._grammars.start(grammar)
        for token in tokens:
            matcher.advance(token)
        return engine.core.runner.choice._masks.possible([matcher])[0]

    return mask


def test_an_answer_returns_only_to_where_its_grammar_leaves_another_token(
    make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    """Most tokens of these answers are the only possible ones."""
    engine, grammar = make_engine("qwen2_vl"), Grammar.regex(LETTERS)
    options, rejected = Opera(threshold=1, rollbacks=6, candidates=2), []
    for seed in range(3):
        messages = families.example_messages("qwen2_vl", 1, seed=seed)
        sampling = replace(LONG, max_tokens=24, ignore_eos=False)
        choice = answer(engine, messages, options, sampling=sampling, grammar=grammar)
        reference = Reference(load_plain("qwen2_vl"), messages, options, follows(engine, grammar))
        rejected += check(choice, reference, 24).values()
    assert rejected, "some of them return"


def test_rows_of_one_batch_have_their_own_candidates_and_neighbours_keep_every_bit(make_engine: MakeEngine) -> None:
    engine, messages = make_engine("qwen2_vl", slots=12), families.example_messages("qwen2_vl", 1)
    other = families.example_messages("qwen2_vl", 2, text="How many?")
    sampling = replace(SAMPLING, max_tokens=14)
    vector = make_vector(engine.mllm)
    asked: list[tuple[Messages, tuple[Any, ...]]] = [
        (messages, (Opera(scale=300.0),)),
        (messages, ()),
        (other, (Opera(candidates=2, penalty=5.0, scale=800.0), steering.Steer(vector, 1.0))),
        (other, (steering.Vcd(), Opera(candidates=3, scale=100.0))),
        (messages, (steering.Pai(amplify=0.9, first_layer=0), Opera(penalty=9.0))),
        (messages, (steering.See(alpha=0.5), steering.Pai(first_layer=1))),
    ]
    requests = [
        steering.decide(engine, steering.Request(prompt, sampling, own, diagnose=["focus"])) for prompt, own in asked
    ]
    together = [result.choices[0] for result in engine.generate(requests)]
    for request, choice in zip(requests, together, strict=True):
        alone = engine.generate([request])[0].choices[0]
        assert choice.token_ids == alone.token_ids
        assert nearly(choice.applied) == nearly(alone.applied)
        assert nearly(choice.diagnostics) == nearly(alone.diagnostics)
    plain = [replace(requests[0], interventions=()), requests[1]]
    beside, beside_plain = (engine.generate(pair)[1].choices[0] for pair in (requests[:2], plain))
    assert beside.logprobs == beside_plain.logprobs


def test_a_step_is_two_passes_however_many_candidates_it_has(make_engine: MakeEngine) -> None:
    """One prompt and its candidates, then five tokens, each followed by the candidates of the next one."""
    engine, passes = make_engine("qwen2_vl"), []
    messages = families.example_messages("qwen2_vl", 1)
    counting = engine.mllm.decoder.register_forward_hook(lambda *_: passes.append(1))
    try:
        for candidates in (2, 20):
            passes.clear()
            options = Opera(rollbacks=0, candidates=candidates)
            answer(engine, messages, options, sampling=replace(SAMPLING, max_tokens=6))
            assert len(passes) == 2 + 2 * 5
    finally:
        counting.remove()


def test_other_interventions_act_in_the_rows_of_candidates(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """A direction that is added with OPERA gives the answer that OPERA has on a model with that direction built in."""
    engine, plain, messages = make_engine("qwen2_vl"), load_plain("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    vector, options = make_vector(engine.mllm), Opera(rollbacks=0, scale=150.0)
    choice = answer(engine, messages, options, steering.Steer(vector, 2.0), sampling=LONG)
    delta = by_hand(vector, 2.0, (0, 2))
    with states_changed(plain, lambda layer, hidden, start: hidden + delta[layer]):
        check(choice, Reference(plain, messages, options), 20)


@pytest.mark.parametrize("amplify", [0.5, 2.0])
def test_attention_is_changed_in_the_rows_of_candidates(
    amplify: float, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    """Attention to images is amplified from the prompt's last row on, so for the candidates of the first token, too."""
    engine, plain, messages = make_engine("qwen2_vl"), load_plain("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    options, pai = Opera(rollbacks=0, penalty=5.0), steering.Pai(alpha=0.0, amplify=amplify, first_layer=1)
    choice = answer(engine, messages, options, pai, sampling=replace(LONG, max_tokens=12))
    reference = Reference(plain, messages, options)

    def amplified(layer: int, scores: torch.Tensor, start: int) -> torch.Tensor:
        changed = scores.clone()
        if layer >= 1:
            rows = changed[:, reference.start - 1 :]
            rows[..., reference.images] += amplify * rows[..., reference.images].abs()
        return changed

    with scores_changed(plain, amplified):
        check(choice, reference, 12)


def test_sampling_without_a_seed_returns_nowhere_and_says_so(make_engine: MakeEngine) -> None:
    engine, messages = make_engine("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    options = Opera(threshold=1, scale=400.0, candidates=2)
    drawn = replace(LONG, temperature=0.7)
    choice = answer(engine, messages, options, sampling=drawn)
    assert choice.applied is not None
    assert choice.applied["opera"]["rolled_back"] is None
    seeded = [answer(engine, messages, options, sampling=replace(drawn, seed=3)) for _ in range(2)]
    assert seeded[0].token_ids == seeded[1].token_ids
    assert seeded[0].applied is not None
    assert seeded[0].applied["opera"]["rolled_back"] is not None


def test_returns_are_counted_by_place() -> None:
    history = Retrospection(candidates=2, threshold=1)
    tokens, many = list(range(100, 120)), [1000] * 20
    once = [None, *range(11), 10, *range(40, 47)]
    assert history.returned(once, tokens, many)
    assert history.excluded == ((11, (111,)),)
    assert history.returned(once, [*tokens[:11], 7, *tokens[12:]], many)
    assert history.excluded == ((11, (111, 7)),)
    assert history.returned(once, tokens, many), "then the token before"
    assert history.excluded == ((10, (110,)),)
    assert not history.returned([None, *range(18)], tokens, many)
    assert not history.returned([None, 3, 3, 3, 3], tokens[:5], many[:5]), "early tokens are no summaries"


def test_nothing_returns_to_a_token_that_was_the_only_one() -> None:
    once, tokens = [None, *range(11), 10, *range(40, 47)], list(range(100, 120))
    forced = [1000] * 11 + [1] + [1000] * 8
    history = Retrospection(candidates=3, threshold=1)
    assert history.returned(once, tokens, forced)
    assert history.excluded == ((10, (110,)),), "the place before, which had others"
    two = [2 if at in (10, 11) else 1000 for at in range(20)]
    history = Retrospection(candidates=3, threshold=1)
    assert history.returned(once, tokens, two)
    assert history.excluded == ((11, (111,)),)
    assert history.returned(once, [*tokens[:11], 7, *tokens[12:]], two), (
        "then the token before, since no third one is allowed"
    )
    assert history.excluded == ((10, (110,)),)
    assert not Retrospection(candidates=3, threshold=1).returned(once, tokens, [1] * 20)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_differs_by_rounding_alone(dtype: str, root: Path, load_plain: LoadPlain) -> None:
    engine, half = rounding(families.checkpoint("qwen2_vl", root), dtype)
    messages, options = chat("qwen2_vl"), Opera(rollbacks=0, penalty=0.0, candidates=20)
    choice = answer(engine, messages, options)

    def along(plain: Plain) -> torch.Tensor:
        reference = Reference(plain, messages, options)
        steps = [reference.step(choice.token_ids[:step])[0] for step in range(len(choice.token_ids))]
        return torch.stack(steps).log_softmax(-1).nan_to_num(neginf=0.0)

    kept = replace(choice, logprobs=tuple(replace(step, top=step.top[:10]) for step in choice.logprobs or ()))
    assert_as_near_as_plain(kept, along(load_plain("qwen2_vl")), along(half), factor=3.0)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Opera(scale=0), "opera.scale"),
        (lambda: Opera(candidates=21), "opera.candidates"),
        (lambda: Opera(threshold=0), "opera.threshold"),
        (lambda: Opera(rollbacks=-1), "opera.rollbacks"),
        (lambda: Opera(penalty=-1), "opera.penalty"),
    ],
)
def test_wrong_settings_name_their_field(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)
