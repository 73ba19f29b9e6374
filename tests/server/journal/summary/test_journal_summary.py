"""The summary of rows whose numbers are known, in SQLite and in a real PostgreSQL."""

from __future__ import annotations

import json
import random
import statistics
from typing import Any

import pytest
from sqlalchemy import delete

from server.encode import dumps
from server.journal.database import Database
from server.journal.reading.queries import Filters
from server.journal.schema import ROWS
from server.journal.summary import summarise
from tests.server.journal.journals import HOUR, START, put, row


def known_rows() -> list[dict[str, Any]]:
    """Eleven answers in two hours whose statistics are easily computed by hand."""
    rows = [row(i, attention_ratio=i / 10, total=1.0 + i, completion_tokens=i) for i in range(10)]
    rows[0] |= {
        "intervention": "steer:vision",
        "dose": 0.5,
        "focus_share": 0.2,
        "correct": True,
        "answer_correct": True,
    }
    rows[1] |= {
        "intervention": "steer:vision",
        "dose": 1.0,
        "focus_share": 0.4,
        "correct": False,
        "answer_correct": True,
    }
    rows[2] |= {"intervention": "sage", "correct": False, "answer_correct": True, "perceptual_blindness": True}
    rows[3] |= {"correct": False, "answer_correct": False, "perceptual_blindness": False, "dissociation": True}
    rows[4] |= {"answer_correct": True, "finish_reason": "length"}
    for number, outcome in enumerate(("quiet", "quiet", "retry")):
        rows[number]["guard"] = outcome
    rows.append(row(10, created=START + 7205, finish_reason="error", first_token=70.0, completion_tokens=0, kl=2.0))
    return rows


def test_the_summary_of_known_rows(database: Database) -> None:
    put(database, *known_rows())
    with database.engine.connect() as connection:
        found = summarise(connection, Filters(since=START))
    assert json.loads(json.dumps(found)) == found  # no Decimals
    assert {name: found[name] for name in ("object", "since", "until", "count", "sampled", "finish_reasons")} == {
        "object": "diagnostics.summary",
        "since": START,
        "until": None,
        "count": 11,
        "sampled": 11,
        "finish_reasons": {"error": 1, "length": 1, "stop": 9},
    }
    assert found["guards"] == {"quiet": 2, "retry": 1}
    values = found["values"]
    # 0, 0.1 ... 0.9: ten numbers; p10 lies at rank 0.9, p50 at 4.5, p90 at 8.1
    ratio = {"count": 10, "mean": 0.45, "min": 0.0, "p10": 0.09, "p50": 0.45, "p90": 0.81, "max": 0.9}
    assert values["attention_ratio"] == pytest.approx(ratio)
    assert values["dose"] == pytest.approx(
        {"count": 2, "mean": 0.75, "min": 0.5, "p10": 0.55, "p50": 0.75, "p90": 0.95, "max": 1.0}
    )
    assert values["kl"] == {"count": 1, "mean": 2, "min": 2, "p10": 2, "p50": 2, "p90": 2, "max": 2}
    assert values["decay_slope"] == {"count": 0} | dict.fromkeys(("mean", "min", "p10", "p50", "p90", "max"))
    assert (values["completion_tokens"]["count"], values["completion_tokens"]["mean"]) == (10, 4.5)
    # 1 ... 10: that of the failed answer does not count
    assert values["total"] == pytest.approx(
        {"count": 10, "mean": 5.5, "min": 1.0, "p10": 1.9, "p50": 5.5, "p90": 9.1, "max": 10.0}
    )
    assert values["first_token"]["count"] == 10
    assert found["flags"] == {
        "perceptual_blindness": {"known": 2, "raised": 1},
        "dissociation": {"known": 1, "raised": 1},
    }
    assert found["focus"] == {"known": 4, "correct": 1, "accuracy": 0.25}
    assert found["ivm"] == {"known": 3, "implicit": 2, "rate": pytest.approx(2 / 3)}
    nothing, steered, sage = found["by_intervention"]
    assert (nothing["intervention"], nothing["count"], nothing["accuracy"]) == ("none", 8, 0.0)
    assert nothing["attention_ratio"] == pytest.approx(4.2 / 7)  # 0.3 to 0.9, and one without
    assert steered == {
        "intervention": "steer:vision",
        "count": 2,
        "attention_ratio": pytest.approx(0.05),
        "focus_share": pytest.approx(0.3),
        "decay_slope": None,
        "accuracy": 0.5,
    }
    assert (sage["intervention"], sage["accuracy"]) == ("sage", 0.0)
    assert found["by_hour"] == [
        {
            "start": HOUR * 3600,
            "count": 10,
            "attention_ratio": pytest.approx(0.45),
            "focus_share": pytest.approx(0.3),
            "decay_slope": None,
            "perceptual_blindness": 1,
            "dissociation": 1,
        },
        {
            "start": (HOUR + 2) * 3600,
            "count": 1,
            **dict.fromkeys(("attention_ratio", "focus_share", "decay_slope")),
            "perceptual_blindness": 0,
            "dissociation": 0,
        },
    ]


def test_the_summary_of_many_rows_is_of_the_newest_and_says_so(database: Database) -> None:
    put(database, *(row(i, kl=float(i), toward=("vision", "none")[i % 2]) for i in range(10)))
    with database.engine.connect() as connection:
        found = summarise(connection, Filters(toward="vision"), sample=3)
    assert (found["count"], found["sampled"]) == (5, 3)
    assert (found["values"]["kl"]["min"], found["values"]["kl"]["max"]) == (4, 8)
    assert sum(hour["count"] for hour in found["by_hour"]) == 3


def test_the_summary_of_readouts_without_columns(database: Database) -> None:
    said = [{"length": 4, "odd": True}, {"length": 1.5, "odd": None}, {"length": None, "odd": False}, {"odd": True}]
    put(
        database, *(row(i, readouts=dumps(one)) for i, one in enumerate(said)), row(4), row(5, readouts='{"length":-1}')
    )
    with database.engine.connect() as connection:
        found = summarise(connection, Filters(since=START, until=START + 5))
    assert [one["flags"] for one in found["by_time"]["rows"]] == [
        {"perceptual_blindness": 0, "dissociation": 0, "odd": 2}
    ]
    lengths = {"count": 2, "mean": 2.75, "min": 1.5, "p10": 1.75, "p50": 2.75, "p90": 3.75, "max": 4.0}
    assert found["values"]["length"] == pytest.approx(lengths)
    counted = [name for name, value in found["values"].items() if value["count"]]
    assert counted == ["first_token", "total", "completion_tokens", "length"]
    assert found["flags"]["odd"] == {"known": 3, "raised": 2}
    assert found["flags"]["dissociation"] == {"known": 0, "raised": 0}


def test_the_summary_of_nothing(database: Database) -> None:
    with database.engine.connect() as connection:
        found = summarise(connection, Filters())
    assert (found["count"], found["finish_reasons"], found["by_intervention"], found["by_hour"]) == (0, {}, [], [])
    assert found["ivm"] == {"known": 0, "implicit": 0, "rate": None}
    assert found["values"]["kl"]["p50"] is None


def test_quantiles_of_any_numbers(database: Database) -> None:
    generator = random.Random(7)
    numbers = [
        # "b" in every row, "a" in some, with ties
        {"b": generator.gauss(0, 1e3), **({"a": generator.randrange(-3, 3)} if generator.random() < 0.3 else {})}
        for _ in range(101)
    ]
    totals = [round(generator.random(), 2) for _ in numbers]
    put(database, *(row(i, readouts=dumps(one), total=totals[i]) for i, one in enumerate(numbers)))
    with database.engine.connect() as connection:
        values = summarise(connection, Filters())["values"]
    known = {name: [one[name] for one in numbers if name in one] for name in "ab"} | {"total": totals}
    for name, given in known.items():
        tenths = statistics.quantiles(given, n=10, method="inclusive")
        assert values[name] == pytest.approx(
            {
                "count": len(given), "mean": statistics.fmean(given), "min": min(given), "p10": tenths[0],
                "p50": statistics.median(given), "p90": tenths[8], "max": max(given),
            }
        ), name  # fmt: skip


def test_the_newest_rows_are_found_where_others_are_gone(database: Database) -> None:
    put(database, *(row(i, kl=float(i)) for i in range(20)))
    with database.writer.begin() as connection:
        connection.execute(delete(ROWS).where(ROWS.c.kl.in_([0, 3, 4, 11, 17, 19])))
    left = [1, 2, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 18]
    for sample in (1, 5, 13, 14, 15, 17, 18, 100):
        with database.engine.connect() as connection:
            found = summarise(connection, Filters(), sample=sample)
        newest = left[-sample:]
        assert (found["count"], found["sampled"]) == (14, len(newest))
        assert (found["values"]["kl"]["min"], found["values"]["kl"]["count"]) == (newest[0], len(newest))
