"""`helmsight keys`: what it prints, keeps and refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from hashlib import sha256
from pathlib import Path
from time import sleep
from typing import Any

import pytest

from server.access import named, ring
from server.access.ring import KeyRing
from server.cli import main
from server.commands import times

ROOT = Path(__file__).parents[3]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "keys.json"


def test_a_key_is_printed_once_and_its_digest_kept(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--role", "use", "--role", "journal", "--rate", "60/minute", "--concurrent", "4", "--file", str(path))
    assert main(["keys", "add", "app", *flags]) == 0
    printed = capsys.readouterr()
    key = printed.out.strip()
    assert "'app'" in printed.err, "several keys in one script's output can be told apart"
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


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Callable[[timedelta], None]:
    """Return a function that moves the clock of keys on by a time."""

    class Clock(datetime):
        moved = timedelta()

        @classmethod
        def now(cls, tz: Any = None) -> datetime:
            return datetime.now(tz) + cls.moved

    for module in (named, ring, times):
        monkeypatch.setattr(module, "datetime", Clock)

    def move(by: timedelta) -> None:
        Clock.moved += by

    return move


def test_a_rotated_key_is_accepted_during_the_overlap_and_no_longer(
    path: Path, capsys: pytest.CaptureFixture[str], clock: Callable[[timedelta], None]
) -> None:
    file, limits = ("--file", str(path)), ("--role", "journal", "--rate", "60/minute", "--concurrent", "4")
    assert main(["keys", "add", "app", *limits, *file]) == 0
    assert main(["keys", "add", "other", *file]) == 0
    before = {one.name: one for one in named.read(path)}
    assert main(["keys", "rotate", "app", "--overlap", "2h", *file]) == 0
    first, other, second = capsys.readouterr().out.split()
    after = {one.name: one for one in named.read(path)}
    kept = ("roles", "rate", "concurrent")
    assert [getattr(after["app"], name) for name in kept] == [getattr(before["app"], name) for name in kept]
    assert list(after) == ["app", "other"]
    assert after["other"] == before["other"]
    keys = KeyRing(named=str(path))

    def accepted() -> list[bool]:
        holders = [keys.holder(key) for key in (first, second, other)]
        assert [holder and holder.name for holder in holders] == ["app", "app", "other"]
        return [holder is not None and not holder.expired for holder in holders]

    assert accepted() == [True, True, True]
    clock(timedelta(hours=1, minutes=59))
    assert accepted() == [True, True, True]
    clock(timedelta(minutes=2))
    assert accepted() == [False, True, True]
    # What has expired is dropped with the next rotation; revoking ends all keys of a name.
    assert main(["keys", "rotate", "app", *file]) == 0
    (rotated,) = {one.name: one for one in named.read(path)}["app"].rotated
    assert rotated.digest == sha256(second.encode()).hexdigest()
    assert main(["keys", "revoke", "app", *file]) == 0
    assert [keys.holder(key) is None for key in (first, second, other)] == [True, True, False]


def test_a_rotation_without_overlap_ends_the_old_key_at_once(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", "app", "--file", str(path)]) == 0
    assert main(["keys", "rotate", "app", "--overlap", "0", "--file", str(path)]) == 0
    told = capsys.readouterr()
    first, second = told.out.split()
    assert "the old one no longer" in told.err
    keys = KeyRing(named=str(path))
    assert [keys.holder(key) is None for key in (first, second)] == [True, False]


def test_a_key_expires(path: Path, capsys: pytest.CaptureFixture[str], clock: Callable[[timedelta], None]) -> None:
    file = ("--file", str(path))
    assert main(["keys", "add", "app", "--expires", "90d", *file]) == 0
    first = capsys.readouterr().out.strip()
    keys = KeyRing(named=str(path))
    assert keys.expiries()["app"] == pytest.approx(datetime.now(UTC) + timedelta(days=90), abs=timedelta(minutes=1))
    # A rotation says when the new key expires; the old one never outlives its own expiry.
    assert main(["keys", "rotate", "app", *file]) == 1
    assert "say with --expires when the new one does" in capsys.readouterr().err
    assert main(["keys", "rotate", "app", "--overlap", "100d", "--expires", "never", *file]) == 0
    second = capsys.readouterr().out.strip()
    assert not keys.expiries(), "that of a rotated key does not count"
    clock(timedelta(days=91))
    assert [holder and holder.expired for holder in map(keys.holder, (first, second))] == [True, False]


@pytest.mark.parametrize(
    ("written", "expected"),
    [("2099-01-31", (2099, 1, 31)), ("2099-01-31T10:30:00+00:00", (2099, 1, 31, 10, 30))],
)
def test_an_expiry_may_be_a_date(path: Path, written: str, expected: tuple[int, ...]) -> None:
    assert main(["keys", "add", "app", "--expires", written, "--file", str(path)]) == 0
    time = datetime(*expected).astimezone() if len(expected) == 3 else datetime(*expected, tzinfo=UTC)  # type: ignore[arg-type, misc]
    assert KeyRing(named=str(path)).expiries() == {"app": time}


def test_the_list_shows_when_keys_expire(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = ("--file", str(path))
    assert main(["keys", "add", "app", "--expires", "2099-01-31T10:30:00+00:00", *file]) == 0
    assert main(["keys", "rotate", "app", "--expires", "2099-02-28T10:30:00+00:00", "--overlap", "7d", *file]) == 0
    capsys.readouterr()
    assert main(["keys", "list", *file]) == 0
    listed = capsys.readouterr().out
    assert "2099-02-28 10:30 UTC" in listed
    assert f"{datetime.now(UTC) + timedelta(days=7):%Y-%m-%d}" in listed
    assert "expired" not in listed
    kept = named.read(path)[0]
    named.write(path, [kept.model_copy(update={"expires": datetime(2026, 1, 31, 10, 30, tzinfo=UTC)})])
    assert main(["keys", "list", *file]) == 0
    assert "2026-01-31 10:30 UTC (expired)" in capsys.readouterr().out


def test_a_file_without_expiries_is_as_before(path: Path) -> None:
    """An older Helmsight reads a file that has none of the new fields."""
    assert main(["keys", "add", "app", "--file", str(path)]) == 0
    assert main(["keys", "rotate", "app", "--overlap", "0", "--file", str(path)]) == 0
    (kept,) = json.loads(path.read_text())["keys"]
    assert kept.keys() == {"name", "digest", "roles", "created"}


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
        (("rotate", "x"), "there is no key 'x' in"),
        (("rotate", "app", "--overlap", "soon"), "'soon' is not a duration"),
        (("add", "x", "--expires", "soon"), "'soon' is not a time"),
        (("add", "x", "--expires", "2020-01-01"), "'2020-01-01' is in the past"),
        (("add", "x", "--expires", "999999w"), "'999999w' is too far away"),
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


@pytest.mark.parametrize("arguments", [(), ("list",), ("add", "other"), ("rotate", "app"), ("revoke", "app")])
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
