"""Token Activation Maps beside an answer; `steering.measures` has the formula."""

from __future__ import annotations

from typing import Any

from steering.protocol.readout import Diagnose, FinishedAnswer, Readout, ReadoutOption
from steering.protocol.signals import Signal
from steering.readouts.maps import maps
from steering.recorders.states import NAME, TokenMaps

CAUSAL = ReadoutOption.flag("causal", "Remove from token activation maps what earlier tokens activate.")


class TamReadout(Readout):
    """The activation of each image's tokens for each token of the answer: how strongly they predict it."""

    name = "tam"
    options = (CAUSAL,)

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.IMAGE_STATES} | ({Signal.TEXT_STATES} if options[CAUSAL] else set()))

    def values(self, options: Diagnose, layers: int, patches: int, tokens: int) -> int:
        return tokens * patches

    def read(self, answer: FinishedAnswer) -> list[dict[str, Any]]:
        token_maps: TokenMaps | None = answer.taken.get(NAME)
        if token_maps is None:
            return []
        rows = token_maps.plain if token_maps.causal is None else token_maps.causal
        by_image = [map_.json("map") for map_ in maps(answer, rows)]
        return [
            {"position": position, "token": answer.context.token_text(answer.tokens[position]), "image": number}
            | {name: values[position] for name, values in image_map.items()}
            for position in range(len(rows))
            for number, image_map in enumerate(by_image, start=1)
        ]
