"""The modality that a task's answers rest on: votes counted by hand, and drops against the engine asked one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from PIL import Image

import steering
from probes.conflicts.samples import ConflictSample, messages
from probes.vector.reliability import task_reliability, vote
from tests.probes.conftest import make_samples


@pytest.mark.parametrize(
    ("votes", "majority"),
    [
        ({"vision": 2, "text": 1}, "vision"), ({"text": 1, "none": 9}, "text"), ({"vision": 2, "text": 2}, "vision"),
        ({"none": 9}, None), ({}, None),
    ],
)  # fmt: skip
def test_the_majority_counts_decided_votes(votes: dict[str, int], majority: str | None) -> None:
    assert vote(votes) == majority


def varied(count: int) -> list[ConflictSample]:
    """Return samples of two tasks whose answers have different probabilities under the tiny model."""
    rng = np.random.default_rng(5)
    return [
        replace(
            sample, image=Image.fromarray(rng.integers(0, 255, (56, 56, 3), np.uint8)), context=f"{'So ' * i}it is."
        )
        for i, sample in enumerate(make_samples(count))
    ]


@pytest.fixture(scope="module")
def single(tiny: steering.Engine) -> dict[str, list[steering.Reliability]]:
    """Measure each chat alone, by sample."""
    return {
        sample.id: [steering.measure(tiny, [messages(sample, "plain", swapped)])[0] for swapped in (False, True)]
        for sample in varied(3)
    }


@pytest.mark.parametrize("batch", [2, 64])
def test_a_tasks_reliability_is_that_of_its_chats_one_by_one(
    tiny: steering.Engine, single: dict[str, list[steering.Reliability]], batch: int
) -> None:
    found = task_reliability(tiny, varied(3), batch=batch, quiet=True)
    assert list(found) == ["color", "shape", "all"]
    for task, of in (("color", "02"), ("shape", "1"), ("all", "012")):
        measured = [one for name in of for one in single[name]]
        reports = [one.report() for one in measured]
        votes = Counter(one.toward or "none" for one in measured)
        assert found[task].votes == votes
        assert found[task].drop_vision == pytest.approx(
            np.mean([one["drop_vision"] for one in reports]), rel=1e-3, abs=0
        )
        assert found[task].drop_text == pytest.approx(np.mean([one["drop_text"] for one in reports]), rel=1e-3, abs=0)
        assert found[task].rests_on == ("vision" if votes["vision"] >= votes["text"] else "text")
    assert found["color"].drop_vision != found["shape"].drop_vision
    assert found["all"].to_json() == {
        "rests_on": found["all"].rests_on, "votes": dict(found["all"].votes),
        "drop_vision": found["all"].drop_vision, "drop_text": found["all"].drop_text,
    }  # fmt: skip


def test_votes_and_drops_of_a_task_by_hand(monkeypatch: pytest.MonkeyPatch, tiny: steering.Engine) -> None:
    # (answer, without images, without context) of both orders of the samples: color, shape, color
    numbers = [(0.8, 0.2, 0.7), (0.5, 0.1, 0.0), (0.6, 0.0, 0.4), (0.6, 0.58, 0.6), (0.4, 0.3, 0.1), (0.9, 0.2, 0.8)]
    rest = iter(steering.Reliability(*one) for one in numbers)
    monkeypatch.setattr("probes.vector.reliability.measure", lambda engine, chats: [next(rest) for _ in chats])
    found = task_reliability(tiny, make_samples(3), batch=2, quiet=True)
    assert found["color"].votes == Counter(vision=2, text=2)
    assert found["shape"].votes == Counter(vision=1, none=1)
    assert found["all"].votes == Counter(vision=3, text=2, none=1)
    assert found["color"].drop_vision == pytest.approx((0.6 + 0.4 + 0.1 + 0.7) / 4)
    assert found["color"].drop_text == pytest.approx((0.1 + 0.5 + 0.3 + 0.1) / 4)
    assert (found["shape"].drop_vision, found["shape"].drop_text) == pytest.approx((0.62 / 2, 0.2 / 2))
    assert {task: one.rests_on for task, one in found.items()} == {
        "color": "vision",
        "shape": "vision",
        "all": "vision",
    }
