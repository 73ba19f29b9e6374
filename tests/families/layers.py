"""Families that few tests ask: layers that add their updates behind norms or scaled, and a processor with a need."""

from __future__ import annotations

from dataclasses import replace

from tests.families import llava, tiled
from tests.families.family import Family
from tests.families.parts import text

# The scales are those of ibm-granite/granite-vision-3.3-2b.
GRANITE_VISION = replace(
    llava.LLAVA_NEXT,
    config=llava.LLAVA_NEXT.config
    | {
        "text_config": text(
            "granite",
            attention_multiplier=0.015625,
            embedding_multiplier=12.0,
            residual_multiplier=0.22,
            logits_scaling=8.0,
            tie_word_embeddings=True,
        ),
        "tie_word_embeddings": True,
    },
)


def _in_llava(model_type: str) -> Family:
    """Return a llava whose language model is of another family."""
    more = {"layer_types": ["full_attention"] * 3, "sliding_window": None} if model_type == "exaone4" else {}
    return replace(llava.LLAVA, config=llava.LLAVA.config | {"text_config": text(model_type, **more)})


OLMO2 = _in_llava("olmo2")
EXAONE4 = _in_llava("exaone4")
GRANITE_MOE = replace(
    GRANITE_VISION,
    config=GRANITE_VISION.config
    | {
        "text_config": GRANITE_VISION.config["text_config"]
        | {
            "model_type": "granitemoeshared",
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
        }
    },
)
SMOLVLM = replace(
    tiled.IDEFICS3,
    config=tiled.IDEFICS3.config | {"model_type": "smolvlm"},
    image_processor=tiled.IDEFICS3.image_processor | {"image_processor_type": "SmolVLMImageProcessor"},
    video_processor={"video_processor_type": "SmolVLMVideoProcessor", "size": {"longest_edge": 28}},
    processor=tiled.IDEFICS3.processor | {"processor_class": "SmolVLMProcessor"},
)
