"""The rows whose attention is read in a step, and a way to read them: what runtime and backends have in common."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from helmsight_vllm.faults import Failing
from helmsight_vllm.plan import Ints


class Labelled(Failing, Protocol):
    """An answer whose prompt's tokens have labels, by which attention is summed."""

    def labels_at(self, start: int, stop: int) -> Ints:
        """Return the labels of the tokens at positions start to stop; `plan.NONE` for no label."""

    def labels_on(self, device: torch.device) -> torch.Tensor:
        """Return the labels of the prompt's tokens, on a device where they stay; tokens behind it have none."""

    def add_attention(self, start: int, stop: int, sums: torch.Tensor) -> None:
        """Take the sums (layers, rows, labels) of the rows at positions start to stop, on the CPU."""


class Span(NamedTuple):
    """The tokens of an answer in a step, some of whose attention may be read.

    place: the answer's in the batch. first: the first token's row in the step. start, stop: their positions. looked: the
    ranges of positions whose attention is read.
    """

    answer: Labelled
    place: int
    first: int
    start: int
    stop: int
    looked: Sequence[tuple[int, int]]


class Look(NamedTuple):
    """Consecutive rows of an answer whose attention is read in a step.

    place: the answer's in the batch. first: the first row's in the step. start, stop: their positions.
    """

    answer: Labelled
    place: int
    first: int
    start: int
    stop: int


def looks_of(spans: Sequence[Span]) -> list[Look]:
    """Return the rows that are read, in the order of their results."""
    return [
        Look(span.answer, span.place, span.first + begin - span.start, begin, end)
        for span in spans
        for begin, end in span.looked
    ]


@dataclass
class MapLook:
    """A row whose attention to some of its answer's columns is read in some layers.

    place: the answer's in the batch. row: the row's in the step. length: the tokens that it sees. columns: (patches,). sums:
    (patches,), over layers, of the mean over this rank's heads.
    """

    answer: Failing
    place: int
    row: int
    length: int
    columns: torch.Tensor
    layers: Sequence[int]
    sums: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sums = torch.zeros(len(self.columns), device=self.columns.device)


class Pass(NamedTuple):
    """A layer's attention in a step, as its backend has it: rows' queries (rows, heads, width), paged keys, and metadata."""

    impl: Any
    layer: Any
    query: torch.Tensor
    cache: torch.Tensor
    meta: Any


class Method(Protocol):
    """A way to read the attention of chosen rows behind a backend's own work."""

    device: torch.device

    def plain(self) -> bool:
        """Return True where the layers' caches, which are there by now, can be read."""

    def begin(self, spans: Sequence[Span], looks: Sequence[Look], width: int) -> None:
        """Prepare a step with labels below `width`."""

    def sum_into(self, sums: torch.Tensor, of: Pass) -> None:
        """Write the sums of weights by label, mean over heads, (looked rows, labels) float32."""

    def map(self, look: MapLook, of: Pass) -> torch.Tensor:
        """Return the weights of a row at its columns, mean over heads, (patches,) float32."""
