"""A memory of earlier answers, so that later ones can be compared with them by id."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from server.errors import BadRequest
from steering import Choice, Earlier

KEPT = 64
"""Number of remembered answers: the latest ones with a drift readout."""


class AnswerStates:
    """The states (2, layers, d) of recent answers' first choices, by answer id."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, answer_id: str, choice: Choice) -> None:
        """Remember a finished choice if it is the first one and has states."""
        if choice.index == 0 and choice.answer_states is not None:
            # Only the direction counts. float16 holds a unit vector to 1e-5, but large activations would overflow.
            direction = torch.nn.functional.normalize(choice.answer_states, dim=-1).half()
            with self._lock:
                self._states[answer_id] = direction
                while len(self._states) > KEPT:
                    self._states.popitem(last=False)

    def find(self, answer_id: str) -> Earlier:
        """Return the states that an answer is compared with; raises BadRequest for an unknown or forgotten id."""
        with self._lock:
            states = self._states.get(answer_id)
        if states is None:
            raise BadRequest(
                f"'diagnostics.compare_to' must name one of the last {KEPT} answers that included 'drift'.",
                "diagnostics.compare_to",
                "answer_not_found",
            )
        return Earlier(answer_id, states)
