"""Readouts: what they need captured, what they report of an answer, and how a request asks for them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Annotated, Any, ClassVar

import torch
from PIL import Image
from pydantic import Field

from steering.errors import RequestError
from steering.model.alarm import Alarm
from steering.model.mllm import MLLM
from steering.model.thresholds import Thresholds
from steering.prompt.layout import ImageSpan, Layout
from steering.prompt.tiles import Tiling
from steering.protocol.signals import OF_UPDATES, Signal, StateChoice
from steering.protocol.wording import check_name, cut, must, shown

MAX_VALUES = 1_000_000
"""Maximum number of values in the maps of one answer."""

MAX_BYTES = 16 * 2**20
"""Maximum size of the tensors of one answer."""

ENVELOPE = ("version", "images", "rows")
"""The keys of the envelope that belong to no readout."""

RESERVED = ("include", "earlier", "given", "compare_to", *("readouts", "signals", "check", "without"))
"""Names that no option of a readout may have."""

Scalar = float | int | bool | None


@dataclass(frozen=True)
class ReadoutContext:
    """The context that readouts need besides an answer's measurements.

    N of the focus metrics, the text of a token, the tiling of each image (None where it has none, or it is unknown), the
    request's pictures (where readouts need them), the model's sinks (layers, rows, columns) where they are known, its
    thresholds of flags, its alarm, and the digest of the calibration that they are from. attention_layers: the numbers of
    the layers whose attention was measured.
    """

    focus_layers: int
    attention_layers: Sequence[int]
    token_text: Callable[[int], str] = str
    tilings: Sequence[Tiling | None] = ()
    pictures: Sequence[Image.Image] = ()
    sinks: torch.Tensor | None = None
    flags: Thresholds | None = None
    alarm: Alarm | None = None
    calibration: str | None = None


@dataclass(frozen=True)
class Quantity:
    """A number that a readout keeps: its meaning, its unit ("" for a ratio), its range, and bounds for its histogram.

    Choose `buckets` so that less than nine tenths of usual answers lie in one of the outermost.
    """

    about: str
    unit: str = ""
    low: float | None = None
    high: float | None = None
    buckets: tuple[float, ...] = ()


@dataclass(frozen=True)
class Earlier:
    """Another answer, by name: its states (2, layers, d), the mean over its rows and those at the last row."""

    name: str
    states: torch.Tensor


def no_fit(value: Any, mllm: MLLM, layout: Layout) -> None:
    """Check nothing: the option fits every model and prompt."""


@dataclass(frozen=True)
class ReadoutOption:
    """An option of readouts, which several readouts may share.

    `name` is its name in requests and the keyword of `Diagnose`. `kind` is its type in JSON, with what its schema says
    beside `about`; `check` returns the value that is kept, or raises RequestError. `fits` raises RequestError where a model,
    or a prompt of this layout, has no place for the value. An option that requests write in another form than the kept one
    has `read`, which turns the request's value into keywords of `Diagnose`, `write`, which does the reverse, and `unset`,
    the request's value where the option is absent. An option that requests do not have at all has `written` False. One that
    names a file of the server has `look_up`, which returns the value with what a store of vectors has by that name.
    """

    name: str
    kind: Any
    default: Any
    about: str
    check: Callable[[Any], Any]
    fits: Callable[[Any, MLLM, Layout], None] = no_fit
    schema: Mapping[str, Any] = field(default_factory=dict)
    read: Callable[[Any], Mapping[str, Any]] | None = None
    write: Callable[[Diagnose], Any] | None = None
    written: bool = True
    unset: Any = None
    look_up: Callable[[Any, Any], Any] | None = None

    @property
    def at_rest(self) -> Any:
        """The value in a request that does not mention the option."""
        return self.default if self.unset is None else self.unset

    def keywords(self, value: Any) -> Mapping[str, Any]:
        """Return the keywords of `Diagnose` for a request's value."""
        return {self.name: value} if self.read is None else self.read(value)

    def wire(self, options: Diagnose) -> Any:
        """Return the request's value for the options."""
        return options[self] if self.write is None else self.write(options)

    @classmethod
    def flag(cls, name: str, about: str, fits: Callable[[Any, MLLM, Layout], None] = no_fit) -> ReadoutOption:
        """Return an option that is on or off, and off by default."""

        def check(value: Any) -> bool:
            if not isinstance(value, bool):
                raise must(f"diagnostics.{name}", "be true or false", value)
            return value

        return cls(name, Annotated[bool, Field(strict=True)], False, about, check, fits)

    @classmethod
    def word(cls, name: str, words: Sequence[str], about: str) -> ReadoutOption:
        """Return an option that takes one of several words, by default the first."""

        def check(value: Any) -> str:
            if value not in words:
                raise RequestError(
                    f"'diagnostics.{name}' must be one of {', '.join(words)}; got {shown(value)}.",
                    param=f"diagnostics.{name}",
                )
            return str(value)

        return cls(name, str, words[0], about, check, schema={"enum": list(words)})


@dataclass(frozen=True, init=False)
class Diagnose:
    """The readouts that a request asks for.

    `include` holds their names, as any iterable; `earlier` is the answer that drift is measured from, by default the
    baseline. All others are the options that registered readouts declare, by name (`Diagnose(["focus"], target_image=2)`),
    and can be read as attributes; `given` holds those that are not at their defaults. Raises RequestError for unknown names
    and options.
    """

    include: frozenset[str]
    earlier: Earlier | None
    given: Mapping[str, Any]

    def __init__(
        self,
        include: Iterable[str] | None = None,
        *,
        earlier: Earlier | None = None,
        given: Mapping[str, Any] | None = None,
        **options: Any,
    ):
        names = _names(cheap() if include is None else include)
        if unknown := sorted(names - REGISTRY.keys()):
            raise RequestError(
                f"'diagnostics.include' does not know {cut(', '.join(unknown))}; allowed: {', '.join(REGISTRY)}.",
                param="diagnostics.include",
            )
        available, values = readout_options(), {**(given or {}), **options}
        for name in values:
            if name not in available:
                raise RequestError(
                    f"'diagnostics.{name}' is unknown; allowed: {', '.join(available)}.", param=f"diagnostics.{name}"
                )
        checked = {name: available[name].check(value) for name, value in values.items()}
        object.__setattr__(self, "include", names)
        object.__setattr__(self, "earlier", earlier)
        object.__setattr__(
            self, "given", {name: value for name, value in checked.items() if value != available[name].default}
        )

    def __hash__(self) -> int:
        return hash((self.include, *self.given))

    def __getattr__(self, name: str) -> Any:
        option = None if name.startswith("_") else readout_options().get(name)
        if option is None:
            raise AttributeError(name)
        return self.given.get(name, option.default)

    def __getitem__(self, option: ReadoutOption) -> Any:
        """Return the value of an option."""
        return self.given.get(option.name, option.default)

    def looked_up(self, store: Any) -> Diagnose:
        """Return the same readouts with what their options name, from a store of vectors; raise as the store does."""
        options = {option.name: option for readout in self.readouts for option in readout.options if option.look_up}
        values = {name: option.look_up(self[option], store) for name, option in options.items() if option.look_up}
        return Diagnose(self.include, earlier=self.earlier, given={**self.given, **values}) if values else self

    def without(self, name: str) -> Diagnose:
        """Return the same readouts with an option at its default."""
        others = {other: value for other, value in self.given.items() if other != name}
        return Diagnose(self.include, earlier=self.earlier, given=others)

    @property
    def readouts(self) -> tuple[Readout, ...]:
        """The requested readouts in the order of the envelope; some, as heat maps, have an option of their own."""
        return tuple(
            readout for readout in REGISTRY.values() if readout.name in self.include or readout.asked_beside(self)
        )

    @property
    def signals(self) -> frozenset[Signal]:
        """The signals that the readouts need captured."""
        return frozenset().union(*(readout.signals(self) for readout in self.readouts))

    @cached_property
    def activations(self) -> Mapping[str, StateChoice]:
        """The hidden states that each readout needs, where it needs any."""
        choices = {readout.name: readout.activations(self) for readout in self.readouts}
        return {name: choice for name, choice in choices.items() if choice is not None}

    def check(self, mllm: MLLM, layout: Layout, tokens: int) -> None:
        """Raise RequestError where the readouts do not fit a model, a prompt of this layout or so long an answer."""
        for option in readout_options().values():
            option.fits(self[option], mllm, layout)
        for readout in self.readouts:
            if not OF_UPDATES.isdisjoint(readout.signals(self)):
                mllm.need_updates(f"diagnostics.{readout.name}")
        values = sum(
            readout.values(self, len(mllm.attention_layers), len(layout.image_columns), tokens)
            for readout in self.readouts
        )
        if values > MAX_VALUES:
            raise RequestError(
                f"'diagnostics' may return at most {MAX_VALUES} numbers in maps, and this request could need {values}: ask "
                "for fewer readouts, fewer layers or fewer 'max_tokens'.",
                param="diagnostics",
                code="too_many_maps",
            )
        positions = len(layout.spans), tokens
        for name, choice in self.activations.items():
            if isinstance(choice.positions, tuple) and choice.positions[0] >= sum(positions):
                raise must(
                    f"diagnostics.{name}.positions",
                    f"begin within the prompt's {positions[0]} tokens and the answer's {tokens} at most",
                    list(choice.positions),
                )
        size = sum(choice.size(mllm.num_layers, *positions) for choice in self.activations.values())
        size *= mllm.hidden_size * mllm.dtype.itemsize
        if size > MAX_BYTES:
            raise RequestError(
                f"'diagnostics' may return at most {MAX_BYTES >> 20} MiB of states, and this request could need "
                f"{-(-size >> 20)} MiB: ask for fewer layers, fewer positions or fewer 'max_tokens'.",
                param="diagnostics",
                code="too_many_states",
            )


@dataclass(frozen=True)
class FinishedAnswer:
    """A finished answer as its readouts see it.

    taken: its measurements, by recorder. fed: how many of its tokens went through the model. baseline: the measurements of
    the answer without interventions. scores: the log-probabilities (nats) of the tokens, without the one that ends the
    answer, where they were captured.
    """

    layout: Layout
    options: Diagnose
    tokens: Sequence[int]
    fed: int
    taken: Mapping[str, Any]
    context: ReadoutContext
    baseline: Mapping[str, Any] | None = None
    scores: Sequence[float] = ()

    @property
    def images(self) -> tuple[ImageSpan, ...]:
        return self.layout.images

    @cached_property
    def image_tokens(self) -> torch.Tensor:
        """Number of tokens of each image, (images,)."""
        return torch.tensor([image.tokens for image in self.images])

    @property
    def tilings(self) -> Sequence[Tiling | None]:
        return self.context.tilings or [None] * len(self.images)

    @cached_property
    def _reports(self) -> dict[str, Any]:
        return {}

    def report_of(self, name: str) -> Any:
        """Return a readout's report of the answer, computed once, because other readouts may depend on it."""
        if name not in self._reports:
            self._reports[name] = REGISTRY[name].read(self)
        return self._reports[name]


class Readout(ABC):
    """A key of the envelope beside an answer.

    A readout that is `part_of` another is reported by that one, and never read. `cheap` readouts are those that
    `diagnostics: true` asks for; `needs_pictures` marks those that read `ReadoutContext.pictures`. `options` are those that
    it reads from an answer's `Diagnose`; readouts that share an option declare the same object.
    """

    name: ClassVar[str]
    options: ClassVar[Sequence[ReadoutOption]] = ()
    cheap: ClassVar[bool] = False
    part_of: ClassVar[str | None] = None
    needs_pictures: ClassVar[bool] = False
    scalars: ClassVar[Mapping[str, type]] = {}
    """The values that the journal and the metrics keep, each a float, int or bool."""
    quantities: ClassVar[Mapping[str, Quantity]] = {}
    """Descriptions of those that are floats."""
    calibrated_by: ClassVar[str | None] = None
    """The part of a model's calibration without which the values are null."""

    @abstractmethod
    def signals(self, options: Diagnose) -> frozenset[Signal]:
        """Return the signals that it needs captured."""

    @abstractmethod
    def read(self, answer: FinishedAnswer) -> Any:
        """Return its report of an answer as JSON; None where it does not exist."""

    def asked_beside(self, options: Diagnose) -> bool:
        """Return True where options other than `include` ask for it."""
        return False

    def activations(self, options: Diagnose) -> StateChoice | None:
        """Return the hidden states that it needs, which `Signal.ACTIVATIONS` captures; None for none."""
        return None

    def values(self, options: Diagnose, layers: int, patches: int, tokens: int) -> int:
        """Return how many numbers its maps may hold, where its size depends on the request.

        The answer has up to `tokens` tokens, to images of `patches` patches, in a model with `layers` layers that attend.
        """
        return 0

    def summary(self, report: Any) -> Mapping[str, Scalar]:
        """Return its `scalars`, taken from its report."""
        return {}


REGISTRY: dict[str, Readout] = {}
"""Every readout by name, in the order of the envelope."""


def register(readout: Readout) -> None:
    """Make a readout known to requests, envelope, metrics, journal and catalogue.

    Raises ValueError where its name, or that of one of its scalars, is taken or invalid.
    """
    for name in (readout.name, *readout.scalars):
        check_name(name, f"The names of {type(readout).__name__} and of its scalars")
    scalars = {scalar for other in REGISTRY.values() for scalar in other.scalars}
    if readout.name in (*REGISTRY, *ENVELOPE) or scalars & set(readout.scalars):
        raise ValueError(f"There is a readout {readout.name!r} already, or one with a scalar of the same name.")
    if strange := sorted(readout.quantities.keys() - {name for name, kind in readout.scalars.items() if kind is float}):
        raise ValueError(
            f"{type(readout).__name__} has quantities that are no scalars of kind float: {', '.join(strange)}."
        )
    for option in readout.options:
        check_name(option.name, f"The names of the options of {type(readout).__name__}")
        if option.name in RESERVED or readout_options().get(option.name, option) is not option:
            raise ValueError(f"There is another option {option.name!r} of readouts already.")
    REGISTRY[readout.name] = readout


def readout_options() -> dict[str, ReadoutOption]:
    """Return the options of registered readouts by name."""
    return {option.name: option for readout in REGISTRY.values() for option in readout.options}


def cheap() -> frozenset[str]:
    """Return the names of the readouts that `diagnostics: true` asks for."""
    return frozenset(name for name, readout in REGISTRY.items() if readout.cheap)


def _names(value: Any) -> frozenset[str]:
    names = None if isinstance(value, str | bytes) or not isinstance(value, Iterable) else list(value)
    if names is None or not all(isinstance(name, str) for name in names):
        raise must("diagnostics.include", "be a list of names of readouts", value)
    return frozenset(names)
