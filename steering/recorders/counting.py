"""What decodes measure is counted in slots once, although a step that raised runs again.

All: positions (rows,), the columns that a decode writes. active: (rows, 1, 1), 0 for rows whose step is for nothing.
counted: (rows,) int64, the last column of each row that was counted, `NEVER` where none is to be.
"""

from __future__ import annotations

import torch

NEVER = torch.iinfo(torch.int64).max
"""Stands for the last column of a slot of which nothing is counted."""


def newly(positions: torch.Tensor, active: torch.Tensor, counted: torch.Tensor) -> torch.Tensor:
    """Return which rows are to be counted, (rows,) bool, and note in `counted` that they were."""
    new = (positions > counted) & (active[:, 0, 0] > 0)
    counted.copy_(torch.where(new, positions, counted))
    return new
