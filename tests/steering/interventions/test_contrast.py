"""VCD, ICD and PAI against two plain runs that share nothing: the whole sequence is computed anew for every token."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from steering import (
    Choice,
    ContextOverflow,
    Contrast,
    Engine,
    Generate,
    Icd,
    Pai,
    Request,
    RequestError,
    Sage,
    Sampling,
    See,
    Think,
    Vcd,
)
from steering.interventions.contrast import INSTRUCTIONS, noised
from steering.model.images import Picture
from steering.prompt.layout import build_prompt
from steering.protocol.intervention_spec import Rule
from steering.runner.contrastive import Rules, contrasted
from tests import families
from tests.steering.conftest import LoadMLLM, LoadPlain
from tests.steering.interventions.published.twins import Combine, combined_along, cut
from tests.steering.interventions.references import assert_chosen_by, scores_changed
from tests.steering.interventions.settings import check_refused
from tests.steering.plain import Plain

STEPS = 5
FAMILIES = ("qwen2_vl", "qwen3_vl", "llava", "gemma3", "glm4v", "idefics3")


def contrasting(alpha: float, beta: float) -> Combine:
    """Return the contrast with a twin's logits."""
    return lambda step, full, twin: cut((1 + alpha) * full - alpha * twin, full, beta)


def answer(engine: Engine, chat: Any, contrast: Contrast) -> Choice:
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=5)
    return engine.generate([Request(chat, sampling, interventions=[contrast])])[0].choices[0]


def check(choice: Choice, expected: tuple[torch.Tensor, int]) -> None:
    """Compare an answer with the log-probabilities along it, and with the number of tokens that the contrast changed.

    A contrast multiplies what processors round apart.
    """
    logprobs, changed = expected
    assert_chosen_by(choice, logprobs, atol=5e-4)
    assert (choice.applied or {})["contrast"]["changed"] == changed
    possible = [min(5, int(row.isfinite().sum())) for row in logprobs]
    assert [len(step.top) for step in choice.logprobs or ()] == possible  # what is impossible is no alternative


@pytest.mark.parametrize(
    ("family", "images"), [*((family, 2) for family in FAMILIES), ("qwen2_vl", 1), ("idefics3", 1)]
)
def test_vcd_equals_two_plain_runs(
    family: str, images: int, load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any
) -> None:
    contrast = Vcd(alpha=2.0, beta=0.6)
    chat, plain = families.example_messages(family, images), load_plain(family)
    full = plain.inputs(chat)
    twin = contrast.twin_prompt(load_mllm(family), chat, build_prompt(load_mllm(family), chat)).inputs
    assert not torch.equal(twin["pixel_values"], full["pixel_values"])
    noisy = full | {"pixel_values": twin["pixel_values"]}
    choice = answer(make_engine(family), chat, contrast)
    check(choice, combined_along(plain, full, noisy, choice.token_ids, contrasting(2.0, 0.6)))


def test_noise_is_that_of_forward_diffusion() -> None:
    pixels = torch.linspace(-1, 1, 3 * 200 * 200).view(1, 3, 200, 200)
    picture = Picture.of({"pixel_values": pixels})
    for step in (1, 500, 999):
        signal = 1.0
        for i in range(step + 1):
            signal *= 1 - (1 / (1 + math.exp(6 - 12 * i / 999)) * (0.5e-2 - 1e-5) + 1e-5)
        noise = (noised(picture, step).tensors["pixel_values"] - math.sqrt(signal) * pixels) / math.sqrt(1 - signal)
        assert float(noise.mean()) == pytest.approx(0, abs=0.02)
        assert float(noise.std()) == pytest.approx(1, abs=0.02)
        assert abs(float((noise * pixels).mean())) < 0.01  # independent of the picture
    again = noised(picture, 500)
    assert again.key == noised(Picture.of({"pixel_values": pixels.clone()}), 500).key != noised(picture, 501).key
    brighter = Picture.of({"pixel_values": pixels + 1})
    moved = noised(brighter, 999).tensors["pixel_values"] - noised(picture, 999).tensors["pixel_values"]
    assert float(moved.std()) > 1  # another picture has other noise


@pytest.mark.parametrize(
    ("family", "images"), [*((family, 2) for family in FAMILIES), ("qwen2_vl", 0), ("qwen2_vl", 1), ("gemma3", 0)]
)
@pytest.mark.parametrize("place", ["system", "question"])
def test_icd_equals_two_plain_runs(
    place: Any, family: str, images: int, load_plain: LoadPlain, make_engine: Any
) -> None:
    contrast = Icd(alpha=1.5, beta=0.3, instruction="You see nothing at all.", place=place)
    chat = families.example_messages(family, images, text="What is this?", system="You are a helpful assistant.")
    if place == "system":
        disturbed = families.example_messages(family, images, text="What is this?", system="You see nothing at all.")
    else:
        text = "You see nothing at all.\nWhat is this?"
        disturbed = families.example_messages(family, images, text=text, system="You are a helpful assistant.")
    plain = load_plain(family)
    choice, inputs = answer(make_engine(family), chat, contrast), (plain.inputs(chat), plain.inputs(disturbed))
    expected = combined_along(plain, *inputs, choice.token_ids, contrasting(1.5, 0.3))
    check(choice, expected)


@pytest.mark.parametrize("name", list(INSTRUCTIONS))
def test_icds_published_instructions_are_known_by_name(name: str, load_plain: LoadPlain, make_engine: Any) -> None:
    plain, chat = load_plain("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    disturbed = families.example_messages("qwen2_vl", 1, system=INSTRUCTIONS[name])
    choice = answer(make_engine("qwen2_vl"), chat, Icd(alpha=0.5, instruction=name))
    inputs = plain.inputs(chat), plain.inputs(disturbed)
    check(choice, combined_along(plain, *inputs, choice.token_ids, contrasting(0.5, 0.1)))


@pytest.mark.parametrize("alpha", [0.0, 0.6, 1.0, 1.7])
def test_icd_in_the_papers_form_subtracts_from_the_plain_logits(
    alpha: float, load_plain: LoadPlain, make_engine: Any
) -> None:
    plain, chat = load_plain("qwen2_vl"), families.example_messages("qwen2_vl", 1)
    disturbed = families.example_messages("qwen2_vl", 1, system=INSTRUCTIONS["confused"])

    def combine(step: int, full: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
        return cut(full - alpha * twin, full, 0.2)

    choice = answer(make_engine("qwen2_vl"), chat, Icd(alpha=alpha, beta=0.2, form="paper"))
    inputs = plain.inputs(chat), plain.inputs(disturbed)
    check(choice, combined_along(plain, *inputs, choice.token_ids, combine))


def test_icd_replaces_a_system_prompt_but_keeps_its_text_contexts(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen2_vl")
    marked = [{"type": "text", "text": "Be kind."}, {"type": "text", "text": " The star is blue.", "span": "context"}]
    for content in (marked, "Be kind.\nText context: The star is blue.\nBe quick."):
        chat = [{"role": "system", "content": content}, {"role": "user", "content": "What colour is the star?"}]
        twin = Icd(instruction="Be confused.").twin_prompt(mllm, chat, build_prompt(mllm, chat))
        text = mllm.tokenizer.decode(twin.ids)
        assert "Be confused." in text
        assert "The star is blue." in text
        assert "Be kind." not in text
        assert "Be quick." not in text


@contextmanager
def amplified(plain: Plain, pai: Pai, image: torch.Tensor) -> Iterator[None]:
    """Within, prompts with images have the scores of image tokens amplified as PAI does, from a row on."""
    on = False
    last = math.inf if pai.last_layer is None else pai.last_layer
    first = len(image) - (pai.first_token == "amplified" or not pai.alpha)

    def before(module: Any, args: Any, kwargs: dict[str, Any]) -> None:
        nonlocal on
        on = bool((kwargs["input_ids"] == module.config.image_token_id).any())

    def change(layer: int, scores: torch.Tensor, start: int) -> torch.Tensor:
        if on and pai.first_layer <= layer <= last:
            for row in range(first, scores.shape[1]):  # each was the last row once
                for column in image.nonzero()[:, 0].tolist():
                    score = scores[:, row, column]
                    scores[:, row, column] = score + pai.amplify * score.abs()
        return scores

    handle = plain.model.register_forward_pre_hook(before, with_kwargs=True)
    with scores_changed(plain, change):
        yield
    handle.remove()


@pytest.mark.parametrize("first_token", ["released", "amplified"])
@pytest.mark.parametrize(
    ("family", "images"),
    [*((family, 2) for family in ("qwen2_vl", "qwen3_vl", "llava", "gemma3", "glm4v", "gpt_oss")), ("qwen2_vl", 1)],
)
def test_pai_equals_two_plain_runs(
    family: str, images: int, first_token: Any, load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any
) -> None:
    contrast = Pai(alpha=0.5, beta=0.2, amplify=3.0, first_layer=1, first_token=first_token)
    chat, plain = families.example_messages(family, images), load_plain(family)
    full, text = plain.inputs(chat), plain.inputs(families.example_messages(family, 0))
    choices = [answer(make_engine(family, prefill_budget=budget), chat, contrast) for budget in (1024, 7)]
    tokens, combine = choices[0].token_ids, contrasting(0.5, 0.2)
    with amplified(plain, contrast, full["input_ids"][0] == load_mllm(family).image_token_id):
        expected = combined_along(plain, full, text, tokens, combine)
    without, _ = combined_along(plain, full, text, tokens[:1], combine)
    is_amplified = not torch.allclose(expected[0][:1].exp(), without.exp(), atol=1e-3)
    assert is_amplified == (first_token == "amplified")
    for choice in choices:
        assert choice.token_ids == tokens
        check(choice, expected)


@pytest.mark.parametrize(("family", "around"), [("llava", "\n"), ("qwen2_vl", "<|vision_start|><|vision_end|>")])
def test_a_prompt_without_images_has_nothing_of_what_stands_around_them(
    family: str, around: str, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    """The authors cut the image tokens alone."""
    chat, mllm, plain = families.example_messages(family, 1), load_mllm(family), load_plain(family)
    prompt, alone = build_prompt(mllm, chat), plain.inputs(families.example_messages(family, 0))["input_ids"][0]
    assert torch.equal(Pai().twin_prompt(mllm, chat, prompt).ids, alone)
    of_authors = plain.tokenizer.decode(prompt.ids[prompt.ids != mllm.image_token_id])
    assert around in of_authors
    assert of_authors.replace(around, "", 1) == plain.tokenizer.decode(alone)


@pytest.mark.parametrize(
    "contrast",
    [
        Pai(alpha=0.5, beta=0.2, amplify=3.0, first_layer=0, last_layer=1),
        Pai(alpha=0.5, beta=0.2, amplify=3.0, first_layer=2, last_layer=2, first_token="amplified"),
        Pai(alpha=0.0, beta=0.9, amplify=3.0, first_layer=0),
    ],
)
def test_pais_layers_and_its_amplification_without_a_contrast_are_exact(
    contrast: Pai, load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any
) -> None:
    """Without a contrast the prompt is amplified, and no token is cut off."""
    chat, plain = families.example_messages("qwen2_vl", 1), load_plain("qwen2_vl")
    full, text = plain.inputs(chat), plain.inputs(families.example_messages("qwen2_vl", 0))
    choice = answer(make_engine("qwen2_vl"), chat, contrast)
    combine = contrasting(contrast.alpha, contrast.beta if contrast.alpha else 0.0)
    with amplified(plain, contrast, full["input_ids"][0] == load_mllm("qwen2_vl").image_token_id):
        check(choice, combined_along(plain, full, text, choice.token_ids, combine))


def test_alpha_zero_is_plain_and_beta_alone_only_cuts(make_engine: Any) -> None:
    chat = families.example_messages("qwen2_vl", 1)
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=3)
    engine = make_engine("qwen2_vl")
    plain, *choices = (
        engine.generate([Request(chat, sampling, interventions=[contrast])])[0].choices[0]
        for contrast in (None, Vcd(alpha=0, beta=0), Icd(alpha=0, beta=0), Pai(alpha=0, beta=0, amplify=0))
    )
    for choice in choices:
        assert choice.token_ids == plain.token_ids
        assert [p.logprob for p in choice.logprobs] == pytest.approx([p.logprob for p in plain.logprobs], abs=1e-5)
    alone = engine.generate([Request(chat, sampling, interventions=[Vcd(alpha=0, beta=1.0)])])[0].choices[0]
    assert alone.token_ids == plain.token_ids
    assert [p.logprob for p in alone.logprobs] == pytest.approx([0.0] * STEPS)


def test_several_answers_baseline_and_the_other_stages(make_engine: Any) -> None:
    chat = families.example_messages("qwen2_vl", 1)
    sampling = Sampling(max_tokens=STEPS, ignore_eos=True, temperature=0.8, seed=4)
    sage = Sage(See(alpha=0.5), Think(gamma=0.5, threshold=0.01))
    engine = make_engine("qwen2_vl", slots=8)
    request = Request(chat, sampling, interventions=[sage, Vcd(alpha=1.0)], n=2, baseline=True)
    first, second = engine.generate([request])[0].choices
    assert engine.stats()["running"] == 0
    (plain,) = engine.generate([Request(chat, sampling)])[0].choices
    assert first.baseline.token_ids == plain.token_ids
    assert first.token_ids != second.token_ids
    assert set(first.applied) == {"sage", "contrast"}
    (alone,) = make_engine("qwen2_vl").generate([replace(request, n=1, baseline=False)])[0].choices
    assert alone.token_ids == first.token_ids


def test_contrasted_logits_equal_those_by_hand() -> None:
    full, twin = torch.tensor([[1.0, 2.0, -torch.inf]] * 3), torch.tensor([[0.0, 3.0, -torch.inf]] * 3)
    rules = [Rule(0.5, relu=True), Rule(0.5, plausible=0.3), Rule(2.0, plausible=0.5)]  # exp(1 - 2) is 0.37
    expected = [[1.5, 2.0, -torch.inf], [1.5, 1.5, -torch.inf], [-torch.inf, 0.0, -torch.inf]]
    assert contrasted(full, twin, Rules.of(rules, full.device)).tolist() == expected
    for row, rule in enumerate(rules):  # where all are alike, less is computed
        alone = contrasted(full[row:][:1], twin[row:][:1], Rules.of([rule], full.device))
        assert alone.tolist() == expected[row:][:1]


def test_a_constant_added_to_all_logits_matters_to_logits_and_not_to_log_probabilities() -> None:
    generator = torch.Generator().manual_seed(4)
    full, twin = torch.randn(2, 1, 50, generator=generator)

    def probabilities(shift: float, *rules: Rule) -> torch.Tensor:
        rows = full.expand(len(rules), -1) + shift, twin.expand(len(rules), -1)
        return contrasted(*rows, Rules.of(rules, full.device)).softmax(-1)

    raw, normalised = Rule(0.8, relu=True), Rule(0.8, relu=True, normalised=True)
    expected = (full + 0.8 * (full.log_softmax(-1) - twin.log_softmax(-1)).relu()).softmax(-1)
    for shift in (0.0, 3.0):
        torch.testing.assert_close(probabilities(shift, normalised), expected)
        torch.testing.assert_close(probabilities(shift, raw, normalised)[1:], expected)
    assert not torch.allclose(probabilities(0.0, raw), probabilities(3.0, raw), atol=1e-3)


@pytest.mark.parametrize(
    ("make", "param"),
    [
        (lambda: Vcd(alpha=-1), "contrast.alpha"),
        (lambda: Icd(alpha=float("nan")), "contrast.alpha"),
        (lambda: Vcd(beta=1.5), "contrast.beta"),
        (lambda: Vcd(step=0), "contrast.step"),
        (lambda: Vcd(step=1000), "contrast.step"),
        (lambda: Icd(instruction=" "), "contrast.instruction"),
        (lambda: Icd(place="user"), "contrast.place"),
        (lambda: Icd(form="none"), "contrast.form"),
        (lambda: Pai(last_layer=-1), "contrast.last_layer"),
        (lambda: Pai(first_token="plain"), "contrast.first_token"),
        (lambda: Pai(amplify=float("inf")), "contrast.amplify"),
        (lambda: Pai(first_layer=-1), "contrast.first_layer"),
    ],
)
def test_settings_out_of_range_are_refused(make: Callable[[], object], param: str) -> None:
    check_refused(make, param)


def test_impossible_requests_are_refused(make_engine: Any) -> None:
    engine = make_engine("qwen2_vl", max_length=100)
    text, with_image = (families.example_messages("qwen2_vl", images) for images in (0, 1))
    for contrast in (Vcd(), Pai(first_layer=0)):
        with pytest.raises(RequestError, match=f"{contrast.kind} needs an image"):
            engine.submit(Request(text, interventions=[contrast]))
    with pytest.raises(RequestError, match="ask for one of them"):
        engine.submit(
            Request(
                with_image,
                interventions=[Sage(generate=Generate()), Vcd()],
            )
        )
    with pytest.raises(RequestError, match="must be below"):
        engine.submit(Request(with_image, interventions=[Pai(first_layer=100)]))
    with pytest.raises(RequestError, match="must be below"):
        engine.submit(Request(with_image, interventions=[Pai(first_layer=0, last_layer=3)]))
    with pytest.raises(RequestError, match="must be at least 2, the first layer"):
        engine.submit(Request(with_image, interventions=[Pai(last_layer=1)]))
    with pytest.raises(ContextOverflow):  # the twin's prompt is longer
        engine.submit(Request(with_image, Sampling(max_tokens=5), interventions=[Icd(instruction="No! " * 20)]))
    with pytest.raises(RequestError, match=r"'contrast.instruction' inserts a text of [0-9]+ tokens") as long:
        engine.submit(Request(with_image, Sampling(max_tokens=5), interventions=[Icd(instruction="No! " * 200)]))
    assert (long.value.param, long.value.code) == ("contrast.instruction", "context_length_exceeded")
    with pytest.raises(RequestError, match="twins count"):
        make_engine("qwen2_vl", slots=3).submit(Request(with_image, interventions=[Vcd()], n=2))
    with pytest.raises(RequestError, match="without its images"):  # its processor wants one in every prompt
        make_engine("paligemma2").submit(
            Request(families.example_messages("paligemma2", 1), interventions=[Pai(first_layer=0)])
        )


def test_the_frames_that_a_processor_makes_of_a_still_picture_have_the_same_noise(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen2_vl")
    chat = families.example_messages("qwen2_vl", 2)
    prompt = build_prompt(mllm, chat)
    twin = Vcd(step=900).twin_prompt(mllm, chat, prompt)
    frames = mllm.processor.image_processor.temporal_patch_size
    assert frames == 2
    for inputs in (prompt.inputs, twin.inputs):
        first, second = inputs["pixel_values"].view(len(inputs["pixel_values"]), 3, frames, -1).unbind(2)
        assert torch.equal(first, second)
    assert not torch.equal(prompt.inputs["pixel_values"], twin.inputs["pixel_values"])
