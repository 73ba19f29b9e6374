"""`helmsight eval pope`: whether a model sees objects that are not there."""

from __future__ import annotations

from probes.image_qa.benchmark import listed

BENCHMARK = listed(
    "pope",
    help="POPE: yes/no questions about present and absent objects",
    description="Ask whether objects are in images, for as many present as absent ones. Absent ones are drawn at random, "
    "by frequency (popular), or by how often they occur with present ones (adversarial). The model answers plainly, "
    "steered, with SAGE and with the contrastive decoders; each is compared with its plain answers to the same "
    "questions.",
    limit=300,
    unit="questions",
)
