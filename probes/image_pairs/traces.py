"""The distance of two answers inside the model: their traces in the residual stream, layer by layer.

Source: SPD-Faith Bench paper, section 4.3, and its released `eval_cosine.py`. The released code counts the embeddings as one
more layer and reads its last layer behind the final norm; here a layer's states are those behind it, as in `drift`, and its
update is what attention and FFN add to them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import torch

from probes.answering.base import Chat
from probes.answering.requests import request
from steering import Diagnose, Engine, Request, Sampling
from steering.readouts.drift import drift


@dataclass(frozen=True)
class Trace:
    """Means over the rows that generate an answer's tokens.

    states: as `Choice.answer_states`. updates: (layers,), the size of a layer's whole update.
    """

    states: torch.Tensor
    updates: np.ndarray


def traces(engine: Engine, answers: Iterable[tuple[Chat, str]]) -> Iterator[Trace]:
    """Yield the trace of every answer that is given to a chat, in their order."""

    def requests() -> Iterator[Request]:
        for chat, answer in answers:
            read = Diagnose(frozenset({"drift", "residual"}))
            yield request(chat, sampling=Sampling(), diagnose=read, forced=answer)

    for result in engine.stream(requests()):
        choice = result.choices[0]
        assert choice.answer_states is not None
        assert choice.diagnostics is not None
        yield Trace(choice.answer_states, np.array(choice.diagnostics["residual"]["update_norm"]))


def alike(first: Trace, second: Trace) -> list[float]:
    """Return the cosine similarity of two answers' mean states per layer: (layers,)."""
    return drift(first.states, second.states)


def divergence(first: Trace, second: Trace) -> float:
    """Return the released code's ICR divergence: the difference in size of two answers' updates, the mean over layers."""
    return float(np.abs(first.updates - second.updates).mean())


def faithfulness(first: Trace, second: Trace) -> float:
    """Return the released code's faithfulness score of two answers: mean cosine times 1 - divergence (at most 1)."""
    return float(np.mean(alike(first, second))) * (1 - min(divergence(first, second), 1))
