"""Maps of rho, the mean attention over heads and rows, as numbers and as pictures (IVM paper, section 3).

They are by image, layer and patch.
"""

from __future__ import annotations

import base64
import io
import zlib
from collections.abc import Sequence
from typing import Annotated, Any, Literal

import numpy as np
import torch
from PIL import Image
from pydantic import BaseModel, ConfigDict, PlainValidator
from pydantic_core import PydanticCustomError

from steering.errors import RequestError
from steering.model.mllm import MLLM
from steering.prompt.layout import Layout
from steering.protocol.intervention_spec import check_layers
from steering.protocol.readout import Diagnose, FinishedAnswer, Readout, ReadoutOption
from steering.protocol.signals import Signal
from steering.protocol.wording import is_whole, must, shown, whole_numbers
from steering.readouts.maps import DISCOUNT_SINKS, attention_maps, judged_maps

SIDE = 512
"""The maximum length of an overlay's longer side, in pixels."""
COLOURS = np.array([(0, 0, 4), (87, 16, 110), (188, 55, 84), (249, 142, 9), (252, 255, 164)])
"""The colours from the weakest to the strongest patch, equally spaced.

They are those of matplotlib's "inferno"; importing matplotlib takes 40 MB.
"""
OPACITY = 0.75
"""The share of the picture that the strongest patch hides; the weakest hides nothing."""
_STRENGTHS = np.linspace(0, 1, 256)
_PLACES = np.linspace(0, 1, len(COLOURS))
PALETTE = (
    np.stack([np.interp(_STRENGTHS, _PLACES, channel).round() for channel in COLOURS.T], -1).astype(np.uint8).tobytes()
)
OPACITIES = (255 * OPACITY * _STRENGTHS).round().astype(int).tolist()
"""The opacity by strength, 0 to 255."""


def overlay(picture: Image.Image, values: torch.Tensor, grid: tuple[int, int]) -> Image.Image:
    """Return the picture, at most `SIDE` long, under its map. values: (patches,), row by row of `grid` (rows, columns)."""
    small = picture.convert("RGB")
    small.thumbnail((SIDE, SIDE))
    low, high = float(values.min()), float(values.max())
    scaled = (values - low) / (high - low) if high > low else torch.zeros_like(values)
    map_ = Image.fromarray(scaled.view(grid).float().numpy()).resize(small.size, Image.Resampling.BICUBIC)
    strength = Image.fromarray((np.asarray(map_).clip(0, 1) * 255).round().astype(np.uint8))
    coloured = strength.convert("P")
    coloured.putpalette(PALETTE)
    small.paste(coloured.convert("RGB"), mask=strength.point(OPACITIES))
    return small


def data_url(picture: Image.Image) -> str:
    """Return the picture as a PNG in a data URL."""
    buffer = io.BytesIO()
    picture.save(
        buffer, "PNG", compress_level=1, compress_type=zlib.Z_RLE
    )  # the fastest setting, and the smallest files
    return f"data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def _numbers(value: Any) -> tuple[int, ...] | None:
    return None if value is None else whole_numbers("diagnostics.layers", value)


def _how_many(value: Any) -> int | None:
    if value is not None and not is_whole(value):
        raise must("diagnostics.layers.last", "be a whole number", value)
    return None if value is None else int(value)


def _are_layers(value: Sequence[int] | None, mllm: MLLM, layout: Layout) -> None:
    _layers_of(value, None, mllm.attention_layers)


def _are_last_layers(value: int | None, mllm: MLLM, layout: Layout) -> None:
    _layers_of(None, value, mllm.attention_layers)


def _form_of_layers(value: Any) -> Any:
    numbers = isinstance(value, list) and all(type(item) is int for item in value)
    last = isinstance(value, dict) and value.keys() == {"last"} and type(value["last"]) is int
    if value != "all" and not numbers and not last:
        raise PydanticCustomError("layers", "must be 'all', a list of layer numbers or {{'last': how many}}")
    return value


def _read_layers(value: Any) -> dict[str, Any]:
    """Return the keywords of `Diagnose` for a request's value."""
    return {"last_layers": value["last"]} if isinstance(value, dict) else {} if value == "all" else {"layers": value}


def _written_layers(options: Diagnose) -> Any:
    """Return the request's value for these keywords."""
    if options[LAST_LAYERS] is not None:
        return {"last": options[LAST_LAYERS]}
    return "all" if options[LAYERS] is None else list(options[LAYERS])


class LastLayers(BaseModel):
    """Layers counted from the end."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")

    last: int
    """The number of layers."""


LAYERS = ReadoutOption(
    "layers",
    Annotated[Any, PlainValidator(_form_of_layers, json_schema_input_type=Literal["all"] | list[int] | LastLayers)],
    None,
    "The layers of the patch maps, numbered from 0.",
    _numbers,
    _are_layers,
    read=_read_layers,
    write=_written_layers,
    unset="all",
)
LAST_LAYERS = ReadoutOption(
    "last_layers",
    int | None,
    None,
    "The number of last layers to return instead.",
    _how_many,
    _are_last_layers,
    written=False,
)
HEATMAPS = ReadoutOption.flag("heatmaps", "Return the patch maps as PNG overlays on the images.")


def chosen_layers(options: Diagnose, attending: Sequence[int]) -> tuple[int, ...]:
    """Return the layers of the patch maps, of those that attend; raise RequestError where any does not."""
    return _layers_of(options[LAYERS], options[LAST_LAYERS], attending)


def _layers_of(layers: Sequence[int] | None, last: int | None, attending: Sequence[int]) -> tuple[int, ...]:
    count = len(attending)
    if last is not None:
        if not 1 <= last <= count:
            raise RequestError(
                f"'diagnostics.layers.last' must be from 1 to {count}; got {shown(last)}.", param="diagnostics.layers"
            )
        return tuple(attending[-last:])
    check_layers(layers, attending, "diagnostics.layers")
    return tuple(attending if layers is None else layers)


class PatchesReadout(Readout):
    """The maps of the chosen layers and, where requested, the same maps with attention sinks discounted."""

    name = "patches"
    options = (LAYERS, LAST_LAYERS, DISCOUNT_SINKS)

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.PATCHES})

    def values(self, options: Diagnose, layers: int, patches: int, tokens: int) -> int:
        return len(options[LAYERS] or range(options[LAST_LAYERS] or layers)) * patches * (1 + options[DISCOUNT_SINKS])

    def read(self, answer: FinishedAnswer) -> list[dict[str, Any]]:
        layers, places = _layers(answer)
        out: list[dict[str, Any]] = [
            {"image": number, "layers": layers, **map_.at(places).json("rho")}
            for number, map_ in enumerate(attention_maps(answer), start=1)
        ]
        if answer.options[DISCOUNT_SINKS]:
            for entry, map_ in zip(out, judged_maps(answer), strict=True):
                entry["discounted"] = map_.whole[places].tolist()
        return out


class HeatmapsReadout(Readout):
    """Overlays of rho, mean over the chosen layers, on the pictures; None for an image whose tokens form no single grid."""

    name = "heatmaps"
    options = (HEATMAPS, LAYERS, LAST_LAYERS, DISCOUNT_SINKS)
    needs_pictures = True

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.PATCHES})

    def asked_beside(self, options: Diagnose) -> bool:
        return bool(options[HEATMAPS])

    def read(self, answer: FinishedAnswer) -> list[dict[str, Any]]:
        (layers, places), out = _layers(answer), []
        for number, (map_, picture) in enumerate(
            zip(judged_maps(answer), answer.context.pictures, strict=True), start=1
        ):
            png = data_url(overlay(picture, map_.whole[places].mean(0), map_.grid)) if map_.grid else None
            out.append({"image": number, "kind": "rho", "layers": layers, "png": png})
        return out


def _layers(answer: FinishedAnswer) -> tuple[list[int], list[int]]:
    """Return the chosen layers, and their places among those that attend."""
    attending = answer.context.attention_layers
    layers = list(chosen_layers(answer.options, attending))
    return layers, [attending.index(layer) for layer in layers]
