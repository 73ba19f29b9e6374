"""SAGE's Generate against two plain runs that share nothing: the whole sequence is computed anew for every token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from steering import (
    MLLM,
    Diagnose,
    Engine,
    Generate,
    Icd,
    Pai,
    Request,
    RequestError,
    Sage,
    Sampling,
    See,
    Steer,
    Think,
    Vcd,
)
from steering.interventions.generate import (
    Mask,
    can_mask_pixels,
    chosen_patches,
    mask_of,
    masked_pixels,
)
from steering.prompt.layout import ImageSpan, build_prompt
from steering.protocol.sequence import State
from tests import families
from tests.steering.conftest import OF_EACH_KIND, LoadMLLM, LoadPlain
from tests.steering.inside import sequences
from tests.steering.interventions.pushes import unit_vector
from tests.steering.interventions.references import features_hidden, occluded
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Plain, uncached

STEPS = 5
FAMILIES = ("qwen2_vl", "qwen3_vl", "llava", "gemma3", "glm4v", "mistral3")
ALL = Sage(See(alpha=0.5), Think(gamma=0.5, threshold=0.01), Generate(weight=2.0))


class Reference:
    """Contrastive decoding by the paper's definition, without a cache."""

    def __init__(
        self,
        plain: Plain,
        chat: Any,
        images: list[ImageSpan],
        focus_layers: int,
        generate: Generate,
    ):
        self.model, self.inputs = plain.model, plain.inputs(chat)
        self.images, self.focus_layers, self.generate = images, focus_layers, generate
        self.changed = 0
        self.gains: list[tuple[float, float]] = []
        self.masked: list[list[list[int]]] = []

    @torch.inference_mode()
    def patches(self, tokens: list[int]) -> list[list[int]]:
        """Return the patches of each image that both maps select for the token after `tokens`."""
        out = uncached(self.model, self.inputs, tokens, output_attentions=True, output_hidden_states=True)
        token = int(out.logits[0, -1].argmax())
        weight = self.model.get_output_embeddings().weight[token]
        attention = torch.stack([layer[0, :, -1].mean(0) for layer in out.attentions[-self.focus_layers :]]).mean(0)
        chosen = []
        for columns in (image.columns for image in self.images):
            activation = [max(0.0, float(out.hidden_states[-1][0, c] @ weight)) for c in columns.tolist()]
            image_attention = attention[columns].tolist()
            count = -(-len(columns) * 20 // 100)
            best = [
                {i for i in sorted(range(len(columns)), key=lambda i: -m[i])[:count] if m[i]}
                for m in (activation, image_attention)
            ]
            in_both = sorted(best[0] & best[1])
            if not in_both:
                product = [a * s for a, s in zip(activation, image_attention, strict=True)]
                values = product if any(product) else image_attention if any(image_attention) else activation
                count = max(1, -(-len(columns) * 5 // 100))
                in_both = sorted(i for i in sorted(range(len(columns)), key=lambda i: -values[i])[:count] if values[i])
            chosen.append(in_both)
        return chosen

    def answer(self) -> tuple[list[int], torch.Tensor]:
        """Greedy tokens and contrasted logits (steps, vocabulary)."""
        tokens: list[int] = []
        rows = []
        masked = self.inputs
        for step in range(STEPS):
            if step == 0 or (self.generate.refresh and step % self.generate.refresh == 0):
                self.masked.append(self.patches(tokens))
                masked = occluded(self.inputs, [image.grid for image in self.images], self.masked[-1])
            full, less = (
                uncached(self.model, inputs, tokens).logits[0, -1].float() for inputs in (self.inputs, masked)
            )
            by_logits, by_logprobs = full - less, full.log_softmax(-1) - less.log_softmax(-1)
            self.gains.append((float((by_logits > 0).float().mean()), float((by_logprobs > 0).float().mean())))
            difference = by_logits if self.generate.scores == "logits" else by_logprobs
            rows.append(full + self.generate.weight * torch.clamp(difference, min=0))
            tokens.append(int(rows[-1].argmax()))
            self.changed += tokens[-1] != int(full.argmax())
        return tokens, torch.stack(rows)


@pytest.mark.parametrize(
    ("family", "adjacent"),
    [
        *((family, True) for family in ("qwen2_vl", "glm4v", "ernie4_5_vl_moe", "video_llama_3")),
        *((family, False) for family in ("paddleocr_vl", "hunyuan_vl")),
    ],
)
def test_pixels_are_masked_only_where_the_patches_of_a_token_are_adjacent(
    family: str, adjacent: bool, load_mllm: LoadMLLM
) -> None:
    prompt = build_prompt(load_mllm(family), families.example_messages(family, 2))
    assert can_mask_pixels(prompt.inputs, prompt.layout.images) == adjacent


@pytest.mark.parametrize(
    ("family", "images", "refresh", "scores"),
    [
        *((family, 2, 3, "logits") for family in FAMILIES),
        *((family, 1, 3, "logits") for family in ("qwen2_vl", "llava", "mistral3")),
        *((family, 2, refresh, "logits") for family in ("qwen2_vl", "gemma3") for refresh in (0, 1)),
        *((family, 1, 3, "log-probabilities") for family in ("qwen2_vl", "llava")),
    ],
)
def test_tokens_equal_those_of_two_separate_runs(
    family: str, images: int, refresh: int, scores: Any, load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any
) -> None:
    generate = Generate(weight=1.0, refresh=refresh, scores=scores)
    chat = families.example_messages(family, images)
    layout = build_prompt(load_mllm(family), chat).layout
    reference = Reference(load_plain(family), chat, list(layout.images), load_mllm(family).focus_layers, generate)
    tokens, logits = reference.answer()
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=5)
    choice = (
        make_engine(family).generate([Request(chat, sampling, interventions=[Sage(generate=generate)])])[0].choices[0]
    )
    report = dict(choice.applied["sage"]["generate"])
    gains = report.pop("gains")
    for number, name in enumerate(("logits", "log-probabilities")):
        expected = sum(step[number] for step in reference.gains) / len(reference.gains)
        assert gains[name] == pytest.approx(expected, abs=0.01)  # a token of 5 whose difference is 0 but for roundings
    assert report == {
        "masking": "pixels",
        "masked": reference.masked[0],
        "rebuilt": [
            {"token": refresh * number, "masked": masked} for number, masked in enumerate(reference.masked) if number
        ],
        "changed": reference.changed,
    }
    assert list(choice.token_ids) == tokens
    within = 2e-4  # twice the answer's logits less the twin's: the roundings of three
    for got, row in zip(choice.logprobs, logits.log_softmax(-1), strict=True):
        for token in (got, *got.top):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=within)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "paligemma2"])
def test_a_twin_that_joins_late_equals_one_from_the_start(
    family: str, load_mllm: LoadMLLM, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With every intervention at once: a mask that is rebuilt to be the same changes nothing."""
    request = Request(
        families.example_messages(family, 1),
        Sampling(max_tokens=7, ignore_eos=True, logprobs=0, presence_penalty=1.0, temperature=0.5, seed=3),
        interventions=[Steer(unit_vector(load_mllm(family)), 0.4), ALL],
        diagnose=Diagnose(),
    )
    first = make_engine(family).generate([request])[0].choices[0]
    masks: list[Mask] = []

    def same_mask(*args: Any) -> Mask:
        masks.append(masks[0] if masks else mask_of(*args))
        return masks[-1]

    monkeypatch.setattr("steering.interventions.generate.mask_of", same_mask)
    refreshing = ALL._replace(generate=ALL.generate.model_copy(update={"refresh": 3}))
    for budget in (1024, 5) if family == "qwen2_vl" else (5,):
        masks.clear()
        engine = make_engine(family, prefill_budget=budget)
        again = engine.generate([replace(request, interventions=[request.asked["steering"], refreshing])])[0].choices[0]
        assert len(masks) == 3
        assert again.token_ids == first.token_ids
        assert [p.logprob for p in again.logprobs] == pytest.approx([p.logprob for p in first.logprobs], abs=1e-4)
        assert again.diagnostics["modality"]["attention_ratio"] == pytest.approx(
            first.diagnostics["modality"]["attention_ratio"], abs=1e-5
        )
        words = dict.fromkeys(
            ("reading", "spans", "from", "calibrated", "calibration", "warning"), 0
        )  # which are no numbers
        for stage in ("see", "think"):
            later = again.applied["sage"][stage] | words
            for key, value in (first.applied["sage"][stage] | words).items():
                assert later[key] == pytest.approx(value, rel=1e-3, abs=1e-5)


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_every_kind_of_family_can_contrast_and_weight_zero_is_plain(family: str, make_engine: Any) -> None:
    chat = families.example_messages(family, 1)
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=0)
    sages = (None, Sage(generate=Generate(weight=0.0)), Sage(generate=Generate(weight=5.0)))
    requests = [Request(chat, sampling, interventions=[sage]) for sage in sages]
    plain, none, strong = (result.choices[0] for result in make_engine(family, slots=5).generate(requests))
    assert none.token_ids == plain.token_ids
    assert none.applied["sage"]["generate"]["changed"] == 0
    assert strong.applied["sage"]["generate"]["masked"][0]
    assert [token.logprob for token in strong.logprobs] != pytest.approx(
        [token.logprob for token in plain.logprobs], abs=1e-3
    )


def mixed(mllm: MLLM, family: str) -> list[Request]:
    """Plain, steered and SAGE requests of different lengths, with different settings."""
    sages = (
        None,
        Sage(generate=Generate(weight=3.0)),
        ALL._replace(generate=Generate(weight=2.0, refresh=2)),
        None,
        Sage(See(alpha=0.6, reading="transfer"), generate=Generate(weight=1.5, top=0.4, refresh=3)),
        ALL,
        None,
        None,
        None,
    )
    contrasts = {
        3: Vcd(alpha=2.0),
        6: Icd(alpha=1.5, beta=0.01),
        7: Pai(amplify=0.5, first_layer=1),
        8: Vcd(alpha=1.0, step=900),
    }
    return [
        Request(
            families.example_messages(family, 1 + i % 2, seed=i, text="What is this? " * (1 + i % 4)),
            Sampling(max_tokens=4 + i % 3, ignore_eos=True, logprobs=1, seed=i, temperature=0.7 * (i % 2)),
            interventions=[(Steer(unit_vector(mllm), 0.4),) * (i % 3 == 2), sage, contrasts.get(i)],
            diagnose=Diagnose() if i % 2 else None,
            n=1 + (i == 2),
            baseline=i == 4,
        )
        for i, sage in enumerate(sages)
    ]


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3", "idefics3"])
def test_a_mixed_batch_gives_each_row_what_it_gets_alone(family: str, load_mllm: LoadMLLM, make_engine: Any) -> None:
    requests = mixed(load_mllm(family), family)
    engine = make_engine(family, slots=9, prefill_budget=200)
    together = engine.generate(requests)
    for number, (request, result) in enumerate(zip(requests, together, strict=True)):
        if family != "qwen2_vl" and number not in (0, 2, 4, 8):
            continue
        (alone,) = engine.generate([request])
        for joint, separate in zip(result.choices, alone.choices, strict=True):
            assert joint.token_ids == separate.token_ids
            assert [p.logprob for p in joint.logprobs] == pytest.approx(
                [p.logprob for p in separate.logprobs], abs=1e-4
            )
            if "contrast" in (joint.applied or {}):
                assert joint.applied["contrast"] == separate.applied["contrast"]
            if "sage" in (joint.applied or {}):
                assert joint.applied["sage"]["generate"] == separate.applied["sage"]["generate"]
                thought = [c.applied["sage"]["think"] for c in (joint, separate)]
                if "sage.think" in request.asked:
                    assert thought[0]["divergence"] == pytest.approx(thought[1]["divergence"], rel=1e-3)
    assert (engine.stats()["running"], engine.stats()["waiting"]) == (0, 0)


def test_sequences_with_twins_wait_until_both_have_slots(make_engine: Any) -> None:
    engine = make_engine("qwen2_vl", slots=3)
    chats = [families.example_messages("qwen2_vl", 1, seed=seed) for seed in range(5)]
    requests = [Request(chat, Sampling(max_tokens=4, ignore_eos=True), interventions=[ALL]) for chat in chats]
    alone = [make_engine("qwen2_vl").generate([request])[0].choices[0].token_ids for request in requests]
    assert [result.choices[0].token_ids for result in engine.generate(requests)] == alone


def test_cancelling_frees_both_slots(make_engine: Any) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=2, prefill_budget=5)  # a replay of several steps
    sage = ALL._replace(generate=Generate(weight=2.0, refresh=4))
    request = Request(
        families.example_messages("qwen2_vl", 1, text="?"),
        Sampling(max_tokens=12, ignore_eos=True),
        interventions=[sage],
    )
    states = set()
    for steps in (31, 25, 22, 21, 19, 18, 13, 10, 9, 4, 1, 0):
        completion = engine.submit(request)
        for _ in range(steps):
            engine.step()
        (leader,), now = sequences(completion), engine.stats()
        states.add((leader.state, now["running"], now["waiting"], bool(leader.tokens)))
        completion.cancel()
        engine.step()
        assert (engine.stats()["running"], engine.stats()["waiting"]) == (0, 0)
    assert states == {
        (State.WAITING, 0, 1, False),
        (State.PREFILL, 1, 0, False),
        *((State.HELD, 1, 1, later) for later in (False, True)),  # its twin waits, the first or a later one
        *((State.HELD, 2, 0, later) for later in (False, True)),  # its twin comes in
        (State.RUNNING, 2, 0, True),
    }
    (result,) = engine.generate([request])
    assert result.choices[0].token_ids == make_engine("qwen2_vl").generate([request])[0].choices[0].token_ids


def test_a_twin_that_fails_ends_its_leader_and_no_other(make_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    engine: Engine = make_engine("qwen2_vl", slots=4)
    real = engine.core.runner.embed

    def embed(sequences: Any) -> None:
        if any(sequence.is_twin for sequence in sequences):
            raise RuntimeError("no memory for a twin")
        real(sequences)

    monkeypatch.setattr(engine.core.runner, "embed", embed)
    chat, sampling = families.example_messages("qwen2_vl", 1), Sampling(max_tokens=5, ignore_eos=True)
    healthy, failing = (
        engine.submit(Request(chat, sampling)),
        engine.submit(Request(chat, sampling, interventions=[ALL])),
    )
    for _ in range(12):
        engine.step()
    assert len(healthy.result().choices[0].token_ids) == 5
    with pytest.raises(Exception, match="no memory for a twin"):
        failing.result()
    assert engine.stats()["running"] == 0


def test_chosen_patches_are_in_the_top_of_both_maps() -> None:
    attention = torch.tensor([0.9, 0.8, 0.1, 0.2, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0])
    activation = torch.tensor([0.1, 0.9, 0.8, 0.0, 0.3, 0.0, 0.0, 0.0, 0.0, 0.0])
    assert chosen_patches(attention, activation, 0.2).nonzero()[:, 0].tolist() == [1]
    # Nothing in common: the largest product, 0.3 * 0.3.
    activation[:3] = torch.tensor([0.0, 0.0, 0.1])
    activation[9] = 0.9
    assert chosen_patches(attention, activation, 0.2).nonzero()[:, 0].tolist() == [4]
    # No patch speaks for the token: the one that is seen most.
    assert chosen_patches(attention, torch.zeros(10), 0.2).nonzero()[:, 0].tolist() == [0]
    assert chosen_patches(torch.zeros(10), activation, 0.2).nonzero()[:, 0].tolist() == [9]
    assert chosen_patches(torch.ones(2), torch.ones(2), 0.99).sum() == 1  # never the whole image


@pytest.mark.parametrize("family", ["internvl", "granite4_vision"])
def test_masked_features_are_the_mean_of_their_image(
    family: str, load_plain: LoadPlain, load_mllm: LoadMLLM, make_engine: Any
) -> None:
    """Beside plain transformers whose decoder is given such features: in its embeddings, or in front of several layers."""
    chat, plain = families.example_messages(family, 2), load_plain(family)
    columns = [image.columns for image in build_prompt(load_mllm(family), chat).layout.images]
    request = Request(chat, Sampling(max_tokens=3, ignore_eos=True, logprobs=3), [Generate(weight=1.0, refresh=0)])
    choice = make_engine(family).generate([request])[0].choices[0]
    report = choice.applied["sage"]["generate"]
    assert report["masking"] == "features"
    for step, got in enumerate(choice.logprobs):
        inputs, tokens = plain.inputs(chat), list(choice.token_ids)[:step]
        full = uncached(plain.model, inputs, tokens).logits[0, -1].float()
        with features_hidden(plain.model.get_decoder(), columns, report["masked"]):
            less = uncached(plain.model, inputs, tokens).logits[0, -1].float()
        assert float((full - less).abs().max()) > 0.01, "what is hidden counts"
        row = (full + torch.clamp(full - less, min=0)).log_softmax(-1)
        for token in (got, *got.top):
            assert token.logprob == pytest.approx(float(row[token.token_id]), abs=2e-4)


def test_tiles_have_no_pixels_of_their_own() -> None:
    inputs = {"pixel_values": torch.zeros(1, 3, 3, 8, 8)}
    assert masked_pixels(inputs, [ImageSpan(torch.arange(4), (2, 2))], [torch.ones(4, dtype=torch.bool)]) is None


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Generate(weight=-1), "sage.generate.lambda"),
        (lambda: Generate(weight=float("nan")), "sage.generate.lambda"),
        (lambda: Generate(top=0.0), "sage.generate.top"),
        (lambda: Generate(top=1.0), "sage.generate.top"),
        (lambda: Generate(refresh=-1), "sage.generate.refresh"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


def test_impossible_requests_are_refused(make_engine: Any) -> None:
    text_only = [{"role": "user", "content": [{"type": "text", "text": "Hello"}]}]
    with pytest.raises(RequestError, match="needs an image"):
        make_engine("qwen2_vl").submit(Request(text_only, interventions=[Sage(generate=Generate())]))
    with pytest.raises(RequestError, match="twins count"):
        make_engine("qwen2_vl", slots=3).submit(
            Request(families.example_messages("qwen2_vl", 1), interventions=[ALL], n=2)
        )
