"""The only place of this room that makes the engine's requests."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from probes.answering.base import Chat
from steering import Diagnose, Options, Request, Sampling, Steer

ONE_TOKEN = Sampling(max_tokens=1)
"""The shortest generation, for requests of which only the prompt is of interest."""


def request(
    chat: Chat,
    interventions: Iterable[Steer | Options] = (),
    *,
    sampling: Sampling = ONE_TOKEN,
    diagnose: Diagnose | None = None,
    **reading: Any,
) -> Request:
    """Return a request with these interventions, of which only `Steer` may occur more than once.

    `reading` are the fields of `Request` that choose what is read of the prompt (`states`, `state_position`, `divergence`)
    or force the answer (`forced`).
    """
    return Request(chat, sampling, tuple(interventions), diagnose, **reading)
