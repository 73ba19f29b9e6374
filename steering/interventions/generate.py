"""SAGE's third stage, Generate: logits are contrasted with those of a masked image (SAGE paper, section 5.1, eq. 6 and 7).

A twin row answers the same prompt with its images occluded where both the visual attention map and the Token Activation Map
of the first token are strongest; logits + lambda * ReLU(logits - logits of the twin) decide every token. The mask may be
rebuilt during the answer: a new twin then prefills the prompt with new images and the answer so far.

The attention map is that of the row before the token, mean over heads and over the model's focus layers, the last ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from pydantic import Field
from torch.utils._pytree import tree_map

from steering.decoder.hooks import Hook
from steering.devices import lost, to_device
from steering.errors import Fault, RequestError
from steering.interventions.see import See
from steering.interventions.think import Think
from steering.measures import activation_maps
from steering.model.embedded import Embedded
from steering.model.images import divide
from steering.model.mllm import MLLM
from steering.prompt.layout import ImageSpan, Prompt
from steering.protocol.intervention_spec import Options, Rule
from steering.protocol.sequence import Sequence as Row
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Reuse, Slots
from steering.recorders import attention, states

log = logging.getLogger(__name__)

NAME = "sage.generate"


class Generate(Options):
    """Contrast the logits with those of a masked image (SAGE's Generate).

    `weight` is lambda; `top` is the share of an image's patches that each map nominates; the mask is rebuilt every `refresh`
    tokens, 0 for never. `scores` tells what the ReLU is of: the paper's difference of "logits" also holds a part that all
    tokens share, so that nearly all or nearly none gain; that of "log-probabilities" does not. Takes a second row of the
    batch. SAGE paper, section 5.1, equations 6 and 7. Raises RequestError for values out of range.
    """

    path = ("sage", "generate")
    twin = True
    needs_image = True

    weight: float = Field(0.5, ge=0, le=10, alias="lambda")
    top: float = Field(0.2, gt=0, lt=1)
    refresh: int = Field(0, ge=0, le=1_000_000)
    scores: Literal["logits", "log-probabilities"] = "logits"

    @property
    def rule(self) -> Rule:
        """The contrast of equation 7."""
        return Rule(self.weight, relu=True, normalised=self.scores == "log-probabilities")

    @property
    def signals(self) -> frozenset[Signal]:
        return frozenset({Signal.MAP, Signal.IMAGE_STATES})

    def check(self, mllm: MLLM, prompt: Prompt) -> None:
        if any(image.tokens < 2 for image in prompt.layout.images):
            raise RequestError("'sage.generate' cannot mask an image that is a single token.", param="sage.generate")

    def due(self, tokens: int) -> bool:
        return self.refresh > 0 and tokens > 0 and tokens % self.refresh == 0

    def report(self, measured: Any) -> dict[str, Any] | None:
        """Report the patches occluded at first and by every rebuilt mask, and how many tokens the contrast changed.

        `gains` is the share of the vocabulary whose logits, and whose log-probabilities, exceed the twin's. measured:
        `TwinReport`.
        """
        if not measured.made:
            return None
        first, *rebuilt = measured.made
        return {
            "masking": "pixels" if first.pixels else "features",
            "masked": first.patches,
            "rebuilt": [{"token": mask.token, "masked": mask.patches} for mask in rebuilt],
            "changed": measured.changed,
            "gains": None
            if measured.rising is None
            else dict(zip(("logits", "log-probabilities"), measured.rising, strict=True)),
        }

    def brief(self, report: dict[str, Any]) -> dict[str, Any]:
        """Return the report with the numbers of patches and of rebuilt masks in place of both."""
        return report | {"masked": [len(patches) for patches in report["masked"]], "rebuilt": len(report["rebuilt"])}


@dataclass(frozen=True)
class Mask:
    """The patches that are occluded for a twin.

    `chosen` is (patches,) bool for each image. Patches are occluded in the image's `pixels` or else in its features. `token`
    is the first generated token, from 0, that the mask decides.
    """

    chosen: tuple[torch.Tensor, ...]
    pixels: bool
    token: int = 0

    @property
    def patches(self) -> list[list[int]]:
        """The occluded patches of each image, row by row from 0."""
        return [chosen.nonzero()[:, 0].tolist() for chosen in self.chosen]

    def occluded(self, prompt: Prompt) -> tuple[Prompt, Callable[[Embedded], Embedded] | None]:
        """Return the twin's prompt and, where features are masked, a function that masks them in its inputs."""
        images = prompt.layout.images
        if not self.pixels:
            return prompt, partial(masked_features, images=images, chosen=self.chosen)
        inputs = masked_pixels(prompt.inputs, images, self.chosen) or prompt.inputs
        return replace(prompt, inputs=inputs, pictures=divide(inputs)), None


def chosen_patches(attention: torch.Tensor, activation: torch.Tensor, top: float) -> torch.Tensor:
    """Return the patches, (patches,) bool, that are in the top of both maps.

    Where the two have none in common, they are the top 5 % of the maps' product. Never all patches of an image are chosen,
    nor one that is zero in both maps. Where the product is zero everywhere, attention decides; where no layer sees the
    image, activation does. attention, activation: (patches,), at least two.
    """
    patches = len(attention)

    def highest(values: torch.Tensor, share: float) -> torch.Tensor:
        count = min(max(1, math.ceil(share * patches)), patches - 1)
        chosen = torch.zeros(patches, dtype=torch.bool, device=values.device)
        chosen[values.topk(count).indices] = True
        return chosen & (values > 0)

    overlap = highest(attention, top) & highest(activation, top)
    if bool(overlap.any()):
        return overlap
    maps = (attention * activation, attention, activation)
    return highest(next((values for values in maps if bool(values.any())), attention), 0.05)


def can_mask_pixels(inputs: Mapping[str, torch.Tensor], images: Sequence[ImageSpan]) -> bool:
    """Return whether image tokens are rectangles of one picture in the processor's tensors, rather than of tiles.

    Where patches merge into tokens, those of a token must be adjacent in the tensors.
    """
    if "image_grid_thw" in inputs:
        return all(image.adjacent for image in images)
    pixels = inputs["pixel_values"]
    return pixels.ndim == 4 and len(pixels) == len(images) and all(image.grid is not None for image in images)


def masked_pixels(
    inputs: Mapping[str, torch.Tensor],
    images: Sequence[ImageSpan],
    chosen: Sequence[torch.Tensor],
    fill: torch.Tensor | None = None,
) -> dict[str, torch.Tensor] | None:
    """Return the processor's tensors with the chosen patches of each image filled with a colour.

    chosen: (patches,) for each image. fill: (channels,), in the processor's units; the image's mean colour by default.
    Returns None where image tokens are no rectangles of one picture (tiles); features are
    masked instead then. The processor's output is filled, not the picture before it, so that cropping and scaling cannot
    shift the patches.
    """
    if not can_mask_pixels(inputs, images):
        return None
    pixels = inputs["pixel_values"].clone()
    if (grids := inputs.get("image_grid_thw")) is not None:
        # (patches before merging, channels * ...): patches that merge into one token are adjacent.
        channels = 3
        for picture, mask in zip(pixels.split(grids.prod(-1).tolist()), chosen, strict=True):
            by_token = picture.view(len(mask), -1, channels, picture.shape[1] // channels)
            colour = by_token.mean((0, 1, 3), keepdim=True)[0] if fill is None else fill.to(pixels)[None, :, None]
            by_token[mask.to(pixels.device)] = colour
    else:
        whole_sizes = [pixels.shape[2:]] * len(images)
        for padded, size, image, mask in zip(
            pixels, inputs.get("image_sizes", whole_sizes), images, chosen, strict=True
        ):
            picture = padded[:, : int(size[0]), : int(size[1])]
            rows, columns = image.grid or (1, 1)
            height, width = picture.shape[1] / rows, picture.shape[2] / columns
            colour = picture.mean((1, 2), keepdim=True) if fill is None else fill.to(pixels)[:, None, None]
            for patch in mask.nonzero()[:, 0].tolist():
                row, column = divmod(patch, columns)
                block = picture[
                    :,
                    round(row * height) : round((row + 1) * height),
                    round(column * width) : round((column + 1) * width),
                ]
                block[:] = colour
    return {**inputs, "pixel_values": pixels}


def masked_features(inputs: Embedded, images: Sequence[ImageSpan], chosen: Sequence[torch.Tensor]) -> Embedded:
    """Return a prompt's inputs with the chosen tokens of each image replaced by the mean of the image's tokens.

    They are replaced in the embeddings and, where further features enter between layers (k, d), in these.
    """
    columns = [image.columns.cpu() for image in images]
    in_order = torch.cat(columns).sort().values
    ranks = [torch.searchsorted(in_order, place) for place in columns]

    def masked(values: torch.Tensor, places: Sequence[torch.Tensor]) -> torch.Tensor:
        values = values.clone()
        for place, mask in zip(places, chosen, strict=True):
            values[to_device(place[mask.cpu()], values.device)] = values[to_device(place, values.device)].mean(0)
        return values

    def further(value: Any) -> Any:
        features = isinstance(value, torch.Tensor) and value.ndim == 2 and len(value) == len(in_order)
        return masked(value, ranks) if features else value

    overlay = inputs.overlay
    if overlay is not None:
        overlay = replace(overlay, features=tree_map(further, overlay.features))
    embeds = masked(inputs.embeds[0], columns)[None]
    return replace(inputs, embeds=embeds, overlay=overlay, extras=tree_map(further, inputs.extras))


def mask_of(
    prompt: Prompt, states: torch.Tensor, attention: torch.Tensor, head: torch.Tensor, top: float, token: int
) -> Mask:
    """Return the mask of a prompt's twin from generated token `token` on.

    states: (image tokens, d), normalised, after the last layer, image by image. attention: (columns,), of the row before the
    token. head: (d,), the token's row of the output embedding.
    """
    images = prompt.layout.images
    image_attention = attention[to_device(torch.cat([image.columns for image in images]), attention.device)]
    maps = torch.stack(
        [image_attention.float(), activation_maps(states, head[None])[0]]
    ).cpu()  # the choice needs several syncs, which cost nothing on the CPU
    parts = maps.split([image.tokens for image in images], 1)
    chosen = [chosen_patches(attended, activated, top) for attended, activated in parts]
    return Mask(tuple(chosen), can_mask_pixels(prompt.inputs, images), token)


class GenerateSlots(Slots):
    """Makes the masks at the prompt's end and when they are due, from the answer's own attention and states."""

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        for row, sequence in enumerate(chunk.sequences):
            options = sequence.spec.asked.get(NAME)
            if isinstance(options, Generate) and computed.logits is not None and not chunk.replay:
                self._mask(sequence, options, computed.logits[row])
                diagnose = sequence.spec.diagnose
                if not options.refresh and (diagnose is None or Signal.IMAGE_STATES not in diagnose.signals):
                    del sequence.captured[states.NAME]

    def reuse(self, sequence: Row) -> Reuse:
        return Reuse(sequence.prompt.length)  # recorders regain the captured states and attention

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        for sequence in batch.sequences:
            options = sequence.spec.asked.get(NAME)
            if not isinstance(options, Generate) or not sequence.due or computed.logits is None:
                continue
            try:
                self._mask(sequence, options, computed.logits[sequence.slot])
            except Exception as error:  # it ends this sequence alone
                if lost(error, self.pool.mllm.devices):
                    raise
                log.exception("A mask could not be made.")
                sequence.error = Fault(f"The masked image could not be made: {error}")

    def _mask(self, sequence: Row, options: Generate, logits: torch.Tensor) -> None:
        """Note the mask that the twin has from the next token on. logits: (vocabulary,)."""
        assert sequence.pair is not None
        head = self.pool.mllm.head_rows(logits.argmax())
        (image_states,), attention_map = sequence.captured[states.NAME].image, sequence.captured[attention.NAME].map
        mask = mask_of(sequence.prompt, image_states, attention_map, head, options.top, len(sequence.tokens))
        chosen = tuple(self.pool.mllm.ranks.agreed(patches) for patches in mask.chosen)
        sequence.pair.made += (replace(mask, chosen=chosen),)


class Sage(NamedTuple):
    """The SAGE stages of one request, in place of its interventions; None turns a stage off.

    `Sage(See(), Think(), Generate())` is all of SAGE, `Sage()` none of it (SPD-Faith Bench paper, section 5.1).
    """

    see: See | None = None
    think: Think | None = None
    generate: Generate | None = None
