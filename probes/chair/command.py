"""`helmsight eval chair`: the objects that a description names although they are not there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probes.image_qa.benchmark import listed

if TYPE_CHECKING:
    from probes.chair.samples import Described
    from probes.image_qa.task import Task


def _task() -> Task[Described]:
    from probes.chair.task import TASK

    return TASK


BENCHMARK = listed(
    "chair",
    _task,
    help="CHAIR: objects that a description names but the image does not show",
    description="Let the model describe images, and find the objects that a description names but the image does not "
    "show. It answers plainly, steered, with SAGE and with the contrastive decoders; each is compared with its plain "
    "answers to the same samples.",
    limit=200,
    unit="pictures",
)
