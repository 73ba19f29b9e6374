"""`helmsight eval ambigcaps`: translation of ambiguous captions beside their picture."""

from __future__ import annotations

from typing import TYPE_CHECKING

from probes.image_qa.benchmark import listed

if TYPE_CHECKING:
    from probes.ambigcaps.samples import Translated
    from probes.image_qa.task import Task


def _task() -> Task[Translated]:
    from probes.ambigcaps.task import TASK

    return TASK


BENCHMARK = listed(
    "ambigcaps",
    _task,
    help="AmbigCaps: translation of ambiguous captions beside their image",
    description="Let the model translate captions that are ambiguous without their image from English into Turkish and "
    "back, scored by BLEU. It answers plainly, steered, with SAGE and with the contrastive decoders; each is compared "
    "with its plain answers to the same samples.",
    limit=500,
    unit="captions",
    automatic=True,
)
