"""Many answers at once on a server with few cache blocks: preempted, abandoned, and beside clients of vLLM's own routes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import requests

import steering
from served import asked
from served.conftest import connected
from served.serving import LAYERS, counters, served, steered_steps, steps_of
from steering import Generate, Icd, Request, RequestError, Sampling, Steer, SteeringVector, Think, Vcd
from steering.front.completion import Completion
from steering.vllm.client import VllmClient
from tests.waiting import wait_for

FLAGS = (
    "--max-model-len", "256", "--num-gpu-blocks-override", "15", "--max-num-batched-tokens", "64",
)  # fmt: skip
"""Fourteen blocks of 32 tokens, which few answers fit into; a prompt has about 70, and a pair of long ones never fits.

A prompt takes two steps or more, and so does what is computed again of a preempted answer.
"""


@pytest.fixture(scope="module", params=LAYERS)
def mode(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def few(mode: str, own: steering.Engine, folder: Path, work: Path) -> Iterator[VllmClient]:
    with served(folder, work, *LAYERS[mode], *FLAGS) as url, connected(own, folder, url) as client:
        yield client


def url_of(client: VllmClient) -> str:
    return next(iter(client.servers)).url


def left_behind(client: VllmClient) -> list[float]:
    """Return what a server has of answers before, when it has given another one: workers hear with its steps what has ended.

    These are answers in vLLM, the share of the cache, kept measurements, places of pairs, and answers in the worker, which
    may have the last one still.
    """
    client.generate([asked.request(0)])
    counts, values = steps_of(url_of(client)), counters(url_of(client))
    queued = values["vllm:num_requests_running"] + values["vllm:num_requests_waiting"]
    return [queued, values["vllm:kv_cache_usage_perc"], counts["kept"], counts["pairs"], max(0, counts["running"] - 1)]


def test_preempted_pairs_end_with_the_same_tokens(
    few: VllmClient, own: steering.Engine, vector: SteeringVector, mode: str
) -> None:
    long = Sampling(max_tokens=70, temperature=0.0, logprobs=1, ignore_eos=True)
    choices = (
        [Icd()],
        [Steer.to(vector, "text")],
        [Vcd()],
        [],
        [Generate(refresh=20)],
        [Icd(), Steer.to(vector, "vision")],
    )
    listed = {
        f"{seed}": Request(list(asked.conversation(seed)), long, list(choices[seed % 6]), diagnose=["focus", "drift"])
        for seed in range(12)
    }
    before = counters(url_of(few))["vllm:num_preemptions_total"]
    with steered_steps(url_of(few), mode):
        found = dict(zip(listed, few.generate(listed.values()), strict=True))
    assert counters(url_of(few))["vllm:num_preemptions_total"] > before
    expected = dict(zip(listed, own.generate(listed.values()), strict=True))
    assert not list(asked.faults(found, expected))


@pytest.fixture(scope="module")
def mixed(own: steering.Engine, vector: SteeringVector) -> tuple[dict[str, Request], dict[str, steering.Result]]:
    """Return two hundred requests and our own engine's answers."""
    listed = asked.mixed(vector, 200)
    return listed, dict(zip(listed, own.generate(listed.values()), strict=True))


def test_two_hundred_mixed_requests(
    few: VllmClient, mixed: tuple[dict[str, Request], dict[str, steering.Result]], mode: str
) -> None:
    listed, expected = mixed
    with steered_steps(url_of(few), mode):
        found = dict(zip(listed, few.generate(listed.values()), strict=True))
    assert not list(asked.faults(found, expected))


def test_abandoned_answers_leave_nothing_behind(few: VllmClient, own: steering.Engine, vector: SteeringVector) -> None:
    """Answers of each kind are given up at each stage: before they begin, within their prompt, and after 1 and 6 tokens.

    They all run at once, where few fit, so that some wait for blocks, some for their other side, and some are preempted.
    """
    kinds: list[list[Any]] = [
        [], [Steer.to(vector, "text")], [Icd()], [Vcd(), Steer.to(vector, "vision")], [Generate(refresh=3)],
        [Think(gamma=0.5, threshold=0.05)],
    ]  # fmt: skip
    long = Sampling(max_tokens=120, temperature=0.0, ignore_eos=True)
    listed = [
        (tokens, Request(list(asked.conversation(place)), long, kind, diagnose=["focus", "drift"]))
        for tokens in (None, 0, 1, 6)
        for place, kind in enumerate(kinds)
    ]
    begun = [(tokens, request, few.submit(request)) for tokens, request in listed]

    def abandon(tokens: int | None, request: Request, completion: Completion) -> None:
        """Give an answer up while it runs; one that has ended before this thread ran again is asked for once more."""
        running = False
        while not running:
            if tokens == 0:
                time.sleep(0.05)
            chunks = iter(completion)
            for _ in range(tokens or 0):
                next(chunks, None)
            running = not completion.done
            completion.cancel()
            if not running:
                completion = few.submit(request)

    with ThreadPoolExecutor(len(begun)) as threads:
        list(threads.map(abandon, *zip(*begun, strict=True)))
    wait_for(lambda: not few.stats()["running"], seconds=120)  # whose pictures may be in work while they are given up
    wait_for(lambda: not any(left_behind(few)), seconds=120)
    after = asked.contrasted(vector, 2)
    found = dict(zip(after, few.generate(after.values()), strict=True))
    assert not list(asked.faults(found, {name: own.generate([request])[0] for name, request in after.items()}))


def test_a_pair_that_can_never_fit_is_refused(few: VllmClient) -> None:
    body = Request(list(asked.conversation(0, images=3)), Sampling(max_tokens=None), [Icd()])  # to the context's end
    with pytest.raises(RequestError, match="tokens of the cache"):
        few.generate([body, body])


def test_other_clients_cannot_write_plans(few: VllmClient, own: steering.Engine, vector: SteeringVector) -> None:
    """Neither a plan in `vllm_xargs` nor nonsense in its place does anything, and the server lives on."""
    answers = set()
    for extra in (None, {"helmsight": "{}"}, {"helmsight": 3}, {"helmsight": ["number", "x"]}):
        body = {"model": "helmsight", "prompt": "What is", "max_tokens": 4, "temperature": 0, "vllm_xargs": extra}
        response = requests.post(f"{url_of(few)}/v1/completions", json=body, timeout=60)
        assert response.status_code == 200, response.text
        answers.add(response.json()["choices"][0]["text"])
    assert len(answers) == 1
    listed = asked.contrasted(vector, 1)
    found = dict(zip(listed, few.generate(listed.values()), strict=True))
    assert not list(asked.faults(found, {name: own.generate([request])[0] for name, request in listed.items()}))


@pytest.mark.parametrize(
    ("changes", "param"),
    [
        ({"prompt": {"ids": [5, 6, 7], "length": 3, "sha256": "0" * 64}}, "prompt.sha256"),
        ({"attention": {"labels": [[0, 2]]}}, "attention.labels"),
        ({"attention": {"labels": [[0, 2], [500, 1]]}}, "attention.labels"),
        ({"think": {"gamma": 0.5, "thresholds": [0.1]}}, "think.thresholds"),
        ({"steering": {"classes": 1, "vectors": []}}, "prompt.classes"),
        ({"twin": {"rule": {"weight": 1.0}}}, "twin"),
        ({"images": ["no picture"]}, "images[0]"),
        ({"unknown": 1}, "unknown"),
    ],
)
def test_what_contradicts_itself_is_refused_by_its_field(
    few: VllmClient, changes: dict[str, object], param: str
) -> None:
    known = "2e4c4603cb0dea8636f8e802bfa0f24caef5f9943377f91d89fd6fbd9577cd1c"
    body = {"prompt": {"ids": [5, 6, 7], "length": 3, "sha256": known}, "sampling": {"max_tokens": 2}, **changes}
    response = requests.post(f"{url_of(few)}/v1/helmsight/answer", json=body, timeout=60)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == param
