"""The command line: `helmsight serve`, `vectors`, `journal`, and what the other rooms add."""

# ruff: noqa: PLC0415 -- heavy imports happen inside the commands, so that --help answers at once
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from demo import command as demo_command
from probes import command as probes_command
from server import settings as server_settings
from server.journal import command as journal_command
from server.vectors import command as vectors_command

if TYPE_CHECKING:
    from probes.faithfulness import Difference, Existence
    from probes.mc2 import Sample


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status."""
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.func(arguments) or 0)
    except server_settings.SettingsError as error:
        print(f"helmsight: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def build_parser() -> argparse.ArgumentParser:
    """The parser with every room's subcommands."""
    parser = argparse.ArgumentParser(
        prog="helmsight", description="Serve a multimodal language model and steer it per request."
    )
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _register_serve(subparsers)
    vectors_command.register(subparsers)
    journal_command.register(subparsers)
    probes_command.register(
        subparsers,
        demo_samples=_demo_samples,
        demo_faithfulness=_demo_faithfulness,
        default_model=server_settings.embedded_checkpoint(),
    )
    demo_command.register(subparsers)
    return parser


def _demo_samples(count: int, seed: int) -> list[Sample]:
    """Conflicts of the demo world, which the room of probes does not know."""
    from demo.conflicts import conflict_samples

    return conflict_samples(count, seed)


def _demo_faithfulness(
    questions: int, pairs: int, seed: int, noise: float
) -> tuple[list[Existence], list[Difference], tuple[str, ...]]:
    """Existence questions, pairs with differences, and the names of what can be in a picture."""
    from demo.faithfulness import difference_samples, existence_samples
    from demo.world import SHAPES

    return existence_samples(questions, seed, noise=noise), difference_samples(pairs, seed, noise=noise), SHAPES


def _register_serve(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serve a model behind OpenAI's chat-completions protocol.",
        epilog="Every flag is also a variable (HELMSIGHT_PORT=8001) and a key in the file of --config (port = 8001).",
    )
    server_settings.add_flags(parser)
    parser.set_defaults(func=_serve)


def _serve(arguments: argparse.Namespace) -> int:
    settings = server_settings.from_arguments(arguments)
    _ = settings.keys  # a missing key file should end the command here, not the worker
    from server.serving import serve

    serve(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
