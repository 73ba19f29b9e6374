"""The image that a model attended to (implicit-visual-misunderstanding paper, section 3: factor and metrics)."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar

import numpy as np
import torch
from pydantic import Field, WithJsonSchema

from steering.errors import RequestError
from steering.model.mllm import MLLM
from steering.prompt.layout import Layout
from steering.prompt.spans import FIRST_IMAGE
from steering.protocol.readout import Diagnose, FinishedAnswer, Quantity, Readout, ReadoutOption, Scalar
from steering.protocol.signals import Signal
from steering.protocol.wording import counted, is_whole, must, shown
from steering.recorders.attention import NAME, Attention


def image_attention_factor(sums: torch.Tensor, rows: int, tokens: torch.Tensor) -> torch.Tensor:
    """Return sigma (layers, images): attention, mean over heads, query rows and the image's own tokens.

    sums: (layers, images), attention summed over `rows` query rows and over each image's tokens, mean over heads. tokens:
    (images,) how many tokens each image has.
    """
    return sums / (rows * tokens)


def lnd(sigma: torch.Tensor) -> int | None:
    """Return LND-N: the image of the largest single factor over these N layers.

    sigma: (N, images) -> index from 0.
    """
    factors = sigma.numpy()  # numpy's small operations take a tenth of torch's time
    return int(factors.argmax()) % factors.shape[1] if factors.any() else None


def m_lnd(sigma: torch.Tensor) -> int | None:
    """Return M-LND-N: the image with the largest mean factor over these N layers.

    sigma: (N, images) -> index from 0.
    """
    factors = sigma.numpy()
    return int(factors.mean(0).argmax()) if factors.any() else None


def mc_lnd(sigma: torch.Tensor) -> int | None:
    """Return MC-LND-N: the image that is layer-focused most often.

    A tie goes to the image with the larger sum of factors over the layers in which it was focused. sigma: (N, images) ->
    index from 0.
    """
    factors = sigma.numpy()
    factors = factors[factors.any(1)]  # a layer whose window holds no image focuses on none
    if not len(factors):
        return None
    votes = np.eye(factors.shape[1])[factors.argmax(1)]
    tied = votes.sum(0) == votes.sum(0).max()
    return int(np.where(tied, (votes * factors).sum(0), -np.inf).argmax())


METRICS = {"lnd": lnd, "m_lnd": m_lnd, "mc_lnd": mc_lnd}


def focus(sigma: torch.Tensor, last: int, target_image: int | None) -> dict[str, object]:
    """Return the `focus` readout; images count from 1.

    `image` is that of M-LND over the last `last` layers, the steadiest of the three; `correct` compares it with
    `target_image`. None where no image was within the attention window. `share` is that image's share of the factors of all
    images. sigma: (layers, images).
    """
    tail = sigma[-last:]
    focused = m_lnd(tail)
    image = _number(focused)
    return {
        "sigma": sigma.tolist(),
        "layer_focused": [_number(lnd(layer[None])) for layer in sigma],
        **{name: {"n": last, "image": _number(metric(tail))} for name, metric in METRICS.items()},
        "image": image,
        "share": None if focused is None else float(tail[:, focused].sum() / tail.sum()),
        "target_image": target_image,
        "correct": None if target_image is None or image is None else image == target_image,
    }


def _number(index: int | None) -> int | None:
    return None if index is None else index + 1


def _number_of_an_image(value: Any) -> int | None:
    if value is None:
        return None
    if not is_whole(value):
        raise must("diagnostics.target_image", "be a whole number", value)
    if value < 1:
        raise RequestError(
            f"'diagnostics.target_image' counts from 1; got {shown(value)}.", param="diagnostics.target_image"
        )
    return int(value)


def _is_in_the_prompt(value: int | None, mllm: MLLM, layout: Layout) -> None:
    if value is not None and value > len(layout.images):
        raise RequestError(
            f"'diagnostics.target_image' is {value}, but the request holds {counted(len(layout.images), 'image')}.",
            param="diagnostics.target_image",
        )


TARGET_IMAGE = ReadoutOption(
    "target_image",
    Annotated[int, Field(strict=True, ge=-(2**63), le=2**63 - 1), WithJsonSchema({"type": "integer"})] | None,
    None,
    "The target image, counted from 1; the focus then reports whether the model looked at it.",
    _number_of_an_image,
    _is_in_the_prompt,
    {"minimum": 1},
)


class FocusReadout(Readout):
    """The image that the answer attended to."""

    name = "focus"
    cheap = True
    options = (TARGET_IMAGE,)
    scalars: ClassVar[dict[str, type]] = {
        "focused_image": int, "focus_share": float, "target_image": int, "correct": bool,
    }  # fmt: skip
    quantities: ClassVar[dict[str, Quantity]] = {
        "focus_share": Quantity(
            "The focused image's share of the attention factors of all images",
            low=0.0, high=1.0, buckets=(0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99, 1.0),
        ),
    }  # fmt: skip

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.SPANS})

    def read(self, answer: FinishedAnswer) -> dict[str, object] | None:
        if not answer.images:
            return None
        attention: Attention = answer.taken[NAME]
        sums = attention.sums[:, FIRST_IMAGE : FIRST_IMAGE + len(answer.images)]
        sigma = image_attention_factor(sums, sum(attention.rows), answer.image_tokens)
        return focus(sigma, answer.context.focus_layers, answer.options[TARGET_IMAGE])

    def summary(self, report: Any) -> dict[str, Scalar]:
        keys = {"focused_image": "image", "focus_share": "share", "target_image": "target_image", "correct": "correct"}
        return {name: report[key] for name, key in keys.items()}


class AnchorReadout(Readout):
    """The earlier image that the last image attended to, by the image-attention factor between images (section 3)."""

    name = "anchor"

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.ANCHOR})

    def read(self, answer: FinishedAnswer) -> dict[str, Any] | None:
        before = len(answer.images) - 1
        if before < 1:
            return None
        attention: Attention = answer.taken[NAME]
        sums, tokens = attention.anchor[:, FIRST_IMAGE : FIRST_IMAGE + before], answer.image_tokens
        sigma = image_attention_factor(sums, int(tokens[-1]), tokens[:before])
        image = m_lnd(sigma[-answer.context.focus_layers :])
        return {"sigma": sigma.tolist(), "image": None if image is None else image + 1}
