"""The fields by which a question's interventions are sent to a server."""

from __future__ import annotations

import pytest

from probes.answering.base import Push
from probes.answering.wire import fields, steering
from steering import See, Think, Vcd
from steering.protocol.intervention_spec import Options


class Top(Options):
    """`count` is five unless it is said to be none."""

    path = ("top",)
    count: int | None = 5
    most: int | None = None


@pytest.mark.parametrize(("given", "said"), [({}, 5), ({"count": None}, None), ({"count": 2}, 2)])
def test_none_is_said_where_it_is_not_the_default(given: dict[str, int | None], said: int | None) -> None:
    assert fields([Top(**given)]) == {"top": {"count": said}}


def test_members_of_a_group_that_are_not_asked_for_are_off() -> None:
    said = fields([See(alpha=0.2), Think()])["sage"]
    assert (said["see"]["alpha"], said["think"]["gamma"], said["generate"]) == (0.2, 0.9, False)
    assert fields([Vcd()])["contrast"]["kind"] == "vcd"
    assert fields([]) == {}


def test_a_push_by_the_vectors_own_sign_is_said_as_a_scale() -> None:
    layers = {"layers": [2]}
    assert steering(Push("minus", "v", 0.5, (2,)), "v") == {"vectors": [{"name": "v", "scale": -0.5, **layers}]}
    assert steering(Push("plus", "v"), "v") == {"vectors": [{"name": "v", "scale": 1.0}]}
    assert steering(Push("text", "v", 0.5, (2,)), "v") == {"vector": "v", "toward": "text", "strength": 0.5, **layers}
