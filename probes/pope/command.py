"""`helmsight eval pope`: whether a model sees objects that are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probes.image_qa.benchmark import listed

if TYPE_CHECKING:
    from probes.image_qa.task import Task
    from probes.image_qa.yes_no import YesNo


def _task() -> Task[YesNo]:
    from probes.pope.task import TASK

    return TASK


BENCHMARK = listed(
    "pope",
    _task,
    help="POPE: whether a model sees objects that are not there",
    description="Ask whether objects are in pictures: as many that are there as that are not, the absent ones drawn at "
    "random, by frequency (popular) or by how often they come with what is there (adversarial). Asked plainly, steered, "
    "with SAGE and with the contrastive decoders; each is compared with the plain answers to the same questions.",
    limit=300,
    unit="questions",
)
