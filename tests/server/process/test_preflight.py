"""A model that cannot be served ends the command with one sentence, before the port opens."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from server import serving
from server.cli import main
from server.process import preflight
from server.process.preflight import check_folder
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


def change(file: Path, **fields: object) -> str:
    return json.dumps(json.loads(file.read_text()) | fields)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("tokenizer.json", None, "the folder has no tokenizer.json"),
        ("tokenizer.json", '{"a": 1}', "tokenizer.json is damaged: it holds no 'model'"),
        ("tokenizer.json", "[]", "tokenizer.json is damaged"),
        ("chat_template.jinja", "{% for %}", "chat_template.jinja is no template: "),
        ("chat_template.jinja", "{{ messages", "(line 1)"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "tokenizer_config.json is no template: "),
        ("calibration.json", "[1, 2]", "calibration.json is no calibration: it holds no object"),
        ("calibration.json", '{"version": 99, "think": "x"}', "its format is not 'helmsight.calibration/1'"),
        ("calibration.json", {"divergence": "x"}, "its part 'divergence' is of a wrong kind"),
        ("calibration.json", {"more": 1}, "it has an unknown part 'more'"),
        ("config.json", {"text_config": {"hidden_size": 384}}, "embed_tokens.weight is 192 wide, and 'hidden_size' is 384"),
    ],
)  # fmt: skip
def test_files_that_say_something_else_are_named(
    name: str, text: str | dict[str, object] | None, why: str, capsys: pytest.CaptureFixture[str], copy: Path
) -> None:
    if text is None:
        (copy / name).unlink()
    else:
        (copy / name).write_text(text if isinstance(text, str) else change(copy / name, **text))
    assert why in sentence(capsys, copy)


def test_templates_of_transformers_own_dialect_pass(copy: Path) -> None:
    text = "{% for m in messages %}{% generation %}{{ m }}{% endgeneration %}{% break %}{% endfor %}"
    (copy / "chat_template.jinja").write_text(text)
    assert check_folder(copy)


@pytest.mark.parametrize(
    ("option", "value", "why"),
    [
        ("--dtype", "int3", "'int3' is not known; it is one of auto, float32, bfloat16, float16"),
        ("--device", "gpu0", "'gpu0' is not known"),
        ("--device", "cuda:9", "no GPU"),
    ],
)
def test_weights_and_devices_that_there_are_not(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_GPUS", ())
    assert main(["serve", option, value]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"helmsight: {option} ")
    assert why in said


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
