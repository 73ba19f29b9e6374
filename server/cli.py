"""The command line: `helmsight serve`, `doctor`, `vectors`, `journal`, and what the other rooms add."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from typer import Option

from demo import command as demo_command
from probes import command as probes_command
from probes.harness.options import Defaults, run
from server import settings as server_settings
from server.allocator import bound_memory
from server.commands import doctor, journal, serve, vectors
from server.openmp import set_wait_policy

if TYPE_CHECKING:
    from probes.conflicts.samples import ConflictSample
    from probes.sage.samples import Difference, Existence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status."""
    set_wait_policy()
    bound_memory()
    defaults = Defaults(
        server_settings.embedded_checkpoint(),
        _vector_folders,
        {"conflicts": _demo_samples, "sage": _demo_faithfulness},
        _look,
    )
    return run(commands(), argv, defaults, (server_settings.SettingsError,))


def commands() -> typer.Typer:
    """Every room's commands."""
    app = typer.Typer(
        help="Serve a multimodal language model and steer it per request.",
        callback=_root,
        no_args_is_help=True,
        context_settings={"help_option_names": ["--help", "-h"]},
    )
    serve.register(app)
    doctor.register(app)
    vectors.register(app)
    journal.register(app)
    probes_command.register(app)
    demo_command.register(app)
    return app


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

    try:
        look(server_settings.Settings(model=model, device=device))
    except server_settings.SettingsError as error:
        raise ValueError(str(error)) from None


def _demo_samples(count: int, seed: int) -> list[ConflictSample]:
    """Conflicts of the demo world, which the room of probes does not know."""
    from demo.world.conflicts import conflict_samples  # noqa: PLC0415

    return conflict_samples(count, seed)


def _demo_faithfulness(
    questions: int, pairs: int, seed: int, noise: float
) -> tuple[list[Existence], list[Difference], tuple[str, ...]]:
    """Existence questions, pairs with differences, and the names of what can be in a picture."""
    from demo.world.faithfulness import difference_samples, existence_samples  # noqa: PLC0415
    from demo.world.scenes import SHAPES  # noqa: PLC0415

    return existence_samples(questions, seed, noise=noise), difference_samples(pairs, seed, noise=noise), SHAPES


if __name__ == "__main__":
    sys.exit(main())
