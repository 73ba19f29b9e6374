"""The ablations: which vectors are pushed how hard, and what is read from curves and clocks made by hand."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import steering
from probes.answering.base import Push, Reply
from probes.conflicts.samples import SIDES
from probes.conflicts.shares import Shares
from probes.harness.bootstrap import wilson
from probes.mc2 import ablate
from probes.mc2.ablate import Knee, Steered, by_samples, by_strength, by_tasks, knee, latency
from probes.mc2.evaluate import Candidate
from probes.vector.build import Recipe, build
from steering import Request, Steering, SteeringVector
from tests.probes.conftest import make_samples
from tests.probes.mc2.scripted import AskedQuestion, Scripted, balls, said, simple_vector

FACTOR = 0.25


@pytest.fixture(scope="module")
def calibrated(tiny: steering.Engine) -> SteeringVector:
    """Return a vector at layer 2, which no probe here would choose, with a factor of its published weight."""
    vector = build(tiny, make_samples(3, question="Which ball?"), quiet=True)
    return replace(vector, layers=(2,), info=vector.info | {"calibration": {"factor": FACTOR, "range": [0.5, 2.0]}})


def by_vector(codes: Sequence[str]) -> Scripted:
    """Follows the side of the push, for the n-th vector that is met, with those balls whose code in the n-th is "+"."""
    met: list[SteeringVector] = []

    def rule(question: AskedQuestion) -> Reply:
        assert question.push is not None
        assert isinstance(question.push.vector, SteeringVector)
        if not any(question.push.vector is vector for vector in met):
            met.append(question.push.vector)
        number = next(i for i, vector in enumerate(met) if vector is question.push.vector)
        return Reply(said(question.push.toward[0] if codes[number][question.ball] == "+" else "a", question.swapped))

    return Scripted(rule)


def pushed(answerer: Scripted) -> list[tuple[SteeringVector, list[Push]]]:
    """Return the vectors in the order in which they came, each with its pushes."""
    pushes_by_vector: list[tuple[SteeringVector, list[Push]]] = []
    for question in answerer.asked:
        assert question.push is not None
        assert isinstance(question.push.vector, SteeringVector)
        pushes = next(
            (known_vector for vector, known_vector in pushes_by_vector if vector is question.push.vector), None
        )
        if pushes is None:
            pushes_by_vector.append((question.push.vector, [question.push]))
        else:
            pushes.append(question.push)
    return pushes_by_vector


def check_same_dose(vector: SteeringVector, published: SteeringVector) -> None:
    """Check that the push at strength 1 is FACTOR times the published weight times the direction."""
    expected = FACTOR * published.weight[:, None] * published.direction
    torch.testing.assert_close(vector.delta(1.0, range(len(expected))), expected, rtol=1e-4, atol=1e-5)


def follows(row: Steered) -> tuple[float, float]:
    return row.shares["vision"].s_vision, row.shares["text"].s_text


def test_probe_sizes_use_the_evaluated_layers_and_dose(tiny: steering.Engine, calibrated: SteeringVector) -> None:
    probe, answerer = make_samples(5), by_vector(["+---", "++--", "+++-"])
    rows = by_samples(tiny, answerer, probe, balls(4), Candidate(calibrated, 1.5), (1, 3, 5, 9), seed=4, quiet=True)
    assert {size: follows(row) for size, row in rows.items()} == {1: (0.25, 0.25), 3: (0.5, 0.5), 5: (0.75, 0.75)}
    assert {size: row.effect for size, row in rows.items()} == {1: 0.25, 3: 0.5, 5: 0.75}
    for size, (vector, pushes) in zip((1, 3, 5), pushed(answerer), strict=True):
        check_same_dose(vector, build(tiny, probe[:size], seed=4, quiet=True))
        assert {(push.toward, push.strength, push.layers) for push in pushes} == {
            ("vision", 1.5, (2,)), ("text", 1.5, (2,)),
        }  # fmt: skip
        assert len(pushes) == 4 * 2 * 2


def test_layers_that_are_evaluated_on_purpose_are_kept(tiny: steering.Engine, calibrated: SteeringVector) -> None:
    answerer = by_vector(["+"])
    by_samples(tiny, answerer, make_samples(1), balls(1), Candidate(calibrated, layers=(0, 1)), (1,), quiet=True)
    assert {question.push.layers for question in answerer.asked if question.push} == {(0, 1)}


def test_a_vector_that_was_not_calibrated_is_compared_at_the_published_weight(tiny: steering.Engine) -> None:
    answerer, probe = by_vector(["+"]), make_samples(2)
    evaluated = build(tiny, make_samples(3), layers=[0], quiet=True)
    by_samples(tiny, answerer, probe, balls(1), Candidate(evaluated), (2,), quiet=True)
    ((vector, pushes),) = pushed(answerer)
    torch.testing.assert_close(vector.weight, build(tiny, probe, quiet=True).weight, rtol=1e-4, atol=1e-5)
    assert pushes[0].layers == (0,)


def test_one_vector_for_each_task_and_one_of_all(tiny: steering.Engine, calibrated: SteeringVector) -> None:
    probe, answerer = make_samples(5), by_vector(["++--", "----", "++++"])
    rows = by_tasks(tiny, answerer, probe, balls(4), Candidate(calibrated, 0.5), quiet=True)
    assert list(rows) == ["color", "shape", "all tasks"]
    assert [follows(row) for row in rows.values()] == [(0.5, 0.5), (0, 0), (1, 1)]
    for part, (vector, pushes) in zip((probe[::2], probe[1::2], probe), pushed(answerer), strict=True):
        check_same_dose(vector, build(tiny, part, quiet=True))
        assert {(push.strength, push.layers) for push in pushes} == {(0.5, (2,))}
        assert len(pushes) == 4 * 2 * 2


def test_probes_of_an_ablation_follow_the_evaluated_vectors_recipe(
    tiny: steering.Engine, calibrated: SteeringVector
) -> None:
    recipe = Recipe("v1", -2, "mean", "instructed")
    evaluated = replace(calibrated, info=calibrated.info | {"recipe": asdict(recipe)})
    probe = make_samples(4)
    for ablation in (by_samples, by_tasks):
        answerer = by_vector(["+"] * 3)
        sizes = {"sizes": (4,)} if ablation is by_samples else {}
        ablation(tiny, answerer, probe, balls(1), Candidate(evaluated), quiet=True, **sizes)  # type: ignore[arg-type]
        vector, _ = pushed(answerer)[-1]
        check_same_dose(vector, build(tiny, probe, recipe=recipe, quiet=True))


@pytest.mark.parametrize(("published", "pushed_at"), [(0.4, {0.0, 1.25, 5.0}), (None, {0.0, 0.5, 2.0})])
def test_strengths_are_in_published_units_whatever_strength_is_evaluated(
    published: float | None, pushed_at: set[float]
) -> None:
    """2.0 published is strength 5 if strength 1 is 0.4 published; a vector without that keeps its own units."""

    def rule(question: AskedQuestion) -> Reply:
        assert question.push is not None
        followed = question.ball < question.push.strength if question.push.toward == "vision" else question.ball == 0
        return Reply(said(question.push.toward[0] if followed else "n", question.swapped))

    answerer, vector = Scripted(rule), simple_vector()
    vector = replace(vector, info=vector.info | ({} if published is None else {"published": published}))
    rows = by_strength(answerer, balls(4), Candidate(vector, 1.5, (2,)), (0.0, 0.5, 2.0), quiet=True)
    followed = {0.0: (0, 0.25), 0.5: (0.25, 0.25), 2.0: (0.5, 0.25)}
    if published is not None:  # at strengths 0, 1.25 and 5
        followed = {0.0: (0, 0.25), 0.5: (0.5, 0.25), 2.0: (1.0, 0.25)}
    assert {strength: follows(row) for strength, row in rows.items()} == followed
    pushes = {question.push for question in answerer.asked if question.push}
    assert {push.strength for push in pushes} == pushed_at
    assert {push.layers for push in pushes} == {(2,)}
    assert all(push.vector is vector for push in pushes)


def test_the_strengths_are_those_of_the_papers_table_10_behind_none() -> None:
    paper = "0.125 0.25 0.5 0.75 1.0 1.25 1.5 1.75 2.0 2.25 2.5 2.75 3.0"
    assert list(ablate.STRENGTHS) == [0.0, *map(float, paper.split())]


def test_a_row_is_reported_by_side() -> None:
    row = Steered({"vision": Shares.of(["vision", "others"]), "text": Shares.of(["text", "text"])})
    assert row.effect == 0.75
    assert (row.to_json()["vision"]["s_vision"], row.to_json()["text"]["s_text"]) == (0.5, 1)


# ------------------------------------------------------------------------------------------------------------ knee


def curve(effects: Mapping[float, float]) -> dict[float, Steered]:
    return {
        strength: Steered({side: Shares(effect, effect, 0, 0.5, 100) for side in SIDES})
        for strength, effect in effects.items()
    }


@pytest.mark.parametrize(
    ("effects", "strength", "before", "after", "breaks", "visible"),
    [
        # Rises by .5 in one unit, then by .02 in two.
        ({0: 0.4, 0.5: 0.7, 1: 0.9, 2: 0.91, 3: 0.92}, 1, 0.5, 0.01, None, True),
        # .86 is close to .9 already; it goes on by .04 in two units.
        ({0: 0.5, 1: 0.86, 3: 0.9}, 1, 0.36, 0.02, None, True),
        # Rises at first twice as fast as it goes on, and is within .05 only at 2.
        ({0: 0.2, 1: 0.8, 2: 0.9, 4: 0.94}, 2, 0.35, 0.02, None, True),
        ({0: 0.9, 1: 0.93, 2: 0.96, 3: 0.99}, 2, 0.03, 0.03, None, False),
        # The greatest strength is the best: who knows how it goes on.
        ({0: 0.2, 1: 0.5, 2: 0.9}, 2, 0.35, None, None, False),
        # Breaks at 2, and the slope after is a fall of .6 in two units.
        ({0: 0.5, 0.5: 0.7, 1: 0.9, 2: 0.8, 3: 0.3}, 1, 0.4, -0.3, 2, True),
        # A dip before the peak is no break.
        ({0: 0.5, 1: 0.2, 2: 0.9, 3: 0.9}, 2, 0.2, 0, None, True),
        ({0: 0.5, 1: 0.5, 2: 0.5}, 0, 0, 0, None, False),
        ({0: 0.5, 1: 0.52, 2: 0.53}, 0, 0, 0.015, None, False),
        # Without steering it is best: there is no knee, however soon steering breaks the answers.
        ({0: 0.9, 1: 0.88, 2: 0.4}, 0, 0, -0.25, 2, False),
        ({0: 0.5}, 0, 0, None, None, False),
    ],
)
def test_the_knee_of_curves_by_hand(
    effects: dict[float, float],
    strength: float,
    before: float,
    after: float | None,
    breaks: float | None,
    visible: bool,
) -> None:
    bend = knee(curve(effects))
    assert (bend.strength, bend.breaks_at, bend.visible) == (strength, breaks, visible)
    assert bend.slope_before == pytest.approx(before)
    assert bend.slope_after == (None if after is None else pytest.approx(after))
    assert bend.to_json() == {
        "strength": strength, "slope_before": pytest.approx(before), "slope_after": bend.slope_after,
        "breaks_at": breaks, "visible": visible,
    }  # fmt: skip


def test_the_order_of_the_rows_does_not_matter() -> None:
    effects = {0: 0.5, 0.5: 0.7, 1: 0.9, 2: 0.8, 3: 0.3}
    assert knee(curve(dict(reversed(effects.items())))) == knee(curve(effects))


def test_a_slow_rise_that_goes_on_is_no_visible_knee() -> None:
    assert Knee(1.0, 0.5, 0.099, None).visible
    assert not Knee(1.0, 0.5, 0.101, None).visible
    assert not Knee(1.0, 0.5, -0.2, None).visible
    assert Knee(1.0, 0.5, -0.2, 2.0).visible


# --------------------------------------------------------------------------------------------------------- latency


def test_latency_of_the_three_ways_on_a_real_engine(tiny: steering.Engine, calibrated: SteeringVector) -> None:
    latencies = latency(tiny, make_samples(3), Candidate(calibrated), quiet=True)
    assert list(latencies) == ["plain", "probing", "steering"]
    for way in latencies.values():
        assert 0 < way.seconds < 60
        assert 0 < way.interval[0] <= way.ratio <= way.interval[1] < math.inf
    assert (latencies["plain"].ratio, latencies["plain"].interval) == (1.0, (1.0, 1.0))
    assert latencies["steering"].to_json() == {
        "seconds": latencies["steering"].seconds, "ratio": latencies["steering"].ratio,
        "ratio_95": list(latencies["steering"].interval), "megabytes": latencies["steering"].megabytes,
        "memory_ratio": pytest.approx(1, abs=0.5), "memory_ratio_95": [pytest.approx(1, abs=0.5)] * 2,
    }  # fmt: skip


@dataclass
class Clock:
    """An engine with scripted durations.

    A plain answer takes as many seconds as its sample's number, and the first request of a chat 100 more; reading states
    takes twice as long, steering three times.
    """

    now: float = 0.0
    order: list[str] = field(default_factory=list)
    requests: list[Request] = field(default_factory=list)
    mllm: SimpleNamespace = field(default_factory=lambda: SimpleNamespace(device=torch.device("cpu")))

    def generate(self, requests: Sequence[Request]) -> None:
        (request,) = requests
        way = "probing" if request.states else "steering" if request.asked else "plain"
        number = int(request.messages[0]["content"][1]["text"].split("ball ")[1].split("?")[0]) + 1
        first = not any(request_before.messages is request.messages for request_before in self.requests)
        self.now += number * {"plain": 1, "probing": 2, "steering": 3}[way] + 100 * first
        self.order.append(way)
        self.requests.append(request)

    def time(self) -> float:
        return self.now


def test_latencies_by_a_scripted_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock.time)
    needs = {"plain": 7.0, "probing": 8.5, "steering": 7.5}
    monkeypatch.setattr("probes.mc2.memory.peak", lambda device: needs[clock.order[-1]])
    latencies = latency(clock, balls(5), Candidate(simple_vector(), 1.5, (0,)), quiet=True)  # type: ignore[arg-type]
    assert {name: way.seconds for name, way in latencies.items()} == {"plain": 3, "probing": 6, "steering": 9}
    assert {name: way.ratio for name, way in latencies.items()} == {"plain": 1, "probing": 2, "steering": 3}
    assert latencies["steering"].interval == (3, 3)
    assert {name: way.megabytes for name, way in latencies.items()} == needs
    assert latencies["steering"].memory == (pytest.approx(7.5 / 7), (pytest.approx(7.5 / 7), pytest.approx(7.5 / 7)))


def test_settings_are_compared_with_the_last_one_by_the_same_samples(
    tiny: steering.Engine, calibrated: SteeringVector
) -> None:
    # Of 40 balls the first setting's answers follow none of the first four, and the second's all.
    answerer = by_vector(["----" + "+" * 36, "+" * 40])
    rows = by_samples(tiny, answerer, make_samples(5), balls(40), Candidate(calibrated, 1.5), (1, 5), quiet=True)
    difference, (low, high) = rows[1].beside["text"]
    assert difference == pytest.approx(-0.1)
    # A resample holds 0 to 10 of those four: binomial(40, .1) / 40.
    drawn = np.quantile(np.random.default_rng(3).binomial(40, 0.1, 20000) / 40, (0.025, 0.975))
    assert (-high, -low) == pytest.approx(tuple(drawn), abs=0.026)
    assert rows[5].beside["text"] == (0, (-wilson(0, 40)[1], wilson(0, 40)[1]))
    assert rows[1].to_json()["text"]["difference_95"] == [low, high]


def test_the_ways_take_turns_and_answer_at_one_length(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr("time.perf_counter", clock.time)
    latency(clock, balls(3), Candidate(simple_vector(), 1.5, (0,)), quiet=True)  # type: ignore[arg-type]
    ways = np.array(clock.order).reshape(3, 4)
    assert set(ways[:, 0]) == {"plain"}
    for place in (1, 2, 3):
        assert set(ways[:, place]) == {"plain", "probing", "steering"}
    for request in clock.requests:
        assert (request.sampling.max_tokens, request.sampling.ignore_eos) == (8, True)
        options = request.asked.get("steering")
        for steer in options.steers if isinstance(options, Steering) else ():
            assert (steer.scale, steer.layers, steer.toward, steer.tokens) == (1.5, (0,), "text", "all")
