"""A day of traffic: what operators and clients change while it runs is seen, and nothing is lost or counted twice."""

from __future__ import annotations

import json
import re
import shutil
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import openai
import pytest
import requests

from server.journal.words import UNFINISHED
from tests.server.day.operator import Operator
from tests.server.day.traffic import HOURS, KEYS, KINDS, Answered, Traffic, day_of
from tests.server.day.watch import DAY, SCRAPES, UNFAITHFUL, Watch, totals
from tests.waiting import wait_for

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed"),
]

REQUESTS = 5000
BAD_HOUR = 13
TRUTHS = 300
LONG = 900.0
"""Seconds that a part of the day may take on a busy machine."""
VECTOR = "modality-preference"
OF_THE_MACHINE = "HelmsightQueueIsLong|HelmsightStreamsStall"
"""Alerts on real seconds: here a minute of the day has less than one, and what a probe takes away lasts for hours of it."""
SETTLED = 1.0
"""Seconds behind a change within which requests may still have begun before it."""


@dataclass
class Change:
    """A change with the times between which it was made, and what it replaced by what."""

    begun: float
    ended: float
    before: str = ""
    after: str = ""


@dataclass
class Day:
    """All that happened."""

    operator: Operator
    traffic: Traffic
    watch: Watch
    watching: str
    changes: dict[str, Change] = field(default_factory=dict)
    truths: dict[str, bool] = field(default_factory=dict)
    backed_up: list[dict[str, Any]] = field(default_factory=list)

    @property
    def answers(self) -> list[Answered]:
        return [answered for answered in self.traffic.answers if answered.request.kind != "refused"]

    def sdk(self, key: str) -> openai.OpenAI:
        secret = self.traffic.secrets[key]
        return openai.OpenAI(base_url=f"{self.operator.url}/v1", api_key=secret, max_retries=0)

    @contextmanager
    def changing(self, name: str) -> Iterator[Change]:
        self.changes[name] = change = Change(time.time(), 0.0)
        yield change
        change.ended = time.time()


def probe(day: Day) -> None:
    """Build a candidate beside the server, which must change nothing."""
    with day.changing("probe"):
        few = ("--samples", "16", "--calibration-samples", "8", "--strengths", "1", "--states", "0")
        printed = day.operator.command("probe", *few, "--force", "--quiet")
    assert f"until 'helmsight vectors use {VECTOR}'" in printed


def use(day: Day) -> None:
    """Let the name stand for the candidate."""
    with day.changing("use") as change:
        printed = day.operator.command("vectors", "use", VECTOR)
    digests = re.search(r"digest (\w+) before, (\w+) now", printed)
    assert digests is not None, printed
    assert "WARNING: " in printed, "a calibration of 8 samples"
    change.before, change.after = digests.groups()


def calibrate(day: Day) -> None:
    """Measure Think's thresholds anew."""
    with day.changing("calibration"):
        day.operator.command("probe", "--calibrate-sage", "--samples", "16", "--replace", "--quiet")


def rotate(day: Day) -> None:
    """Rotate a key; its clients go on with the old one for a while, and then get the new one."""
    old = day.traffic.secrets["shop"]
    with day.changing("rotation") as change:
        change.before, change.after = old, day.operator.key("rotate", "shop", "--overlap", "2h", "--expires", "90d")
    reached = day.traffic.done() + len(day.traffic.day) // HOURS // 4
    wait_for(lambda: day.traffic.done() >= reached, LONG)
    day.traffic.secrets["shop"] = change.after


def restart(day: Day) -> None:
    """Restart the server under its clients, who ask again while it is away."""
    with day.changing("restart"):
        day.operator.stop()
        day.operator.serve()


def judge(day: Day) -> None:
    """Say of answers of the morning whether they were right: stored ones by the SDK's method, others by their id."""
    single = [answered for answered in day.answers if answered.request.choices == 1 and answered.request.hour < 12]
    for answered in sorted(single, key=lambda answered: answered.request.number)[:TRUTHS]:
        right, request = answered.request.is_right(answered.text), answered.request
        metadata = {"answer_correct": str(right).lower()}
        if request.kind == "vision":
            with day.sdk(request.key) as sdk:
                sdk.chat.completions.update(answered.identity, metadata={**request.about, **metadata})
        else:
            response = requests.post(
                f"{day.operator.url}/v1/diagnostics/{answered.identity}", json={"metadata": metadata}, timeout=60,
                headers={"Authorization": f"Bearer {day.traffic.secrets[request.key]}"},
            )  # fmt: skip
            assert response.status_code == 200, response.text
        day.truths[answered.identity] = right


def upgrade(day: Day) -> None:
    """Back the journal up, check the newer version beside the running one, and restart with it."""
    operator = day.operator
    operator.command("journal", "backup", "before.db", "--config", "helmsight.toml")
    operator.command("doctor", "--config", "helmsight.toml", "--no-load", "--port", "0", newer=True)
    with day.changing("upgrade"):
        operator.stop()
        operator.serve(newer=True)
    text = operator.command("journal", "export", "--journal", "before.db")
    day.backed_up = [json.loads(line) for line in text.splitlines()]
    operator.command(
        "journal", "summary", "--config", "helmsight.toml", status=1
    )  # the old one refuses the newer tables


EVENTS: list[tuple[int, int, Callable[[Day], None]]] = [
    (2, 7, probe), (8, 9, use), (10, 12, calibrate), (12, 13, rotate), (16, 17, restart), (18, 19, judge), (20, 21, upgrade),
]  # fmt: skip
"""The events of the day, from which hour on, and before which hour's requests begin."""


def walk(folder: Path, count: int) -> Iterator[Day]:
    """Run a day of so many requests; yield it while its last server is running."""
    operator = Operator(folder)
    secrets = {name: operator.key("add", name, "--rate", "1000000/day", "--expires", "90d") for name in KEYS}
    watching = operator.key("add", "prometheus", "--role", "journal")
    ended = threading.Event()
    try:
        operator.serve()
        traffic = Traffic(operator.url, secrets, day_of(count, BAD_HOUR))
        day = Day(operator, traffic, Watch(operator.url, watching), watching)

        def scrape() -> None:
            while not ended.is_set():
                if day.watch.scrapes <= len(traffic.answers) * SCRAPES // count:
                    day.watch.scrape()
                ended.wait(0.01)

        scraping = threading.Thread(target=scrape, daemon=True)
        scraping.start()
        traffic.start()
        for hour, before, happens in EVENTS:
            traffic.release(before)
            first = hour * count // HOURS
            wait_for(lambda first=first: traffic.done() >= first, LONG)  # type: ignore[misc]
            happens(day)
        traffic.release(HOURS)
        wait_for(lambda: traffic.done() == count, LONG)
        traffic.join()
        wait_for(lambda: day.watch.scrapes > SCRAPES, LONG)
        ended.set()
        scraping.join()
        yield day
    finally:
        ended.set()
        operator.kill()


@pytest.fixture(scope="module")
def day(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Day]:
    yield from walk(tmp_path_factory.mktemp("day"), REQUESTS)


@pytest.fixture(scope="module")
def rows(day: Day) -> list[dict[str, Any]]:
    return day.operator.rows(newer=True)


Rows = list[dict[str, Any]]


def test_every_request_was_answered_and_all_kinds_and_keys_took_part(day: Day) -> None:
    answers = day.traffic.answers
    assert sorted(answered.request.number for answered in answers) == list(range(len(day.traffic.day)))
    assert {answered.status for answered in answers} == {200, 400}
    assert {answered.request.kind for answered in answers} == set(KINDS)
    assert {answered.request.key for answered in answers} == set(KEYS)
    assert any(answered.again for answered in answers), "clients felt the restarts"


def test_every_answer_has_its_rows_once_with_its_tokens_and_its_key(day: Day, rows: Rows) -> None:
    by_id = defaultdict(list)
    for row in rows:
        by_id[row["id"]].append(row)
    for answered in day.answers:
        own = by_id.pop(answered.identity)
        request = answered.request
        assert sorted(row["choice"] for row in own) == list(range(request.choices)), request.name
        assert sum(row["usage"]["completion_tokens"] for row in own) == answered.tokens, request.name
        assert {row["finish_reason"] for row in own} <= {"stop", "length"}
        assert {(row["key_name"], row["source"], row["request_id"]) for row in own} == {
            (request.key, "live", answered.request_id)
        }
        metadata = own[0]["metadata"]
        assert request.name in (metadata.get("walk"), metadata.get("user_id"))
    # What is left are attempts that broke off with a server, which their clients know of.
    broken = sum(answered.broken for answered in day.traffic.answers)
    assert {row["finish_reason"] for own in by_id.values() for row in own} <= set(UNFINISHED)
    assert len(by_id) <= broken


def test_refusals_are_counted_once_over_restarts(day: Day) -> None:
    text = day.operator.command("journal", "summary", "--json", "--config", "helmsight.toml", newer=True)
    refused = [answered for answered in day.traffic.answers if answered.request.kind == "refused"]
    bad_requests = [entry for entry in json.loads(text)["refusals"]["by_code"] if entry["status"] == 400]
    assert sum(entry["count"] for entry in bad_requests) == len(refused)


def test_every_answer_has_one_line_in_the_log(day: Day) -> None:
    lines = Counter(line.get("completion_id") for line in day.operator.lines() if line.get("event") == "request")
    assert {lines[answered.identity] for answered in day.answers} == {1}


def apart(rows: Rows, change: Change) -> tuple[Rows, Rows]:
    """Return the rows of requests before a change, and of those behind it."""
    before = [row for row in rows if row["created"] < change.begun]
    return before, [row for row in rows if row["created"] > change.ended + SETTLED]


def test_a_probe_changes_nothing_and_a_used_vector_is_seen_in_log_journal_and_metrics(day: Day, rows: Rows) -> None:
    change = day.changes["use"]
    steered = [row for row in rows if row["vectors"]]
    before, behind = apart(steered, change)
    assert {tuple(row["digests"]) for row in before} == {(f"{VECTOR}@{change.before}",)}
    assert {tuple(row["digests"]) for row in behind} == {(f"{VECTOR}@{change.after}",)}
    assert any(row["created"] > day.changes["probe"].ended for row in before), "the probe was over before it was used"
    (line,) = day.operator.logged(f"steering vector {VECTOR} changed")
    assert f"digest {change.before} before, {change.after} now" in line["message"]
    info = totals(day.operator.url, day.watching, "helmsight_vector_info")
    assert [value for name, value in info.items() if change.after in name] == [1.0]


def test_a_calibration_is_seen_in_log_journal_and_metrics(day: Day, rows: Rows) -> None:
    before, behind = ({row["calibration"] for row in part} for part in apart(rows, day.changes["calibration"]))
    assert (len(before), len(behind)) == (1, 1)
    assert before != behind
    (line,) = day.operator.logged("the calibration of")
    assert f"digest {before.pop()} before, {(now := behind.pop())} now" in line["message"]
    assert any(now in name for name in totals(day.operator.url, day.watching, "helmsight_calibration_info"))


def test_a_rotated_key_is_the_same_to_journal_and_owner(day: Day, rows: Rows) -> None:
    change = day.changes["rotation"]
    used = Counter(answered.key for answered in day.answers if answered.request.key == "shop")
    assert set(used) == {change.before, change.after}
    assert sum(used.values()) == sum(answered.request.key == "shop" for answered in day.answers)
    assert Counter(row["key_name"] for row in rows).keys() == set(KEYS)
    assert len(day.operator.logged("keys.json: 4 keys")) == 1


def test_stored_answers_outlive_rotation_restart_and_upgrade(day: Day) -> None:
    for key in KEYS:
        own = [answered for answered in day.answers if answered.request.key == key and answered.request.stored]
        with day.sdk(key) as sdk:
            listed = {stored.id: stored.choices[0].message.content for stored in sdk.chat.completions.list(limit=100)}
            assert listed == {answered.identity: answered.text for answered in own if answered.request.kind == "vision"}
            responses = [answered for answered in own if answered.request.kind == "response"]
            for answered in (*responses[:5], *responses[-5:]):
                assert sdk.responses.retrieve(answered.identity).output_text == answered.text
    others = (
        answered for answered in day.answers if (answered.request.kind, answered.request.key) == ("response", "lab")
    )
    with day.sdk("shop") as sdk, pytest.raises(openai.NotFoundError):
        sdk.responses.retrieve(next(others).identity)


def test_truths_that_came_later_are_all_there_and_no_others(day: Day, rows: Rows) -> None:
    judged = {
        row["id"]: row["metadata"]["answer_correct"] for row in rows if "answer_correct" in (row["metadata"] or {})
    }
    assert len(day.truths) == TRUTHS
    assert judged == {identity: str(right).lower() for identity, right in day.truths.items()}
    assert all(row["metadata"].keys() > {"answer_correct"} for row in rows if row["id"] in judged), "others stay"
    command = ("eval", "alarm", "--from-journal", "--since", "1d", "--quiet")
    assert f"{TRUTHS} judged answers of the journal" in day.operator.command(*command, newer=True)


def test_an_upgrade_keeps_every_row_and_says_so(day: Day, rows: Rows) -> None:
    (line,) = day.operator.logged("journal: migrated from revision")
    assert line["message"].endswith("from revision 0007 to 0008")
    assert {row["weather"] for row in rows} == {None}
    known = {(row["id"], row["choice"]): row for row in rows}
    assert 0 < len(day.backed_up) < len(rows)
    for row in day.backed_up:
        assert row.items() <= known[row["id"], row["choice"]].items()


def test_the_last_servers_metrics_are_its_rows(day: Day, rows: Rows) -> None:
    own = [row for row in rows if row["created"] >= day.operator.starts[-1]]
    assert sum(totals(day.operator.url, day.watching, "helmsight_choices_total").values()) == len(own) > 0
    last = totals(day.operator.url, day.watching, "helmsight_journal_rows_total")
    assert {name: value for name, value in last.items() if "dropped" in name and value} == {}


def share_of_alarms(rows: Rows) -> Mapping[int, float]:
    raised = defaultdict(list)
    for row in rows:
        hour = (row["metadata"] or {}).get("hour")
        if hour is not None and row["diagnostics"]["alarm"] is not None:
            raised[int(hour)].append(row["diagnostics"]["alarm"])
    return {hour: sum(values) / len(values) for hour, values in raised.items()}


def test_the_unfaithful_hour_calls_and_no_other_alert_does(day: Day, rows: Rows, tmp_path: Path) -> None:
    shares = share_of_alarms(rows)
    assert max(shares, key=shares.__getitem__) == BAD_HOUR
    assert max(share for hour, share in shares.items() if hour != BAD_HOUR) < shares[BAD_HOUR] / 2
    quarters = list(range(1800, DAY + 1, 900))
    watch, only, others = day.watch, f'alertname="{UNFAITHFUL}"', f'alertname!~"{UNFAITHFUL}|{OF_THE_MACHINE}"'
    assert watch.firing(tmp_path, quarters, others, {}) == ""
    bad = BAD_HOUR * 3600
    quiet = [second for second in quarters if second <= bad or second >= bad + 9000]
    assert watch.firing(tmp_path, quiet, only, {}) == ""
    assert watch.firing(tmp_path, [bad + 3600], only, {UNFAITHFUL: 1}) == ""
