"""A model that cannot be served ends the command with one sentence, before the port opens."""

from __future__ import annotations

import json
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from server import serving
from server.cli import main
from server.process import preflight
from server.process.preflight import check_folder
from server.settings import Settings, SettingsError
from tests.families.registry import ALL, SUPPORTED
from tests.server.fakes import checkpoint

SERVE = serving.serve


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


def test_every_family_of_the_tests_is_known() -> None:
    assert set(ALL) >= preflight.TESTED
    assert set(SUPPORTED) - preflight.TESTED == {"paligemma2"}  # whose type is paligemma


def test_what_is_no_checkpoint_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert "no such folder" in sentence(capsys, tmp_path / "nobody")
    assert "config.json" in sentence(capsys, tmp_path)
    assert "--download" in sentence(capsys, "nobody-there/no-such-model")


def test_damaged_files_are_named(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    weights = copy / "model.safetensors"
    whole = weights.read_bytes()
    for damaged, why in (
        (whole[:100_000], "truncated: it has 100000 bytes instead of"),
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
        ("chat_template.jinja", "{% for %}", "chat_template.jinja is not a valid template: "),
        ("chat_template.jinja", "{{ messages", "(line 1)"),
        ("tokenizer_config.json", '{"chat_template": "{% if %}"}', "tokenizer_config.json is not a valid template: "),
        ("calibration.json", "[1, 2]", "calibration.json is not a valid calibration: it holds no object"),
        ("calibration.json", '{"version": 99, "think": "x"}', "its format is not 'helmsight.calibration/1'"),
        ("calibration.json", {"divergence": "x"}, "its part 'divergence' has the wrong type"),
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
        ("--dtype", "float8", "'float8' is unknown; use one of auto, float32, bfloat16, float16"),
        ("--device", "gpu0", "'gpu0' is unknown"),
        ("--device", "cuda:9", "no GPU"),
    ],
)
def test_weights_and_devices_that_there_are_not(
    option: str, value: str, why: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "_GPUS", ())
    monkeypatch.setattr(preflight, "version", lambda package: "2.13.0")
    assert main(["serve", option, value]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert said.startswith(f"helmsight: {option} ")
    assert why in said


def test_a_torch_without_cuda_is_told_apart_from_a_machine_without_a_gpu(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(preflight, "version", lambda package: {"torch": "2.13.0+cpu"}[package])
    assert main(["serve", "--device", "cuda"]) == 2
    said = "helmsight: --device cuda: the installed torch is built for the CPU only\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1"])
def test_a_port_that_is_taken_is_named(host: str, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as listening:
        port = listening.getsockname()[1]
        assert main(["serve", "--host", host, "--port", str(port)]) == 2
    assert capsys.readouterr().err == (
        f"helmsight: --port {port} is taken: another program listens there; stop it, or choose another port\n"
    )
    preflight.check_place(Settings(host=host, port=port))


def test_a_host_that_is_none_of_this_machine_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--host", "192.0.2.1", "--port", "8321"]) == 2
    assert capsys.readouterr().err.startswith("helmsight: --host 192.0.2.1 --port 8321: ")
    preflight.check_place(Settings(host="unix:/nowhere"))


def test_a_key_file_that_is_not_there_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["serve", "--api-key-file", str(tmp_path / "keys")]) == 2
    assert capsys.readouterr().err == f"helmsight: --api-key-file {tmp_path / 'keys'}: No such file or directory\n"


@pytest.mark.parametrize("command", ["probe", "eval mc2", "eval sage", "probe reliability"])
def test_commands_that_load_a_model_look_at_it_first(
    command: str, capsys: pytest.CaptureFixture[str], copy: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("steering.load", lambda *_, **__: pytest.fail("the model was loaded"))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)

    def refused(*words: str) -> str:
        assert main([*command.split(), *words, "--quiet"]) == 1
        return capsys.readouterr().err.strip().splitlines()[-1]

    (copy / "model.safetensors").write_bytes(b"cut")
    assert "model.safetensors is damaged" in refused("--model", str(copy))
    assert refused("--model", "/nowhere").endswith("'/nowhere' cannot be served: there is no such folder")
    assert refused("--model", "nobody/there").endswith("from the hub; --download fetches it")
    assert "--device 'tpu' is unknown" in refused("--device", "tpu")
    file = tmp_path / "file"
    file.write_text("")
    if command != "probe":
        assert refused("--json", f"{file}/x.json") == f"helmsight: {file} cannot be written to: {file} is no folder"
    if command != "probe reliability":
        assert refused("--out", f"{file}/x").endswith(f"{file} is no folder")


def test_a_missing_shard_is_named(copy: Path) -> None:
    (copy / "model.safetensors").rename(copy / "model-00001-of-00002.safetensors")
    shards = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(SettingsError, match=r"model-00002-of-00002\.safetensors, which .* is missing"):
        check_folder(copy)


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}, "takes no images"),
        ({"model_type": "frobnicator"}, "does not recognize this architecture"),
        ({"model_type": "llama4", "vision_config": {}}, "chunked_attention"),
    ],
)
def test_what_the_engine_cannot_serve_is_refused_in_one_sentence(
    copy: Path, config: dict[str, object], why: str
) -> None:
    (copy / "config.json").write_text(json.dumps(config))
    said = str(preflight.refusal(str(copy), download=False))
    assert why in said
    assert "\n" not in said


@pytest.mark.slow
def test_what_the_engine_refuses_the_command_says(capsys: pytest.CaptureFixture[str], copy: Path) -> None:
    (copy / "config.json").write_text(json.dumps({"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"]}))
    assert "takes no images" in sentence(capsys, copy)


def test_a_division_that_cannot_be_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr(preflight, "sees_gpu", lambda: False)
    for given, why in (
        ({"device_map": "auto", "device": "cpu"}, "--device-map and --device are mutually exclusive"),
        ({"device_map": "auto", "compiled": True}, "--device-map and --compiled are mutually exclusive"),
        ({"device_map": "auto", "quantization": "int8"}, "--device-map and --quantization are mutually exclusive"),
        ({"device_map": "auto", "tensor_parallel": 2}, "--device-map and --tensor-parallel are mutually exclusive"),
        ({"tensor_parallel": 2, "device": "cpu"}, "--tensor-parallel and --device are mutually exclusive"),
        ({"tensor_parallel": 2, "compiled": True}, "--tensor-parallel and --compiled are mutually exclusive"),
        ({"tensor_parallel": 2, "replicas": 2}, "--tensor-parallel and --replicas are mutually exclusive"),
        ({"tensor_parallel": 3}, "--nproc-per-node 3 --no-python helmsight serve ...; it has started 2"),
    ):
        with pytest.raises(SettingsError, match=why):
            preflight.look(Settings(**given))  # type: ignore[arg-type]
    preflight.look(Settings(tensor_parallel=2))
    with pytest.raises(SettingsError, match="torch finds none on this machine"):
        preflight.look(Settings(device_map="auto"))
    monkeypatch.delenv("WORLD_SIZE")
    with pytest.raises(SettingsError, match="it has started none"):
        preflight.look(Settings(tensor_parallel=2))
    monkeypatch.setattr(preflight, "find_spec", lambda name: None)
    for settings in (Settings(device_map="auto"), Settings(tensor_parallel=2)):
        with pytest.raises(SettingsError, match=r"helmsight\[parallel\]"):
            preflight.look(settings)


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"disable_interventions": ("oprea",)}, "'oprea' is unknown; did you mean 'opera'"),
        ({"journal_readouts": ("fokus",)}, "'fokus' is unknown; did you mean 'focus'"),
        ({"presets": {"x": {"fields": {"warmth": 0}, "source": "a file"}}}, "preset 'x' .*warmth"),
    ],
)
def test_names_that_do_not_exist_are_told_before_a_worker_starts(
    fields: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("import_ahead", "set_up_logging"):
        monkeypatch.setattr(serving, name, lambda *given: None)
    monkeypatch.setattr(serving.Gunicorn, "run", lambda self: pytest.fail("a worker would have started"))
    with pytest.raises(SettingsError, match=told):
        SERVE(Settings(journal="off", **fields))
