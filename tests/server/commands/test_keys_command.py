"""`helmsight keys`: what it prints, keeps and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from server.access import named
from server.access.ring import KeyRing
from server.cli import main

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_printed_once_and_its_digest_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--role", "use", "--role", "journal", "--rate", "60/minute", "--concurrent", "4", "--file", str(path))
    assert main(["keys", "add", "app", *flags]) == 0
    key = capsys.readouterr().out.strip()
    assert len(key) > 40
    text = path.read_text()
    assert key not in text
    (kept,) = json.loads(text)["keys"]
    assert kept["digest"] == sha256(key.encode()).hexdigest()
    assert (kept["roles"], kept["rate"], kept["concurrent"]) == (["use", "journal"], "60/minute", 4)
    assert path.stat().st_mode & 0o777 == 0o600
    holder = KeyRing(named=str(path)).holder(key)
    assert holder is not None
    assert (holder.name, holder.roles, holder.concurrent) == ("app", {"use", "journal"}, 4)
    assert KeyRing(named=str(path)).holder(key[:-1]) is None
    assert main(["keys", "list", "--file", str(path)]) == 0
    listed = capsys.readouterr().out
    assert "60/minute" in listed
    assert kept["digest"] not in listed


def test_a_key_is_replaced_and_revoked(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path_flag = ("--file", str(path))
    assert main(["keys", "add", "app", *path_flag]) == 0
    assert main(["keys", "add", "other", *path_flag]) == 0
    path.chmod(0o640)
    assert main(["keys", "add", "app", "--replace", *path_flag]) == 0
    first, other, second = capsys.readouterr().out.split()
    assert path.stat().st_mode & 0o777 == 0o640
    ring = KeyRing(named=str(path))
    assert [ring.holder(key) is None for key in (first, other, second)] == [True, False, False]
    assert main(["keys", "revoke", "app", *path_flag]) == 0
    assert [ring.holder(key) is None for key in (other, second)] == [False, True]


def test_a_key_that_is_rotated_keeps_its_roles_and_limits_unless_others_are_given(path: Path) -> None:
    limits = ("--role", "journal", "--rate", "60/minute", "--concurrent", "4")

    def rotated(*arguments: str) -> tuple[list[str], str | None, int | None]:
        assert main(["keys", "add", "app", "--replace", *arguments, "--file", str(path)]) == 0
        (kept,) = json.loads(path.read_text())["keys"]
        return kept["roles"], kept.get("rate"), kept.get("concurrent")

    assert main(["keys", "add", "app", *limits, "--file", str(path)]) == 0
    assert rotated() == (["journal"], "60/minute", 4)
    assert rotated("--rate", "5/second") == (["journal"], "5/second", 4)
    assert rotated("--role", "use", "--rate", "any", "--concurrent", "0") == (["use"], None, None)


def test_keys_that_are_made_at_once_are_all_kept(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def slowly(*given: Any) -> Any:
        sleep(0.05)  # between what is read and what is written
        return new_key(*given)

    new_key = named.new_key
    monkeypatch.setattr(named, "new_key", slowly)
    monkeypatch.setenv("PYDANTIC_DISABLE_PLUGINS", "1")  # else typer's threads set and delete it for one another
    with ThreadPoolExecutor(4) as threads:
        done = threads.map(lambda number: main(["keys", "add", f"app{number}", "--file", str(path)]), range(4))
        assert list(done) == [0] * 4
    assert {key.name for key in named.read(path)} == {f"app{number}" for number in range(4)}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("add", "app"), "already has a key 'app'"),
        (("add", "a b"), "'name': must match"),
        (("add", "x", "--role", "admin"), "'roles': must be 'use', 'journal' or 'vectors'"),
        (("add", "x", "--rate", "often"), "a rate is written as 60/minute"),
        (("revoke", "x"), "there is no key 'x' in"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str
) -> None:
    assert main(["keys", "add", "app", "--file", str(path)]) == 0
    before = path.read_bytes()
    capsys.readouterr()
    assert main(["keys", *arguments, "--file", str(path)]) != 0
    told = capsys.readouterr()
    assert said in told.err
    assert (told.out, told.err.count("\n")) == ("", 1)
    assert path.read_bytes() == before


def test_a_file_that_is_not_there_is_said(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "list", "--file", str(path)]) != 0
    assert "'helmsight keys add NAME' creates it" in capsys.readouterr().err


HEAVY = ("torch", "transformers", "steering", "flask")
LOADED = f"""
import sys
from server.cli import main
from server.access import named
code = main(sys.argv[1:]) if sys.argv[1:] else 0
sys.exit(code or ", ".join(sys.modules.keys() & {HEAVY!r}) or 0)
"""


@pytest.mark.parametrize("arguments", [(), ("list",), ("add", "other"), ("revoke", "app")])
def test_it_does_not_wait_for_libraries_that_it_does_not_need(path: Path, arguments: tuple[str, ...]) -> None:
    """The process fails with the modules that are loaded as its message."""
    named.write(path, [named.new_key("app")[1]])
    words = ("keys", *arguments, "--file", str(path)) if arguments else ()
    command = [sys.executable, "-c", LOADED, *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_file_that_cannot_be_replaced_stays_as_it_was(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    named.write(path, [named.new_key("app")[1]])
    before = path.read_bytes()

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("server.access.named.os.replace", full)
    with pytest.raises(OSError, match="No space"):
        named.write(path, ())
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]
