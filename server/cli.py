"""The command line: `helmsight serve`, `doctor`, `bench`, `vectors`, `journal`, and what the other rooms add."""

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
from probes.harness.options import Defaults, run
from server.allocator import bound_memory
from server.openmp import set_wait_policy

COMMANDS = {
    "serve": ("server.commands.serve", "serve a model over HTTP"),
    "doctor": ("server.commands.doctor", "look at all that a server rests on, and say what to do"),
    "bench": ("server.commands.bench", "what a device makes of a model, a GPU above all"),
    "vectors": ("server.commands.vectors", "list, show, build, compose, export and import steering vectors"),
    "keys": ("server.commands.keys", "make, list and revoke keys with names, roles and limits"),
    "journal": ("server.commands.journal", "export, prune or summarise the journal of answers"),
    "probe": ("probes.command", "build a modality-preference vector for a model"),
    "eval": ("probes.command", "run a benchmark"),
    "reproduce": ("probes.command", "every table and figure of the four papers"),
    "demo": ("demo.command", "the embedded default model: train it, evaluate it, draw its scenes"),
}
"""Of each command the module whose `register` adds it, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    set_wait_policy()
    bound_memory()
    return run(commands(), argv, Defaults(CHECKPOINT, _vector_folders, DRAWS, _look, located), _usage_errors)


class Commands(TyperGroup):
    """Imports the command that is called, and no other: together they take longer than --help has to."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As Typer's, of the whole command."""
        if args[0] in COMMANDS:
            self.commands[args[0]] = command(args[0])
        return super().resolve_command(ctx, args)


def commands() -> typer.Typer:
    """Every room's commands, by what --help says of them."""
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
    """A command with all its options and parts."""
    module, about = COMMANDS[name]
    app = typer.Typer(callback=_root)
    import_module(module).register(app)
    made = typer.main.get_group(app).commands[name]
    made.help = made.help or about
    return made


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version  # noqa: PLC0415 -- takes time, like the next ones

        print(f"helmsight {version('helmsight')}")
        raise typer.Exit


def _root(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


def _vector_folders() -> list[Path]:
    """Where a server looks for vectors before the model's folder."""
    from server.process.sources import load_settings  # noqa: PLC0415

    return [Path(folder).expanduser() for folder in load_settings().vectors]


def _look(model: str, device: str) -> None:
    """Raise ValueError for a model whose files are missing or damaged, and for a device that there is not."""
    from server.process.preflight import look  # noqa: PLC0415
    from server.settings import Settings, SettingsError  # noqa: PLC0415

    try:
        look(Settings(model=model, device=device))
    except SettingsError as error:
        raise ValueError(str(error)) from None


def _usage_errors() -> tuple[type[Exception], ...]:
    """What is told as a wrong command line is."""
    from server.settings import SettingsError  # noqa: PLC0415

    return (SettingsError,)


if __name__ == "__main__":
    sys.exit(main())
