"""What commands share: options of the model, what they fall back to, and how errors are told. Imports nothing heavy, so that
--help answers at once."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from steering import Engine


def own_vectors() -> list[Path]:
    """The user's folder of vectors."""
    return [Path("~/.helmsight/vectors").expanduser()]


@dataclass(frozen=True)
class Defaults:
    """What the commands fall back to.

    `draw`: by the name of a kind of samples, what draws them where no file is given. `vectors()` are the folders where
    vectors are looked for before the model's own, and the first is written to.
    """

    model: str | Path | None = None
    vectors: Callable[[], Sequence[Path]] = own_vectors
    draw: Mapping[str, Callable[..., Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ModelOptions:
    """A checkpoint and how it is run in this process; `default` where it was not asked for by its name."""

    path: str
    device: str = "auto"
    threads: int | None = None
    slots: int = 16
    default: bool = False

    @classmethod
    def of(cls, arguments: argparse.Namespace, defaults: Defaults) -> ModelOptions:
        """The options that `add_model` added."""
        default = arguments.model == defaults.model
        return cls(str(arguments.model), arguments.device, arguments.threads, arguments.slots, default)

    def engine(self) -> Engine:
        """The engine of the model, which is loaded."""
        import steering

        return steering.Engine(steering.load(self.path, device=self.device), slots=self.slots, threads=self.threads)


def add_model(parser: argparse.ArgumentParser, defaults: Defaults) -> None:
    """The model and how it is run."""
    parser.add_argument(
        "--model", default=defaults.model, required=defaults.model is None, metavar="PATH",
        help="checkpoint folder or hub name" + (" (default: the embedded model)" if defaults.model else ""),
    )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, help="seed of everything random (default %(default)s)")
    parser.add_argument("--device", default="auto", help="cpu, cuda, ... (default %(default)s)")
    parser.add_argument("--threads", type=positive, metavar="N", help="CPU threads")
    parser.add_argument(
        "--slots", type=positive, default=16, metavar="N", help="prompts in a batch (default %(default)s)"
    )
    parser.add_argument("--quiet", action="store_true", help="no progress bars")


def positive(text: str) -> int:
    """A whole number of at least 1."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def check_writable(folder: Path) -> None:
    """Raise PermissionError where nothing can be written into the folder."""
    if not os.access(folder, os.W_OK):
        raise PermissionError(f"{folder} cannot be written to")


def guarded(command: Callable[[argparse.Namespace], int]) -> Callable[[argparse.Namespace], int]:
    """A command for argparse; what a user can put right is one line on standard error and status 1, not a traceback."""

    def run(arguments: argparse.Namespace) -> int:
        from steering import SteeringError

        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        try:
            return command(arguments)
        except (SteeringError, ValueError, OSError) as error:
            print(f"helmsight: {error}", file=sys.stderr)
            return 1

    return run
