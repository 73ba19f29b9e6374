"""`helmsight doctor`: what it finds on a machine that is well, and of each part that is not."""

from __future__ import annotations

import json
import os
import shutil
import socket
import sys
from collections.abc import Callable
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from sqlalchemy import text

from server.access.named import new_key, write
from server.cli import main
from server.commands import findings
from server.engine import resources
from server.journal.database import Place, open_database
from server.journal.schema import VERSION_TABLE
from server.startup.openmp import set_wait_policy
from tests.server.fakes import checkpoint
from tests.server.journal.journals import put, row

Look = Callable[..., dict[str, list[dict[str, Any]]]]


@pytest.fixture
def look(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Look:
    """Return a function that runs the command, checks its exit status, and returns its findings by part."""
    monkeypatch.setenv("HOME", str(tmp_path))

    def look(*words: str, status: int = 0, load: bool = False) -> dict[str, list[dict[str, Any]]]:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = str(free.getsockname()[1])
        given = ["doctor", "--json", *([] if load else ["--no-load"]), "--device", "cpu", "--port", port, *words]
        assert main(given) == status
        page = json.loads(capsys.readouterr().out)
        assert page["ok"] is (status == 0)
        found: dict[str, list[dict[str, Any]]] = {}
        for one in page["findings"]:
            assert one["state"] == "ok" or one["advice"], "what is not well comes with what to do"
            found.setdefault(one["part"], []).append(one)
        return found

    return look


def test_keys_are_counted_and_a_broken_file_of_them_is_found(look: Look, tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    flags = ("--named-key-file", str(path), "--api-key", "sk-0123456789")
    (found,) = look(*flags, status=1)["keys"]
    assert (found["state"], found["advice"]) == ("problem", findings.ADVICE["keys"])
    write(path, [new_key("app")[1], new_key("other")[1]])
    (found,) = look(*flags)["keys"]
    assert (found["state"], found["said"]) == ("ok", "3 keys, 2 of them with a name")
    soon, late = (datetime.now(UTC) + timedelta(days=days) for days in (2, 20))
    write(path, [new_key("app", expires=soon)[1], new_key("other", expires=late)[1]])
    _, warned = look(*flags)["keys"]
    assert (warned["state"], warned["said"]) == ("warning", f"the key 'app' expires at {soon:%Y-%m-%d %H:%M} UTC")
    gone = datetime.now(UTC) - timedelta(minutes=5)
    write(path, [new_key("app", expires=gone)[1], new_key("other", expires=late)[1]])
    _, warned = look(*flags)["keys"]
    said = f"the key 'app' expired at {gone:%Y-%m-%d %H:%M} UTC: its requests are refused"
    assert (warned["state"], warned["said"]) == ("warning", said)


def test_a_machine_that_is_well(look: Look, vectors: Path) -> None:
    found = look("--vectors", str(vectors), "--threads", "1", "--no-compiled", load=True)
    assert list(found) == [
        "packages",
        "device",
        "threads",
        "openmp",
        "compiler",
        "model",
        "memory",
        "vectors",
        "presets",
        "prepared",
        "journal",
        "port",
    ]
    states = {part: {one["state"] for one in ones} for part, ones in found.items()}
    assert {part for part, seen in states.items() if seen != {"ok"}} == {"vectors"}  # one file is damaged
    assert found["model"][0]["said"].startswith("helmsight-demo: 8 layers, float32 on cpu, context of 2048 tokens")
    # keys and values of 8 layers, 2 KV heads, 32 wide, in float32: 2 x 8 x 2 x 32 x 4
    assert found["memory"][0]["said"].startswith(
        "64 slots of 2,048 tokens: 512 MiB for keys and values (4,096 bytes a token), "
    )
    assert found["journal"][0]["said"] == "off"
    assert found["presets"][0]["said"].startswith("@vision, @text, @auto, ")
    said = [one["said"] for one in found["vectors"]]
    assert said[0].startswith(f"{vectors / 'damaged.safetensors'}: Not a steering vector file")
    assert said[1] == f"{vectors}: modality-preference; of other models: stranger"


def test_a_model_that_lacks_something(look: Look, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder, ignore=shutil.ignore_patterns("vectors"))
    content = json.loads((folder / "calibration.json").read_text())
    (folder / "calibration.json").write_text(json.dumps(content | {"alarm": None}))
    given = ("--model", str(folder), "--vectors", str(tmp_path / "none"), "--no-compiled")
    found = {one["said"].partition(":")[0]: one for one in look(*given, load=True)["prepared"]}
    assert {name for name, one in found.items() if one["state"] == "warning"} == {"vector", "alarm"}
    assert found["alarm"]["said"] == "alarm: missing; readout alarm: it is null, so that no alert on it fires"
    assert found["alarm"]["advice"] == (
        f"'helmsight prepare {folder}' measures all that is missing, "
        f"'helmsight eval alarm --keep --model {folder}' this alone"
    )
    assert "unknown until it is loaded" in look(*given)["prepared"][0]["said"]


def test_the_page_is_a_line_a_finding_and_its_advice(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--no-load", "--model", "/nowhere", "--port", "0", "--device", "cpu"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert "ok       port      --port 0: a free port would be chosen" in lines
    assert "problem  model     the model '/nowhere' cannot be served: there is no such folder" in lines
    assert lines[lines.index(next(one for one in lines if one.startswith("problem"))) + 1].strip() == (
        "-> download it again, or choose another one with --model"
    )


def test_a_model_that_is_damaged(look: Look, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    (folder / "model.safetensors").write_bytes(b"cut")
    (found,) = look("--model", str(folder), status=1, load=True)["model"]
    assert found["state"] == "problem"
    assert "model.safetensors is damaged" in found["said"]


def test_settings_that_are_wrong(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HELMSIGHT_PROT", "1")
    (warned,) = look()["settings"]
    assert (warned["state"], warned["said"]) == ("warning", "HELMSIGHT_PROT is not a setting")
    assert warned["advice"] == "did you mean HELMSIGHT_PORT?"
    monkeypatch.delenv("HELMSIGHT_PROT")
    monkeypatch.setenv("HELMSIGHT_SLOTS", "0")
    found = look(status=1)
    assert list(found) == ["packages", "settings"]
    assert "'slots' (environment)" in found["settings"][0]["said"]


def test_versions_are_compared_with_those_that_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    stated = ["torch<3,>=99", "numpy>=1", "no-such-package>=1", "gguf>=99; extra == 'gguf'"]
    monkeypatch.setattr(findings.metadata, "requires", lambda name: {"helmsight": stated}[name])
    found = {one.said: one for one in findings.packages()}
    assert [one.state for one in found.values()] == ["problem", "warning", "ok"]
    assert found["no-such-package is missing"].advice == "pip install 'no-such-package>=1'"
    assert "is not among the tested versions, <3,>=99" in list(found)[1]


def test_more_threads_than_processors_are_warned_of(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    cores = len(os.sched_getaffinity(0))
    (found,) = look("--threads", str(cores + 1))["threads"]
    assert found["state"] == "warning"
    monkeypatch.setattr(resources, "cpu_quota", lambda: 0.5)
    (found,) = look("--threads", "2")["threads"]
    assert found["advice"].startswith("--threads 1:")
    assert "quota of 0.5" in found["said"]


@pytest.mark.parametrize("name", ["OMP_WAIT_POLICY", "GOMP_SPINCOUNT"])
def test_threads_that_spin_are_warned_of(name: str) -> None:
    assert findings.openmp({name: {"OMP_WAIT_POLICY": "active", "GOMP_SPINCOUNT": "infinity"}[name]}).state == "warning"
    assert findings.openmp({name: "7"}).state == "ok"
    environ: dict[str, str] = {}
    set_wait_policy(environ)
    assert findings.openmp(environ).state == "ok"


def test_a_compiler_is_missed_where_steps_could_be_compiled(look: Look, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    (found,) = look("--compiled")["compiler"]
    assert (found["state"], found["advice"]) == ("warning", "install /nowhere/c++")
    assert look("--no-compiled")["compiler"][0]["state"] == "ok"
    monkeypatch.setenv("CXX", sys.executable)
    (found,) = look("--compiled")["compiler"]
    assert (found["state"], found["said"]) == ("ok", f"{sys.executable}, which compiles steps")


def test_a_journal_is_counted_and_left_as_it_is(look: Look, place: str) -> None:
    assert look("--journal", place)["journal"][0]["said"].endswith(": does not exist yet; the first start creates it")
    database = open_database(Place.of(place))
    put(database, row(0), row(1))
    head = look("--journal", place)["journal"][0]["said"]
    assert head.endswith(", 2 rows")
    with database.writer.begin() as connection:
        connection.execute(text(f"UPDATE {VERSION_TABLE} SET version_num = '0001'"))
    assert "revision 0001, 2 rows" in look("--journal", place)["journal"][0]["said"]
    with closing(database.engine.connect()) as connection:
        assert connection.execute(text(f"SELECT version_num FROM {VERSION_TABLE}")).scalar_one() == "0001"
    database.close()


def test_what_is_no_journal_is_a_problem(look: Look, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no database")
    (found,) = look("--journal", str(tmp_path / "file"), status=1)["journal"]
    assert "not a journal" in found["said"]


def test_a_port_that_is_taken_is_a_problem_unless_a_server_of_ours_has_it(
    look: Look, app: Flask, live: Callable[[Flask], str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        (found,) = look("--port", str(listening.getsockname()[1]), status=1)["port"]
    assert (found["state"], found["advice"]) == ("problem", findings.ADVICE["port"])
    (found,) = look("--port", live(app).rpartition(":")[2])["port"]
    assert (found["state"], found["advice"]) == ("warning", "it is a Helmsight server, which is ready")


def test_presets_of_the_settings(look: Look, vectors: Path, tmp_path: Path) -> None:
    config = tmp_path / "helmsight.toml"
    words = ("--config", str(config), "--vectors", str(vectors))
    config.write_text('[presets.calm]\nsteering = {vector = "nobody"}\n[presets.keen]\nsteering = true\n')
    missing, own = look(*words)["presets"]
    assert missing["state"] == "warning"
    assert missing["said"].startswith(f"@calm (config file {config}): There is no steering vector 'nobody'")
    assert own["said"].startswith("from the settings: @calm, @keen; ")
    config.write_text("[presets.calm]\nsage = {see = {alfa = 1}}\n")
    (wrong,) = look(*words, status=1)["presets"]
    assert wrong["state"] == "problem"
    assert wrong["said"].startswith(
        f"preset 'calm' (config file {config}): 'sage.see.alfa' is unknown; allowed: alpha, "
    )


def test_a_disk_that_is_nearly_full_is_told(look: Look, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(findings, "ROOM", 2**80)
    first, *_ = look("--journal", str(tmp_path / "not" / "there" / "journal.db"))["journal"]
    assert first["state"] == "warning"
    assert "MiB left" in first["said"]


def test_a_database_that_cannot_be_reached_is_not_to_be_moved_away(look: Look) -> None:
    (found,) = look("--journal", "postgresql://nobody@127.0.0.1:1/none", status=1)["journal"]
    assert "database server" in found["advice"]


def test_a_context_that_the_model_has_not_is_told(look: Look) -> None:
    first, second = look("--max-length", "999999", load=True)["model"]
    assert (first["state"], second["state"]) == ("warning", "ok")
    assert first["said"] == "--max-length 999999 exceeds the model's context of 2048 tokens"
