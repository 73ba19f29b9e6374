"""Alerts about what answers are like: each is fed series with which it must call, and series with which it must not."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.server.deploy.test_alerts import (
    fired,
    pytestmark,  # noqa: F401 -- the same program evaluates these
    valued,
)

PLAIN = ""
LABELLED = ', model="m", intervention="none", source="live"'
"""Labels of the series of answers; an older server has none."""
STEP, DAY = "30m", 48
"""A step between samples where days pass, and the number of them in a day."""

RIGHT, WRONG = 0.05, 0.3
CALIBRATED = {
    'helmsight_flag_calibrated_share{flag="alarm", answers="right", instance="a"}': f"{RIGHT}x240",
    'helmsight_flag_calibrated_share{flag="alarm", answers="wrong", instance="a"}': f"{WRONG}x240",
    'helmsight_flag_calibrated_share{flag="dissociation", answers="wrong", instance="a"}': "0.01x240",
}


def alarms(share: float, an_hour: float, labels: str = PLAIN, before: float | None = None) -> dict[str, str]:
    """Return four hours of answers, of which the alarm was raised on a share; on another one for the first three hours."""
    series = {}
    for raised in (True, False):
        first, last = ((part if raised else 1 - part) * an_hour / 60 for part in (before or share, share))
        name = f'helmsight_flags_total{{flag="alarm", raised="{str(raised).lower()}", instance="a"{labels}}}'
        series[name] = f"0+{first}x180 {180 * first + last}+{last}x60"
    return series


def looks_unfaithful(folder: Path, series: Mapping[str, str], at: str = "240m") -> bool:
    return bool(fired(folder, "HelmsightAnswersLookUnfaithful", series, at))


@pytest.mark.parametrize("labels", [PLAIN, LABELLED])
def test_an_hour_of_unfaithful_answers_calls(tmp_path: Path, labels: str) -> None:
    series = alarms(0.3, an_hour=120, before=0.08, labels=labels) | CALIBRATED
    assert not looks_unfaithful(tmp_path, series, "180m")
    assert looks_unfaithful(tmp_path, series)
    assert not looks_unfaithful(tmp_path, alarms(0.08, an_hour=120, labels=labels) | CALIBRATED)


@pytest.mark.parametrize(
    ("series", "why"),
    [
        (alarms(0.16, 600), "fewer than between right and wrong answers"),
        (alarms(0.2, 40), "more, but by chance: two standard errors of .2 in 40 are .13"),
        (alarms(1.0, 20), "too few answers"),
        (alarms(0.3, 120, LABELLED.replace("live", "eval")), "those of a benchmark"),
        (alarms(0.3, 120, LABELLED.replace("live", "probe")), "those of a probe"),
        (alarms(0.0, 120), "none at all"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_nobody_is_called_for_alarms_that_are(tmp_path: Path, series: dict[str, str], why: str) -> None:
    assert not looks_unfaithful(tmp_path, series | CALIBRATED), why


def test_answers_of_another_engine_that_are_observed_count(tmp_path: Path) -> None:
    assert looks_unfaithful(tmp_path, alarms(0.3, 120, LABELLED.replace("live", "observe")) | CALIBRATED)


def test_without_a_calibration_nothing_is_known(tmp_path: Path) -> None:
    assert not looks_unfaithful(tmp_path, alarms(0.9, 120))


@pytest.mark.parametrize(
    ("share", "wrong"), [(0.05, 0.0), (0.01, 0.0), (0.175, 0.5), (0.25, 0.8), (0.6, 1.0), (0.0, 0.0)]
)
def test_the_share_of_wrong_answers_is_estimated_from_the_calibration(
    tmp_path: Path, share: float, wrong: float
) -> None:
    """The share of alarms is (1 - wrong) * RIGHT + wrong * WRONG, solved for wrong."""
    series = alarms(share, 120, LABELLED) | CALIBRATED
    assert valued(tmp_path, "helmsight:wrong_answers:ratio1h", series, "240m", '{instance="a"}', wrong)


AVAILABLE = 'helmsight_readout_available{readout="alarm", instance="a"}'
OF_THE_JOURNAL = 'helmsight_journal_readouts{readout="alarm", instance="a"}'
ASKED = 'helmsight_diagnostics_total{readout="alarm", instance="a"}'


@pytest.mark.parametrize(
    ("series", "fires"),
    [
        ({AVAILABLE: "0x60", OF_THE_JOURNAL: "1x60"}, True),
        ({AVAILABLE: "1x60", OF_THE_JOURNAL: "1x60"}, False),
        ({AVAILABLE: "0x60"}, False),
        ({AVAILABLE: "0x60", ASKED: "5x60"}, False),
        ({AVAILABLE: "0x60", ASKED: "0+1x60"}, True),
        ({AVAILABLE: "0x60", OF_THE_JOURNAL.replace("alarm", "focus"): "1x60"}, False),
        ({AVAILABLE: "0x60", OF_THE_JOURNAL.replace('"a"', '"b"'): "1x60"}, False),
        (
            {
                AVAILABLE.replace("}", ', replica="1"}'): "1x60",
                AVAILABLE.replace("}", ', replica="2"}'): "0x60",
                OF_THE_JOURNAL.replace("}", ', replica="1"}'): "1x60",
            },
            True,
        ),
    ],
)  # fmt: skip
def test_a_readout_that_a_model_lacks_calls_where_it_is_wanted(
    tmp_path: Path, series: dict[str, str], fires: bool
) -> None:
    said = fired(tmp_path, "HelmsightReadoutUnavailable", series, "40m")
    assert bool(said) == fires
    assert not fires or 'readout="alarm"' in said


def counted(name: str, *steps: tuple[float, int], labels: str = PLAIN) -> dict[str, str]:
    """Return a counter that grows by so much a step, for so many steps."""
    values, total = [], 0.0
    for grows, count in steps:
        values.append(f"{total}+{grows}x{count - 1}")
        total += grows * count
    return {f'{name}{{instance="a"{labels}}}': " ".join(values)}


@pytest.mark.parametrize(
    ("numbers", "answers", "labels", "fires"),
    [
        (((10, 2 * DAY), (0, DAY)), ((10, 3 * DAY),), PLAIN, True),
        (((10, 2 * DAY), (0, DAY)), ((10, 3 * DAY),), LABELLED, True),
        (((10, 2 * DAY), (0, DAY)), ((10, 3 * DAY),), LABELLED.replace("live", "eval"), False),
        (((10, 3 * DAY),), ((10, 3 * DAY),), LABELLED, False),  # they go on
        (((10, 2 * DAY), (0, DAY)), ((10, 2 * DAY), (0, DAY)), LABELLED, False),  # nobody asks
        (((0, 3 * DAY),), ((10, 3 * DAY),), LABELLED, False),  # they never were
        (((1, 2 * DAY), (0, DAY)), ((10, 3 * DAY),), LABELLED, False),  # they were few
    ],
)
def test_numbers_that_no_answer_has_any_more_call(
    tmp_path: Path, labels: str, numbers: Any, answers: Any, fires: bool
) -> None:
    series = counted("helmsight_focus_share_count", *numbers, labels=labels)
    series |= counted("helmsight_choices_total", *answers, labels=', finish_reason="stop"')
    said = fired(tmp_path, "HelmsightReadoutsAbsent", series, "60h", STEP)
    assert bool(said) == fires
    assert not fires or 'number="focus_share"' in said


def spread(number: str, *steps: tuple[float, float, int], labels: str = PLAIN) -> dict[str, str]:
    """Return a histogram whose share of small values is given, with so many answers a day, for so many days."""
    series = {}
    for bound in ("0.5", "1.0", "+Inf"):
        grows = [(answers / DAY * (share if bound == "0.5" else 1), days * DAY) for share, answers, days in steps]
        series |= counted(f"helmsight_{number}_bucket", *grows, labels=f', le="{bound}"{labels}')
    return series | counted(
        f"helmsight_{number}_count", *((n / DAY, days * DAY) for _, n, days in steps), labels=labels
    )


@pytest.mark.parametrize(
    ("number", "steps", "labels", "fires"),
    [
        ("focus_share", ((0.2, 1000, 8), (0.6, 1000, 1)), PLAIN, True),
        ("focus_share", ((0.2, 1000, 8), (0.6, 1000, 1)), LABELLED, True),
        ("dose", ((0.6, 1000, 8), (0.2, 1000, 1)), LABELLED, True),
        ("dose", ((0.6, 1000, 8), (0.2, 1000, 1)), LABELLED.replace("live", "probe"), False),
        ("focus_share", ((0.2, 1000, 9),), LABELLED, False),
        ("focus_share", ((0.2, 1000, 8), (0.2, 9000, 1)), LABELLED, False),  # more answers, of the same kind
        ("dose", ((0.2, 1000, 8), (0.35, 1000, 1)), LABELLED, False),  # a small change
        ("dose", ((0.2, 40, 8), (0.6, 40, 1)), LABELLED, False),  # which chance explains: 1.95 * sqrt(2 / 40) is .44
        ("focus_share", ((0.2, 0, 7), (0.2, 1000, 1), (0.6, 1000, 1)), LABELLED, False),  # there was no week before
    ],
)
def test_a_distribution_that_is_not_that_of_the_week_before_calls(
    tmp_path: Path, number: str, labels: str, steps: Any, fires: bool
) -> None:
    said = fired(tmp_path, "HelmsightReadoutsDrift", spread(number, *steps, labels=labels), "215h", STEP)
    assert bool(said) == fires
    assert not fires or (f'number="{number}"' in said and ('model="m"' in said) == bool(labels))


def test_the_drift_is_kolmogorovs_and_smirnovs_statistic(tmp_path: Path) -> None:
    """The largest difference of two distributions, at the bounds of the histogram: |.2 - .6| at .5."""
    series = spread("dose", (0.2, 1000, 8), (0.6, 2000, 1), labels=LABELLED)
    who = '{intervention="none", model="m", number="dose"}'
    assert valued(tmp_path, f"helmsight:drift:ks1d{who}", series, "216h", who, 0.4, STEP)
    bound = round(1.95 * (1 / 2000 + 1 / 1000) ** 0.5, 3)
    assert valued(tmp_path, f"helmsight:drift_bound:ks1d{who}", series, "216h", who, bound, STEP)


@pytest.mark.parametrize(("left", "fires"), [(2 * 86_400, True), (5 * 86_400, False), (-86_400, True)])
def test_a_key_that_is_about_to_expire_calls(tmp_path: Path, left: int, fires: bool) -> None:
    series = {'helmsight_key_expiry_timestamp_seconds{key="shop", instance="a"}': f"{600 + left}x10"}
    assert bool(fired(tmp_path, "HelmsightKeyExpires", series, "10m")) == fires
