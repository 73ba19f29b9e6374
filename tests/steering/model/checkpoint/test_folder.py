"""The places where a model is searched, and the error if there is none."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import steering
from steering.model.checkpoint import folder as checkpoint


def test_the_embedded_model_ships_with_the_package() -> None:
    assert (checkpoint.embedded() / "model.safetensors").is_file()
    assert checkpoint.embedded() == Path(__file__).parents[4] / "demo" / "checkpoint"


def test_a_missing_embedded_model_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Path:
        raise ModuleNotFoundError(name)

    monkeypatch.setattr(checkpoint.importlib.resources, "files", missing)
    with pytest.raises(FileNotFoundError, match="embedded model is not installed; name a checkpoint"):
        steering.load()


@pytest.mark.parametrize("name", ["./nowhere", "/no/such/folder", "a/b/c", "~/nowhere"])
def test_a_folder_that_is_not_there_is_named(name: str) -> None:
    with pytest.raises(FileNotFoundError, match=f"There is no checkpoint folder '{name}'"):
        steering.load(name)


def test_a_name_that_was_not_downloaded_says_how_to_download_it() -> None:
    with pytest.raises(
        FileNotFoundError, match=r"'nobody/nothing', and no model of that name .* local_files_only=False"
    ):
        steering.load("nobody/nothing")
    assert checkpoint.located("nobody/nothing", local_files_only=False) == "nobody/nothing"


def test_a_home_folder_may_be_written_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps({}))
    assert checkpoint.located("~/model", local_files_only=True) == tmp_path / "model"


def test_an_unknown_dtype_is_named() -> None:
    with pytest.raises(steering.UnsupportedModel, match="auto, float32, bfloat16, float16; got 'float8'"):
        steering.load(dtype="float8")
