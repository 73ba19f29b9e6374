"""A `vllm serve` that the server starts: it is kept running, asked for a key, and ends with the server."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from server.engine import launched as launched_module
from server.engine.launched import LaunchedServer, command_of, executable
from server.engine.local import load_without_weights
from server.engine.runtime import load
from server.process import engine_checks
from server.settings import Settings
from steering import Request, Sampling
from tests.server.engine.vllm_stub import write_environment
from tests.steering.parallel.asking import small
from tests.steering.vllm.computing import PlainAnswers
from tests.steering.vllm.fake import FakeVllm, facts_of
from tests.waiting import PATIENCE, is_alive, wait_for

ROOT = Path(__file__).parents[3]


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., LaunchedServer]]:
    monkeypatch.setattr(launched_module, "PAUSE", 0.05)
    started: list[LaunchedServer] = []

    def launched(program: str, **options: Any) -> LaunchedServer:
        started.append(LaunchedServer([sys.executable, "-c", program], dict(os.environ), **options))
        started[-1].start()
        return started[-1]

    yield launched
    for one in started:
        one.stop()


def pids_in(folder: Path) -> list[int]:
    return sorted(int(file.name) for file in folder.iterdir())


SLEEPS = "import os, pathlib, time; pathlib.Path({!r}, str(os.getpid())).touch(); time.sleep(600)"
FORKS = "import subprocess, sys; subprocess.run([sys.executable, '-c', {!r}])"


def test_it_is_started_again_where_it_ends_and_stopped_with_what_it_has_started(
    launch: Callable[..., LaunchedServer], tmp_path: Path
) -> None:
    server = launch(FORKS.format(SLEEPS.format(str(tmp_path))))
    wait_for(lambda: pids_in(tmp_path))
    (first,) = pids_in(tmp_path)
    server.ready()
    assert server._process is not None
    os.killpg(server._process.pid, signal.SIGKILL)
    wait_for(lambda: len(pids_in(tmp_path)) == 2)
    second = next(pid for pid in pids_in(tmp_path) if pid != first)
    assert is_alive(second)
    server.stop()
    wait_for(lambda: not is_alive(second))
    assert not server.given_up


def test_it_is_started_again_as_often_as_it_was_ready(launch: Callable[..., LaunchedServer], tmp_path: Path) -> None:
    server = launch(SLEEPS.format(str(tmp_path)))
    for count in range(1, launched_module.TRIES + 2):
        wait_for(lambda count=count: len(pids_in(tmp_path)) == count)  # type: ignore[misc]
        server.ready()
        assert server._process is not None
        os.killpg(server._process.pid, signal.SIGKILL)
    wait_for(lambda: len(pids_in(tmp_path)) == launched_module.TRIES + 2)
    assert not server.given_up


def test_what_a_killed_process_leaves_behind_is_killed(launch: Callable[..., LaunchedServer], tmp_path: Path) -> None:
    server = launch(FORKS.format(SLEEPS.format(str(tmp_path))))
    wait_for(lambda: pids_in(tmp_path))
    (engine,) = pids_in(tmp_path)
    server.ready()
    assert server._process is not None
    server._process.kill()  # and not what it has started
    wait_for(lambda: not is_alive(engine))
    wait_for(lambda: len(pids_in(tmp_path)) == 2)


def test_it_is_given_up_where_it_ends_before_it_is_ready(launch: Callable[..., LaunchedServer]) -> None:
    failed = threading.Event()
    server = launch("raise SystemExit(3)", failed=failed.set)
    assert failed.wait(PATIENCE)
    assert server.given_up


@pytest.mark.parametrize("deaf", ["", "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN); "])
def test_it_ends_with_the_process_that_started_it(tmp_path: Path, deaf: str) -> None:
    started_program = FORKS.format(deaf + SLEEPS.format(str(tmp_path)))
    program = (
        "import os, sys, time; from server.engine import launched; launched.LAST = 0.3; "
        f"launched.LaunchedServer([sys.executable, '-c', {started_program!r}], dict(os.environ)).start(); "
        "time.sleep(600)"
    )
    pid = os.spawnv(os.P_NOWAIT, sys.executable, [sys.executable, "-c", program])
    wait_for(lambda: pids_in(tmp_path))
    (started,) = pids_in(tmp_path)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    wait_for(lambda: not is_alive(started))


def test_one_command_serves_over_a_vllm_that_is_started_again_and_ends_with_it(
    tmp_path: Path, kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched_module, "PAUSE", 0.05)
    monkeypatch.setenv("HELMSIGHT_API_KEYS", "mine")
    monkeypatch.setenv("HOME", str(tmp_path))  # which has no vectors of the user
    model = small(tmp_path / "model")
    answers = PlainAnswers(model, [model / "vectors"], load_without_weights(Settings(model=str(model))))
    vllm = FakeVllm(answers.answer, facts_of(answers, slots=2)).start()
    environment = write_environment(tmp_path / "env", ROOT, vllm.server.server_port)
    settings = Settings(engine="vllm", vllm_env=str(environment), model=str(model), slots=2, vectors=())
    engine_checks.check(settings)
    serving = load(settings)
    engine: Any = serving.engine
    try:
        (note,) = notes_in(environment)
        command = " ".join(note["arguments"])
        assert all(part in command for part in (f"serve {model} ", "--host 127.0.0.1 ", "--max-num-seqs 2 "))
        key, url = note["environment"]["VLLM_API_KEY"], next(iter(engine._client.servers)).url
        assert len(key) > 30
        assert key not in " ".join([*note["arguments"], *sys.argv])
        assert "HELMSIGHT_API_KEYS" not in note["environment"]
        assert note["environment"]["HELMSIGHT_VECTORS"] == str(model / "vectors")
        with pytest.raises(HTTPError, match="401"):
            urlopen(f"{url}/v1/helmsight/facts")
        asked = Request([{"role": "user", "content": "Hi!"}], Sampling(max_tokens=3, ignore_eos=True))
        tokens = engine._client.submit(asked).result().choices[0].token_ids
        (environment / "wait").touch()
        os.kill(note["pid"], signal.SIGKILL)
        wait_for(lambda: not engine.healthy)
        (environment / "wait").unlink()
        wait_for(lambda: engine.healthy)
        assert engine._client.submit(asked).result().choices[0].token_ids == tokens
        pids = [note["pid"] for note in notes_in(environment)]
        assert len(pids) == 2
    finally:
        engine.stop()
        vllm.stop()
    assert not any(map(is_alive, pids))


def notes_in(environment: Path) -> list[Any]:
    return [json.loads(file.read_text()) for file in environment.glob("*.json")]


def test_the_command_has_the_settings(tmp_path: Path) -> None:
    settings = Settings(
        engine="vllm", vllm_env=str(tmp_path), vllm_args="--tensor-parallel-size 2 --hf-overrides '{\"a\": 1}'",
        slots=8, max_length=512, dtype="bfloat16", max_images=3,
    )  # fmt: skip
    command = command_of(settings, "a/model", 8123)
    assert command[0] == str(executable(settings)) == str(tmp_path / "bin" / "python")
    assert command[-4:] == ["--tensor-parallel-size", "2", "--hf-overrides", '{"a": 1}']
    flags = dict(zip(command[5::2], command[6::2], strict=False))
    assert command[3:5] == ["serve", "a/model"]
    assert {name: flags[name] for name in ("--port", "--max-num-seqs", "--max-model-len", "--dtype")} == {
        "--port": "8123", "--max-num-seqs": "8", "--max-model-len": "512", "--dtype": "bfloat16",
    }  # fmt: skip
    assert json.loads(flags["--limit-mm-per-prompt"]) == {"image": 3, "video": 0}
