"""What a readout is, what it needs to be captured and says of an answer, and how a request asks for it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from PIL import Image

from steering.errors import RequestError
from steering.model.alarm import Alarm
from steering.model.mllm import MLLM
from steering.model.thresholds import Thresholds
from steering.prompt.layout import ImageSpan, Layout
from steering.prompt.spans import PARTITIONS
from steering.prompt.tiles import Tiling
from steering.protocol.signals import OF_UPDATES, Signal
from steering.protocol.wording import check_name, counted, cut, is_whole, must, shown, whole_numbers

SPANS = PARTITIONS
"""What may count as system and as user text in `decay`: the whole prompt, template included, or the messages' texts."""
RESIDUAL_ROWS = ("answer", "prompt", "generated")
"""Rows of the `residual` readout: those that generate the answer's tokens, which are the prompt's last one and those of all
generated tokens that are fed; all of the prompt's, as in the authors' `analysis/analyze_layer_changes.py`; or those of
generated tokens alone."""
DRIFT_ROWS = ("mean", "last")
"""What stands for an answer in `drift`: the mean of the residual stream over the rows that generated its tokens, as in the
authors' `analysis/eval_cosine.py`, or the one that generated its last token."""

MAX_VALUES = 1_000_000
"""Numbers that the maps of one answer may hold."""

ENVELOPE = ("version", "images", "rows")
"""The keys of the envelope that are no readout's."""

Scalar = float | int | bool | None


@dataclass(frozen=True)
class Surroundings:
    """What readouts need besides an answer's readings: N of the focus metrics, the text of a token, how each image is tiled
    (None where it is not, or nobody knows), the request's pictures (where readouts need them), the model's sinks
    (layers, rows, columns) where they are known, its thresholds of flags, and its alarm."""

    focus_layers: int
    token_text: Callable[[int], str] = str
    tilings: Sequence[Tiling | None] = ()
    pictures: Sequence[Image.Image] = ()
    sinks: torch.Tensor | None = None
    flags: Thresholds | None = None
    alarm: Alarm | None = None


@dataclass(frozen=True)
class Earlier:
    """Another answer, by what it is called: its states (2, layers, d), in the order of `DRIFT_ROWS`."""

    name: str
    states: torch.Tensor


@dataclass(frozen=True)
class Diagnose:
    """Options of the diagnostics envelope.

    `include` are the readouts, by any iterable of names. `layers` are those of the patch maps: numbers from 0, None for
    all; `last_layers` the last so many instead. `heatmaps` lays their mean over the pictures. `causal` removes from
    token activation maps what earlier tokens activate. `discount_sinks` adds patch maps less what places attract anyway,
    and lets the flags and heat maps go by them. `target_image` (counted from 1) adds the correctness of the focused
    image. `spans` is what counts as system and as user text in `decay`, one of `SPANS`; `residual_rows` one of
    `RESIDUAL_ROWS`, `drift_rows` one of `DRIFT_ROWS`. `earlier` is the answer that drift is measured from, by default
    the baseline. Raises RequestError for what is none of these.
    """

    include: frozenset[str] = field(default_factory=lambda: cheap())  # noqa: PLW0108
    layers: tuple[int, ...] | None = None
    last_layers: int | None = None
    heatmaps: bool = False
    causal: bool = False
    discount_sinks: bool = False
    target_image: int | None = None
    spans: str = PARTITIONS[0]
    residual_rows: str = RESIDUAL_ROWS[0]
    drift_rows: str = DRIFT_ROWS[0]
    earlier: Earlier | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "include", _names(self.include))
        if unknown := sorted(self.include - REGISTRY.keys()):
            raise RequestError(
                f"'diagnostics.include' does not know {cut(', '.join(unknown))}; allowed: {', '.join(REGISTRY)}.",
                param="diagnostics.include",
            )
        for name, word, known in (
            ("spans", self.spans, PARTITIONS),
            ("residual_rows", self.residual_rows, RESIDUAL_ROWS),
            ("drift_rows", self.drift_rows, DRIFT_ROWS),
        ):
            if word not in known:
                raise RequestError(
                    f"'diagnostics.{name}' must be one of {', '.join(known)}; got {shown(word)}.",
                    param=f"diagnostics.{name}",
                )
        for name, number in (("layers.last", self.last_layers), ("target_image", self.target_image)):
            if number is not None and not is_whole(number):
                raise must(f"diagnostics.{name}", "be a whole number", number)
        if self.layers is not None:
            object.__setattr__(self, "layers", whole_numbers("diagnostics.layers", self.layers))
        if self.target_image is not None and self.target_image < 1:
            raise RequestError(
                f"'diagnostics.target_image' counts from 1; got {shown(self.target_image)}.",
                param="diagnostics.target_image",
            )

    def chosen_layers(self, count: int) -> tuple[int, ...]:
        """The layers of the patch maps of a model with `count`; raises RequestError where it has none such."""
        if self.last_layers is not None:
            if not 1 <= self.last_layers <= count:
                raise RequestError(
                    f"'diagnostics.layers.last' must be from 1 to {count}; got {shown(self.last_layers)}.",
                    param="diagnostics.layers",
                )
            return tuple(range(count - self.last_layers, count))
        chosen = tuple(range(count)) if self.layers is None else self.layers
        if not chosen or len(set(chosen)) < len(chosen) or any(not 0 <= layer < count for layer in chosen):
            raise RequestError(
                f"'diagnostics.layers' must be different layer numbers from 0 to {count - 1}; got {shown(list(chosen))}.",
                param="diagnostics.layers",
            )
        return chosen

    @property
    def readouts(self) -> tuple[Readout, ...]:
        """Those that were asked for, in the order of the envelope; heat maps are one that has an option of its own."""
        return tuple(one for one in REGISTRY.values() if one.name in self.include or one.asked_beside(self))

    @property
    def signals(self) -> frozenset[Signal]:
        """What they need to be captured."""
        return frozenset().union(*(one.signals(self) for one in self.readouts))

    def check(self, mllm: MLLM, layout: Layout, tokens: int) -> None:
        """Raise RequestError where it does not fit a model, or a prompt of this layout and an answer of up to `tokens`."""
        images = len(layout.images)
        if self.target_image is not None and self.target_image > images:
            raise RequestError(
                f"'diagnostics.target_image' is {self.target_image}, but the request holds {counted(images, 'image')}.",
                param="diagnostics.target_image",
            )
        if self.discount_sinks and (mllm.calibration is None or mllm.calibration.sinks is None):
            raise RequestError(
                f"{mllm.name} was not calibrated for 'diagnostics.discount_sinks'; run 'helmsight probe --calibrate-sinks' "
                "on it.",
                param="diagnostics.discount_sinks",
            )
        for one in self.readouts:
            if not OF_UPDATES.isdisjoint(one.signals(self)):
                mllm.need_updates(f"diagnostics.{one.name}")
        self.chosen_layers(mllm.num_layers)
        values = sum(one.values(self, mllm.num_layers, len(layout.image_columns), tokens) for one in self.readouts)
        if values > MAX_VALUES:
            raise RequestError(
                f"'diagnostics' may return at most {MAX_VALUES} numbers in maps, and this request could need {values}: ask "
                "for fewer readouts, fewer layers or fewer 'max_tokens'.",
                param="diagnostics",
                code="too_many_maps",
            )


@dataclass(frozen=True)
class FinishedAnswer:
    """One finished answer as its readouts see it. taken: by recorder, what was measured of it. fed: how many of its tokens
    went through the model. baseline: the same of the answer without interventions. scores: the log-probabilities (nats) of
    the tokens, without the one that ends the answer, where they were captured."""

    layout: Layout
    options: Diagnose
    tokens: Sequence[int]
    fed: int
    taken: Mapping[str, Any]
    around: Surroundings
    baseline: Mapping[str, Any] | None = None
    scores: Sequence[float] = ()

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        return self.layout.images

    @cached_property
    def image_tokens(self) -> torch.Tensor:
        """(images,) how many tokens each image has."""
        return torch.tensor([image.tokens for image in self.images])

    @property
    def tilings(self) -> Sequence[Tiling | None]:
        return self.around.tilings or [None] * len(self.images)

    @cached_property
    def _said(self) -> dict[str, Any]:
        return {}

    def said(self, name: str) -> Any:
        """What a readout says of it, which others may rest on: it is read once."""
        if name not in self._said:
            self._said[name] = REGISTRY[name].read(self)
        return self._said[name]


class Readout(ABC):
    """One key of the envelope beside an answer; one that is `part_of` another is said by that, and never read. `cheap`
    ones are those that `diagnostics: true` asks for; `needs_pictures` those that read `Surroundings.pictures`."""

    name: ClassVar[str]
    cheap: ClassVar[bool] = False
    part_of: ClassVar[str | None] = None
    needs_pictures: ClassVar[bool] = False
    scalars: ClassVar[Mapping[str, type]] = {}
    """The numbers of it that the journal and the metrics keep, float, int or bool each."""

    @abstractmethod
    def signals(self, options: Diagnose) -> frozenset[Signal]:
        """What is to be captured for it."""

    @abstractmethod
    def read(self, answer: FinishedAnswer) -> Any:
        """What it says of an answer, as JSON; None where it does not exist."""

    def asked_beside(self, options: Diagnose) -> bool:
        """Whether options other than `include` ask for it."""
        return False

    def values(self, options: Diagnose, layers: int, patches: int, tokens: int) -> int:
        """How many numbers it may hold, of an answer of up to `tokens` tokens to images of so many patches, where that is a
        matter of size."""
        return 0

    def summary(self, said: Any) -> Mapping[str, Scalar]:
        """Its `scalars` out of what it said."""
        return {}


REGISTRY: dict[str, Readout] = {}
"""Every readout by name, in the order of the envelope."""


def register(readout: Readout) -> None:
    """Make a readout known to requests, envelope, metrics, journal and catalogue; raises ValueError where its name, or that
    of one of its scalars, is taken or cannot be one."""
    for name in (readout.name, *readout.scalars):
        check_name(name, f"The names of {type(readout).__name__} and of its scalars")
    taken = {scalar for other in REGISTRY.values() for scalar in other.scalars}
    if readout.name in (*REGISTRY, *ENVELOPE) or taken & set(readout.scalars):
        raise ValueError(f"There is a readout {readout.name!r} already, or one with a scalar of the same name.")
    REGISTRY[readout.name] = readout


def cheap() -> frozenset[str]:
    """The names of the readouts that `diagnostics: true` asks for."""
    return frozenset(name for name, readout in REGISTRY.items() if readout.cheap)


def _names(given: Any) -> frozenset[str]:
    names = None if isinstance(given, str | bytes) or not isinstance(given, Iterable) else list(given)
    if names is None or not all(isinstance(name, str) for name in names):
        raise must("diagnostics.include", "be a list of names of readouts", given)
    return frozenset(names)
