"""The table of what is added to the residual stream: a row for each different addition, shared by the answers with it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from helmsight_vllm.plan import addition

ROWS_PER_ANSWER = 8


class AdditionTable:
    """rows: (layers, rows, d), of which row 0 is 0. `owned` are this rank's layers.

    Raises RuntimeError where more additions than rows are asked for at once.
    """

    def __init__(self, layers: int, width: int, answers: int, dtype: torch.dtype, device: torch.device):
        count = 1 + ROWS_PER_ANSWER * answers
        self.rows = torch.zeros(layers, count, width, dtype=dtype, device=device)
        self._free = list(range(count - 1, 0, -1))
        self._used: dict[str, list[int]] = {}  # by addition: its row, and the number of its users

    def take(self, terms: str) -> int:
        """Return the row of an addition, which is computed for its first user."""
        if not terms:
            return 0
        if terms not in self._used:
            if not self._free:
                raise RuntimeError("There are more different additions than rows.")
            layers, _, width = self.rows.shape
            added = addition(terms, layers, width)
            self.rows[:, self._free[-1]] = added.to(self.rows)
            self._used[terms] = [self._free.pop(), 0]
        entry = self._used[terms]
        entry[1] += 1
        return entry[0]

    def take_all(self, additions: Sequence[str]) -> list[int]:
        """Return the rows of several additions, of which none is taken where one cannot be."""
        rows = list[int]()
        try:
            rows += map(self.take, additions)
        except Exception:
            for terms in additions[: len(rows)]:
                self.release(terms)
            raise
        return rows

    def release(self, terms: str) -> None:
        """Count one user of an addition less; without any its row is free."""
        if not terms:
            return
        entry = self._used[terms]
        entry[1] -= 1
        if not entry[1]:
            self._free.append(self._used.pop(terms)[0])
