"""What the commands share: options, samples, the engine, and how errors are told."""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from probes.conflicts.samples import Sample
    from probes.sage.samples import Difference, Existence
    from steering import Engine, SteeringVector

    DemoSamples = Callable[[int, int], Sequence[Sample]]
    DemoFaithfulness = Callable[[int, int, int, float], tuple[Sequence[Existence], Sequence[Difference], Sequence[str]]]

PROBE_SEEDS = 1_000_000_000
"""Added to the seed when a probe draws demo samples, so that an evaluation's small seeds never meet them again."""

VECTOR = "modality-preference"


def own_vectors() -> list[Path]:
    """The user's folder of vectors."""
    return [Path("~/.helmsight/vectors").expanduser()]


@dataclass(frozen=True)
class Defaults:
    """What the commands fall back to: `samples(count, seed)` draws conflicts where no MC2 file is given,
    `faithfulness(questions, pairs, seed, noise)` existence questions, pairs of pictures and the names of objects;
    `vectors()` are the folders where vectors are looked for before the model's own, and the first is written to."""

    samples: DemoSamples | None = None
    faithfulness: DemoFaithfulness | None = None
    model: str | Path | None = None
    vectors: Callable[[], Sequence[Path]] = own_vectors


def add_data(parser: argparse.ArgumentParser) -> None:
    """The samples of MC2's commands."""
    parser.add_argument("--mc2", metavar="JSON", help="MC2's samples (default: conflicts of the demo world)")
    parser.add_argument("--images", metavar="DIR", help="the COCO images of --mc2")


def add_wording(parser: argparse.ArgumentParser) -> None:
    """Which instructions the prompts hold."""
    parser.add_argument(
        "--wording", choices=("paper", "v2", "v1"), default="paper",
        help="the authors' instructions, word for word: those they mark as used in the paper, their version 2 or version 1 "
        "(default %(default)s)",
    )  # fmt: skip


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


def guarded(command: Callable[[argparse.Namespace, Defaults], int], defaults: Defaults) -> Callable[..., int]:
    """A command for argparse; what a user can put right is one line on standard error and status 1, not a traceback."""

    def run(arguments: argparse.Namespace) -> int:
        from steering import SteeringError

        logging.basicConfig(level=logging.WARNING, format="%(levelname)s: %(message)s")
        try:
            return command(arguments, defaults)
        except (SteeringError, ValueError, OSError) as error:
            print(f"helmsight: {error}", file=sys.stderr)
            return 1

    return run


def write_json(path: str | Path, report: dict[str, Any]) -> None:
    """Write a report atomically: a reader sees the old file or the whole new one."""
    from steering.files import write_atomically

    write_atomically(path, (json.dumps(report, indent=2) + "\n").encode())


def show(table: Table) -> None:
    """Print a table, wide enough to be read also where the output is no terminal."""
    from rich.console import Console

    Console(width=None if sys.stdout.isatty() else 120).print(table)


def samples_of(
    arguments: argparse.Namespace, defaults: Defaults, count: int, seed: int, without: Collection[str] = ()
) -> list[Sample]:
    """`count` samples (fewer where a file has fewer), drawn by the seed from the MC2 file or the demo world.

    Those of a file whose ids are in `without` have another use; the demo world's draws are told apart by their seeds.
    """
    from probes.conflicts import file as mc2_file

    tasks = set(getattr(arguments, "tasks", None) or ())
    if arguments.mc2:
        if not arguments.images:
            raise ValueError("--mc2 needs --images, the folder of COCO 2014")
        found = mc2_file.load(arguments.mc2, arguments.images)
        random.Random(arguments.seed).shuffle(found)
        used = frozenset(without)
        found = [sample for sample in found if sample.id not in used]
    elif defaults.samples is None:
        raise ValueError("--mc2 is needed: there is no demo world here to draw conflicts from")
    else:
        # Tasks come in turn, so a draw of several times the count holds enough of any one of them.
        found = list(defaults.samples(count * 8 if tasks else count, seed))
    known = {sample.task for sample in found}
    if tasks - known:
        raise ValueError(f"--tasks: unknown {', '.join(sorted(tasks - known))}; there are {', '.join(sorted(known))}")
    chosen = [sample for sample in found if not tasks or sample.task in tasks][:count]
    if len(chosen) < count:
        logging.getLogger(__name__).warning("There are %d samples, %d were asked for.", len(chosen), count)
    return chosen


def engine_of(arguments: argparse.Namespace) -> Engine:
    """The engine of --model."""
    import steering

    mllm = steering.load(arguments.model, device=arguments.device)
    return steering.Engine(mllm, slots=arguments.slots, threads=arguments.threads)


def vector_of(
    wanted: str, model: str | Path, folders: Sequence[Path], fingerprint: Callable[[], str]
) -> SteeringVector:
    """A vector by its file, or by its name in these folders and the model's: the first one of the model, as a server finds
    it. The model's fingerprint is asked for only where vectors of several models have that name."""
    from steering import SteeringVector, VectorStore

    if Path(wanted).is_file():
        return SteeringVector.load(wanted)
    found = VectorStore(*folders, Path(model) / "vectors").all(wanted)
    if len({vector.fingerprint for vector in found}) == 1:
        return found[0]
    of_model = fingerprint()
    return next((vector for vector in found if vector.fingerprint == of_model), found[0])
