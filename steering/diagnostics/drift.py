"""How far two answers are apart inside the model: semantic drift (SPD-Faith Bench paper, section 4.3)."""

from __future__ import annotations

from typing import Any

import torch

ROWS = ("mean", "last")
"""What stands for an answer: the mean of the residual stream over the rows that generated its tokens, as in the authors'
`analysis/eval_cosine.py`, or the one that generated its last token."""


def drift(one: torch.Tensor, other: torch.Tensor, rows: str = ROWS[0]) -> list[float]:
    """Cosine similarity by layer of two answers' states, (2, layers, d) each, in the order of `ROWS`."""
    index = ROWS.index(rows)
    return torch.nn.functional.cosine_similarity(one[index].float(), other[index].float(), dim=-1).tolist()


def drifted(to: str, one: torch.Tensor, other: torch.Tensor, rows: str) -> dict[str, Any]:
    """The `drift` readout of an answer, from the one that is named `to`."""
    return {"to": to, "rows": rows, "cosine": drift(one, other, rows)}
