"""Command-line options that select conflicts, and the drawing of samples by them."""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from probes.harness.options import Defaults, sample_option

if TYPE_CHECKING:
    from probes.conflicts.samples import ConflictSample

PROBE_SEEDS = 1_000_000_000
"""The offset of a probe's seed for demo samples, so that they never meet those of an evaluation's small seeds."""


MC2File = Annotated[
    str | None, sample_option("--mc2", metavar="JSON", help="MC2's samples (default: conflicts of the demo world)")
]
Images = Annotated[str | None, sample_option(metavar="DIR", help="folder of the COCO images of --mc2")]
Tasks = Annotated[list[str] | None, sample_option(metavar="TASK...", help="use only samples of these tasks")]
Instructions = Annotated[
    Literal["paper", "v2", "v1", "case"],
    sample_option(
        help="wording of the authors' instructions: the one they mark as used in the paper, their version 2 or 1, or the "
        "short one of the paper's figure 12"
    ),
]


@dataclass(frozen=True)
class Data:
    """MC2's file and the folder of its images, or the demo samples that `demo(count, seed)` draws.

    Only samples of the `tasks` are used, if any are named. `seed` shuffles a file.
    """

    mc2: str | None = None
    images: str | None = None
    tasks: frozenset[str] = frozenset()
    seed: int = 0
    demo: Callable[[int, int], Sequence[ConflictSample]] | None = None

    @classmethod
    def of(
        cls, defaults: Defaults, mc2: str | None, images: str | None, tasks: Sequence[str] | None, seed: int
    ) -> Data:
        """Return the data that the command line selects; raise ValueError for images without the file of their samples."""
        if images is not None and mc2 is None:
            raise ValueError("--images needs --mc2, the file of the samples that the images belong to")
        return cls(mc2, images, frozenset(tasks or ()), seed, defaults.draw.get("conflicts"))

    def draw(
        self, count: int, seed: int, without: Collection[str] = (), left_out: list[str] | None = None
    ) -> list[ConflictSample]:
        """Return `count` samples, or fewer if a file has fewer.

        Samples of a file whose ids are in `without` are reserved for another use; the demo world's draws differ by their
        seeds. Samples of a file whose pictures are missing or do not decode are left out and added to `left_out`. Raises
        ValueError for tasks without samples, and if there is nothing to draw from.
        """
        from probes.conflicts import file

        samples = self._file(frozenset(without), left_out) if self.mc2 else self._demo(count, seed)
        tasks = {sample.task for sample in samples}
        if self.tasks - tasks:
            unknown, available = ", ".join(sorted(self.tasks - tasks)), ", ".join(sorted(tasks))
            raise ValueError(f"--tasks: unknown {unknown}; there are {available}")
        selected = [sample for sample in samples if not self.tasks or sample.task in self.tasks]
        chosen = file.decodable(selected, count, left_out=left_out) if self.mc2 else selected[:count]
        if len(chosen) < count:
            logging.getLogger(__name__).warning("There are only %d samples; %d were requested.", len(chosen), count)
        return chosen

    def _file(self, used: frozenset[str], left_out: list[str] | None) -> list[ConflictSample]:
        assert self.mc2 is not None
        if not self.images:
            raise ValueError("--mc2 needs --images, the folder of its images (COCO 2014)")
        from probes.conflicts import file

        samples = file.load(self.mc2, self.images, left_out=left_out)
        random.Random(self.seed).shuffle(samples)
        return [sample for sample in samples if sample.id not in used]

    def _demo(self, count: int, seed: int) -> list[ConflictSample]:
        if self.demo is None:
            raise ValueError("--mc2 is needed: the demo world, which draws conflicts, is not installed")
        # Tasks alternate, so a draw of several times the count holds enough of each.
        return list(self.demo(count * 8 if self.tasks else count, seed))
