"""A model that cannot be served ends the command with one sentence, before the port opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from server import serving
from server.cli import main
from server.preflight import check_folder
from server.settings import SettingsError
from tests.server.fakes import checkpoint


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(checkpoint(), folder)
    return folder


@pytest.fixture(autouse=True)
def no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serving, "serve", lambda settings: pytest.fail("the port was opened"))


def sentence(capsys: pytest.CaptureFixture[str], model: object) -> str:
    assert main(["serve", "--model", str(model)]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith("helmsight: the model ")
    return said


def test_what_is_no_checkpoint_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such folder" in sentence(capsys, tmp_path / "nobody")
    assert "config.json" in sentence(capsys, tmp_path)
    assert "--download" in sentence(capsys, "nobody-there/no-such-model")


def test_damaged_files_are_named(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    for damaged, why in (
        (whole[:100_000], "cut off: it has 100000 bytes instead of"),
        (b"\xff" * 1000, "damaged"),
        (whole + b"more", "damaged"),
        (whole[:8] + b"?" * 100 + whole[108:], "header"),
        (b"", "damaged"),
    ):
        weights.write_bytes(damaged)
        said = sentence(capsys, copy)
        assert "model.safetensors " in said
        assert why in said
    weights.unlink()
    assert "neither model.safetensors nor" in sentence(capsys, copy)
    weights.write_bytes(whole)
    assert check_folder(copy)["model_type"] == "qwen2_vl"
    (copy / "tokenizer.json").write_text('{"broken')
    assert "tokenizer.json is damaged" in sentence(capsys, copy)


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(SettingsError, match=r"model-00002-of-00002\.safetensors, which .* is missing"):
        check_folder(copy)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "takes no images"),
        ({"model_type": "frobnicator"}, "does not recognize this architecture"),
        ({"model_type": "qwen3_5", "vision_config": {}}, "linear_attention"),
    ],
)
def test_what_the_engine_cannot_serve_is_said(
    capsys: pytest.CaptureFixture[str], copy: Path, config: dict[str, object], why: str
) -> None:
    (copy / "config.json").write_text(json.dumps(config))
    assert why in sentence(capsys, copy)
