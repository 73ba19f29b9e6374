"""`helmsight eval vsr`: the truth of statements about spatial relations in a picture."""

from __future__ import annotations

from probes.image_qa.benchmark import listed

BENCHMARK = listed(
    "vsr",
    help="VSR: the truth of statements about spatial relations",
    description="Ask whether statements about spatial relations are true of an image. The model answers plainly, "
    "steered, with SAGE and with the contrastive decoders; each is compared with its plain answers to the same samples.",
    limit=500,
    unit="statements",
)
