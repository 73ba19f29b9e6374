"""The choice of a replica: the home of a picture while it is not busy, else the least busy one."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray.serve")

from server.replicas.call import Call
from server.replicas.router import PictureRouter, home
from tests.server.replicas.loops import ran

PICTURES = [bytes([number, 7]) for number in range(200)]


def test_pictures_spread_and_few_move_when_a_replica_comes() -> None:
    two = {picture: home(picture, ["a", "b"]) for picture in PICTURES}
    three = {picture: home(picture, ["a", "b", "c"]) for picture in PICTURES}
    assert 70 < Counter(two.values())["a"] < 130
    moved = {picture for picture in PICTURES if two[picture] != three[picture]}
    assert {three[picture] for picture in moved} == {"c"}
    assert 35 < len(moved) < 100


class Router(PictureRouter):
    """With queues that the test states, and nothing of Ray behind it."""

    def __init__(self, queues: dict[str, int]):
        self.queues = queues
        self.initialize_state(slots=2)

    @property
    def replica_queue_len_cache(self) -> Any:
        return SimpleNamespace(get=lambda replica: self.queues.get(replica.unique_id))


def chosen(queues: dict[str, int], call: Call) -> list[list[str]]:
    every: Any = [SimpleNamespace(replica_id=SimpleNamespace(unique_id=name)) for name in ("a", "b", "c")]
    pending: Any = SimpleNamespace(args=[call], routing_context=SimpleNamespace(should_backoff=False))
    groups = ran(Router(queues).choose_replicas(every, pending))
    assert pending.routing_context.should_backoff
    return [sorted(replica.replica_id.unique_id for replica in group) for group in groups]


def test_a_busy_home_is_passed_over() -> None:
    call = Call("POST", "/v1/chat/completions", body=b'{"url": "data:image/png;base64,AAAA"}')
    assert call.picture is not None
    own, every = home(call.picture, ["a", "b", "c"]), ["a", "b", "c"]
    assert chosen({}, call) == chosen({own: 1}, call) == [[own], every]
    assert chosen({own: 2}, call) == [every]
    assert chosen({}, Call("GET", "/v1/models")) == [every]
