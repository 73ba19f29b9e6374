"""A vector that is uploaded anew while clients stream with it: every answer is that of the one or the other."""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import requests
from flask import Flask

import steering
from tests.server.conftest import user
from tests.server.vectors.uploads import BINARY, QUESTION, ROUTE, MakeVector
from tests.waiting import PATIENCE

CLIENTS = 3


def test_a_vector_that_is_replaced_under_load_is_the_old_or_the_new_one(
    make_app: Callable[..., Flask],
    make_vector: MakeVector,
    serve_worker: Callable[[Flask], int],
    engine: steering.Engine,
) -> None:
    url = f"http://127.0.0.1:{serve_worker(make_app())}"
    contents = [make_vector(seed=seed).to_bytes() for seed in (1, 5)]
    body: dict[str, Any] = {
        "messages": [user(QUESTION)], "stream": True, "max_tokens": 12, "temperature": 0,
        "steering": {"vector": "mine", "toward": "text", "strength": 3.0},
        "logit_bias": dict.fromkeys(map(str, engine.mllm.stop_ids), -100),
    }  # fmt: skip

    def put(content: bytes) -> None:
        head = {"Content-Type": BINARY}
        assert (
            requests.post(f"{url}{ROUTE}?replace=true", data=content, headers=head, timeout=PATIENCE).status_code == 201
        )

    def answered() -> str:
        answer = requests.post(f"{url}/v1/chat/completions", json=body, timeout=PATIENCE)
        lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line]
        assert (answer.status_code, lines.pop()) == (200, "[DONE]"), answer.text
        (first, *_), *_ = events = [json.loads(line)["choices"] for line in lines]
        assert first["index"] == 0
        return "".join(choice["delta"].get("content", "") for (choice,) in events)

    alone = []
    for content in contents:
        put(content)
        alone.append(answered())
    assert alone[0] != alone[1]
    found: Counter[str] = Counter()
    enough = threading.Event()

    def streams() -> None:
        while not enough.is_set():
            found.update([answered()])

    with ThreadPoolExecutor(CLIENTS) as pool:
        clients = [pool.submit(streams) for _ in range(CLIENTS)]
        until = time.monotonic() + PATIENCE
        try:
            for number in itertools.count():
                put(contents[number % 2])
                enough.wait(0.05)
                if (number > 20 and min(found[one] for one in alone) > 4) or time.monotonic() > until:
                    break
        finally:
            enough.set()
        for client in clients:
            client.result()
    assert found.keys() == set(alone)
    assert min(found.values()) > 4, "both were in use, again and again"
