"""`helmsight eval tallyqa`: counting questions."""

from __future__ import annotations

from probes.image_qa.benchmark import listed

BENCHMARK = listed(
    "tallyqa",
    help="TallyQA: counting questions",
    description="Ask how many objects of a kind are in an image. The model answers plainly, steered, with SAGE and with "
    "the contrastive decoders; each is compared with its plain answers to the same samples.",
    limit=300,
    unit="questions",
)
