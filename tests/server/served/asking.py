"""Clients that ask a server for every kind of request, alone and mixed, and hold each answer to that of the plain path."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from threading import local
from typing import Any

import numpy as np
import requests
from PIL import Image

from tests.server.conftest import data_uri
from tests.server.served.answers import (
    EXACT,
    TIE,
    Answer,
    answers_in,
    differences,
    first_parting,
    without_numbers,
)
from tests.server.served.kinds import Kind, Pictures
from tests.server.served.serving import Inside, Plain, Served, Withheld

CLIENTS = 12
TOP = 20
"""Candidates of each token that are told."""
LEAVES = 6
"""Number of a mixed load's clients of which one leaves."""
OLD = 1000
"""First number of the pictures that are shown in every phase."""


def noise(number: int, size: tuple[int, int]) -> str:
    """Return a picture of its own for each number."""
    pixels = np.random.default_rng(number).integers(0, 255, (*size, 3), dtype=np.uint8)
    return data_uri(Image.fromarray(pixels))


def pictures(phase: int) -> Pictures:
    """Return the pictures that are shown in a phase."""
    sizes = (56, 56), (28, 84)
    old, new = ([noise(first + at, size) for at, size in enumerate(sizes)] for first in (OLD, 10 * phase))
    return Pictures((old[0], old[1]), (new[0], new[1]))


class Clients:
    """Clients that ask a server, and note each difference from the plain path.

    half: both compute in half precision, where one of two candidates that are nearly as likely may be chosen. strict:
    the model knows all kinds, so that none is refused.
    """

    def __init__(
        self,
        server: Served | Inside,
        plain: Plain,
        kinds: Sequence[Kind],
        half: bool = False,
        strict: bool = True,
        tolerance: float = EXACT,
    ):
        self.server, self.plain, self.kinds, self.half, self.strict = server, plain, kinds, half, strict
        self.tolerance = tolerance
        self.wrong: list[str] = []
        self.asked = self.left = self.ties = self.refused = 0
        self._sessions = local()

    def alone(self, phase: int, kinds: Iterable[Kind] | None = None) -> None:
        """Each kind by itself, one after the other."""
        for kind in self.kinds if kinds is None else kinds:
            self._check("alone", phase, kind, self._answer(kind, phase))

    def mixed(self, phase: int, kinds: Iterable[Kind] | None = None) -> None:
        """All of them beside one another, and beside clients that leave."""
        order = [*(self.kinds if kinds is None else kinds)]
        random.Random(phase).shuffle(order)
        with ThreadPoolExecutor(CLIENTS) as pool:
            waiting: dict[Future[Answer], Kind] = {}
            gone = []
            for number, kind in enumerate(order):
                waiting[pool.submit(self._answer, kind, phase)] = kind
                if number % LEAVES == 0:
                    gone.append(pool.submit(self.server.leave, kind, pictures(phase), self._session))
            for done in as_completed(waiting):
                self._check("mixed", phase, waiting[done], done.result())
            statuses = [one.result() for one in gone]
        self.left += statuses.count(200)
        self.wrong += [f"a client that left had status {status}" for status in statuses if status >= 500]

    def across_the_switch(self, withheld: Withheld) -> None:
        """Send all kinds mixed before steps are compiled, during the switch, and afterwards, and each alone then.

        Before it some are sent alone, and during it steps come into use one by one. The pictures shown afterwards are
        known from before, from the switch, and new.
        """
        self.alone(0, self.kinds[::3])  # one of them at a time without compiled steps is what other rooms test
        self.mixed(0)
        assert isinstance(self.server, Served)
        assert self.server.metric("compiled_in_use") == 0
        names = withheld.names
        share = -(-len(self.kinds) // len(names))
        for number, name in enumerate(names):
            withheld.give(name)
            self.mixed(1, self.kinds[number * share : (number + 1) * share])
        self.server.wait_until_compiled(len(names))
        self.alone(1)
        self.mixed(2, self.kinds[::3])

    def check(self) -> None:
        """Nothing was wrong, although some clients left."""
        assert not self.wrong, "\n".join([f"{len(self.wrong)} of {self.asked}:", *self.wrong[:40]])
        assert self.left > 0

    @property
    def _session(self) -> requests.Session:
        if not hasattr(self._sessions, "own"):
            self._sessions.own = requests.Session()
        session: requests.Session = self._sessions.own
        return session

    def _answer(self, kind: Kind, phase: int) -> Answer:
        return self.server.answer(kind, pictures(phase), self._session, **self._more)

    @property
    def _more(self) -> dict[str, Any]:
        """Fields of every request: in half precision tokens are compared by their numbers, and none is drawn."""
        return {"logprobs": True, "top_logprobs": TOP, "temperature": 0} if self.half else {}

    def _check(self, how: str, phase: int, kind: Kind, answer: Answer) -> None:
        self.asked += 1
        expected = self.plain.answer(kind, pictures(phase), **self._more)
        assert expected.status == 200 or kind.made or not self.strict, (kind.name, expected)
        self.refused += expected.status != 200
        wrong = self._wrong(expected, answer)
        self.wrong += [f"{kind.name}, {how} in phase {phase}: {one}" for one in wrong]

    def _wrong(self, expected: Answer, answer: Answer) -> Iterator[str]:
        if answer.status != expected.status:
            yield f"status {answer.status}: {answer.body}"
        elif not self.half:
            yield from differences(expected.body, answer.body, self.tolerance)
        else:
            pairs = list(zip(answers_in(expected.body), answers_in(answer.body), strict=True))
            parted = [first_parting(one, other) for one, other in pairs]
            yield from (f"{apart.words}" for apart in parted if apart is not None and not apart.nats <= TIE)
            self.ties += sum(1 for apart in parted if apart is not None and apart.nats <= TIE)
            if not any(parted):
                yield from differences(without_numbers(expected.body), without_numbers(answer.body))
