"""`helmsight eval tallyqa`: counting questions."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probes.image_qa.benchmark import listed

if TYPE_CHECKING:
    from probes.image_qa.task import Task
    from probes.tallyqa.task import Counted


def _task() -> Task[Counted]:
    from probes.tallyqa.task import TASK

    return TASK


BENCHMARK = listed(
    "tallyqa",
    _task,
    help="TallyQA: counting questions",
    description="Ask how many objects of a kind are in an image. The model answers plainly, steered, with SAGE and with "
    "the contrastive decoders; each is compared with its plain answers to the same samples.",
    limit=300,
    unit="questions",
)
