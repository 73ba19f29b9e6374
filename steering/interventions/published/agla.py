"""AGLA, approximated: the logits are joined with those of the images' salient parts alone.

An et al. 2025, "Mitigating Object Hallucinations in Large Vision-Language Models with Assembly of Global and Local
Attention", arXiv 2406.12718, sections 3.2 and 3.3. A twin answers the same prompt with the images masked to what matters for
the question; logits + alpha * logits of the twin decide every token, among those that are plausible without it.

The combination, alpha 2 and beta 0.5 are those of the authors' code (github.com/Lackel/AGLA: sample.py, run_llava.py). The
mask is an approximation. There, a second model (BLIP, image-text matching) gives it: GradCAM of the question over 24 x 24
places, blurred, of which a share of pixels is kept that follows from the match of image and question, 1 - score / 2. Here,
the model's own attention gives it: from the prompt's last token to the image, mean over heads and over the focus layers, the
last ones. The `keep` share of patches with the most attention stays. The others become black, as in that code, or, where
image tokens are no rectangles of one picture, the mean of the image's features.

That code copies the row's own cache for the twin before each token. From the second token on, the twin's logits there are
the row's own, which only divides the temperature by 1 + alpha. Here the twin keeps its own states, as in the paper.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Rows
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from pydantic import Field

from steering.decoder.hooks import Hook
from steering.devices import to_device
from steering.interventions.contrast import WeightedContrast
from steering.interventions.generate import Mask, can_mask_pixels, masked_features, masked_pixels
from steering.model.embedded import Embedded
from steering.model.images import divide
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol.intervention_spec import Messages, Rule
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, PrefillChunk, Reuse, Slots
from steering.recorders import attention


class Agla(WeightedContrast):
    """Join the logits with those of the images' salient parts alone (AGLA, approximated).

    Logits become logits + `alpha` * those of a twin, whose images show only the `keep` share of patches that the prompt's
    last token attends to most. Tokens less likely than `beta` times the likeliest one are impossible. An et al. 2025,
    sections 3.2 and 3.3, with the model's own attention in place of a second model's. Raises RequestError for values out of
    range.
    """

    kind = "agla"
    needs_image = True

    alpha: float = Field(2.0, ge=0, le=10)
    beta: float = Field(0.5, ge=0, le=1)
    keep: float = Field(0.8, gt=0, le=1)

    @property
    def rule(self) -> Rule:
        """Logits + alpha * twin, written with their difference."""
        return Rule(-self.alpha, plausible=self.beta, scale=1 + self.alpha)

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset({Signal.MAP})

    def twin_prompt(self, mllm: MLLM, messages: Messages, prompt: Prompt) -> Prompt | None:
        return None  # it follows from the prompt's attention

    def report(self, measured: Any) -> dict[str, Any]:
        """Report the settings, the source of the saliency, the masked patches, and how many tokens were changed.

        measured: `TwinReport`.
        """
        masked = None if not measured.made else measured.made[0].patches
        return {**super().report(measured), "saliency": "attention", "masked": masked}

    def brief(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the report with the numbers of masked patches in place of the patches."""
        return report | {"masked": [len(patches) for patches in report["masked"] or ()]}


@dataclass(frozen=True)
class LocalView(Mask):
    """The patches that are masked for a twin, and the colour (channels,) that they get, in the processor's units."""

    fill: tuple[float, ...] = ()

    def occluded(self, prompt: Prompt) -> tuple[Prompt, Callable[[Embedded], Embedded] | None]:
        """Return the twin's prompt and, where features are masked, a function that masks them in its inputs."""
        images = prompt.layout.images
        inputs = masked_pixels(prompt.inputs, images, self.chosen, torch.tensor(self.fill)) if self.pixels else None
        if inputs is None:
            return prompt, partial(masked_features, images=images, chosen=self.chosen)
        return replace(prompt, inputs=inputs, pictures=divide(inputs)), None


def black(mllm: MLLM) -> tuple[float, ...]:
    """Return black in the units of a model's image processor, a number for each channel."""
    processor = mllm.processor.image_processor
    mean, deviation = getattr(processor, "image_mean", None), getattr(processor, "image_std", None)
    if not getattr(processor, "do_normalize", True) or mean is None or deviation is None:
        return (0.0, 0.0, 0.0)
    return tuple(-float(m) / float(d) for m, d in zip(mean, deviation, strict=True))


def least_salient(saliency: torch.Tensor, keep: float) -> torch.Tensor:
    """Return which patches are masked, (patches,) bool: all but the `keep` share with the highest saliency, at least one.

    saliency: (patches,).
    """
    count = max(1, round(keep * len(saliency)))
    masked = torch.ones(len(saliency), dtype=torch.bool)
    masked[saliency.argsort(descending=True, stable=True)[:count]] = False
    return masked


class AglaSlots(Slots):
    """Makes the mask at the prompt's end, from the attention of its last token."""

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        for sequence in chunk.sequences:
            options = sequence.spec.asked.get(self.name)
            if isinstance(options, Agla) and computed.logits is not None and not chunk.replay:
                assert sequence.pair is not None
                sequence.pair.made += (self._view(sequence, options),)

    def reuse(self, sequence: Sequence) -> Reuse:
        return Reuse(sequence.prompt.length)  # the recorder regains the attention

    def _view(self, sequence: Sequence, options: Agla) -> LocalView:
        mllm, images = self.pool.mllm, sequence.prompt.layout.images
        attended = sequence.captured[attention.NAME].map  # (columns,)
        columns = to_device(torch.cat([image.columns for image in images]), attended.device)
        maps = attended[columns].float().cpu().split([image.tokens for image in images])
        chosen = self._agreed([least_salient(saliency, options.keep) for saliency in maps])
        return LocalView(chosen, can_mask_pixels(sequence.prompt.inputs, images), fill=black(mllm))

    def _agreed(self, masks: Rows[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        """Return the masks of the first rank, because rounding may decide between patches."""
        return tuple(self.pool.mllm.ranks.agreed(mask) for mask in masks)
