"""`helmsight eval mme`: two questions on each picture, one for yes and one for no."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probes.image_qa.benchmark import listed

if TYPE_CHECKING:
    from probes.image_qa.task import Task
    from probes.mme.samples import MmePair


def _task() -> Task[MmePair]:
    from probes.mme.task import TASK

    return TASK


BENCHMARK = listed(
    "mme",
    _task,
    help="MME: two questions on each image, one for yes and one for no",
    description="Ask two questions on each image, one for yes and one for no, by subtask. The model answers plainly, "
    "steered, with SAGE and with the contrastive decoders; each is compared with its plain answers to the same samples.",
    limit=200,
    unit="pairs of questions",
)
