"""The command line: `helmsight serve`, `doctor`, `bench`, `vectors`, `journal`, and the commands of other rooms."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Option
from typer.core import TyperGroup

from demo import CHECKPOINT, located
from demo.draws import DRAWS
from probes.harness.options import Defaults, ModelOptions, run
from server.startup.allocator import bound_memory
from server.startup.openmp import set_wait_policy

COMMANDS = {
    "serve": ("server.commands.serve", "serve a model over HTTP"),
    "doctor": ("server.commands.doctor", "check everything that a server depends on, with advice"),
    "bench": ("server.commands.bench", "measure how fast a device, usually a GPU, runs a model"),
    "vectors": ("server.commands.vectors", "list, show, build, compose, export and import steering vectors"),
    "keys": ("server.commands.keys", "make, rotate, list and revoke keys with names, roles and limits"),
    "journal": (
        "server.commands.journal",
        "back up, export, prune or summarise the journal of answers, send its scores",
    ),
    "batch": ("server.commands.batch", "answer a file of requests in OpenAI's batch format, under several conditions"),
    "observe": ("server.commands.observe", "read the answers that another engine gave with the same weights"),
    "prepare": ("probes.command", "measure everything that a model lacks, one part after the other"),
    "probe": ("probes.command", "build a modality-preference vector for a model"),
    "eval": ("probes.command", "run a benchmark"),
    "reproduce": ("probes.command", "reproduce every table and figure of the four papers"),
    "demo": ("demo.command", "the embedded default model: train it, evaluate it, draw its scenes"),
}
"""For each command, the module whose `register` adds it, and its help text."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    set_wait_policy()
    bound_memory()
    draws = {**DRAWS, "journal": _judged}
    return run(commands(), argv, Defaults(CHECKPOINT, _vector_folders, draws, _look, located), _usage_errors)


class Commands(TyperGroup):
    """A group that only imports the called command, since importing all takes too long for --help."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Resolve a command as Typer does, after importing it."""
        if args[0] in COMMANDS:
            self.commands[args[0]] = command(args[0])
        return super().resolve_command(ctx, args)


def commands() -> typer.Typer:
    """Return all commands with their help texts only."""
    app = typer.Typer(
        cls=Commands,
        help="Serve a multimodal language model and steer it per request.",
        callback=_root,
        no_args_is_help=True,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    for name, (_, about) in COMMANDS.items():
        app.command(name, help=about)(lambda: None)
    return app


def command(name: str) -> Any:
    """Return a command with all its options and parts."""
    module, about = COMMANDS[name]
    app = typer.Typer(callback=_root)
    import_module(module).register(app)
    click_command = typer.main.get_group(app).commands[name]
    click_command.help = click_command.help or about
    return click_command


def _show_version(requested: bool) -> None:
    if requested:
        from importlib.metadata import version  # noqa: PLC0415 -- takes time, like the next ones

        print(f"helmsight {version('helmsight')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Handle the options that precede a command."""


def _vector_folders() -> list[Path]:
    """Return the folders that a server searches for vectors before the model's own."""
    from server.process.sources import load_settings  # noqa: PLC0415

    return [Path(folder).expanduser() for folder in load_settings().vectors]


def _look(model: ModelOptions) -> None:
    """Raise ValueError for a model whose files are missing or damaged, and for options that do not fit this machine."""
    from server.process.preflight import look  # noqa: PLC0415
    from server.settings import Settings, SettingsError  # noqa: PLC0415

    try:
        look(Settings(**model.settings))
    except SettingsError as error:
        raise ValueError(str(error)) from None


def _judged(journal: str | None, since: str | None) -> list[dict[str, Any]]:
    """Return the judged answers of a journal, by default that of the settings."""
    from server.commands.options import settings_of  # noqa: PLC0415
    from server.journal.reading.queries import Filters  # noqa: PLC0415
    from server.journal.reading.times import unix_time  # noqa: PLC0415
    from server.journal.reading.truths import judged_of  # noqa: PLC0415

    setting = settings_of(None, journal=journal).journal.get_secret_value()
    if setting.strip().lower() == "off":
        raise ValueError("the journal is switched off; name one with --journal")
    try:
        begin = None if since is None else unix_time(since)
    except ValueError as error:
        raise ValueError(f"--since {error}") from None
    return judged_of(setting, Filters(since=begin))


def _usage_errors() -> tuple[type[Exception], ...]:
    """Return the errors that are reported like a wrong command line."""
    from server.settings import SettingsError  # noqa: PLC0415

    return (SettingsError,)


if __name__ == "__main__":
    sys.exit(main())
