"""`helmsight eval chair`: the objects that a description names although they are not there."""

from __future__ import annotations

from probes.image_qa.benchmark import listed

BENCHMARK = listed(
    "chair",
    help="CHAIR: objects that a description names but the image does not show",
    description="Let the model describe images, and find the objects that a description names but the image does not "
    "show. It answers plainly, steered, with SAGE and with the contrastive decoders; each is compared with its plain "
    "answers to the same samples.",
    limit=200,
    unit="pictures",
)
