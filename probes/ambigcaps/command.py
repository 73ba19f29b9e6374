"""`helmsight eval ambigcaps`: translation of ambiguous captions beside their picture."""

from __future__ import annotations

from probes.image_qa.benchmark import listed

BENCHMARK = listed(
    "ambigcaps",
    help="AmbigCaps: translation of ambiguous captions beside their image",
    description="Let the model translate captions that are ambiguous without their image from English into Turkish and "
    "back, scored by BLEU. It answers plainly, steered, with SAGE and with the contrastive decoders; each is compared "
    "with its plain answers to the same samples.",
    limit=500,
    unit="captions",
    automatic=True,
)
