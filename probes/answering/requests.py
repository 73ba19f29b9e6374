"""The one place of this room that makes the engine's requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from probes.answering.base import Chat, Intervention
from steering import Contrast, Diagnose, Generate, Request, Sage, Sampling, See, Steer, Think

ONE_TOKEN = Sampling(max_tokens=1)
"""As little as can be generated, where only the prompt is of interest."""


def request(
    chat: Chat,
    interventions: Iterable[Steer | Intervention] = (),
    *,
    sampling: Sampling = ONE_TOKEN,
    diagnose: Diagnose | None = None,
    **reading: Any,
) -> Request:
    """A request with these interventions, of which only `Steer` may be given more than once; `reading` are `Request`'s own
    fields that say what is read of the prompt (`states`, `state_position`, `divergence`)."""
    steers: list[Steer] = []
    sage, contrast = Sage(), None
    for one in interventions:
        match one:
            case Steer():
                steers.append(one)
            case See():
                sage = replace(sage, see=one)
            case Think():
                sage = replace(sage, think=one)
            case Generate():
                sage = replace(sage, generate=one)
            case Contrast():
                contrast = one
    asked = None if sage == Sage() else sage
    return Request(chat, sampling, tuple(steers), asked, contrast, diagnose, **reading)
