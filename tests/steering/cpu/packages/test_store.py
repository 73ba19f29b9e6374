"""A store finds compiled packages again, and rejects broken ones and those that others may have written."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from steering.cpu.packages import store
from steering.cpu.packages.store import Store, Unsafe, default_folder


@pytest.fixture
def kept(tmp_path: Path) -> Store:
    store = Store(tmp_path / "own" / "compiled")
    keep(store, "key", b"code")
    return store


def keep(into: Store, key: str, code: bytes) -> None:
    with into.room() as room:
        (room / "built").write_bytes(code)
        into.keep(key, room / "built", {"left": [1]})


def entry_of(kept: Store) -> Path:
    entry = kept.find("key")
    assert entry is not None
    return entry.package


def test_an_entry_is_found_by_its_key_alone(kept: Store) -> None:
    entry = Store(kept.folder).find("key")
    assert entry is not None
    assert (entry.package.read_bytes(), entry.about["left"]) == (b"code", [1])
    assert kept.find("another key") is None


def test_the_folder_is_private_to_this_user(kept: Store) -> None:
    assert kept.folder.stat().st_mode & 0o777 == 0o700
    assert entry_of(kept).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("damage", ["cut", "changed", "other key", "no notes", "others may write", "link"])
def test_broken_and_foreign_entries_are_ignored_and_removed(kept: Store, damage: str, tmp_path: Path) -> None:
    package = entry_of(kept)
    notes = package.with_name("about.json")
    match damage:
        case "cut":
            package.write_bytes(b"cod")
        case "changed":
            package.write_bytes(b"c0de")
        case "other key":
            notes.write_text(notes.read_text().replace('"key": "key"', '"key": "other"'))
        case "no notes":
            notes.unlink()
        case "others may write":
            package.chmod(0o666)
        case "link":
            (tmp_path / "elsewhere").write_bytes(b"code")
            package.unlink()
            package.symlink_to(tmp_path / "elsewhere")
    assert kept.find("key") is None
    assert not package.parent.exists()
    keep(kept, "key", b"anew")
    assert entry_of(kept).read_bytes() == b"anew"


@pytest.mark.parametrize("mode", [0o770, 0o707, 0o777])
def test_a_folder_that_others_may_write_is_refused(kept: Store, mode: int) -> None:
    kept.folder.chmod(mode)
    with pytest.raises(Unsafe, match="others than this user may write"):
        Store(kept.folder)


def test_a_folder_in_one_that_others_may_write_is_refused(kept: Store) -> None:
    kept.folder.parent.chmod(0o777)
    with pytest.raises(Unsafe):
        Store(kept.folder)
    kept.folder.parent.chmod(0o1777)  # as /tmp, where nobody can put aside what is another's
    Store(kept.folder)


def test_a_link_is_no_folder_of_this_user(kept: Store, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(kept.folder)
    with pytest.raises(Unsafe):
        Store(tmp_path / "link")


def test_the_least_recently_used_entry_is_removed(kept: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store, "KEPT", 2)
    keep(kept, "second", b"2")
    for key, age in (("key", 10), ("second", 100)):
        entry = kept.find(key)
        assert entry is not None
        os.utime(entry.package.parent, (1e9 - age, 1e9 - age))
    keep(kept, "third", b"3")
    assert [kept.find(key) is not None for key in ("key", "second", "third")] == [True, False, True]


def test_unfinished_entries_are_removed_after_a_day(kept: Store) -> None:
    old, new = kept.folder / ".building-old", kept.folder / ".building-new"
    old.mkdir()
    new.mkdir()
    os.utime(old, (1e9, 1e9))
    with kept.room() as room:
        assert room.parent == kept.folder
        assert (old.exists(), new.exists()) == (False, True)
    assert not room.exists()


def test_the_users_cache_is_where_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_folder() == Path("/caches/helmsight/compiled")
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # which the specification has ignored
    assert default_folder() == Path.home() / ".cache" / "helmsight" / "compiled"
