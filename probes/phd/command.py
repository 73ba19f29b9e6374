"""`helmsight eval phd`: yes/no questions beside a misleading text."""

from __future__ import annotations

from probes.image_qa.benchmark import listed

BENCHMARK = listed(
    "phd",
    help="PhD: yes/no questions beside a misleading text",
    description="Ask yes/no questions alone, beside an inaccurate text, and beside an incorrect one. The model answers "
    "plainly, steered, with SAGE and with the contrastive decoders; each is compared with its plain answers to the same "
    "samples.",
    limit=600,
    unit="questions",
)
