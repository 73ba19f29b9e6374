"""The progress display while questions are asked: bars in a terminal, lines elsewhere, from the same counts."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from probes.answering.base import Question
from probes.answering.progress import Tracker
from probes.answering.replies import replies
from probes.conflicts.asking import Condition, ask
from probes.harness.ledger import Remembering
from tests.probes.conftest import Scripted, make_samples


class Clock:
    """A time that passes when it is told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_lines_come_every_few_seconds_and_tell_each_condition() -> None:
    clock, file = Clock(), io.StringIO()
    with Tracker("Conditions", {"plain": 10, "steered": 10}, file=file, clock=clock) as progress:
        for number in range(20):
            clock.now += 1
            progress.advance(("plain", "steered")[number % 2])
    assert file.getvalue().splitlines() == [
        "Conditions: 2/20 answers, 0:18 left (plain 1/10, steered 1/10)",
        "Conditions: 7/20 answers, 0:13 left (plain 4/10, steered 3/10)",
        "Conditions: 12/20 answers, 0:08 left (plain 6/10, steered 6/10)",
        "Conditions: 17/20 answers, 0:03 left (plain 9/10, steered 8/10)",
        "Conditions: 20/20 answers (plain 10/10, steered 10/10)",
    ]


def test_what_is_kept_counts_and_takes_no_time() -> None:
    clock, file = Clock(), io.StringIO()
    with Tracker("Conditions", {"": 360}, file=file, clock=clock) as progress:
        for _ in range(300):
            progress.advance(kept=True)
        clock.now += 20
        progress.advance(by=20)
    assert file.getvalue().splitlines()[0] == "Conditions: 320/360 answers, 300 kept, 0:40 left"


def test_what_takes_no_time_and_what_is_quiet_shows_nothing() -> None:
    for quiet in (False, True):
        clock, file = Clock(), io.StringIO()
        with Tracker("Conditions", {"": 2}, quiet=quiet, file=file, clock=clock) as progress:
            clock.now += 30 * quiet
            progress.advance(by=2)
        assert file.getvalue() == ""


def test_a_condition_that_is_left_out_is_not_waited_for() -> None:
    clock, file = Clock(), io.StringIO()
    with Tracker("Conditions", {"plain": 4, "icd": 4}, file=file, clock=clock) as progress:
        clock.now += 4
        progress.advance("plain", by=4)
        progress.leave_out("icd")
    assert file.getvalue().splitlines()[-1] == "Conditions: 4/4 answers (plain 4/4, icd 0/0)"


def test_a_terminal_has_a_bar_for_the_whole_and_one_for_each_condition() -> None:
    clock, file = Clock(), Terminal()
    with Tracker("Conditions", {"plain": 3, "steered [text]": 3}, file=file, clock=clock) as progress:
        progress.advance("plain", kept=True)
        clock.now += 90
        progress.advance("plain", by=2)
    shown = file.getvalue()
    for words in ("Conditions", "plain", "steered [text]", "3/6", "3/3", "0/3", "1 kept, 2:15 left"):
        assert words in shown


def test_a_run_that_is_resumed_begins_with_what_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[str | None, bool]] = []
    monkeypatch.setattr(Tracker, "advance", lambda _, part, kept=False: seen.append((part, kept)))
    asked = [Question([{"role": "user", "content": str(n)}]) for n in range(6)]
    first = Scripted(lambda _: "yes")
    list(replies(Remembering(first, tmp_path / "a.jsonl"), asked[:3], ["x"] * 3, quiet=True))
    assert seen == [("x", False)] * 3
    seen.clear()

    def refuse(_: Question) -> str:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(replies(Remembering(Scripted(refuse), tmp_path / "a.jsonl"), asked, ["x"] * 6, quiet=True))
    assert seen == [("x", True)] * 3  # before the model was asked anything


def test_conditions_are_counted_by_their_names(monkeypatch: pytest.MonkeyPatch) -> None:
    counted: dict[str, int] = {}
    monkeypatch.setattr(
        Tracker, "__enter__", lambda self: counted.update({k: v.total for k, v in self.parts.items()}) or self
    )
    ask(Scripted(lambda _: "A"), make_samples(3), [Condition(), Condition("image_only"), Condition("text")], quiet=True)
    assert counted == {"plain": 6, "image only": 6, "text": 6}
