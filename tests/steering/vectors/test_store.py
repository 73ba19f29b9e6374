"""The store finds vectors by name in several folders, and reads a file again when it changed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from steering import PinError, VectorError, VectorStore
from tests.steering.vectors.made import make


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "A", "-a", "_a", ".a", "a b", "a\n", "ä", "a" * 65, "a\0"],
)
def test_names_that_could_be_paths_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(VectorError) as refused:
        make(name)
    assert refused.value.code == "bad_vector_name"
    with pytest.raises(VectorError) as refused:
        VectorStore(tmp_path).get(name)
    assert refused.value.code == "unknown_vector"


def test_the_store_finds_names_and_earlier_folders_come_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    make("a", seed=1).save(first / "a.safetensors")
    make("a", seed=2).save(second / "a.safetensors")
    make("b", seed=3).save(second / "b.safetensors")
    store = VectorStore(first, second, tmp_path / "missing")
    assert store.names() == ["a", "b"]
    assert torch.equal(store.get("a").direction, make(seed=1).direction)
    assert torch.equal(store.get("b").direction, make(seed=3).direction)
    (first / "a.safetensors").unlink()
    assert torch.equal(store.get("a").direction, make(seed=2).direction)


def test_a_vector_of_another_model_hides_none_of_the_stores_own(tmp_path: Path) -> None:
    users, models = tmp_path / "users", tmp_path / "models"
    foreign, own = make("a", 1, fingerprint="other"), make("a", 2)
    foreign.save(users / "a.safetensors")
    own.save(models / "a.safetensors")
    store = VectorStore(users, models, fingerprint="abc")
    assert torch.equal(store.get("a").direction, own.direction)
    assert store.read("a") == (models / "a.safetensors").read_bytes()
    assert [vector.fingerprint for vector in store.all("a")] == ["other", "abc"]
    assert store.files("a") == [users / "a.safetensors", models / "a.safetensors"]
    assert VectorStore(users, models).get("a").fingerprint == "other"  # no model is known
    assert VectorStore(users, models, fingerprint="third").get("a").fingerprint == "other"  # and none fits

    make("a", 3).save(users / "a.safetensors")
    assert torch.equal(store.get("a").direction, make("a", 3).direction)
    (users / "a.safetensors").write_bytes(b"damaged")
    with pytest.raises(VectorError, match="Not a steering vector file"):  # nobody knows whose it is
        store.get("a")
    assert store.files("a") == [users / "a.safetensors", models / "a.safetensors"]
    with pytest.raises(VectorError, match="There is no steering vector 'b'"):
        store.all("b")


def test_the_store_reads_a_file_again_when_it_changed_and_only_then(tmp_path: Path) -> None:
    path = make(seed=1).save(tmp_path / "preference.safetensors")
    store = VectorStore(tmp_path)
    first = store.get("preference")
    assert store.get("preference") is first
    make(seed=2).save(path)
    os.utime(path, ns=(1, 1))
    assert torch.equal(store.get("preference").direction, make(seed=2).direction)
    path.unlink()
    with pytest.raises(VectorError) as refused:
        store.get("preference")
    assert (refused.value.code, "available: none" in str(refused.value)) == ("unknown_vector", True)


def test_a_file_that_was_replaced_within_one_tick_of_the_clock_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "preference.safetensors"
    store = VectorStore(tmp_path)
    for seed in range(3):
        make(seed=seed).save(path)
        os.utime(path, ns=(1, 1))
        assert torch.equal(store.get("preference").direction, make(seed=seed).direction)


def test_a_known_name_is_looked_up_without_reading_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a").save(tmp_path / "a.safetensors")
    store = VectorStore(tmp_path / "missing", tmp_path)

    def scan(*args: Any) -> None:
        raise AssertionError("a directory was read")

    for function in ("scandir", "listdir"):
        monkeypatch.setattr(os, function, scan)
    assert store.get("a") is store.get("a")


def test_the_store_gives_the_bytes_of_a_file(tmp_path: Path) -> None:
    path = make("a").save(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"damaged")
    store = VectorStore(tmp_path / "missing", tmp_path)
    assert store.read("a") == path.read_bytes()
    for name, code in (("b", "bad_vector"), ("c", "unknown_vector"), ("../a", "unknown_vector")):
        with pytest.raises(VectorError) as refused:
            store.read(name)
        assert refused.value.code == code


def test_an_unknown_name_is_told_what_there_is(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make(name).save(tmp_path / f"{name}.safetensors")
    with pytest.raises(VectorError, match=r"no steering vector 'c'; available: a, b\."):
        VectorStore(tmp_path).get("c")


def test_files_that_cannot_be_asked_for_are_not_listed(tmp_path: Path) -> None:
    make("a").save(tmp_path / "a.safetensors")
    make("a").save(tmp_path / "My Vector.safetensors")
    make("a").save(tmp_path / ".hidden.safetensors")
    (tmp_path / "a.txt").write_text("")
    assert VectorStore(tmp_path).names() == ["a"]


def test_a_damaged_file_in_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(make("a").to_bytes()[:-5])
    with pytest.raises(VectorError) as refused:
        VectorStore(tmp_path).get("a")
    assert refused.value.code == "bad_vector"


def test_a_name_that_comes_to_stand_for_another_vector_is_reported_once(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    old, new = make("a", seed=1), make("a", seed=2)
    old.save(second / "a.safetensors")
    store, seen = VectorStore(first, second), list[tuple[str, str | None, str | None]]()
    store.watch(lambda *change: seen.append(change))
    store.get("a")
    with pytest.raises(VectorError):
        store.get("nothing")
    assert seen == []
    new.save(first / "a.safetensors")  # hides the other
    store.get("a")
    store.get("a")
    make("b").save(first / "b.safetensors")
    store.get("b")
    (first / "a.safetensors").unlink()
    store.read("a")
    (second / "a.safetensors").unlink()
    for _ in range(2):
        with pytest.raises(VectorError):
            store.get("a")
    assert seen == [
        ("a", old.identity, new.identity),
        ("b", None, make("b").identity),
        ("a", new.identity, old.identity),
        ("a", old.identity, None),
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"seed": 1},
        {"layers": (1,)},
        {"kind": "other"},
        {"fingerprint": "def"},
        {"info": {"positive": "vision", "calibration": {"range": [0.5, 1.5]}}},
        {"info": {"calibration": {"range": [0.5, 2.5]}}},
        {"info": {"calibration": {"range": [0.5, 1.5], "factor": 2.0}}},
    ],
)
def test_everything_that_an_answer_takes_from_a_vector_is_in_its_identity(change: dict[str, Any]) -> None:
    assert make(**change).identity != make().identity
    assert make("other").identity == make(info={"calibration": {"range": [0.5, 1.5]}}).identity == make().identity


def test_a_pinned_name_is_the_vector_with_that_digest_or_none(tmp_path: Path) -> None:
    make("a").save(tmp_path / "a.safetensors")
    store, digest = VectorStore(tmp_path), make("a").identity
    for pin in (digest, digest[:8]):
        assert store.get(f"a@{pin}").identity == digest
    for pin, code in (
        ("f" * 64, "vector_digest_mismatch"),
        (digest[:7], "bad_vector_digest"),
        ("", "bad_vector_digest"),
    ):
        with pytest.raises(PinError) as refused:
            store.get(f"a@{pin}")
        assert refused.value.code == code
        assert "'a'" in str(refused.value)
    with pytest.raises(VectorError, match="no steering vector 'b'"):
        store.get(f"b@{digest}")
