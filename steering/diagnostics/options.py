"""Which readouts a request asks for."""

from __future__ import annotations

from dataclasses import dataclass

from steering.diagnostics import drift
from steering.errors import RequestError
from steering.spans import PARTITIONS

CHEAP = ("focus", "modality", "decay")
READOUTS = (*CHEAP, "decay_layers", "residual", "patches", "tam", "flags", "anchor", "drift")
"""Readouts this engine computes, in the order of the envelope."""

RESIDUAL_ROWS = ("answer", "prompt", "generated")
"""Rows of the `residual` readout: those that generate the answer's tokens, which are the prompt's last one and those of all
generated tokens that are fed; all of the prompt's, as in the authors' `analysis/analyze_layer_changes.py`; or those of
generated tokens alone."""

MAX_VALUES = 1_000_000
"""Numbers that the maps of one answer may hold."""


@dataclass(frozen=True)
class Diagnose:
    """Options of the diagnostics envelope.

    `layers` are those of the patch maps: numbers from 0, None for all; `last_layers` the last so many instead. `heatmaps`
    lays their mean over the pictures. `causal` removes from token activation maps what earlier tokens activate.
    `discount_sinks` adds patch maps less what places attract anyway, and lets the flags and heat maps go by them.
    `target_image` (counted from 1) adds the correctness of the focused image. `spans` is what counts as system and as user
    text in `decay`, one of `PARTITIONS`; `residual_rows` one of `RESIDUAL_ROWS`, `drift_rows` one of `drift.ROWS`.
    """

    include: frozenset[str] = frozenset(CHEAP)
    layers: tuple[int, ...] | None = None
    last_layers: int | None = None
    heatmaps: bool = False
    causal: bool = False
    discount_sinks: bool = False
    target_image: int | None = None
    spans: str = PARTITIONS[0]
    residual_rows: str = RESIDUAL_ROWS[0]
    drift_rows: str = drift.ROWS[0]

    def __post_init__(self) -> None:
        if unknown := sorted(self.include - set(READOUTS)):
            raise RequestError(
                f"'diagnostics.include' does not know {', '.join(unknown)}; allowed: {', '.join(READOUTS)}.",
                param="diagnostics.include",
            )
        for name, word, known in (
            ("spans", self.spans, PARTITIONS),
            ("residual_rows", self.residual_rows, RESIDUAL_ROWS),
            ("drift_rows", self.drift_rows, drift.ROWS),
        ):
            if word not in known:
                raise RequestError(
                    f"'diagnostics.{name}' must be one of {', '.join(known)}; got {word!r}.",
                    param=f"diagnostics.{name}",
                )
        if self.target_image is not None and self.target_image < 1:
            raise RequestError(
                f"'diagnostics.target_image' counts from 1; got {self.target_image}.", param="diagnostics.target_image"
            )

    def chosen_layers(self, count: int) -> tuple[int, ...]:
        """The layers of the patch maps of a model with `count`; raises RequestError where it has none such."""
        if self.last_layers is not None:
            if not 1 <= self.last_layers <= count:
                raise RequestError(
                    f"'diagnostics.layers.last' must be from 1 to {count}; got {self.last_layers}.",
                    param="diagnostics.layers",
                )
            return tuple(range(count - self.last_layers, count))
        chosen = tuple(range(count)) if self.layers is None else self.layers
        if not chosen or len(set(chosen)) < len(chosen) or any(not 0 <= layer < count for layer in chosen):
            raise RequestError(
                f"'diagnostics.layers' must be different layer numbers from 0 to {count - 1}; got {list(chosen)}.",
                param="diagnostics.layers",
            )
        return chosen

    def values(self, layers: int, patches: int, tokens: int) -> int:
        """How many numbers the maps of an answer of up to `tokens` tokens hold. patches: those of all images."""
        sizes = {
            "patches": len(self.chosen_layers(layers)) * patches * (1 + self.discount_sinks),
            "tam": tokens * patches,
            "decay_layers": 3 * layers * tokens,
        }
        return sum(size for name, size in sizes.items() if name in self.include)

    @property
    def wants_patches(self) -> bool:
        """Whether attention is to be kept by column."""
        return self.heatmaps or bool(self.include & {"patches", "flags"})

    @property
    def wants_activations(self) -> bool:
        """Whether the states of image tokens are to be kept."""
        return bool(self.include & {"tam", "flags"})

    @property
    def wants_residual(self) -> bool:
        """Whether the residual stream and its updates are to be kept."""
        return bool(self.include & {"residual", "drift"})
