"""Helmsight itself, served by a process of its own, answers as its engine does."""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest
import requests
import torch

import steering
from probes.answering.base import Push, Question
from probes.answering.endpoint import Endpoint
from probes.answering.engine import InProcess
from server import cli
from steering import Generate, Icd, Options, Pai, See, Think
from tests import families
from tests.forked import forked
from tests.probes.answering.scripted_server import vector


@pytest.fixture(scope="module")
def model(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a tiny checkpoint whose defaults have a penalty, as those of the large Qwens do."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(families.checkpoint("qwen2_vl", root), folder)
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"repetition_penalty": 1.5}))
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> steering.Engine:
    engine = steering.Engine(steering.load(model, device="cpu"), slots=4, max_length=512)
    mllm = engine.mllm
    for name in ("push", "other"):
        made = vector(name, mllm.num_layers, mllm.hidden_size, mllm.fingerprint)
        made.save(model / "vectors" / f"{name}.safetensors")
    return engine


@pytest.fixture(scope="module")
def helmsight(model: Path, engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start `helmsight serve` in a process and yield its URL: this room knows nothing of the server's insides."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    words = {
        "model": model, "device": "cpu", "slots": 4, "max-length": 512, "port": 0, "journal": "off", "threads": 1,
        "vectors": log.parent, "api-key": "key-of-the-test",
    }  # fmt: skip
    command = ["serve", *(f"--{name}={value}" for name, value in words.items())]

    def serve() -> None:
        for name in [name for name in os.environ if name.startswith("HELMSIGHT_")]:
            del os.environ[name]
        os.environ["HELMSIGHT_COMPILED"] = "false"
        cli.main(command)

    with forked(serve, log) as process:
        yield wait_until_ready(process, log)
        process.terminate()
        process.join(20)


def wait_until_ready(process: BaseProcess, log: Path) -> str:
    deadline = time.monotonic() + 120
    while process.is_alive() and time.monotonic() < deadline:
        if log.exists() and (found := re.search(r"Listening at: (http://\S+)", log.read_text())):
            with suppress(requests.RequestException):  # it answers when it has loaded the model, which may take long
                if requests.get(found[1] + "/ready", timeout=5).ok:
                    return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def questions(push: Push | None) -> list[Question]:
    out = []
    for number in range(3):
        text = f"Text context: the ball number {number} is blue.\nWhat colour is the ball?"
        parts = [{"type": "image", "image": families.example_image(number)}, {"type": "text", "text": text}]
        out.append(Question([{"role": "user", "content": parts}], push, max_tokens=12))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("toward", [None, "vision", "text", "auto"])
def test_a_server_answers_as_its_engine_does(helmsight: str, engine: steering.Engine, toward: Any) -> None:
    there = Endpoint(helmsight, api_key="key-of-the-test", concurrency=2)
    push = None if toward is None else Push(toward, steering.VectorStore(engine.mllm.path / "vectors").get("push"), 3.0)
    here = list(InProcess(engine).answers(questions(push)))
    replies = list(there.answers(questions(push)))
    assert [reply.text for reply in replies] == [reply.text for reply in here]
    for reply, expected in zip(replies, here, strict=True):
        assert expected.attention_ratio is not None
        assert reply.attention_ratio == pytest.approx(expected.attention_ratio, abs=1e-4)
        assert (reply.auto is None) == (expected.auto is None) == (toward != "auto")
        if toward == "auto":
            assert list(reply.auto) == list(expected.auto)
            for name, value in expected.auto.items():
                exact = value is None or isinstance(value, str)
                assert reply.auto[name] == (
                    value if exact else pytest.approx(value, rel=1e-3, abs=0)
                )  # 1e-113 at least
    if push is not None:  # else the comparison would prove nothing
        assert here != list(InProcess(engine).answers(questions(None)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [(See(alpha=0.4), Generate(refresh=2)), (Think(gamma=0.1, threshold=0.0),), (Icd(),), (Pai(),)]
)
def test_a_server_intervenes_as_its_engine_does(
    helmsight: str, engine: steering.Engine, what: tuple[Options, ...]
) -> None:
    there = Endpoint(helmsight, api_key="key-of-the-test", concurrency=2)
    plain = [replace(one, diagnose=None) for one in questions(None)]
    changed = [replace(one, interventions=what) for one in plain]
    here = list(InProcess(engine).answers(changed))
    assert list(there.answers(changed)) == here != list(InProcess(engine).answers(plain))


@pytest.mark.slow
def test_a_server_tells_what_it_is_and_refuses_in_its_own_words(helmsight: str, engine: steering.Engine) -> None:
    there = Endpoint(helmsight, api_key="key-of-the-test")
    assert there.is_helmsight
    assert there.identity == f"{helmsight}/v1 tiny {engine.mllm.fingerprint}"
    assert set(there.vectors) == {"push", "other"}
    fetched = there.vector("push")
    torch.testing.assert_close(fetched.delta(1.0), vector("push", *fetched.direction.shape).delta(1.0), rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no vector 'none'; it has"):
        there.vector("none")
    with pytest.raises(ValueError, match=r"status 400: 'steering\.layers' must be layer numbers from 0 to 2"):
        list(there.answers(questions(Push("text", "push", layers=(9,)))))
    with pytest.raises(ValueError, match="status 401: An API key is required"):
        Endpoint(helmsight)
