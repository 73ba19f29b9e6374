"""A replica joins while many ask and leaves when few do, and nobody's stream breaks."""

from __future__ import annotations

import contextlib
import sqlite3
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from threading import Event

import pytest
from flask.testing import FlaskClient

from tests.server.api.test_streams import wait_for
from tests.server.process.servers import PATIENCE, Server
from tests.server.replicas.cluster import REPLICA, alone, measured, processes, replicas, serving, streamed

pytest.importorskip("ray.serve")
pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray")]

COLOURS = ("red", "green", "blue", "yellow")
TOKENS, LAST = 60, 1900
SAME = 200
"""Characters of the longest answers that are compared: of so many tokens two are alike at some point, and batches decide."""
SCALED = [
    "--replicas", "1", "--max-replicas", "2", "--replica-requests", "2.5", "--replica-added-after", "1",
    "--replica-removed-after", "4", "--no-compiled", "--graceful-timeout", "120",
]  # fmt: skip
"""The replica that leaves has time for the last stream even where other tests have the machine."""


def serve(server: Server, count: int) -> bool:
    """Whether so many serve, asked seldom: questions are requests at work, too."""
    time.sleep(0.5)
    return len(replicas(server)) == count


def test_replicas_come_with_the_load_and_go_with_it(client: FlaskClient, tmp_path: Path) -> None:
    with ThreadPoolExecutor(len(COLOURS)) as pool:
        expected = {colour: pool.submit(alone, client, colour, TOKENS) for colour in COLOURS}
        expected_last = pool.submit(alone, client, None, LAST)
        with serving(tmp_path, *SCALED) as server:
            texts, last = {colour: one.result() for colour, one in expected.items()}, expected_last.result()
            first, enough = replicas(server), Event()
            assert len(first) == 1

            def again(colour: str) -> int:
                """Stream one answer after the other; how many."""
                count = 0
                while not enough.is_set():
                    assert streamed(server, colour, TOKENS) == (texts[colour], None)
                    count += 1
                return count

            streams = [pool.submit(again, colour) for colour in COLOURS]
            wait_for(lambda: serve(server, 2) or any(one.done() for one in streams), PATIENCE)
            (second,) = replicas(server) - first
            wait_for(lambda: measured(server, "helmsight_choices_total").get(second, 0) > 0, PATIENCE)
            enough.set()
            answers = sum(one.result() for one in streams)

            # A stream on each: not more than one is to have, so that the other leaves, but only after its stream has ended.
            placed: dict[str, Future[tuple[str, str | None]]] = {}
            for _ in range(8):
                before, left = measured(server, "helmsight_running"), Event()
                stream = pool.submit(streamed, server, None, LAST, left)
                wait_for(lambda before=before: measured(server, "helmsight_running") != before, PATIENCE)
                now = measured(server, "helmsight_running")
                (name,) = (name for name in now if now[name] > before[name])
                if name not in placed:
                    placed[name] = stream
                    if len(placed) == 2:
                        break
                else:  # both on one, as the router's numbers are of a moment ago
                    left.set()
                    stream.result()
                    wait_for(lambda before=before: measured(server, "helmsight_running") == before, PATIENCE)
            assert placed.keys() == replicas(server)
            lasts = list(placed.values())
            wait_for(lambda: serve(server, 1) or any(one.done() for one in lasts), PATIENCE)
            assert not any(one.done() for one in lasts), "a replica was to leave before its stream had ended"
            assert len(processes(server, REPLICA)) == 2
            ends = [one.result() for one in lasts]
            assert [(text[:SAME], error) for text, error in ends] == [(last[:SAME], None)] * 2
            wait_for(lambda: len(processes(server, REPLICA)) == 1, PATIENCE)
            assert streamed(server, "red", TOKENS) == (texts["red"], None)

            # Of all of these the journal has rows, also of those that the replica wrote that is gone.
            with contextlib.closing(sqlite3.connect(tmp_path / "journal.db")) as journal:
                rows = "SELECT count(*) FROM helmsight_journal WHERE finish_reason = 'length'"
                wait_for(lambda: journal.execute(rows).fetchone()[0] == answers + len(lasts) + 1, PATIENCE)
