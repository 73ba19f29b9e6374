"""What is kept of earlier answers, so that later ones can be compared with them by id."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from server.errors import BadRequest
from steering import Choice, Earlier

KEPT = 64
"""Answers that are remembered, the latest ones that read out their drift."""


class AnswerStates:
    """The states (2, layers, d) of recent answers' first choices, by answer id."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, answer_id: str, choice: Choice) -> None:
        """Remember a finished choice, where it is the first one and its states were asked for."""
        if choice.index == 0 and choice.answer_states is not None:
            # Only the direction counts, and that of a unit vector float16 holds to 1e-5; large activations would overflow.
            direction = torch.nn.functional.normalize(choice.answer_states, dim=-1).half()
            with self._lock:
                self._states[answer_id] = direction
                while len(self._states) > KEPT:
                    self._states.popitem(last=False)

    def find(self, answer_id: str) -> Earlier:
        """What an answer is to be compared with; raises BadRequest where it is not known, or no more."""
        with self._lock:
            states = self._states.get(answer_id)
        if states is None:
            raise BadRequest(
                f"'diagnostics.compare_to' names no answer that is remembered: the last {KEPT} that included 'drift' are.",
                "diagnostics.compare_to",
                "answer_not_found",
            )
        return Earlier(answer_id, states)
