"""The command line as a whole: what every command's parser has in common."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

import pytest

from server import cli


def parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and those of all its subcommands."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from parsers(inner)


ALL = list(parsers(cli.build_parser()))


def test_every_command_is_walked() -> None:
    names = {parser.prog for parser in ALL}
    assert {"helmsight", "helmsight serve", "helmsight probe", "helmsight eval mc2", "helmsight eval sage"} <= names
    assert {"helmsight vectors compose", "helmsight journal export", "helmsight demo train"} <= names


@pytest.mark.parametrize("parser", ALL, ids=lambda parser: str(parser.prog))
def test_no_option_is_taken_for_one_that_it_only_begins_like(parser: argparse.ArgumentParser) -> None:
    assert parser.allow_abbrev is False


@pytest.mark.parametrize(
    "words",
    [
        ["probe", "--sample", "3"],
        ["probe", "--repl"],
        ["eval", "mc2", "--limi", "3"],
        ["serve", "--por", "1"],
        ["vectors", "compose", "a", "--add", "b", "--rep"],
        ["journal", "export", "--lim", "1"],
        ["demo", "scene", "--see", "1"],
    ],
)
def test_a_shortened_option_is_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.build_parser().parse_args(words)
    assert ended.value.code == 2
    assert "error: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["probe", "--sample", "3"], "helmsight probe: error: unrecognized option --sample; did you mean --samples?"),
        (["probe", "--sample=3"], "unrecognized option --sample; did you mean --samples?"),
        (["serve", "--prot", "1"], "helmsight serve: error: unrecognized option --prot; did you mean --port?"),
        (
            ["vectors", "compose", "a", "--ad", "b"],
            "vectors compose: error: unrecognized option --ad; did you mean --add?",
        ),
        (["journal", "export", "--limt", "1"], "unrecognized option --limt; did you mean --limit?"),
        (["--sample", "serve"], "helmsight: error: unrecognized option --sample\n"),
        (["serve", "--zzz"], "unrecognized option --zzz\n"),
    ],
)
def test_an_unknown_option_is_named_with_the_one_that_is_meant(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.build_parser().parse_args(words)
    assert said in capsys.readouterr().err


def test_a_value_is_not_taken_for_an_option() -> None:
    arguments = cli.build_parser().parse_args(["serve", "--host=--odd", "--port", "1"])
    assert (arguments.host, arguments.port) == ("--odd", "1")
