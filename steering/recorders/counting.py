"""Measurements of decodes are counted once per token, although a step that raised runs again.

Common shapes: positions (rows,), the columns that a decode writes. active: (rows, 1, 1), 0 for rows whose step has no
effect. counted: (rows,) int64, the last column of each row that was counted, `NEVER` where nothing is to be counted.
"""

from __future__ import annotations

import torch

NEVER = torch.iinfo(torch.int64).max
"""The last counted column of a slot of which nothing is counted."""


def newly(positions: torch.Tensor, active: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return which rows are to be counted now, (rows,) bool, and mark them in `counted`."""
    new = (positions > counted) & (active[:, 0, 0] > 0)
    counted.copy_(torch.where(new, positions, counted))
    return new
