"""Contrastive decoding: a row's logits against those of its twin, another row that repeats its tokens on another prompt.

SAGE's Generate (see `generate`) and published methods that it is compared with differ in the twin's prompt:

- VCD: noised images (Leng et al. 2024, "Mitigating Object Hallucinations in Large Vision-Language Models through Visual
  Contrastive Decoding", sections 3.2 and 3.3);
- ICD: an instruction that disturbs (Wang et al. 2024, "Mitigating Hallucinations in Large Vision-Language Models with
  Instruction Contrastive Decoding", section 3);
- M3ID: no images, with a weight that grows along the answer (see `m3id`);
- PAI: no images, while the row's own attention to its images is amplified (Liu et al. 2024, "Paying More Attention to
  Image", sections 3.2 and 3.3).
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import Any, Literal

import torch
from pydantic import Field

from steering.errors import RequestError
from steering.model.images import PIXELS, Inputs, Picture, is_text_input
from steering.model.mllm import MLLM
from steering.prompt.chat import context_parts, without_images
from steering.prompt.layout import Prompt, build_prompt
from steering.protocol.intervention_spec import Messages, Options, Rule, Words

INSTRUCTIONS = {
    "objects": "You are an object detector to recognize every different objects.",
    "details": "You are an object detector to recognize every different objects by focusing the shapes, colors and "
    "relationships of objects.",
    "vague": "I want you avoid any specific identification or categorization of the objects depicted.",
    "confused": "You are a confused objects detector to provide a fuzzy overview or impression of the image.",
    "overview": "You are an object detector to provide a general overview or impression of the image.",
}
"""ICD's disturbing instructions by name, as its authors' scripts list them (github.com/p1k0pan/ICD)."""
DIFFUSION_STEPS = 1000
CHANNELS = 3


class Contrast(Options):
    """A published method that contrasts the logits with those of a twin.

    Tokens less likely than `beta` times the likeliest one are impossible (VCD paper, equation 4); 0 for none.
    """

    path = ("contrast",)
    twin = True

    beta: float = Field(0.1, ge=0, le=1)

    @abstractmethod
    def twin_prompt(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt | None: ...

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the settings and the number of tokens that the contrast changed.

        measured: `TwinReport`.
        """
        return {**self.settings(), "changed": measured.changed}


class WeightedContrast(Contrast):
    """A contrast of constant weight: (1 + alpha) * full - alpha * twin (VCD paper, equation 3)."""

    alpha: float = Field(1.0, ge=0, le=10)

    @property
    def rule(self) -> Rule:
        return Rule(self.alpha, plausible=self.beta)


class Vcd(WeightedContrast):
    """Contrast the logits with those of noised images (VCD).

    The images are noised as by `step` of 1,000 steps of forward diffusion. alpha, beta and step default to the released
    code's values (Leng et al. 2024, "Visual Contrastive Decoding", equations 1, 3 and 4). Raises RequestError for values out
    of range.
    """

    kind = "vcd"
    needs_image = True

    step: int = Field(500, ge=1, le=DIFFUSION_STEPS - 1)

    def twin_prompt(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt:
        frames = getattr(mllm.processor.image_processor, "temporal_patch_size", 1)
        pictures = tuple(noised(picture, self.step, frames) for picture in prompt.pictures)
        texts = {name: prompt.inputs[name] for name in prompt.inputs if is_text_input(name)}
        return replace(prompt, inputs=Inputs(texts, pictures), pictures=pictures)


class Icd(WeightedContrast):
    """Contrast the logits with those under a disturbing instruction (ICD).

    `instruction` is a text, or the name of one of the authors' five: objects, details, vague, confused, overview. At `place`
    "system" it replaces the system prompt, as in the authors' script for LLaVA, and at "question" it is a line before the
    question. The `released` form of the logits is (1 + alpha) * full - alpha * twin, that of the `paper` (equation 4) full -
    alpha * twin. Wang et al. 2024, section 3. Raises RequestError for values out of range.
    """

    kind = "icd"

    instruction: Words = "confused"
    place: Literal["system", "question"] = "system"
    form: Literal["released", "paper"] = "released"

    @property
    def text(self) -> str:
        """The instruction in words."""
        return INSTRUCTIONS.get(self.instruction, self.instruction)

    @property
    def texts(self) -> tuple[str, ...]:
        return (self.text,)

    @property
    def rule(self) -> Rule:
        return super().rule if self.form == "released" else super().rule._replace(scale=1 - self.alpha)

    def twin_prompt(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt:
        if self.place == "question":
            return build_prompt(mllm, _add_instruction(messages, self.text), options=prompt.options)
        twin = build_prompt(mllm, _replace_system(messages, self.text), options=prompt.options)
        if torch.equal(twin.ids, prompt.ids):
            raise RequestError(
                f"'contrast.place' is 'system', but the chat template of {mllm.name} shows no system prompt; give "
                "'question'.",
                param="contrast.place",
            )
        return twin


def text_alone(mllm: MLLM, messages: Messages, prompt: Prompt, kind: str) -> Prompt:
    """Return the prompt without its images, for a twin; raises RequestError where it cannot be prepared.

    The chat template renders the chat without images, so that what it puts around an image goes, too. The authors of PAI,
    and of ONLY for M3ID, cut the image alone out of the prompt.
    """
    try:
        return build_prompt(mllm, without_images(messages), options=prompt.options)
    except RequestError as error:
        raise RequestError(
            f"'contrast' of kind {kind} needs the prompt without its images, which cannot be prepared: {error}",
            param="contrast",
        ) from error


def diffusion(step: int) -> tuple[float, float]:
    """Return the factors of the picture and of standard noise after a step of forward diffusion.

    They are the square roots of the cumulative product of 1 - b and of its complement; b rises from 1e-5 to 5e-3 along a
    sigmoid (VCD's released schedule).
    """
    b = torch.linspace(-6, 6, DIFFUSION_STEPS, dtype=torch.float64).sigmoid() * (0.5e-2 - 1e-5) + 1e-5
    signal_share = float((1 - b)[: step + 1].prod())
    return signal_share**0.5, (1 - signal_share) ** 0.5


def noise_seed(picture: Picture) -> int:
    """Return the seed of a picture's noise, which follows from the processor's pixels, whether it is kept raw or not."""
    return int.from_bytes(picture.processed.key[:8], "little", signed=True)


def noised(picture: Picture, step: int, frames: int = 1) -> Picture:
    """Return a picture after a step of forward diffusion.

    The noise depends on the picture alone, so that the same request has the same answer and the features can be cached.
    Where a processor repeats a still picture for `frames` frames, (patches, channels * frames * ...), all frames have the
    same noise.
    """
    picture = picture.processed
    pixels = picture.tensors[PIXELS]
    generator = torch.Generator().manual_seed(noise_seed(picture))
    signal, added = diffusion(step)
    shape, still = pixels.shape, pixels.ndim == 2 and frames > 1
    if still:
        shape = torch.Size((len(pixels), CHANNELS, 1, pixels.shape[1] // (CHANNELS * frames)))
    noise = torch.randn(shape, generator=generator).to(pixels.dtype)
    if still:
        noise = noise.expand(-1, -1, frames, -1).reshape(pixels.shape)
    return Picture.of({**picture.tensors, PIXELS: signal * pixels + added * noise})


def _replace_system(messages: Messages, instruction: str) -> list[dict[str, Any]]:
    """Return the messages with the instruction in place of the system prompt, of which text contexts stay."""
    parts: list[dict[str, Any]] = [{"type": "text", "text": instruction}]
    for message in messages:
        if message["role"] == "system":
            content = message["content"]
            texts = [{"type": "text", "text": content}] if isinstance(content, str) else content
            parts += context_parts(texts)
    return [
        {"role": "system", "content": parts},
        *(dict(message) for message in messages if message["role"] != "system"),
    ]


def _add_instruction(messages: Messages, instruction: str) -> list[dict[str, Any]]:
    """Return the messages with the instruction on a line before the first text of the last user message.

    Parts that are text context do not count as texts.
    """
    out = [dict(message) for message in messages]
    last = max(i for i, message in enumerate(out) if message["role"] == "user")
    content = out[last]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else [dict(part) for part in content]
    texts = [part for part in parts if part["type"] == "text" and part.get("span") != "context"]
    if texts:
        texts[0]["text"] = f"{instruction}\n{texts[0]['text']}"
    else:
        parts.append({"type": "text", "text": instruction})
    out[last]["content"] = parts
    return out
