"""Every family by its name: those that an engine runs, and those that it must refuse."""

from __future__ import annotations

from tests.families import further, gemma, llava, native, qwen, tiled
from tests.families.family import Family

SUPPORTED: dict[str, Family] = {
    "qwen2_vl": qwen.QWEN2_VL,
    "qwen2_5_vl": qwen.QWEN25_VL,
    "qwen3_vl": qwen.QWEN3_VL,
    "qwen3_vl_moe": qwen.QWEN3_VL_MOE,
    "llava": llava.LLAVA,
    "llava_next": llava.LLAVA_NEXT,
    "llava_onevision": llava.LLAVA_ONEVISION,
    "internvl": tiled.INTERNVL,
    "gemma3": gemma.GEMMA3,
    "glm4v": native.GLM4V,
    "idefics3": tiled.IDEFICS3,
    "paligemma": gemma.PALIGEMMA,
    "paligemma2": gemma.PALIGEMMA2,
    "mistral3": native.MISTRAL3,
    "aya_vision": tiled.AYA_VISION,
    "gemma4": gemma.GEMMA4,
    "qwen3_5": qwen.QWEN3_5,
    "lfm2_vl": tiled.LFM2_VL,
}
REFUSED: dict[str, Family] = {"mllama": tiled.MLLAMA}
"""Models that an engine with one key-value slot per layer and token must refuse."""
IMAGE_ONLY = ("paligemma", "paligemma2")
"""Their processors refuse a chat without images."""
UNLIKE: dict[str, Family] = {
    "latent": further.LATENT,
    "video_llama_3": further.VIDEO_LLAMA_3,
    "hunyuan_vl": further.HUNYUAN_VL,
    "ernie4_5_vl_moe": further.ERNIE4_5_VL_MOE,
    "ovis2": further.OVIS2,
    "granite4_vision": further.GRANITE4_VISION,
    "gpt_oss": further.GPT_OSS,
}
"""Models whose layers, encoder or processor have something of their own; the tests of answers and readouts ask them."""
FURTHER: dict[str, Family] = {
    "granite_vision": further.GRANITE_VISION,
    "granite_moe": further.GRANITE_MOE,
    "olmo2": further.OLMO2,
    "exaone4": further.EXAONE4,
    "smolvlm": further.SMOLVLM,
    "glm4v_moe": further.GLM4V_MOE,
    "mistral4": further.MISTRAL4,
    "exaone4_5": further.EXAONE4_5,
    "paddleocr_vl": further.PADDLEOCR_VL,
    "llama4": further.LLAMA4,
    "gemma4_large": gemma.GEMMA4_LARGE,
    "qwen3_5_moe": qwen.QWEN3_5_MOE,
}
"""Models that differ from those in one thing; not every test asks them."""
ALL = SUPPORTED | REFUSED | UNLIKE | FURTHER
