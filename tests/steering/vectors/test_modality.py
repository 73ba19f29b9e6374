"""A vector knows which modality it pushes toward, whatever it was composed of."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from steering import RequestError, Steer, SteeringVector
from tests.steering.vectors.made import make


@pytest.mark.parametrize(
    ("combine", "positive"),
    [
        (lambda a, _: a, "text"),
        (lambda a, _: 0.5 * a, "text"),
        (lambda a, _: -a, "vision"),
        (lambda a, _: -0.5 * a, "vision"),
        (lambda a, _: -1.0 * (-2 * a), "text"),
        (lambda a, _: (-a).named("renamed"), "vision"),
        (lambda a, b: a + b, "text"),
        (lambda a, b: -a - b, "vision"),
        (lambda a, _: a - 0.4 * a, "text"),
        (lambda a, _: a - 3 * a, "vision"),
        (lambda a, b: a + -0.0 * b, "text"),
        (lambda a, _: -0.5 * a + 2 * a, "text"),
        (lambda a, b: a - b, None),  # of different directions: nobody knows
        (lambda a, b: 2 * (a - b), None),
        (lambda a, b: a + b.named("x") * -0.1, None),
    ],
)
def test_a_vector_knows_which_modality_it_pushes_toward(combine: Any, positive: str | None) -> None:
    one = make("one", seed=1)
    vector = combine(one, make("two", seed=2))
    vector = SteeringVector.from_bytes(vector.to_bytes())
    assert vector.positive == positive
    assert vector.kind == ("composed" if positive is None else one.kind)
    if positive is None:
        with pytest.raises(RequestError, match=r"'composed'\. .* signed 'scale' in 'steering.vectors'") as refused:
            Steer.to(vector, "text")
        assert (refused.value.param, refused.value.code) == ("steering.vector", "not_a_preference")
        assert Steer(vector, -1.0).way is None
        return
    for toward in ("text", "vision"):
        steer = Steer.to(vector, toward, 2.0)
        assert steer.scale == (2.0 if toward == positive else -2.0)
        assert (steer.toward, steer.way, steer.settings["strength"]) == (toward, toward, 2.0)
    assert Steer(vector, 0.5).way == positive
    assert Steer(vector, 0.0).way is None


def test_toward_is_the_same_push_by_a_vector_and_by_its_negative() -> None:
    vector = make()
    for toward in ("text", "vision"):
        assert torch.equal(Steer.to(-0.5 * vector, toward, 2.0).delta, Steer.to(vector, toward, 1.0).delta)
