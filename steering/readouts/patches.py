"""rho, by image, layer and patch: mean attention over heads and rows (IVM paper, section 3), as numbers and as pictures."""

from __future__ import annotations

from typing import Any

from steering.protocol.readout import Diagnose, FinishedAnswer, Readout
from steering.protocol.signals import Signal
from steering.readouts.attention import NAME
from steering.readouts.heatmaps import data_url, overlay
from steering.readouts.maps import attention_maps, judged_maps


class PatchesReadout(Readout):
    """The maps of the chosen layers; beside them, where that is asked for, less what places attract anyway."""

    name = "patches"

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.PATCHES})

    def values(self, options: Diagnose, layers: int, patches: int, tokens: int) -> int:
        return len(options.chosen_layers(layers)) * patches * (1 + options.discount_sinks)

    def read(self, answer: FinishedAnswer) -> list[dict[str, Any]]:
        layers = _layers(answer)
        out: list[dict[str, Any]] = [
            {"image": number, "layers": layers, **map_.at(layers).json("rho")}
            for number, map_ in enumerate(attention_maps(answer), start=1)
        ]
        if answer.options.discount_sinks:
            for one, map_ in zip(out, judged_maps(answer), strict=True):
                one["discounted"] = map_.whole[layers].tolist()
        return out


class HeatmapsReadout(Readout):
    """Overlays of rho, mean over the chosen layers, on the pictures; None for an image whose tokens are no single grid."""

    name = "heatmaps"
    needs_pictures = True

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.PATCHES})

    def asked_beside(self, options: Diagnose) -> bool:
        return options.heatmaps

    def read(self, answer: FinishedAnswer) -> list[dict[str, Any]]:
        layers, out = _layers(answer), []
        for number, (map_, picture) in enumerate(
            zip(judged_maps(answer), answer.around.pictures, strict=True), start=1
        ):
            png = data_url(overlay(picture, map_.whole[layers].mean(0), map_.grid)) if map_.grid else None
            out.append({"image": number, "kind": "rho", "layers": layers, "png": png})
        return out


def _layers(answer: FinishedAnswer) -> list[int]:
    return list(answer.options.chosen_layers(len(answer.taken[NAME].patches)))
