"""Several threads take a pass's rows."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from steering.cpu.packages.team import TRIED, Team
from tests.waiting import PATIENCE


@pytest.mark.parametrize(
    ("threads", "rows", "least", "ends"),
    [
        (2, 5, 3, [5]),
        (2, 6, 3, [3, 6]),
        (2, 7, 3, [3, 7]),
        (4, 11, 3, [3, 7, 11]),
        (4, 32, 3, [8, 16, 24, 32]),
        (1, 64, 1, [64]),
        (2, 1, 1, [1]),
    ],
)
def test_shares_are_about_equal_and_none_is_too_small(threads: int, rows: int, least: int, ends: list[int]) -> None:
    shares = Team(threads).shares(rows, least)
    assert [share.stop for share in shares] == ends
    assert [share.start for share in shares] == [0, *ends[:-1]]


def test_each_call_runs_on_its_own_thread_in_inference_mode() -> None:
    together, threads = threading.Barrier(3, timeout=PATIENCE), torch.get_num_threads()

    def call(number: int) -> Callable[[], tuple[int, int, int, bool]]:
        def said() -> tuple[int, int, int, bool]:
            together.wait()
            return number, threading.get_ident(), torch.get_num_threads(), torch.is_inference_mode_enabled()

        return said

    torch.set_num_threads(2)
    try:
        with torch.inference_mode():
            results = Team(3).run([call(number) for number in range(3)])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert [number for number, *_ in results] == [0, 1, 2]
    assert results[0][1] == threading.get_ident()
    assert len({thread for _, thread, *_ in results}) == 3
    assert {result[2:] for result in results} == {(1, True)}


def test_an_error_is_raised_after_all_calls_have_ended() -> None:
    ended = []

    def fails() -> None:
        raise ValueError("no")

    for calls in ([fails, lambda: ended.append(1)], [lambda: ended.append(2), fails]):
        with pytest.raises(ValueError, match="no"):
            Team(2).run(calls)
    assert ended == [1, 2]


def test_one_thread_runs_most_passes_while_the_others_are_late() -> None:
    times: list[float] = []
    team = Team(2, clock=lambda: times.pop(0))

    def threads(passes: int, late: float) -> list[int]:
        """Return the number of shares in each pass.

        An own share takes a second, and the others are late by that much.
        """
        counts = []
        for _ in range(passes):
            times[:] = [0.0, 1.0, 1.0 + late]
            shares = team.shares(8, 3)
            team.run([lambda: None] * len(shares))
            counts.append(len(shares))
        return counts

    assert threads(100, late=0.3) == [2] * 100
    assert threads(1, late=1e6) == [2]  # as of a pause of the machine
    assert threads(20, late=0.3) == [2] * 20
    counts = threads(40 * TRIED, late=1.0)
    assert 0 < counts.index(1) < 10
    assert sum(counts[2 * TRIED :]) == 38 * (TRIED + 1)
    back = threads(40 * TRIED, late=0.1)
    assert set(back[10 * TRIED :]) == {2}
