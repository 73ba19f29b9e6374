"""Contrastive decoding: a row's logits against those of its twin, another row that repeats its tokens on another prompt.

SAGE's Generate (see `generate`) and three published methods that it is compared with differ in the twin's prompt:

- VCD: noised images (Leng et al. 2024, "Mitigating Object Hallucinations in Large Vision-Language Models through Visual
  Contrastive Decoding", sections 3.2 and 3.3);
- ICD: an instruction that disturbs (Wang et al. 2024, "Mitigating Hallucinations in Large Vision-Language Models with
  Instruction Contrastive Decoding", section 3);
- PAI: no images, while the row's own attention to its images is amplified (Liu et al. 2024, "Paying More Attention to
  Image", sections 3.2 and 3.3).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, NamedTuple

import torch

from steering.errors import RequestError
from steering.images import Picture
from steering.layout import Prompt, build_prompt, without_images
from steering.mllm import MLLM

Messages = Sequence[Mapping[str, Any]]
DIFFUSION_STEPS = 1000


class Rule(NamedTuple):
    """How a row's logits and its twin's are combined: full + weight * (full - twin), or where `relu`, with the ReLU of the
    difference. Tokens less likely than `plausible` times the likeliest one (by `full`) are impossible."""

    weight: float
    relu: bool = False
    plausible: float = 0.0


@dataclass(frozen=True)
class Contrast(ABC):
    """A published contrast: (1 + alpha) * full - alpha * twin among the plausible tokens (VCD paper, equations 3 and 4).

    `beta` is the plausibility cut-off, 0 for none.
    """

    alpha: float = 1.0
    beta: float = 0.1

    kind: ClassVar[str]
    needs_image: ClassVar[bool]

    def __post_init__(self) -> None:
        _within("alpha", self.alpha, 10.0)
        _within("beta", self.beta, 1.0)

    @property
    def rule(self) -> Rule:
        return Rule(self.alpha, plausible=self.beta)

    @abstractmethod
    def twin(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt:
        """The twin's prompt; `prompt` is what became of the messages."""

    def report(self, changed: int) -> dict[str, Any]:
        """What was done. changed: how many tokens would have been others without the contrast, chosen greedily."""
        return {"kind": self.kind, **asdict(self), "changed": changed}


@dataclass(frozen=True)
class Vcd(Contrast):
    """Images noised as by `step` of 1,000 steps of forward diffusion; the released code's alpha, beta and step."""

    step: int = 500

    kind = "vcd"
    needs_image = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.step < DIFFUSION_STEPS:
            raise RequestError(
                f"'contrast.step' must be from 1 to {DIFFUSION_STEPS - 1}; got {self.step}.", param="contrast.step"
            )

    def twin(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt:
        pictures = tuple(noised(picture, self.step) for picture in prompt.pictures)
        pixels = torch.cat([picture.tensors["pixel_values"] for picture in pictures])
        return replace(prompt, inputs={**prompt.inputs, "pixel_values": pixels}, pictures=pictures)


@dataclass(frozen=True)
class Icd(Contrast):
    """A disturbing role on a line before the question; the paper's first one and the released code's alpha and beta."""

    instruction: str = "You are a confused object detector."

    kind = "icd"
    needs_image = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.instruction.strip():
            raise RequestError("'contrast.instruction' must not be empty.", param="contrast.instruction")

    def twin(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt:
        return build_prompt(mllm, _with_instruction(messages, self.instruction))


@dataclass(frozen=True)
class Pai(Contrast):
    """Against the text alone; gamma of the paper is 1 + alpha. From layer `first_layer` on the last row's scores s of image
    tokens become s + amplify * |s| before the softmax. The paper's gamma, the released code's other values."""

    alpha: float = 0.1
    amplify: float = 0.2
    first_layer: int = 2

    kind = "pai"
    needs_image = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _within("amplify", self.amplify, 10.0)
        if self.first_layer < 0:
            raise RequestError(
                f"'contrast.first_layer' must be at least 0; got {self.first_layer}.", param="contrast.first_layer"
            )

    def twin(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt:
        try:
            return build_prompt(mllm, without_images(messages))
        except RequestError as error:
            raise RequestError(
                f"'contrast' of kind pai needs the prompt without its images, which fails: {error}", param="contrast"
            ) from error


def _within(name: str, value: float, high: float) -> None:
    if not (math.isfinite(value) and 0 <= value <= high):
        raise RequestError(f"'contrast.{name}' must be from 0 to {high:g}; got {value}.", param=f"contrast.{name}")


def diffusion(step: int) -> tuple[float, float]:
    """What share of a picture and of standard noise is left after a step of forward diffusion: the square roots of the
    product of 1 - b and of its complement, b rising from 1e-5 to 5e-3 along a sigmoid (VCD's released schedule)."""
    b = torch.linspace(-6, 6, DIFFUSION_STEPS, dtype=torch.float64).sigmoid() * (0.5e-2 - 1e-5) + 1e-5
    kept = float((1 - b)[: step + 1].prod())
    return kept**0.5, (1 - kept) ** 0.5


def noised(picture: Picture, step: int) -> Picture:
    """A picture after a step of forward diffusion. The noise depends on the picture alone, so that the same request has the
    same answer and the features are cached."""
    pixels = picture.tensors["pixel_values"]
    generator = torch.Generator().manual_seed(int.from_bytes(picture.key[:8], "little", signed=True))
    kept, added = diffusion(step)
    noise = torch.randn(pixels.shape, generator=generator).to(pixels.dtype)
    return Picture.of({**picture.tensors, "pixel_values": kept * pixels + added * noise})


def _with_instruction(messages: Messages, instruction: str) -> list[dict[str, Any]]:
    """The messages with a line before the first text of the last user message that is no text context."""
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


def contrasted(
    full: torch.Tensor, twin: torch.Tensor, weight: torch.Tensor, relu: torch.Tensor, plausible: torch.Tensor
) -> torch.Tensor:
    """Logits (rows, vocabulary) by the `Rule` of each row: weight, plausible (rows, 1), relu (rows, 1) bool.

    full, twin: (rows, vocabulary) logits. What is impossible stays impossible.
    """
    difference = full - twin
    combined = full + weight * torch.where(relu, difference.relu(), difference)
    least = full.amax(-1, keepdim=True) + plausible.log()
    return torch.where(full.isneginf() | (full < least), -torch.inf, combined)


class ContrastSlots:
    """The rule of every slot, and how many of its tokens the contrast changed."""

    def __init__(self, slots: int, device: torch.device):
        self.weight = torch.zeros(slots, 1, device=device)
        self.relu = torch.zeros(slots, 1, dtype=torch.bool, device=device)
        self.plausible = torch.zeros(slots, 1, device=device)
        self.changed = torch.zeros(slots, dtype=torch.int32, device=device)

    def place(self, slot: int, rule: Rule | None) -> None:
        """Write a sequence's rule into its slot."""
        self.changed[slot] = 0
        if rule is not None:
            self.weight[slot], self.relu[slot], self.plausible[slot] = rule

    def move(self, source: int, target: int) -> None:
        """Copy a slot's rule and count to another slot."""
        for tensor in (self.weight, self.relu, self.plausible, self.changed):
            tensor[target] = tensor[source]

    def apply(self, slots: torch.Tensor, full: torch.Tensor, twin: torch.Tensor) -> torch.Tensor:
        """Contrasted logits (rows, vocabulary) of some slots; full, twin: theirs and their twins'."""
        return contrasted(full, twin, self.weight[slots], self.relu[slots], self.plausible[slots])

    def count(self, slots: torch.Tensor, full: torch.Tensor, contrasted: torch.Tensor) -> None:
        """Count where the likeliest token changed; full, contrasted: logits (rows, vocabulary) of some slots."""
        self.changed[slots] += (contrasted.argmax(-1) != full.argmax(-1)).int()
