"""Sources of settings, their precedence, and the command line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from pydantic import SecretStr

from server.cli import main
from server.commands.options import settings_flags, settings_of
from server.process.sources import load_settings
from server.serving import gunicorn_options
from server.settings import Settings, SettingsError, warnings_for


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
        ({"port": "http"}, {}, r"'port' \(command line\): must be an integer; got 'http'$"),
        ({"api_keys": 12345678}, {}, "'api_keys' .*: must be a list$"),  # secrets are not repeated
        ({"journal": 5}, {}, "'journal' .*: must be a string$"),
        ({}, {"HELMSIGHT_SLOTS": "0"}, r"'slots' \(environment\)"),
        ({"api_keys": ("short",)}, {}, "at least 8 characters"),
        ({"colour": "red"}, {}, r"'colour' \(command line\): there is no such setting"),
        ({"prt": "1"}, {}, "'prt' .*; did you mean 'port'"),
        ({"journal": "mysql://u:p@host/x"}, {}, r"'journal' \(command line\): .*postgresql://"),
        ({}, {"HELMSIGHT_JOURNAL": " "}, r"'journal' \(environment\)"),
        ({}, {"HELMSIGHT_CONFIG": "/no/such/file"}, "/no/such/file: there is no such file"),
        ({}, {"HELMSIGHT_CONFIG": "/"}, "config file /: is no file"),
        ({"request_timeout": "nan"}, {}, r"'request_timeout' \(command line\): must be a finite number"),
    ],
)
def test_wrong_settings_are_named_with_their_source(
    flags: dict[str, object], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(SettingsError, match=message):
        load_settings(flags, environ)


def test_every_setting_has_help_and_a_flag() -> None:
    flags = {one.name for one in settings_flags()}
    assert flags - {f"no_{name}" for name in Settings.model_fields} == set(Settings.model_fields) - {"presets"}
    assert all(field.description for field in Settings.model_fields.values())
    assert settings_of(None, **dict.fromkeys(flags)) == load_settings({})
    settings = settings_of(None, api_keys=["k" * 8, "l" * 8], no_access_log=True, no_download=False, slots="3")
    assert (len(settings.keys), settings.access_log, settings.download, settings.slots) == (2, False, False, 3)


def test_a_switch_of_the_file_is_turned_off_by_a_flag(tmp_path: Path) -> None:
    config = tmp_path / "helmsight.toml"
    config.write_text("download = true\naccess_log = false\n")
    assert settings_of(str(config)).download
    assert not settings_of(str(config), no_download=True).download
    assert settings_of(str(config), access_log=True).access_log


def test_an_empty_variable_is_none_but_that_of_the_vectors() -> None:
    settings = load_settings({}, {"HELMSIGHT_PORT": "", "HELMSIGHT_VECTORS": "", "helmsight_slots": "3"})
    assert (settings.port, settings.vectors, settings.slots) == (8000, (), 64)


def test_an_unknown_variable_is_warned_of(caplog: pytest.LogCaptureFixture) -> None:
    platforms = ("PORT_8000_TCP_ADDR", "PORT_8000_TCP", "SERVICE_HOST", "SERVICE_PORT_HTTP")
    load_settings({}, {f"HELMSIGHT_{name}": "tcp://10.0.0.1" for name in platforms} | {"HELMSIGHT_CONFIG": ""})
    assert caplog.messages == []
    load_settings({}, {"HELMSIGHT_PROT": "1", "HELMSIGHT_API_KEY": "k", "HELMSIGHT_XYZZY": "", "OTHER_PROT": ""})
    assert caplog.messages == [
        "HELMSIGHT_API_KEY is not a setting; did you mean HELMSIGHT_API_KEYS?",
        "HELMSIGHT_PROT is not a setting; did you mean HELMSIGHT_PORT?",
        "HELMSIGHT_XYZZY is not a setting",
    ]


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


@pytest.mark.parametrize(
    ("words", "more"), [(["serve", "--help"], set()), (["--help"], {"pydantic", "probes.command"})]
)
def test_help_imports_neither_torch_nor_flask(words: list[str], more: set[str]) -> None:
    code = f"import sys; from server.cli import main; main({words}); print(*sys.modules)"
    loaded = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout.split()
    heavy = {"torch", "transformers", "flask", "matplotlib", "numpy", "PIL", "sqlalchemy", "pydantic_settings"}
    assert not (heavy | more) & set(loaded)
