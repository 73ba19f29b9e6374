"""What is kept of earlier answers, so that later ones can be compared with them by id."""

from __future__ import annotations

import threading
from collections import OrderedDict

import torch

from server.errors import BadRequest
from steering import Choice, drift

KEPT = 64
"""Answers that are remembered, the latest ones that read out their drift."""


class AnswerStates:
    """The final states (layers, d) of recent answers' first choices, by answer id."""

    def __init__(self) -> None:
        self._states: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._lock = threading.Lock()

    def keep(self, answer_id: str, choice: Choice) -> None:
        """Remember a finished choice, where it is the first one and its states were asked for."""
        if choice.index == 0 and choice.final_states is not None:
            with self._lock:
                self._states[answer_id] = choice.final_states.half()
                while len(self._states) > KEPT:
                    self._states.popitem(last=False)

    def find(self, answer_id: str) -> Comparison:
        """What an answer is to be compared with; raises BadRequest where it is not known, or no more."""
        with self._lock:
            states = self._states.get(answer_id)
        if states is None:
            raise BadRequest(
                f"'diagnostics.compare_to' names no answer that is remembered: the last {KEPT} that included 'drift' are.",
                "diagnostics.compare_to",
                "answer_not_found",
            )
        return Comparison(answer_id, states)


class Comparison:
    """One earlier answer, as another's `drift` readout shows it."""

    def __init__(self, answer_id: str, states: torch.Tensor):
        self.answer_id = answer_id
        self.states = states

    def readout(self, choice: Choice) -> dict[str, object] | None:
        """The `drift` readout of a choice, None where it kept no states."""
        if choice.final_states is None:
            return None
        return {"to": self.answer_id, "cosine": drift(choice.final_states, self.states)}
