"""Answers of vLLM servers in their modes are those of our own engine: tokens equal, attention factors within 1e-5."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import steering
from served import asked
from served.conftest import connected
from served.serving import LAYERS, counters, served, steered_steps
from steering import Diagnose, Icd, Inapplicable, Request, Sampling, Steer, SteeringVector
from steering.auto.reliability import Auto
from steering.front.turn import decide
from steering.vllm.client import VllmClient
from tests.steering.parallel.asking import requests
from tests.steering.vllm.test_answers import more_requests

MODES = {
    **LAYERS,
    "chunked": [*LAYERS["eager"], "--max-num-batched-tokens", "64"],
    # The embedded model's vision tower has three heads.
    "parallel": [*LAYERS["eager"], "--tensor-parallel-size", "2", "--mm-encoder-tp-mode", "data"],
}
Answers = dict[str, steering.Result]


@pytest.fixture(scope="module", params=MODES)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def client(mode: str, own: steering.Engine, folder: Path, work: Path) -> Iterator[VllmClient]:
    with served(folder, work, *MODES[mode]) as url, connected(own, folder, url) as client:
        yield client


@pytest.fixture(scope="session")
def common(own: steering.Engine, vector: SteeringVector) -> dict[str, Request]:
    """Return requests with what front and engine can do in general."""
    listed = {**requests(own.mllm), **more_requests(vector, min(own.mllm.stop_ids))}
    return {name: request for name, request in listed.items() if name != "sampled"}


@pytest.fixture(scope="session")
def expected(own: steering.Engine, vector: SteeringVector) -> Answers:
    """Return our own engine's answers, each computed alone."""
    listed = {**asked.steered(vector), **asked.contrasted(vector)}
    return {name: own.generate([request])[0] for name, request in listed.items()}


def test_steering_moves_answers(expected: Answers) -> None:
    """Otherwise the comparisons below would prove nothing."""
    texts = {name: result.choices[0].text for name, result in expected.items()}
    assert sum(texts[f"text {seed}"] != texts[f"vision {seed}"] for seed in range(8)) >= 4


def test_steered_answers_in_one_batch(client: VllmClient, vector: SteeringVector, expected: Answers) -> None:
    listed = asked.steered(vector)
    found = dict(zip(listed, client.generate(listed.values()), strict=True))
    assert not list(asked.faults(found, expected))


def test_contrast_pairs_beside_single_answers(client: VllmClient, vector: SteeringVector, expected: Answers) -> None:
    listed = asked.contrasted(vector)
    found = dict(zip(listed, client.generate(listed.values()), strict=True))
    assert not list(asked.faults(found, expected))


def test_what_else_requests_ask_for(client: VllmClient, own: steering.Engine, common: dict[str, Request]) -> None:
    served: dict[str, Any] = {}
    for name, request in common.items():
        try:
            client.inspect(request)
        except Inapplicable:
            continue
        served[name] = request
    assert len(served) == 36
    expected = {name: own.generate([request])[0] for name, request in served.items()}
    found = dict(zip(served, client.generate(served.values()), strict=True))
    assert not list(asked.faults(found, expected))
    streamed = {name: client.submit(request) for name, request in served.items()}
    assert not list(asked.faults({name: answer.result() for name, answer in streamed.items()}, expected))


def test_cached_keys_of_other_interventions_are_not_used(
    client: VllmClient, own: steering.Engine, vector: SteeringVector
) -> None:
    """Prompts are steered before the same ones are not: steered answers take nothing from the cache, but fill it."""
    steers = [[Steer.to(vector, "text", 2.0)], [Steer.to(vector, "vision", 2.0)], [], []]
    listed = {f"{i} {j}": asked.request(40 + i, *steer) for i in range(4) for j, steer in enumerate(steers)}
    url = client.servers.well[0].url
    before = counters(url)
    found = {name: client.generate([request])[0] for name, request in listed.items()}
    assert not list(asked.faults(found, {name: own.generate([request])[0] for name, request in listed.items()}))
    read = Diagnose(["focus"])
    listed = {name: asked.request(40, diagnose=read) for name in ("first", "again")}
    found = {name: client.generate([request])[0] for name, request in listed.items()}
    assert not list(asked.faults(found, {name: own.generate([request])[0] for name, request in listed.items()}))
    for listed in ({"once": asked.request(41)}, {"scored": asked.request(41, reply="The ring is white.")}):
        found = {name: client.generate([request])[0] for name, request in listed.items()}
        assert not list(asked.faults(found, {name: own.generate([request])[0] for name, request in listed.items()}))
    after = counters(url)
    assert after["vllm:prefix_cache_hits_total"] > before["vllm:prefix_cache_hits_total"]


def test_steered_steps_run_compiled(client: VllmClient, vector: SteeringVector, mode: str) -> None:
    with steered_steps(client.servers.well[0].url, mode):
        client.generate([asked.request(seed, Steer.to(vector, "text")) for seed in range(4)])


def test_seeds_decide_what_is_drawn(client: VllmClient, vector: SteeringVector) -> None:
    """Equal seeds draw the same, beside other answers and in pairs too; others, and answers of one request, do not."""

    def drawn(seed: int, n: int = 1, *interventions: Any) -> Request:
        sampling = Sampling(max_tokens=10, temperature=1.5, seed=seed, ignore_eos=True)
        return Request(list(asked.conversation(3)), sampling, [Steer.to(vector, "text"), *interventions], n=n)

    def tokens(result: steering.Result) -> list[tuple[int, ...]]:
        return [tuple(choice.token_ids) for choice in result.choices]

    first, other, several, pair = map(tokens, client.generate([drawn(1), drawn(90), drawn(1, 3), drawn(1, 1, Icd())]))
    (again,), (pair_again,) = tokens(client.generate([drawn(1)])[0]), tokens(client.generate([drawn(1, 1, Icd())])[0])
    assert first == [again] == several[:1]
    assert pair == [pair_again] != first
    assert len({*first, *other, *several}) == 4


def test_an_automatic_direction_is_found(client: VllmClient, own: steering.Engine, vector: SteeringVector) -> None:
    request = asked.request(2, Auto(vector))
    found, expected = ({"auto": engine.generate([decide(engine, request)])[0]} for engine in (client, own))
    assert not list(asked.faults(found, expected))
