"""Intervals against all resamples that there are and the score test, and tests against binomial sums done by hand."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from probes.harness import bootstrap
from probes.harness.bootstrap import Scores, Share, Tallies, detectable, estimates, mcnemar, paired, wilson

RIGHT = np.array([1.0, 1, 0, 1, 0])
PLAIN = np.array([1.0, 0, 0, 0, 1])


def tallies(right: Sequence[float] | np.ndarray) -> Tallies:
    return {"right": np.asarray(right, float), "n": np.ones(len(right))}


def share(sums: Tallies) -> dict[str, np.ndarray]:
    return {"share": sums["right"] / sums["n"]}


def every_resample(values: np.ndarray) -> tuple[float, float]:
    means = [np.mean(drawn) for drawn in itertools.product(values, repeat=len(values))]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def test_the_difference_has_the_interval_of_the_samples_differences() -> None:
    estimate = estimates(tallies(RIGHT), share, tallies(PLAIN))["share"]
    assert (estimate.value, estimate.difference) == (pytest.approx(0.6), pytest.approx(0.2))
    assert estimate.interval == pytest.approx(every_resample(RIGHT))
    assert estimate.difference_interval == pytest.approx(every_resample(RIGHT - PLAIN))
    assert estimate.p is None  # nobody said that it is a share of samples


def test_the_same_answers_differ_by_nothing_however_wide_the_interval_of_either() -> None:
    estimate = estimates(tallies(RIGHT), share, tallies(RIGHT), shares={"share": Share("right", "n")})["share"]
    assert estimate.interval is not None
    assert estimate.interval[1] - estimate.interval[0] > 0.5
    assert (estimate.difference, estimate.p, estimate.turned) == (0, 1, 0)
    bound = wilson(0, len(RIGHT))[1]
    assert estimate.difference_interval == (-bound, bound)


def test_changes_are_a_share_of_the_samples_of_the_metric() -> None:
    ours, theirs, about = np.array([1.0, 0, 1, 0, 0]), np.array([0.0, 0, 1, 1, 0]), np.array([1.0, 1, 1, 1, 0])

    def both(right: np.ndarray) -> Tallies:
        return {"right": right, "n": about}

    estimate = estimates(both(ours), share, both(theirs), shares={"share": Share("right", "n")})["share"]
    assert estimate.turned == 2 / 4


def test_a_single_condition_has_no_difference() -> None:
    estimate = estimates(tallies(RIGHT), share)["share"]
    assert estimate.to_json() == {"value": 0.6, "value_95": list(estimate.interval or ())}


def test_questions_about_one_picture_are_drawn_together() -> None:
    once = estimates(tallies(RIGHT), share)["share"]
    twice = estimates(tallies(np.repeat(RIGHT, 2)), share, clusters=[c for c in "abcde" for _ in range(2)])["share"]
    apart = estimates(tallies(np.repeat(RIGHT, 2)), share)["share"]
    assert twice.interval == once.interval
    assert twice.interval is not None
    assert apart.interval is not None
    assert twice.interval[0] < apart.interval[0]
    assert twice.interval[1] > apart.interval[1]


SHARES = {"share": Share("right", "n")}


def half_width(estimate: bootstrap.Estimate) -> float:
    assert estimate.interval is not None
    return (estimate.interval[1] - estimate.interval[0]) / 2


def test_a_share_has_wilsons_interval_and_its_difference_that_of_the_bootstrap() -> None:
    estimate = estimates(tallies(RIGHT), share, tallies(PLAIN), shares=SHARES)["share"]
    z = 1.959963985
    middle, spread = 3 + z**2 / 2, z * (3 * 2 / 5 + z**2 / 4) ** 0.5
    assert estimate.interval == pytest.approx(((middle - spread) / (5 + z**2), (middle + spread) / (5 + z**2)))
    assert estimate.difference_interval == estimates(tallies(RIGHT), share, tallies(PLAIN))["share"].difference_interval


def test_a_share_without_variation_has_an_interval() -> None:
    estimate = estimates(tallies(np.ones(20)), share, shares=SHARES, clusters=[i // 2 for i in range(20)])["share"]
    assert estimate.interval == wilson(10, 10)
    assert estimate.interval[0] == pytest.approx(10 / (10 + 1.959963985**2))


@pytest.mark.parametrize("right", [0.0, 1.0])
def test_questions_that_are_all_answered_alike_count_once_a_picture(right: float) -> None:
    """No resample differs, which does not show that the five answers of one picture are independent."""
    runs = {"right": np.full(40, 5 * right), "n": np.full(40, 5.0)}
    assert estimates(runs, share, shares=SHARES)["share"].interval == wilson(40 * right, 40)
    some = {name: np.concatenate([sums, np.zeros(10)]) for name, sums in runs.items()}  # ten hold none that counts
    assert estimates(some, share, shares=SHARES)["share"].interval == wilson(40 * right, 40)


def test_one_picture_is_one_sample_however_many_questions_are_about_it() -> None:
    estimate = estimates(tallies([1, 1, 1, 0] * 5), share, shares=SHARES, clusters=[0] * 20)["share"]
    assert estimate.interval == pytest.approx(wilson(0.75, 1))


def test_a_share_of_several_answers_that_are_all_alike_differs_by_its_score_interval() -> None:
    runs = {"right": np.array([5.0, 0, 2] * 8), "n": np.full(24, 5.0)}
    of_several = {"share": Share("right", "n", fixed=False)}
    estimate = estimates(runs, share, runs, shares=of_several)["share"]
    bound = wilson(0, 24)[1]
    assert (estimate.difference, estimate.difference_interval) == (0, (-bound, bound))
    assert estimates(runs, share, runs)["share"].difference_interval is None


def test_questions_that_are_answered_alike_count_once() -> None:
    rng = np.random.default_rng(5)
    right = (rng.random(300) < 0.7).astype(float)
    once = estimates(tallies(right), share, shares=SHARES)["share"]
    doubled = estimates(
        tallies(np.repeat(right, 2)), share, shares=SHARES, clusters=np.repeat(np.arange(300), 2).tolist()
    )
    assert doubled["share"].value == once.value
    assert half_width(doubled["share"]) == pytest.approx(
        half_width(once), rel=0.06
    )  # the effect is measured on 1000 resamples


def test_the_design_effect_is_that_of_the_correlation_within_clusters() -> None:
    """1 + (m - 1) rho (Kish 1965) of clusters of m with the correlation rho between two of one."""
    rng = np.random.default_rng(6)
    groups, m, rho, p = 3000, 4, 0.3, 0.6
    common, individual = rng.random((groups, 1)) < p, rng.random((groups, m)) < p
    right = np.where(rng.random((groups, m)) < rho**0.5, common, individual).astype(float)
    clusters = np.repeat(np.arange(groups), m).tolist()
    estimate = estimates(tallies(right.ravel()), share, shares=SHARES, clusters=clusters)["share"]
    apart = estimates(tallies(right.ravel()), share, shares=SHARES)["share"]
    assert (half_width(estimate) / half_width(apart)) ** 2 == pytest.approx(1 + (m - 1) * rho, rel=0.12)


def test_clusters_that_balance_each_other_do_not_narrow_an_interval() -> None:
    right = np.array([1.0, 0] * 50)  # of every picture one answer is right: no resample has another share
    estimate = estimates(tallies(right), share, shares=SHARES, clusters=[i // 2 for i in range(100)])["share"]
    assert estimate.interval == wilson(50, 100)


def test_samples_that_hold_several_each_are_clusters_too() -> None:
    claims = {"right": np.array([3.0, 0, 3, 0] * 20), "n": np.full(80, 3.0)}
    estimate = estimates(claims, share, shares={"share": Share("right", "n", fixed=False)})["share"]
    assert estimate.interval == pytest.approx(wilson(40, 80), abs=0.012)  # as 80 claims, not as 240


def test_a_share_of_what_depends_on_the_answers_has_no_p() -> None:
    estimate = estimates(tallies(RIGHT), share, tallies(PLAIN), shares={"share": Share("right", "n", fixed=False)})[
        "share"
    ]
    assert (estimate.p, estimate.turned) == (None, None)
    assert estimate.interval == estimates(tallies(RIGHT), share, shares=SHARES)["share"].interval


def test_without_statsmodels_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    bootstrap.check_statistics()
    monkeypatch.setattr(bootstrap, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"^Intervals of shares need statsmodels: pip install statsmodels$"):
        bootstrap.check_statistics()


def test_a_metric_that_does_not_exist_is_none_and_its_resamples_do_not_count() -> None:
    def quotient(sums: Tallies) -> dict[str, np.ndarray]:
        with np.errstate(invalid="ignore"):
            return {"quotient": sums["right"] / sums["n"]}

    scores: Scores = quotient
    nothing = {"right": np.zeros(3), "n": np.zeros(3)}
    assert estimates(nothing, scores)["quotient"].to_json() == {"value": None, "value_95": None}
    single = {
        "right": np.array([1.0, 0, 0]),
        "n": np.array([1.0, 0, 0]),
    }  # a third of the resamples lack the first sample
    assert estimates(single, scores)["quotient"].interval is None  # the others do not differ
    beside = estimates(nothing, scores, single)["quotient"]
    assert (beside.difference, beside.difference_interval) == (None, None)


@pytest.mark.parametrize(
    ("only_first", "only_second", "p"),
    [
        (0, 0, 1),
        (1, 0, 1),  # 2 * 1/2
        (6, 1, 2 * (1 + 7) / 2**7),
        (1, 6, 2 * (1 + 7) / 2**7),
        (10, 0, 2 / 2**10),
        (3, 3, 1),  # the tail holds more than half: no p exceeds 1
    ],
)
def test_mcnemar_is_a_binomial_test_of_those_that_turned(only_first: int, only_second: int, p: float) -> None:
    first = np.array([1.0] * only_first + [0] * only_second + [1, 1, 0])
    second = np.array([0.0] * only_first + [1] * only_second + [1, 1, 0])
    assert mcnemar(first, second) == pytest.approx(p)


def test_the_detectable_difference_is_found_in_four_of_five_experiments() -> None:
    rng = np.random.default_rng(0)
    samples, turned = 1000, 0.1
    difference = detectable(turned, samples)
    shares = [(turned + difference) / 2, (turned - difference) / 2, 1 - turned]
    detected = 0
    for better, worse, _ in rng.multinomial(samples, shares, size=1000):
        detected += mcnemar(np.repeat([1, 0], [better, worse]), np.repeat([0, 1], [better, worse])) < 0.05
    assert detected / 1000 == pytest.approx(0.8, abs=0.06)


@pytest.mark.parametrize("same", [-1.0, 0.0, 1.0])
def test_a_constant_difference_has_an_interval(same: float) -> None:
    """Tango's score test, its likelihood maximised on a grid: differences d that it does not refuse at 5 %."""
    n, grid = 24, np.linspace(0, 1, 2001)
    gained, lost = n * (same > 0), n * (same < 0)
    accepted = []
    for d in np.linspace(-0.999, 0.999, 1999):
        up, down = grid, grid - d  # the shares that turn one way and the other way
        able = (down >= 0) & (up + down <= 1)
        up, down = up[able], down[able]
        with np.errstate(divide="ignore"):
            terms = ((gained, up), (lost, down), (n - gained - lost, 1 - up - down))
            likely = sum(count * np.log(np.clip(value, 0, 1)) for count, value in terms if count)
        best = np.argmax(likely)
        variance = n * (up[best] + down[best] - d**2)
        if abs(gained - lost - n * d) <= 1.96 * np.sqrt(max(variance, 0)) + 1e-9:
            accepted.append(d)
    assert paired(np.full(n, same)) == pytest.approx((min(accepted), max(accepted)), abs=0.003)


def test_a_difference_that_varies_has_the_interval_of_the_bootstrap() -> None:
    assert paired(RIGHT - PLAIN) == bootstrap.interval(RIGHT - PLAIN)
