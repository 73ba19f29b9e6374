"""The engine protocol: everything that the server requires and knows of an engine.

`server.engine.local` adapts Helmsight's own engine; any other implementation can serve the same wire format.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from steering import Auto, Chunk, Histogram, Request, Result, Steer, TextBounds


@dataclass(frozen=True)
class Capabilities:
    """The model that an engine serves, and the features that it supports.

    `name` and `fingerprint` are the model's; `folder` holds its checkpoint, None if that is not local. `context_length`
    counts the tokens of prompt and answer together, `text` bounds the text of a request. `image_size` (width, height) is the
    size that all images are resized to, None if they keep their own. `pixels` (least, most) are the processor's own bounds
    of an image, None if a request cannot set others. `generation_defaults` are the checkpoint's own sampling values;
    `template_variables` are the names that a request may pass to the chat template; `reasoning` are the tags that it
    puts around reasoning, and with `takes_reasoning` it has a place for that of earlier answers; `engine` is "own", or the
    name and version of another engine; one that `recovers` becomes healthy again by itself; `about` holds further facts of
    the model as JSON.

    `interventions` and `readouts` name those that can be requested. Other names are refused before they reach the engine, as
    are grammars unless `grammars`, and tools unless `tools`.
    """

    name: str
    fingerprint: str
    layers: int
    hidden_size: int
    context_length: int
    text: TextBounds
    device: str
    dtype: str
    quantization: str | None = None
    image_size: tuple[int, int] | None = None
    pixels: tuple[int, int] | None = None
    folder: Path | None = None
    generation_defaults: Mapping[str, Any] = field(default_factory=dict)
    interventions: frozenset[str] = frozenset()
    readouts: frozenset[str] = frozenset()
    grammars: bool = False
    tools: bool = False
    template_variables: frozenset[str] = frozenset()
    reasoning: tuple[str, str] | None = None
    takes_reasoning: bool = False
    engine: str = "own"
    recovers: bool = False
    about: Mapping[str, Any] = field(default_factory=dict)


class Inspected(NamedTuple):
    """The sizes of a prepared request: tokens of its prompt, and the largest number of tokens of an answer."""

    prompt_tokens: int
    max_tokens: int


class Calibrated(Protocol):
    """The calibration of a model: the numbers that were measured on it, and hold for no other."""

    @property
    def digest(self) -> str | None:
        """A hash of its numbers; None while nothing is measured."""

    @property
    def parts(self) -> Sequence[str]:
        """The names of the parts that are measured (see `steering.readiness`)."""


@runtime_checkable
class ServedCompletion(Protocol):
    """The answers of one request, while they are generated."""

    prompt_tokens: int
    max_tokens: int
    """Largest number of tokens of an answer: the requested one, or what fits."""
    prompt_end: str
    """The text of the prompt's last tokens, special ones included."""

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks of all choices as they arrive; raises Fault if the request failed. Ends early after `cancel`."""

    def result(self) -> Result:
        """Wait for the whole request; raises Fault if it failed or was cancelled."""

    def whole(self) -> Iterator[Chunk]:
        """Yield the last chunk of each choice."""

    def paused(self, resume: Callable[[], object]) -> Iterator[Chunk | None]:
        """Yield chunks without waiting, and None whenever there is none yet.

        `resume`, which does not block, is called when there may be more.
        """

    @property
    def first_at(self) -> float | None:
        """The time of the first token on the monotonic clock, None before it."""

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that came from a cache; known with the first chunk."""

    def generated(self, index: int) -> int:
        """Return how many tokens of choice `index` exist so far."""

    def text_of(self, index: int) -> str:
        """Return the text of choice `index` so far."""

    def cancel(self) -> None:
        """Stop generating; harmless if the request is finished."""


@runtime_checkable
class ServedTurn(Protocol):
    """A place in the engine's queue for one client, whose several requests may depend on each other.

    All of them are answered under the calibration of the turn's beginning.
    """

    @property
    def calibration(self) -> Calibrated | None:
        """The calibration that the requests are answered under; None where nothing is calibrated."""

    def check(self) -> None:
        """Raise Busy if any request would be refused now, Fault if the engine is closed."""

    def submit(self, request: Request) -> ServedCompletion:
        """Queue a request.

        Raises RequestError if it is invalid, Busy if the queue is full, Fault if the engine is closed.
        """

    def decide(self, request: Request, begun: Callable[[ServedCompletion], object]) -> Request:
        """Return the request with the intervention that its first prelude decides on (`steering.decide_next`).

        `begun` receives each completion that runs for that, so that it can be cancelled, which raises Fault. Required if
        `interventions` contains "steering".
        """


@runtime_checkable
class ServedEngine(Protocol):
    """An engine that generates answers for any number of threads."""

    @property
    def capabilities(self) -> Capabilities:
        """The engine's capabilities, constant over its life but for the facts of `about`."""

    @property
    def healthy(self) -> bool:
        """True if requests are being worked on."""

    def start(self) -> None:
        """Start to work on requests."""

    def stop(self, drain: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain` seconds, cancel the rest; returns when done."""

    def turn(self, group: str = "") -> AbstractContextManager[ServedTurn]:
        """Hold a place in the queue until the block ends; groups take turns.

        Requests submitted in it are answered even while the engine drains.
        """

    def inspect(self, request: Request) -> Inspected:
        """Prepare a request as `ServedTurn.submit` does, without answering it; raises RequestError if it is invalid.

        Preludes are only checked.
        """

    def stats(self) -> Mapping[str, float]:
        """Return counters since the start and current gauges: at least "running", "waiting", "slots" and "max_waiting"."""

    def calibration(self) -> Calibrated | None:
        """Return the model's calibration as of now, under which a turn that begins now is answered; None without one."""

    @property
    def bins(self) -> Mapping[str, Histogram]:
        """Histograms of times and batch sizes since the start, keyed as in `server.telemetry.collectors`; some may lack."""

    # -- where `interventions` has "steering" --------------------------------------------------------------------------

    def magnitudes(self) -> torch.Tensor:
        """Return the (layers,) mean |h| of the model after each layer, the unit of steering strengths."""

    def check_steer(self, steer: Steer, images: int | None = None) -> None:
        """Raise VectorError or RequestError unless a vector can be added to the model's hidden states.

        `images` is the prompt's number of images, None if the prompt is not known.
        """

    def check_auto(self, auto: Auto) -> None:
        """Raise VectorError or RequestError unless the direction can be chosen and the vector be added."""
