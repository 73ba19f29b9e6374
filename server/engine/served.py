"""What the server needs of an engine, and all that it knows of one. `server.engine.local` makes Helmsight's own fit;
whatever else does as much can stand behind the same wire."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from steering import Auto, Bins, Chunk, Fault, Request, Result, Steer, TextBounds


class EngineEnded(Fault):
    """The engine's process is gone, which says nothing of its model; who has started it replaces it."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine serves, and what it can do.

    `name` and `fingerprint` are the model's; `folder` is where its checkpoint lies, None where that is nowhere near.
    `context_length` is how many tokens prompt and answer may have together, `text` how much text a request may hold,
    `image_size` (width, height) the one that all images are brought to, None where they keep their own.
    `pixels` (least, most) are the processor's own bounds of a picture, None where a request cannot state others.
    `generation_defaults` are the checkpoint's own sampling values; `template_variables` are what a request may tell the
    chat template, by name; `about` is what else a person may want to know of the
    model, as JSON has it. `interventions` and `readouts` are the names of those
    that can be asked for; a request for another one is refused before it gets here, and so are a grammar where it follows no
    `grammars`, and `tools` where the model is told of none.
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
    about: Mapping[str, Any] = field(default_factory=dict)


@runtime_checkable
class ServedCompletion(Protocol):
    """The answers of one request, while they are generated."""

    prompt_tokens: int
    max_tokens: int
    """What an answer may have: what was asked for, or what fits."""

    def __iter__(self) -> Iterator[Chunk]:
        """Chunks of all choices as they come; raises Fault when the request failed. Ends early after `cancel`."""

    def result(self) -> Result:
        """Wait for the whole request; raises Fault when it failed or was cancelled."""

    def whole(self) -> Iterator[Chunk]:
        """The last chunk of each choice, as by iterating."""

    def paused(self, resume: Callable[[], object]) -> Iterator[Chunk | None]:
        """Chunks as by iterating, but None where there is none yet, instead of waiting; `resume`, which does not wait, is
        called when there may be more."""

    @property
    def first_at(self) -> float | None:
        """When the first token came, on the monotonic clock."""

    def generated(self, index: int) -> int:
        """How many tokens of choice `index` there are so far."""

    def said(self, index: int) -> str:
        """The text of choice `index` so far."""

    def cancel(self) -> None:
        """Stop generating; harmless when the request is finished."""


@runtime_checkable
class ServedTurn(Protocol):
    """A place in the engine's queue for one client, who may need several requests because one depends on another."""

    def check(self) -> None:
        """Raise Busy where whatever is asked now would be refused, Fault when the engine is closed."""

    def submit(self, request: Request) -> ServedCompletion:
        """Queue a request. Raises RequestError when it is wrong, Busy when the queue is full, Fault when the engine is
        closed."""

    def decide(self, request: Request, begun: Callable[[ServedCompletion], object]) -> Request:
        """Return the request with the intervention that its first prelude decides on (`steering.decide_next`). `begun` is
        given everything that runs for that, so that it can be cancelled; raises Fault then. Needed where `interventions` has
        "steering"."""


@runtime_checkable
class ServedEngine(Protocol):
    """Generates answers for any number of threads."""

    @property
    def capabilities(self) -> Capabilities:
        """What it serves, and what it can do; the same as long as it lives."""

    @property
    def healthy(self) -> bool:
        """Whether requests are being worked on."""

    def start(self) -> None:
        """Work on requests from now on."""

    def stop(self, drain: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain` seconds, cancel the rest; returns when done."""

    def turn(self, group: str = "") -> AbstractContextManager[ServedTurn]:
        """A place in the queue until the end of the block, in turns with those of other groups. What is submitted in it is
        answered while the engine drains."""

    def stats(self) -> Mapping[str, float]:
        """Counters since the start and gauges of now: "running", "waiting", "slots" and "max_waiting" at least."""

    @property
    def bins(self) -> Mapping[str, Bins]:
        """How times and batches spread since the start, by the names of `server.telemetry.collectors`; some may lack."""

    # -- where `interventions` has "steering" --------------------------------------------------------------------------

    def magnitudes(self) -> torch.Tensor:
        """(layers,) mean |h| of the model after each layer, which strengths are measured in."""

    def check_steer(self, steer: Steer, images: int | None = None) -> None:
        """Raise VectorError or RequestError unless a vector can be added to the model's states, in a prompt of so many
        images; None where the prompt is not known."""

    def check_auto(self, auto: Auto) -> None:
        """Raise VectorError or RequestError unless the way can be found, and the vector be added."""
