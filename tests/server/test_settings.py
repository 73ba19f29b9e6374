"""Where settings come from, which source wins, and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from server.cli import build_parser, main
from server.serving import gunicorn_options
from server.settings import Settings, SettingsError, from_arguments, load_settings, warnings_for


def test_flags_beat_the_environment_which_beats_the_file(tmp_path: Path) -> None:
    config = tmp_path / "helmsight.toml"
    config.write_text('port = 1\nslots = 2\nhost = "::1"\nvectors = ["a", "b"]\n')
    environ = {"HELMSIGHT_PORT": "3", "HELMSIGHT_SLOTS": "4", "HELMSIGHT_CONFIG": str(config)}
    settings = load_settings({"port": "5"}, environ)
    assert (settings.port, settings.slots, settings.host, settings.vectors) == (5, 4, "::1", ("a", "b"))


def test_the_environment_gives_lists_and_switches() -> None:
    environ = {"HELMSIGHT_API_KEYS": "first-key, second-key", "HELMSIGHT_ALLOW_REMOTE_IMAGES": "true"}
    settings = load_settings({}, environ)
    assert settings.keys == ("first-key", "second-key")
    assert settings.allow_remote_images


def test_a_journals_password_does_not_show() -> None:
    settings = load_settings({}, {"HELMSIGHT_JOURNAL": "postgresql://u:secret-word@host/x"})
    assert "secret-word" not in repr(settings)
    with pytest.raises(SettingsError) as caught:
        load_settings({"journal": "mysql://u:secret-word@host/x"}, {})
    assert "secret-word" not in str(caught.value)


def test_keys_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("# ours\nfile-key-1\n\nfile-key-2\n")
    assert Settings(api_keys=(SecretStr("flag-key"),), api_key_file=str(file)).keys == (
        "flag-key",
        "file-key-1",
        "file-key-2",
    )
    file.write_text("\n")
    with pytest.raises(SettingsError, match="no key"):
        _ = Settings(api_key_file=str(file)).keys


@pytest.mark.parametrize(
    ("flags", "environ", "message"),
    [
        ({"port": "http"}, {}, r"'port' \(command line\)"),
        ({}, {"HELMSIGHT_SLOTS": "0"}, r"'slots' \(environment\)"),
        ({"api_keys": ("short",)}, {}, "at least 8 characters"),
        ({"colour": "red"}, {}, "'colour'"),
        ({"journal": "mysql://u:p@host/x"}, {}, r"'journal' \(command line\): .*postgresql://"),
        ({}, {"HELMSIGHT_JOURNAL": " "}, r"'journal' \(environment\)"),
        ({}, {"HELMSIGHT_CONFIG": "/no/such/file"}, "/no/such/file"),
    ],
)
def test_wrong_settings_are_named_with_their_source(
    flags: dict[str, object], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(flags, environ)


def test_every_setting_has_help_and_a_flag() -> None:
    arguments = build_parser().parse_args(["serve"])
    assert from_arguments(arguments) == load_settings({})
    assert all(field.description for field in Settings.model_fields.values())
    parsed = build_parser().parse_args(["serve", "--api-key", "k" * 8, "--api-key", "l" * 8, "--no-access-log"])
    settings = from_arguments(parsed)
    assert len(settings.keys) == 2
    assert not settings.access_log


def test_listening_to_the_world_without_a_key_warns() -> None:
    assert (
        warnings_for(Settings()) == warnings_for(Settings(host="localhost")) == warnings_for(Settings(host="::1")) == []
    )
    assert "without an API key" in warnings_for(Settings(host="0.0.0.0"))[0]
    assert warnings_for(Settings(host="0.0.0.0", api_keys=(SecretStr("k" * 8),))) == []


def test_one_process_has_a_thread_for_everyone_who_runs_or_waits() -> None:
    options = gunicorn_options(Settings(slots=4, max_waiting=8, host="::1", port=99))
    assert (options["workers"], options["preload_app"], options["bind"]) == (1, False, "[::1]:99")
    assert options["threads"] > 4 + 8
    assert options["worker_connections"] > options["threads"]


def test_a_wrong_flag_ends_with_a_message(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--slots", "0"]) == 2
    assert "'slots' (command line)" in capsys.readouterr().err


def test_vectors_are_listed_and_shown(vectors: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vectors", "list", "--vectors", str(vectors), "--model", str(vectors)]) == 0
    listing = capsys.readouterr().out
    assert "modality-preference" in listing
    assert "Not a steering vector file" in listing
    assert main(["vectors", "show", "modality-preference", "--vectors", str(vectors)]) == 0
    assert '"layers": [' in capsys.readouterr().out
    assert main(["vectors", "show", "nobody", "--vectors", str(vectors)]) == 1


def test_help_imports_neither_torch_nor_flask() -> None:
    code = "import sys; from server.cli import build_parser; build_parser().format_help(); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    assert not {"torch", "transformers", "flask", "matplotlib"} & set(loaded)
