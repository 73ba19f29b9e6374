"""The command line as a whole: what every command's options have in common, and how what is wrong is told."""

from __future__ import annotations

import importlib.metadata
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

import steering
from probes.harness.loading.settings import ModelSettings
from server import cli
from server.process import preflight
from server.settings import Settings

ROOT = Path(__file__).parents[2]


def walk(command: Any, path: str = "helmsight") -> Iterator[tuple[str, Any]]:
    """Yield a command and all its subcommands, by what is written."""
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from walk(inner, f"{path} {name}")


HELMSIGHT: Any = typer.main.get_command(cli.commands())
HELMSIGHT.commands = {name: cli.command(name) for name in cli.COMMANDS}
ALL = dict(walk(HELMSIGHT))


def told(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on standard error."""
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err.strip()


VECTORS = ("list", "show", "build", "compose", "export", "import", "use")


def test_every_command_is_there() -> None:
    assert set(ALL) == {
        "helmsight",
        *("helmsight batch", "helmsight observe"),
        *("helmsight serve", "helmsight doctor", "helmsight bench", "helmsight probe", "helmsight reproduce"),
        "helmsight prepare",
        "helmsight eval",
        *(f"helmsight eval {one}" for one in ("alarm", "faithfulness", "guard", "mc2", "mm-sap", "sage")),
        *(f"helmsight eval {one}" for one in ("spd-faith", "stme", "ambigcaps", "chair", "mme")),
        *(f"helmsight eval {one}" for one in ("phd", "pope", "readings", "tallyqa", "vsr")),
        *("helmsight vectors", *(f"helmsight vectors {one}" for one in VECTORS)),
        *("helmsight keys", *(f"helmsight keys {one}" for one in ("add", "list", "revoke", "rotate"))),
        *("helmsight journal", *(f"helmsight journal {one}" for one in ("backup", "export", "prune", "scores", "summary"))),
        *("helmsight demo", *(f"helmsight demo {one}" for one in ("train", "evaluate", "scene", "samples", "conflicts"))),
        *("helmsight demo organisms", "helmsight demo smol"),
    }  # fmt: skip


@pytest.mark.parametrize("path", ALL)
def test_help_names_every_option_uncut(path: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*path.split()[1:], "--help"]) == 0
    printed = capsys.readouterr().out
    assert "…" not in printed  # of a name that 80 columns have no room for
    squeezed = "".join(printed.replace("│", "").split())
    for option in ALL[path].params:
        if not option.hidden:
            assert (option.opts[0] if option.param_type_name == "option" else option.display_name_raw) in printed
            assert "".join((option.help or "").split())[:20] in squeezed, "brackets must not be taken for markup"


RUN_A_MODEL = sorted(
    path for path in ALL if re.match("helmsight (probe|prepare|reproduce|eval .+|vectors build)$", path)
)


@pytest.mark.parametrize("path", RUN_A_MODEL)
def test_commands_that_run_a_model_have_the_options_with_which_serve_loads_one(path: str) -> None:
    served, own = ({one.name: one for one in ALL[name].params} for name in ("helmsight serve", path))
    names = {*ModelSettings.model_fields, "no_download"}
    assert {"model", "dtype", "quantization", "device", "device_map", "download", "chat_template"} < names
    for name in names - ({"model"} if path == "helmsight prepare" else set()):
        assert (own[name].opts, own[name].help, own[name].metavar) == (
            served[name].opts, served[name].help, served[name].metavar,
        )  # fmt: skip
        choices = [getattr(one[name].type_descriptor, "choices", None) for one in (served, own)]
        assert choices[0] == choices[1]


def test_a_command_loads_the_model_as_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded: list[tuple[Any, dict[str, Any]]] = []

    def load(path: Any, **options: Any) -> None:
        loaded.append((path, options))
        raise ValueError("loaded")

    monkeypatch.setattr(steering, "load", load)
    monkeypatch.setattr(preflight, "sees_gpu", lambda: True)
    monkeypatch.setattr(preflight, "for_cpu_alone", lambda: False)
    monkeypatch.setattr(preflight, "find_spec", lambda name: True)
    monkeypatch.chdir(tmp_path)
    template = tmp_path / "chat.jinja"
    template.write_text("{{ messages }}")
    (tmp_path / "pairs.jsonl").write_text("")
    hub, told = "acme/model-7b", ("--dtype", "bfloat16", "--download", "--chat-template", str(template))
    commands = (("probe",), ("eval", "pope", "--conditions", "SAGE"), ("probe", "--calibrate-sinks"), ("eval", "stme"))
    for words in commands:
        for more, expected in (
            (("--quantization", "int8", "--device", "cpu"), ("int8", "cpu", None)),
            (("--device-map", "auto"), (None, "auto", "auto")),
        ):
            assert cli.main([*words, "--model", hub, *told, *more]) == 1
            path, options = loaded.pop()
            assert (path, options["dtype"], options["local_files_only"]) == (hub, "bfloat16", False)
            assert (options["quantization"], options["device"], options["device_map"]) == expected
            assert options["chat_template"] == str(template)
    capsys.readouterr()
    assert cli.main(["probe", "--model", hub]) == 1
    assert "no model of that name has been downloaded" in told_error(capsys)
    assert cli.main(["eval", "pope", "--dtype", "float8"]) == 1
    assert "--dtype 'float8' is unknown; use one of auto, float32, bfloat16, float16" in told_error(capsys)
    assert not loaded


def told_error(capsys: pytest.CaptureFixture[str]) -> str:
    """Return the one line on standard error that a command ends with."""
    return capsys.readouterr().err.strip().splitlines()[-1]


def test_help_shows_no_default_that_depends_on_where_the_code_is() -> None:
    options = [(path, option) for path, command in ALL.items() for option in command.params]
    absolute = [(path, option) for path, option in options if str(option.default).startswith(str(ROOT))]
    assert {path for path, _ in absolute} >= {"helmsight demo evaluate", "helmsight demo samples"}, "none is looked at"
    assert [f"{path} {option.opts[0]}" for path, option in absolute if option.show_default is True] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["probe", "--sample", "3"], "helmsight probe: No such option: --sample; did you mean --samples?"),
        (["probe", "--sample=3"], "helmsight probe: No such option: --sample; did you mean --samples?"),
        (["probe", "--repl"], "helmsight probe: No such option: --repl; did you mean --replace?"),
        (["eval", "mc2", "--limi", "3"], "helmsight eval mc2: No such option: --limi; did you mean --limit?"),
        (["eval", "mc2", "--conditions", "plain", "--limt", "3"], "No such option: --limt; did you mean --limit?"),
        (["serve", "--prot", "1"], "helmsight serve: No such option: --prot; did you mean --port?"),
        (["vectors", "compose", "a", "--ad", "b"], "No such option: --ad; did you mean --add?"),
        (["journal", "export", "--lim", "1"], "No such option: --lim; did you mean --limit?"),
        (["demo", "scene", "--see", "1"], "No such option: --see; did you mean --seed?"),
        (["--sample", "serve"], "helmsight: No such option: --sample"),
        (["serve", "--zzz"], "helmsight serve: No such option: --zzz"),
        (["serv"], "helmsight: No such command 'serv'. Did you mean 'serve'"),
        (["vectors", "lst"], "helmsight vectors: No such command 'lst'. Did you mean 'list'?"),
        (["serve", "model", "more"], "helmsight serve: Got unexpected extra argument(s) (more)"),
        (["serve", "--host", "--port", "1"], "helmsight serve: Option --host needs a value."),
        (["serve", "--host"], "helmsight serve: Option --host needs a value."),
        (["eval", "mc2", "--conditions", "--limit", "3"], "helmsight eval mc2: Option --conditions needs a value."),
        (
            ["eval", "mc2", "--conditions", "plan"],
            "'plan' is not one of 'plain', 'instruct', 'chain', 'shots', 'steer', 'both'.",
        ),
        (["eval", "mc2", "--limit", "0"], "Invalid value for '--limit'"),
        (["vectors", "compose", "a"], "helmsight vectors compose: Missing option '--add'."),
        (["vectors", "show"], "helmsight vectors show: Missing argument 'name'."),
    ],
)
def test_a_wrong_command_line_is_one_line_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(words) == 2
    assert said in told(capsys)


def test_alone_it_shows_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ([], ["vectors"]):
        assert cli.main(words) == 2
        captured = capsys.readouterr()
        assert "Commands" in captured.out
        assert captured.err == ""


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"helmsight {importlib.metadata.version('helmsight')}\n"


def parsed(path: str, *words: str) -> dict[str, Any]:
    """Return the parameters that a command parses from words."""
    with ALL[path].make_context("it", list(words)) as context:
        return dict(context.params)


def test_an_option_takes_the_words_up_to_the_next_one() -> None:
    given = parsed("helmsight probe", "--layers", "3", "-1", "--tasks", "a", "--strengths", "0.3", "-0.5", "--quiet")
    assert (given["layers"], given["tasks"], given["strengths"], given["quiet"]) == ([3, -1], ["a"], [0.3, -0.5], True)
    again = parsed("helmsight vectors compose", "out", "--add", "a", "b:-0.5", "--add", "c")
    assert (again["add"], again["out"]) == (["a", "b:-0.5", "c"], "out")
    assert parsed("helmsight demo scene", "--size", "40", "50", "--seed", "2")["size"] == (40, 50)


def test_a_repeated_option_takes_one_word_each() -> None:
    given = parsed("helmsight vectors show", "--folder", "name", "name", "--vectors", "b")
    assert (given["vectors"], given["name"]) == (["name", "b"], "name")


def test_all_criteria_are_meant_where_none_is_named() -> None:
    assert not parsed("helmsight eval mc2")["auto"]
    assert parsed("helmsight eval mc2", "--auto", "--limit", "3")["auto"] == ["drop", "surprise"]
    assert parsed("helmsight eval mc2", "--auto", "drop")["auto"] == ["drop"]


def test_a_value_may_look_like_an_option_where_it_is_attached() -> None:
    assert parsed("helmsight serve", "--host=--odd", "--port", "1")["host"] == "--odd"


def test_a_switch_can_be_turned_both_ways_and_help_shows_the_one_that_changes_something() -> None:
    options = {option.opts[0]: option for option in ALL["helmsight serve"].params}
    assert {name for name, field in Settings.model_fields.items() if field.annotation is bool} == {
        "download", "allow_remote_images", "allow_uploads", "journal_texts", "access_log",
            "engine_process", "traces",
    }  # fmt: skip
    assert (options["--download"].hidden, options["--no-download"].hidden) == (False, True)
    assert (options["--access-log"].hidden, options["--no-access-log"].hidden) == (True, False)
    assert (options["--compiled"].hidden, options["--no-compiled"].hidden) == (False, False)  # the default is neither
    assert parsed("helmsight serve", "--no-compiled")["no_compiled"] is True


def test_ctrl_c_is_status_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("server.commands.journal.settings_of", interrupted)
    assert cli.main(["journal", "summary"]) == 130


def test_a_defect_keeps_its_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    def defect(*_: object, **__: object) -> None:
        raise AttributeError("a defect")

    monkeypatch.setattr("server.commands.journal.settings_of", defect)
    with pytest.raises(AttributeError, match="a defect"):
        cli.main(["journal", "summary"])


def at_a_terminal(*words: str, **environ: str) -> str:
    """Return the output of a command on a terminal of 100 columns."""
    leader, follower = pty.openpty()
    clean = {name: value for name, value in os.environ.items() if name not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    command = [sys.executable, "-m", "server.cli", *words]
    settings = {"TERM": "xterm-256color", "COLUMNS": "100", **environ}
    subprocess.run(command, cwd=ROOT, env=clean | settings, stdout=follower, stderr=follower, check=False)
    os.close(follower)
    shown = b""
    try:
        while part := os.read(leader, 65_536):
            shown += part
    except OSError:  # the other end is closed
        pass
    os.close(leader)
    return shown.decode()


def test_there_are_colours_on_a_terminal_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b[1;31mhelmsight serve:\x1b[0m No such option" in at_a_terminal("serve", "--zzz")
    assert "\x1b[3" not in at_a_terminal("serve", "--zzz", NO_COLOR="1")
    assert cli.main(["serve", "--zzz"]) == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(
    shell: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def completed(line: str) -> str:
        words = line.split(" ")
        told = {"_HELMSIGHT_COMPLETE": f"complete_{shell}", "COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1)}
        told |= {"_TYPER_COMPLETE_ARGS": line, "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
        for name, value in told.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit):
            cli.main([])
        return capsys.readouterr().out

    assert "vectors" in completed("helmsight ve")
    assert "--allow-uploads" in completed("helmsight serve --allow-u")
    assert "instructed" in completed("helmsight probe --weight-states in")
