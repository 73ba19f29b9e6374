"""Learners of directions, against computations of their own and on states of plain transformers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest
from scipy.optimize import minimize

import steering
from probes.commands.pairs import Learner as WireLearner
from probes.pairs import logistic
from probes.pairs.build import build
from probes.pairs.file import load
from probes.pairs.learners import FORMULAS, LEARNERS, HeldOut, Learner, PairStates, doubtful, learn, learned
from tests import families
from tests.probes.pairs.writing import Run, building, user, write
from tests.steering.plain import Plain

FAMILY = "qwen2_vl"


def drawn(pairs: int = 12, layers: int = 2, width: int = 20) -> PairStates:
    """Return states with a contrast along one axis, and much variance along another one."""
    generator = np.random.default_rng(3)
    noise = generator.normal(size=(2, pairs, layers, width))
    shared = generator.normal(size=(pairs, layers, width))
    axis, other = np.eye(width)[0], np.eye(width)[1]
    topic = 9 * generator.normal(size=(pairs, layers, 1)) * other
    return PairStates(2 * axis + shared + topic + noise[0], -1 * axis + shared + topic + noise[1])


def cosines(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    return (one * other).sum(-1) / np.linalg.norm(one, axis=-1) / np.linalg.norm(other, axis=-1)


def leading_axis(rows: np.ndarray) -> np.ndarray:
    """Return the eigenvector of the covariance with the greatest eigenvalue."""
    return np.linalg.eigh(np.cov(rows, rowvar=False))[1][:, -1]


def test_every_learner_by_another_computation() -> None:
    states = drawn()
    difference = states.toward - states.away
    mean = difference.mean(0)
    np.testing.assert_allclose(learn("mean", states), mean)
    np.testing.assert_allclose(learn("actadd", states.of([4])), difference[4])
    pooled = np.concatenate([states.toward, states.away])
    for layer in range(2):
        axis = leading_axis(pooled[:, layer])
        axis *= np.sign(axis @ mean[layer])
        np.testing.assert_allclose(learn("pca", states)[layer], axis, atol=1e-9)
        shuffling, signs = random.Random(7), []
        for _ in range(len(states)):
            pair = [1, -1]
            shuffling.shuffle(pair)
            signs.append(pair[0])
        axis = leading_axis(difference[:, layer] * np.array(signs)[:, None])
        farther = np.sum(difference[:, layer] @ axis > 0)
        axis *= 1 if farther * 2 >= len(states) else -1
        np.testing.assert_allclose(learn("lat", states, 7)[layer], axis, atol=1e-9)
        unit = mean[layer] / np.linalg.norm(mean[layer])
        sigma = np.std([state @ unit for state in pooled[:, layer]], ddof=1)
        np.testing.assert_allclose(learn("iti", states)[layer], sigma * unit)
    np.testing.assert_allclose(np.abs(cosines(learn("pca", states), np.eye(20)[1])), 1, atol=0.05)
    assert (cosines(learn("lat", states, 7), np.eye(20)[0]) > 0.6).all(), "what both sides share cancels"
    assert (cosines(learn("probe", states), np.eye(20)[0]) > 0.6).all()


@pytest.mark.parametrize(("samples", "width"), [(24, 40), (60, 5)])
def test_the_probe_is_the_optimum_of_its_loss(samples: int, width: int) -> None:
    generator = np.random.default_rng(samples)
    wanted = np.arange(samples) % 3 == 0
    states = generator.normal(size=(samples, width)) * 30 + 100
    states[wanted, 0] += 40
    middle = states.mean(0)
    size = np.sqrt(np.mean((states - middle) ** 2))
    scaled = (states - middle) / size

    def loss(free: np.ndarray) -> float:
        margins = np.where(wanted, 1, -1) * (scaled @ free[:-1] + free[-1])
        return float(np.logaddexp(0, -margins).sum() + free[:-1] @ free[:-1] / 2)

    best = minimize(loss, np.zeros(width + 1), method="BFGS", options={"gtol": 1e-7, "maxiter": 10_000}).x
    weights, bias = logistic.fit(states, wanted)
    np.testing.assert_allclose(weights, best[:-1] / size, atol=1e-5 / size)
    np.testing.assert_allclose(bias, best[-1] - best[:-1] @ middle / size, atol=1e-3)


def test_the_probe_of_states_that_are_all_alike_is_nothing() -> None:
    weights, bias = logistic.fit(np.ones((8, 3)), np.arange(8) < 4)
    assert np.abs(weights).max() == 0
    assert bias == pytest.approx(0, abs=1e-9)


def test_layers_are_ranked_on_pairs_that_nothing_was_learned_from() -> None:
    states = drawn(40)
    blind = np.random.default_rng(1).normal(size=states.toward.shape)
    states.toward[:, 0], states.away[:, 0] = blind[:, 0], blind[:, 1]
    for learner in LEARNERS[2:]:
        if learner == "pca":
            continue  # its axis is that of the topic, on purpose
        held = HeldOut.of(learner, states, 5, [0, 1])
        assert (held.ranking, held.pairs) == ([1, 0], 10), learner
        assert held.auroc is not None
        assert held.auroc[0] > 0.8
        assert HeldOut.of(learner, states, 5, [0]).ranking == [0]
    order = [*range(40)]
    random.Random(5).shuffle(order)
    rest, wanted = states.of(order[10:]), np.arange(20) < 10
    weights, bias = logistic.fit(rest.both[:, 1], rest.is_toward)
    right = (states.of(order[:10]).both[:, 1] @ weights + bias > 0) == wanted
    assert HeldOut.of("iti", states, 5, [0, 1]).accuracy[1] == right.mean()  # type: ignore[index]


@pytest.fixture(scope="module")
def plain(root: Path) -> Plain:
    return Plain(families.checkpoint(FAMILY, root))


def chats(count: int) -> list[dict[str, Any]]:
    wordings = {"toward": "Answer politely. What is number {}?", "away": "Answer rudely. What is number {}?"}
    return [
        {side: user([{"type": "text", "text": wording.format(n)}]) for side, wording in wordings.items()}
        for n in range(count)
    ]


@pytest.mark.parametrize("learner", ["pca", "lat", "iti", "probe"])
def test_a_vector_has_the_direction_that_states_of_plain_transformers_give(
    tiny: steering.Engine, plain: Plain, tmp_path: Path, learner: Learner
) -> None:
    pairs = load(write(tmp_path, chats(8)))
    made = build(tiny, pairs, name="manners", sides=("polite", "rude"), learner=learner, seed=4, quiet=True)
    sides = []
    for side in ("toward", "away"):
        answers = [plain.answer(getattr(pair, side).chat(), 1) for pair in pairs]
        sides.append(np.stack([one.hidden[:, one.prompt_length - 1].double().numpy() for one in answers]))
    states = PairStates(*sides)
    expected = learn(learner, states, 4)
    assert (cosines(made.direction.double().numpy(), expected) > 1 - 1e-3).all()
    (layer,) = made.layers
    added = np.abs(made.delta(1.0)[layer].double().numpy()).mean()
    size = np.abs(states.both[:, layer]).mean()
    strength = np.abs(expected[layer]).mean() / size if learner == "iti" else 1.0
    assert added == pytest.approx(size * strength, rel=1e-3)
    assert made.published == pytest.approx(strength, rel=1e-3)
    assert made.info["learner"]["name"] == learner
    assert made.info["learner"]["held_out"]["pairs"] == 2
    assert steering.SteeringVector.from_bytes(made.to_bytes()).info == made.info


def test_a_direction_that_tells_nothing_apart_is_doubted(tiny: steering.Engine, tmp_path: Path) -> None:
    pairs = load(write(tmp_path, chats(5)))
    made = build(tiny, pairs, name="manners", sides=("polite", "rude"), quiet=True)
    generator = np.random.default_rng(0)
    shape = (40, *made.direction.shape)
    blind = PairStates(generator.normal(size=shape), generator.normal(size=shape))
    assert "tell held-out pairs apart" in doubtful(learned(made, "probe", blind, [0], 0))[0]
    assert doubtful(learned(made, "probe", drawn(40, *made.direction.shape), [0], 0)) == []
    assert doubtful(made) == []


@pytest.fixture
def run(
    tiny: steering.Engine, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run `vectors build --pairs` on a model that is loaded already, in a home of its own."""
    run = building("--pairs", tiny.mllm, tmp_path, capsys, monkeypatch)
    return lambda rows, *words: run(write(tmp_path, rows), "--name", "manners", *words)


def test_the_command_builds_and_reports_with_each_learner(run: Run, tmp_path: Path) -> None:
    assert set(LEARNERS) == set(get_args(WireLearner))
    path = tmp_path / ".helmsight" / "vectors" / "manners.safetensors"
    for learner in LEARNERS:
        rows, words = (chats(1), ("--layers", "1")) if learner == "actadd" else (chats(20), ())
        status, printed, problem = run(rows, "--learner", learner, "--force", "--replace", *words)
        assert status == 0, problem
        made = steering.SteeringVector.load(path)
        page = (tmp_path / "report" / "report.md").read_text()
        assert FORMULAS[learner].format(plus="toward", minus="away")[:30] in page
        assert ("AUROC" in page) is (learner not in ("mean", "actadd"))
        assert made.info.get("learner", {"name": "mean"})["name"] == learner
        assert ("one sigma" in printed) is (learner == "iti")
        if learner == "actadd":
            assert made.layers == (1,)


@pytest.mark.parametrize(
    ("rows", "words", "why"),
    [
        (20, ("--learner", "actadd"), "makes a vector of a single pair, but"),
        (1, ("--learner", "actadd"), "needs --layers with one layer"),
        (1, ("--learner", "pca"), "too few different pairs"),
    ],
)
def test_what_a_learner_cannot_use_is_refused(run: Run, rows: int, words: tuple[str, ...], why: str) -> None:
    status, _, problem = run(chats(rows), *words)
    assert status != 0
    assert why in problem
