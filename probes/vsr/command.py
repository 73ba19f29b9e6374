"""`helmsight eval vsr`: the truth of statements about spatial relations in a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probes.image_qa.benchmark import listed

if TYPE_CHECKING:
    from probes.image_qa.task import Task
    from probes.image_qa.yes_no import YesNo


def _task() -> Task[YesNo]:
    from probes.vsr.task import TASK

    return TASK


BENCHMARK = listed(
    "vsr",
    _task,
    help="VSR: the truth of statements about spatial relations",
    description="Ask whether statements about spatial relations are true of an image. The model answers plainly, "
    "steered, with SAGE and with the contrastive decoders; each is compared with its plain answers to the same samples.",
    limit=500,
    unit="statements",
)
