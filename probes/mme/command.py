"""`helmsight eval mme`: two questions on each picture, one for yes and one for no."""

from __future__ import annotations

from probes.image_qa.benchmark import listed

BENCHMARK = listed(
    "mme",
    help="MME: two questions on each image, one for yes and one for no",
    description="Ask two questions on each image, one for yes and one for no, by subtask. The model answers plainly, "
    "steered, with SAGE and with the contrastive decoders; each is compared with its plain answers to the same samples.",
    limit=200,
    unit="pairs of questions",
)
