"""The costs of passes on several machines, and the requests that they get."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

PICTURE = 400
"""The number of tokens of a picture."""


@dataclass(frozen=True)
class Machine:
    """A machine's costs in seconds.

    They are of a prefill pass and of each of its tokens, of a decode and of each of its rows, of encoding pictures and of
    each of their tokens.
    """

    name: str
    fixed: float
    token: float
    decode: float
    row: float
    picture: float
    picture_token: float

    def prefill(self, tokens: int) -> float:
        """Return the seconds of a pass of `tokens` tokens, padding included."""
        return self.fixed + self.token * tokens

    def decoding(self, rows: int) -> float:
        """Return the seconds of a step that only decodes."""
        return self.decode + self.row * rows

    def encoding(self, tokens: int) -> float:
        """Return the seconds of encoding pictures of `tokens` tokens."""
        return self.picture + self.picture_token * tokens if tokens else 0.0


MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h100-7b", 0.030, 0.00002, 0.0080, 0.00004, 0.020, 0.00001),
        Machine("h100-7b-fused", 0.012, 0.00002, 0.0055, 0.00004, 0.008, 0.00001),
        Machine("l4-7b", 0.050, 0.00020, 0.0550, 0.00020, 0.025, 0.00012),
        Machine("cpu-embedded", 0.0015, 0.00006, 0.0015, 0.00010, 0.0015, 0.00015),
        Machine("cpu-wide", 0.008, 0.00090, 0.0110, 0.00150, 0.006, 0.00070),
    )
}
"""The machines by name.

They are an H100 with Qwen2.5-VL-7B as measured (benchmarks/GPU.md), and as fused kernels would have it; an L4 by its
bandwidth and its arithmetic; the embedded and the wide model on two processors, approximately.
"""


@dataclass(frozen=True)
class Arrival:
    """A request: its arrival time, the tokens of its prompt, those of its pictures among them, and of its answer."""

    at: float
    tokens: int
    pictures: int
    answer: int


def cost(machine: Machine, tokens: float, pictures: float, answer: float) -> float:
    """Return the seconds that a request takes where it shares its passes with very many others."""
    return machine.token * tokens + machine.picture_token * pictures + machine.decoding(32) * answer / 32


def pictured(draw: random.Random) -> tuple[int, int, int]:
    """Draw a picture of 400 tokens with a question of 40."""
    return 40 + PICTURE, PICTURE, draw.randint(32, 96)


def mixed(draw: random.Random) -> tuple[int, int, int]:
    """Draw a prompt of 50 to 7,000 tokens, every third with one to four pictures."""
    tokens = round(50 * 140 ** draw.random())
    pictures = PICTURE * draw.randint(1, 4) if draw.random() < 1 / 3 else 0
    return tokens + pictures, pictures, draw.randint(32, 96)


def poisson(
    machine: Machine, kind: Callable[[random.Random], tuple[int, int, int]], count: int, load: float
) -> list[Arrival]:
    """Draw requests of a Poisson process that take the share `load` of the machine's time."""
    draw = random.Random(f"{machine.name} {count}")
    drawn = [kind(draw) for _ in range(count)]
    rate = load * count / sum(cost(machine, *request) for request in drawn)
    now, arriving = 0.0, []
    for request in drawn:
        now += draw.expovariate(rate)
        arriving.append(Arrival(now, *request))
    return arriving


def bursts(
    machine: Machine, kind: Callable[[random.Random], tuple[int, int, int]], count: int, size: int
) -> list[Arrival]:
    """Draw bursts of `size` requests, as often as the machine can just answer them."""
    draw = random.Random(f"{machine.name} {count}")
    drawn = [kind(draw) for _ in range(count)]
    pause = size / count * sum(cost(machine, *request) for request in drawn)
    return [Arrival(index // size * pause, *request) for index, request in enumerate(drawn)]


ARRIVALS: dict[str, Callable[[Machine], list[Arrival]]] = {
    "pictures, half the load": lambda machine: poisson(machine, pictured, 200, 0.5),
    "pictures, too many": lambda machine: poisson(machine, pictured, 200, 1.5),
    "pictures, 64 at once": lambda machine: bursts(machine, pictured, 192, 64),
    "50 to 7,000 tokens, half the load": lambda machine: poisson(machine, mixed, 100, 0.5),
    "50 to 7,000 tokens, 16 at once": lambda machine: bursts(machine, mixed, 96, 16),
}
"""The requests by name."""
