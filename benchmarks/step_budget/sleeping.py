"""The real engine on the embedded model, where passes sleep until they have taken as long as a machine's."""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from typing import Any

import steering
from benchmarks.step_budget.prices import PICTURE, Arrival, Machine
from benchmarks.step_budget.simulation import Outcome, Seen, outcome
from steering.bench.asking import chat, noise, words
from steering.core.budget import StepBudget
from steering.front.input_processor import read_prompt

LENGTH = 1024
SLOTS = 9
DECODE = 0.04
"""The least seconds of a decode in slow motion, so that the embedded model's own time does not count."""


class Clock:
    """A machine's simulated clock."""

    def now(self) -> float:
        """Return the seconds of a monotonic clock, which the engine uses, too."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Let `seconds` pass."""
        time.sleep(seconds)


def slowness(machine: Machine) -> float:
    """Return how many times slower than the machine the engine runs."""
    return max(1.0, DECODE / machine.decoding(SLOTS))


class Sleeping:
    """An engine that gets the same requests as a simulation.

    slow: how many times slower than the machine it runs.
    """

    def __init__(self, machine: Machine, mllm: steering.MLLM, gap: float, clock: Clock, slow: float):
        self.machine, self.clock, self.slow = machine, clock, slow
        self.engine = steering.Engine(
            mllm, slots=SLOTS, max_length=LENGTH, image_cache_bytes=0, self_check=False, compiled=False
        )
        self._steps = self.engine.core.steps
        self._steps.budget = StepBudget(1024, gap * slow)
        runner = self._steps.runner
        self._prefill, self._decode, self._encode = runner.prefill, runner.decode, runner.embedder._features
        runner.prefill = self._slow_prefill  # type: ignore[method-assign]
        runner.decode = self._slow_decode  # type: ignore[method-assign]
        runner.embedder._features = self._slow_encoding  # type: ignore[method-assign]

    def requests(self, count: int, answer: int) -> list[steering.Request]:
        """Draw prompts of 40 to 700 words, every third with a picture."""
        draw = random.Random(0)
        sampling = steering.Sampling(max_tokens=answer, ignore_eos=True)
        texts = [words(draw, round(40 * 17.5 ** draw.random())) for _ in range(count)]
        return [
            steering.Request(chat(text, *([noise((84, 84))] if index % 3 == 0 else [])), sampling)
            for index, text in enumerate(texts)
        ]

    def run(self, requests: Sequence[steering.Request], times: Sequence[float]) -> tuple[list[Arrival], Outcome]:
        """Answer requests that arrive at these seconds of the machine.

        Returns the requests as a simulation takes them, and their outcome in the machine's time.
        """
        prompts = [read_prompt(self.engine.mllm, request, LENGTH) for request in requests]
        arrivals_run = [
            Arrival(at, prompt.length, PICTURE * len(prompt.pictures), request.sampling.max_tokens or 1)
            for at, prompt, request in zip(times, prompts, requests, strict=True)
        ]
        gaps: list[float] = []
        self._steps.bins["inter_token_seconds"].add = gaps.append  # type: ignore[method-assign]
        began, completions = self.clock.now(), []
        while len(completions) < len(requests) or not all(completion.done for completion in completions):
            elapsed = self.clock.now() - began
            while len(completions) < len(requests) and times[len(completions)] * self.slow <= elapsed:
                number = len(completions)
                completions.append(self.engine.submit(requests[number]))
            if all(completion.done for completion in completions):
                self.clock.sleep(
                    max(0.0, times[len(completions)] * self.slow - elapsed) + 1e-6
                )  # floats may round down
            else:
                self.engine.step()
        records = [
            Seen(arrival, 0.0, 1.0, self._simulated_time(completion.first_at or 0.0, began))
            for arrival, completion in zip(arrivals_run, completions, strict=True)
        ]
        records[0].gaps = [gap / self.slow for gap in gaps]
        return arrivals_run, outcome(records, self._simulated_time(self.clock.now(), began) - times[0])

    def _simulated_time(self, at: float, began: float) -> float:
        return (at - began) / self.slow

    def _until(self, started: float, seconds: float) -> None:
        self.clock.sleep(max(0.0, started + seconds * self.slow - self.clock.now()))

    def _slow_prefill(self, sequences: list[Any], part: int) -> Any:
        started, before = self.clock.now(), [sequence.computed for sequence in sequences]
        logits = self._prefill(sequences, part)
        ran = [sequence.computed - start for sequence, start in zip(sequences, before, strict=True)]
        self._until(started, self.machine.prefill(len(ran) * max(ran)))
        return logits

    def _slow_decode(self, running: list[Any], *args: Any) -> Any:
        started = self.clock.now()
        decoded = self._decode(running, *args)
        self._until(started, self.machine.decoding(len(running)))
        return decoded

    def _slow_encoding(self, pictures: Any) -> Any:
        started = self.clock.now()
        features = self._encode(pictures)
        self._until(started, self.machine.encoding(PICTURE * len(pictures["image_grid_thw"])))
        return features


def arrivals(machine: Machine, count: int) -> list[float]:
    """Draw arrival times of requests: half of them at once, the others one by one while those are answered."""
    draw = random.Random(1)
    times = [0.0] * (count // 2)
    while len(times) < count:
        times.append(times[-1] + draw.expovariate(1 / (4 * machine.prefill(300))))
    return times
