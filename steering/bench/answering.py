"""Timing of an engine's steps, one by one."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

from steering.errors import Fault
from steering.front.engine import Engine
from steering.protocol.request import Request


@dataclass(frozen=True)
class Clocked:
    """The times of a batch in seconds.

    prepared: the callers' time for submitting. first: from then until all had their first token. steps: of the steps that
    generated one token for every answer and did nothing else. whole: from the first submission to the last token.
    """

    prepared: float
    first: float
    steps: tuple[float, ...]
    whole: float

    @property
    def step(self) -> float:
        """The median step."""
        return statistics.median(self.steps)


def answered(engine: Engine, requests: Sequence[Request]) -> Clocked:
    """Answer all requests at once; raise Fault where one fails."""
    begun = time.perf_counter()
    completions = [engine.submit(request) for request in requests]
    submitted = time.perf_counter()
    first, steps = 0.0, []
    while not all(completion.done for completion in completions):
        before, at = engine.stats(), time.perf_counter()
        engine.step()  # it ends once the host has read the tokens
        after, now = engine.stats(), time.perf_counter()
        if not first and all(completion.first_at for completion in completions):
            first = now - submitted
        generated, read = (after[key] - before[key] for key in ("generated_tokens", "prompt_tokens"))
        if generated == len(requests) and not read and after["finished"] == before["finished"]:
            steps.append(now - at)
    total = time.perf_counter() - begun
    for completion in completions:
        completion.result()  # raises where the request failed
    if not steps:
        raise Fault("The answers were too short to time a step.")
    return Clocked(submitted - begun, first, tuple(steps), total)
