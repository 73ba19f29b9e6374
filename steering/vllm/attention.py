"""The spans of a prompt as labels, by which a server sums attention, and the sums as our recorder would have them.

A token may belong to a span and to a half of the prompt. Its label stands for both, so that labels are disjoint, and the
server need not know what a span is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from steering.prompt.layout import Layout
from steering.recorders.attention import Attention, RowCounts
from steering.recorders.spans import source_shares, span_count, span_sources

NONE = -1
"""The label of tokens whose attention is in no sum."""


@dataclass(frozen=True)
class SpanLabels:
    """The labels of a prompt's tokens.

    runs: (label, tokens) of every stretch of equal labels. table: (labels, spans), 1 where a label is part of a span, which
    are those of `recorders.attention`.
    """

    runs: tuple[tuple[int, int], ...]
    table: torch.Tensor

    @classmethod
    def of(cls, layout: Layout, by_content: bool) -> SpanLabels:
        """Return the labels of a layout; `by_content`: the halves are the messages' texts alone."""
        spans = layout.spans.numpy()
        halves = (layout.texts if by_content else layout.halves).numpy()
        members = np.zeros((len(spans), span_count(len(layout.images))), np.float32)
        columns = (spans >= 0).nonzero()[0]
        members[columns, spans[columns]] = 1.0
        members[:, -2:] = halves
        codes = (spans + 2) * 4 + halves @ np.array([1, 2])
        _, first, labels = np.unique(codes, return_index=True, return_inverse=True)
        labelled = members[first].any(1)
        labels = np.where(labelled, labelled.cumsum() - 1, NONE)[labels]
        return cls(runs_of(labels), torch.from_numpy(members[first][labelled]))


def runs_of(values: np.ndarray[Any, Any]) -> tuple[tuple[int, int], ...]:
    """Return (value, length) of every stretch of equal values."""
    if not len(values):
        return ()
    starts = np.concatenate([[0], (np.diff(values) != 0).nonzero()[0] + 1])
    lengths = np.diff(np.concatenate([starts, [len(values)]]))
    return tuple(zip(values[starts].tolist(), lengths.tolist(), strict=True))


def ranges_of(columns: torch.Tensor) -> list[list[int]]:
    """Return ascending columns as ranges [from, to)."""
    numbers = columns.numpy()
    if not len(numbers):
        return []
    cuts = (np.diff(numbers) != 1).nonzero()[0]
    starts, ends = numbers[[0, *(cuts + 1)]], numbers[[*cuts, -1]] + 1
    return [[int(start), int(end)] for start, end in zip(starts, ends, strict=True)]


def attention_of(layout: Layout, labels: SpanLabels, sums: Mapping[str, torch.Tensor], fed: int) -> Attention:
    """Return the attention of an answer as the recorder leaves it, without patches.

    sums, by name (layers, labels), mean over heads: "question", "modality", "anchor", "last" of these rows of the prompt,
    "generated" of the rows of generated tokens; "steps" (steps, layers, labels) of each of the latter, where requested. fed:
    the number of generated tokens that went through the model.
    """
    by_span = {name: values @ labels.table for name, values in sums.items()}
    last = by_span["last"]
    layers, spans = last.shape
    nothing = torch.zeros(layers, spans)
    rows, modality_rows = (RowCounts.of(len(columns), fed) for columns in (layout.question_rows, layout.modality_rows))
    generated = by_span.get("generated", nothing)
    steps = by_span.get("steps", torch.zeros(0, layers, spans))
    return Attention(
        last if rows.last else by_span.get("question", nothing) + generated,
        rows,
        last if modality_rows.last else by_span.get("modality", nothing) + generated,
        modality_rows,
        source_shares(torch.cat([last[None], steps]), span_sources(spans)),
        by_span.get("anchor", nothing),
        torch.zeros(layers, 0),
    )
