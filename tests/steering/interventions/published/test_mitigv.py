"""The published decoders against the library `mitigv`, a computation that nobody here wrote; `make test-long` installs it.

It answers one request at a time over the plain model on eager attention. Its adapters are left out: `Rendered` renders a
question as the engine does, and `Apart` keeps the two prompts of a contrast apart. It is compared where both read a paper
alike:

- ONLY there runs the other layers a second time, with weights that it normalises and averages otherwise;
- OPERA there always has beams; here, its penalty is compared for each candidate, over windows of the whole answer;
- AGLA there crops the image; here, its logits are compared, for the image that is masked;
- VISTA there takes the last layer's vector behind the final norm, and has no second part.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import torch

import steering
from steering.interventions.contrast import diffusion, noised
from steering.interventions.published.agla import Agla, black
from steering.interventions.published.m3id import M3id
from steering.interventions.published.opera import Opera
from steering.interventions.published.vista import Vista
from steering.model.images import divide
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.references import SAMPLING, occluded
from tests.steering.plain import Messages, Plain, uncached

pytestmark = pytest.mark.long
mitigv = pytest.importorskip("mitigv")
perturbations = pytest.importorskip("mitigv.perturbations")

QUESTION = "What colour is the small ball?"
STEPS = 12
CLOSE = {"abs": 5e-4, "rel": 3e-5}
"""The weights of a contrast multiply rounding, in the log-probabilities of unlikely tokens most."""
FAMILIES = ("llava", "qwen2_5_vl")


@dataclass
class Rendered:
    """A processor that renders the question, with the picture or without, and changes words and tensors as told."""

    plain: Plain
    words: Callable[[str], str] = lambda text: text
    tensors: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    """Tensors in place of a call's own, by the call's number from 0."""
    calls: int = 0

    @property
    def tokenizer(self) -> Any:
        return self.plain.tokenizer

    def __call__(self, *, text: str, images: Any, **_: Any) -> dict[str, torch.Tensor]:
        parts = [{"type": "image", "image": images}] if images is not None else []
        content = [*parts, {"type": "text", "text": self.words(text)}]
        inputs = self.plain.inputs([{"role": "user", "content": content}])
        number, self.calls = self.calls, self.calls + 1
        return inputs | self.tensors.get(number, {})


class Apart:
    """The plain model, with the rope deltas that Qwen's wrapper keeps between calls told apart by the cache of a call.

    As in the library's adapter for Qwen, cached steps have no mask.
    """

    def __init__(self, model: Any):
        self._model = model
        self._deltas: dict[int, Any] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._model, name)

    def __call__(self, *, past_key_values: Any, attention_mask: Any, **inputs: Any) -> Any:
        wrapper = self._model.model
        keeps = hasattr(wrapper, "rope_deltas")
        if keeps:
            attention_mask = attention_mask if past_key_values is None else None
            wrapper.rope_deltas = self._deltas.get(id(past_key_values))
        out = self._model(past_key_values=past_key_values, attention_mask=attention_mask, **inputs)
        if keeps:
            self._deltas[id(out.past_key_values)], wrapper.rope_deltas = wrapper.rope_deltas, None
        return out


def answered(mitigator: Any, picture: Any) -> torch.Tensor:
    """Return the log-probabilities (steps, vocabulary) before each token of its greedy answer."""
    rows, step = [], mitigator._step_logits

    def recording(*args: Any) -> Any:
        logits, past = step(*args)
        rows.append(logits[0].float().log_softmax(-1))
        return logits, past

    mitigator._step_logits = recording
    mitigator._eos_token_id = lambda: None
    mitigator.generate(picture, QUESTION, max_new_tokens=STEPS)
    return torch.stack(rows)


def messages_of(family: str) -> Messages:
    return families.example_messages(family, 1, text=QUESTION)


def ours(engine: steering.Engine, messages: Messages, *asked: Any) -> steering.Choice:
    request = steering.Request(messages, replace(SAMPLING, max_tokens=STEPS), asked)
    return engine.generate([steering.decide(engine, request)])[0].choices[0]


def check(choice: steering.Choice, theirs: torch.Tensor) -> None:
    """Check the tokens, and the log-probabilities of the twenty likeliest ones; each is possible for both or neither."""
    assert choice.token_ids == tuple(theirs.argmax(-1).tolist())
    for row, step in zip(theirs, choice.logprobs or (), strict=True):
        for token in step.top:
            assert token.logprob == pytest.approx(float(row[token.token_id]), **CLOSE)


def mitigator(name: str, plain: Plain, processor: Any, **options: Any) -> Any:
    plain.model.config.image_token_index = plain.model.config.image_token_id
    model = plain.model if name in ("pai", "vista", "agla") else Apart(plain.model)  # these look for its layers
    return mitigv.build_mitigator(name, model, processor, **options)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("alpha", "beta"), [(1.0, 0.1), (2.5, 0.4), (0.7, 0.0)])
def test_vcd(family: str, alpha: float, beta: float, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """With the same noise, whose schedule is compared by itself."""
    engine, plain = make_engine(family), load_plain(family)
    schedule = perturbations.DiffusionNoisePerturbation(500)
    assert diffusion(500)[0] ** 2 == pytest.approx(float(schedule._alpha_bar[500]), rel=1e-5)
    frames = getattr(engine.mllm.processor.image_processor, "temporal_patch_size", 1)

    class Given(perturbations.Perturbation):  # type: ignore[misc, name-defined]
        name = f"given {family} {alpha} {beta}"

        def __call__(self, image: torch.Tensor) -> torch.Tensor:
            inputs = {
                name: value for name, value in plain.inputs(messages_of(family)).items() if name.startswith("image")
            }
            pictures = divide({**inputs, "pixel_values": image})
            return torch.cat([noised(picture, 500, frames).tensors["pixel_values"] for picture in pictures])

    perturbations.register_perturbation(Given)
    theirs = mitigator("vcd", plain, Rendered(plain), alpha=alpha, beta=beta, distortion=Given.name)
    picture = messages_of(family)[0]["content"][0]["image"]
    check(ours(engine, messages_of(family), steering.Vcd(alpha=alpha, beta=beta)), answered(theirs, picture))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("strength", "beta"), [(0.5, 0.1), (0.8, 0.0)])
def test_icd(family: str, strength: float, beta: float, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """A space joins prefix and question there, and a line here."""
    engine, plain = make_engine(family), load_plain(family)
    prefix = "You are a confused objects detector."
    rendered = Rendered(plain, lambda text: text.replace(f"{prefix} ", f"{prefix}\n"))
    theirs = mitigator("icd", plain, rendered, lam=strength, alpha=beta, disturbance_prefix=prefix)
    icd = steering.Icd(alpha=strength, beta=beta, instruction=prefix, place="question", form="paper")
    picture = messages_of(family)[0]["content"][0]["image"]
    check(ours(engine, messages_of(family), icd), answered(theirs, picture))


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(("forgetting", "threshold"), [(0.02, 0.3), (0.3, 1.0), (0.1, 0.01)])
def test_m3id(family: str, forgetting: float, threshold: float, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain = make_engine(family), load_plain(family)
    theirs = mitigator("m3id", plain, Rendered(plain), forgetting_rate=forgetting, alpha=threshold)
    picture = messages_of(family)[0]["content"][0]["image"]
    m3id = M3id(forgetting=forgetting, threshold=threshold)
    check(ours(engine, messages_of(family), m3id), answered(theirs, picture))


@pytest.mark.parametrize(("gain", "gamma", "beta"), [(0.2, 1.1, 0.1), (0.9, 2.0, 0.0), (0.5, 1.0, 0.0)])
def test_pai(gain: float, gamma: float, beta: float, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """Which amplifies the first token, too."""
    engine, plain = make_engine("llava"), load_plain("llava")
    theirs = mitigator("pai", plain, Rendered(plain), alpha=gain, gamma=gamma, beta=beta, start_layer=1)
    pai = steering.Pai(amplify=gain, alpha=gamma - 1, beta=beta, first_layer=1, first_token="amplified")
    picture = messages_of("llava")[0]["content"][0]["image"]
    check(ours(engine, messages_of("llava"), pai), answered(theirs, picture))


@pytest.mark.parametrize("strength", [0.01, 0.2])
def test_vista(strength: float, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain = make_engine("llava"), load_plain("llava")
    theirs, layers = mitigator("vista", plain, Rendered(plain), steer_strength=strength), len(plain.layers)
    vectors = theirs._compute_steering_vectors
    theirs._compute_steering_vectors = lambda inputs: vectors(inputs)[:-1]
    vista = Vista(strength=strength, place="residual", alpha=0.0, layers=[*range(layers - 1)])
    picture = messages_of("llava")[0]["content"][0]["image"]
    check(ours(engine, messages_of("llava"), vista), answered(theirs, picture))


@pytest.mark.parametrize("alpha", [0.5, 2.0])
def test_the_logits_of_agla(alpha: float, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain = make_engine("llava"), load_plain("llava")
    messages = messages_of("llava")
    choice = ours(engine, messages, Agla(alpha=alpha, beta=0.0, keep=0.5))
    assert choice.applied is not None
    inputs = plain.inputs(messages)
    masked = occluded(inputs, [(4, 4)], choice.applied["contrast"]["masked"], black(engine.mllm))
    rendered = Rendered(plain, tensors={1: {"pixel_values": masked["pixel_values"]}})
    theirs = mitigator("agla", plain, rendered, alpha=alpha)
    check(choice, answered(theirs, messages[0]["content"][0]["image"]))


@pytest.mark.parametrize("scale", [50.0, 400.0])
def test_the_penalties_of_opera(scale: float, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """Its product over a window of the whole answer, times the factor of the authors' code, from the eleventh token on."""
    engine, plain = make_engine("llava"), load_plain("llava")
    messages, opera = messages_of("llava"), mitigv.algorithms.opera.OPERA
    choice = ours(engine, messages, Opera(scale=scale, rollbacks=0, candidates=3))
    assert choice.applied is not None
    inputs, start = plain.inputs(messages), plain.inputs(messages)["input_ids"].shape[1]
    for step in range(10, STEPS):
        tokens = choice.token_ids[:step]
        with torch.inference_mode():
            full = uncached(plain.model, inputs, tokens).logits[0, -1].float()
        logits = torch.full_like(full, -torch.inf)
        for score, token in zip(*(found.tolist() for found in full.topk(3)), strict=True):
            with torch.inference_mode():
                attention = uncached(plain.model, inputs, (*tokens, token), output_attentions=True).attentions[-1]
            rows = [*opera._process_attention(attention)[0, start:]]
            penalty, _ = opera._compute_penalty(rows, attention.shape[-1], scale)
            logits[token] = score - min(1e-7 * float(penalty), 65504.0)
        assert choice.token_ids[step] == int(logits.argmax())
        for top in (choice.logprobs or ())[step].top[:3]:
            assert top.logprob == pytest.approx(float(logits.log_softmax(-1)[top.token_id]), **CLOSE)
