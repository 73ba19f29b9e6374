"""The command line: `helmsight serve`, `vectors`, `journal`, and what the other rooms add."""

# ruff: noqa: PLC0415 -- heavy imports happen inside the commands, so that --help answers at once
from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from difflib import get_close_matches
from itertools import takewhile
from pathlib import Path
from typing import TYPE_CHECKING, Any

from demo import command as demo_command
from probes import command as probes_command
from server import settings as server_settings
from server.allocator import bound_memory
from server.commands import journal as journal_command
from server.commands import vectors as vectors_command
from server.openmp import set_wait_policy

if TYPE_CHECKING:
    from probes.conflicts.samples import ConflictSample
    from probes.sage.samples import Difference, Existence


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand and return the exit status."""
    set_wait_policy()
    bound_memory()
    parser = build_parser()
    arguments = parser.parse_args(argv)
    try:
        return int(arguments.func(arguments) or 0)
    except server_settings.SettingsError as error:
        print(f"helmsight: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


class Parser(argparse.ArgumentParser):
    """A parser, and the parsers of its subcommands, that take no option for another one that it begins like."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **{"allow_abbrev": False, **options})

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's, but an unknown option is named before its value is taken for something else."""
        words = sys.argv[1:] if args is None else list(args)
        for word in takewhile(lambda word: word != "--" and word not in self._commands(), words):
            name = word.partition("=")[0]
            if name.startswith("--") and " " not in word and name not in self._option_string_actions:
                meant = get_close_matches(name, self._option_string_actions, n=1)
                self.error(f"unrecognized option {name}" + (f"; did you mean {meant[0]}?" if meant else ""))
        return super().parse_known_args(args, namespace)

    def _commands(self) -> set[str]:
        """The names behind which another parser reads on."""
        found = [action.choices for action in self._actions if isinstance(action, argparse._SubParsersAction)]
        return {name for choices in found for name in choices}


def build_parser() -> argparse.ArgumentParser:
    """The parser with every room's subcommands."""
    parser = Parser(prog="helmsight", description="Serve a multimodal language model and steer it per request.")
    subparsers = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    _register_serve(subparsers)
    vectors_command.register(subparsers)
    journal_command.register(subparsers)
    probes_command.register(
        subparsers,
        demo_samples=_demo_samples,
        demo_faithfulness=_demo_faithfulness,
        default_model=server_settings.embedded_checkpoint(),
        vector_folders=_vector_folders,
    )
    demo_command.register(subparsers)
    return parser


def _vector_folders() -> list[Path]:
    """Where a server looks for vectors before the model's folder."""
    return [Path(folder).expanduser() for folder in server_settings.load_settings().vectors]


def _demo_samples(count: int, seed: int) -> list[ConflictSample]:
    """Conflicts of the demo world, which the room of probes does not know."""
    from demo.world.conflicts import conflict_samples

    return conflict_samples(count, seed)


def _demo_faithfulness(
    questions: int, pairs: int, seed: int, noise: float
) -> tuple[list[Existence], list[Difference], tuple[str, ...]]:
    """Existence questions, pairs with differences, and the names of what can be in a picture."""
    from demo.world.faithfulness import difference_samples, existence_samples
    from demo.world.scenes import SHAPES

    return existence_samples(questions, seed, noise=noise), difference_samples(pairs, seed, noise=noise), SHAPES


def _register_serve(subparsers: argparse._SubParsersAction) -> None:
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
    from server.process.preflight import preflight
    from server.serving import serve

    preflight(settings)

    serve(settings)
    return 0


if __name__ == "__main__":
    sys.exit(main())
