"""Workers that end while they load are replaced, later and later; for ever only where the model once was ready."""

from __future__ import annotations

import os

import pytest

from server.engine_process.starts import MOST, TRIES, Starts


def test_a_model_that_never_was_ready_is_tried_a_few_times() -> None:
    starts, waits = Starts(), []
    while not starts.hopeless:
        starts.begin()
        waits.append(starts.wait)
    assert waits == [0, 0, 2, 4]
    assert len(waits) == TRIES


def test_one_that_was_ready_is_tried_for_ever_but_not_in_haste() -> None:
    starts = Starts()
    starts.begin()
    starts.ready()
    waits = []
    for _ in range(20):
        starts.begin()
        waits.append(starts.wait)
        assert not starts.hopeless
    assert waits[:6] == [0, 0, 2, 4, 8, 16]
    assert waits[-1] == MOST
    starts.ready()
    starts.begin()
    assert starts.wait == 0


@pytest.mark.parametrize("ready", [True, False])
def test_the_master_knows_what_its_workers_say(ready: bool) -> None:
    starts = Starts()
    for _ in range(TRIES):
        starts.begin()
    if (pid := os.fork()) == 0:
        if ready:
            starts.ready()
        os._exit(0)
    os.waitpid(pid, 0)
    assert starts.hopeless is not ready
