"""Qwen-VL: 2x2 patches of 7 pixels are one token, so sizes are kept in steps of 14 pixels."""

from __future__ import annotations

from tests.families.family import Family, Json
from tests.families.parts import CHATML, CHATML_ENDS, FRAMES, HIDDEN, MROPE, PATCHES, chatml, text

_IDS: Json = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_SPECIALS = (*CHATML, "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_TURNS = chatml("<|vision_start|><|image_pad|><|vision_end|>")
_DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
"""
_VISION2 = PATCHES | {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
_VISION25 = PATCHES | {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "intermediate_size": 64,
    "fullatt_block_indexes": [1],
    "window_size": 28,
}
_VISION3 = PATCHES | {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_position_embeddings": 64,
}
_DEEPSTACK = _VISION3 | {"deepstack_visual_indexes": [0, 1]}


def _qwen(
    generation: str,
    model_type: str,
    text: Json,
    vision: Json,
    template: str = _TURNS,
    final_norm: float | None = None,
) -> Family:
    sizes = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}
    return Family(
        config={"model_type": model_type, "text_config": text, "vision_config": vision} | _IDS,
        image_processor={"image_processor_type": "Qwen2VLImageProcessorFast"} | sizes | FRAMES,
        video_processor={"video_processor_type": f"Qwen{generation[0]}VLVideoProcessor"} | sizes | FRAMES,
        processor={"processor_class": f"Qwen{generation}VLProcessor"},
        template=template,
        specials=_SPECIALS,
        final_norm=final_norm,
        **CHATML_ENDS,
    )


QWEN2_VL = _qwen(
    "2",
    "qwen2_vl",
    text("qwen2_vl_text", rope_parameters=MROPE),
    _VISION2,
    _DEFAULT_SYSTEM + _TURNS,
)
QWEN25_VL = _qwen(
    "2_5_",
    "qwen2_5_vl",
    text("qwen2_5_vl_text", rope_parameters=MROPE),
    _VISION25,
    _DEFAULT_SYSTEM + _TURNS,
)
QWEN3_VL = _qwen("3", "qwen3_vl", text("qwen3_vl_text", head_dim=16, rope_parameters=MROPE), _DEEPSTACK)
QWEN3_VL_MOE = _qwen(
    "3",
    "qwen3_vl_moe",
    text(
        "qwen3_vl_moe_text",
        head_dim=16,
        rope_parameters=MROPE,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
    ),
    _DEEPSTACK,
)
_LINEAR: Json = {
    "head_dim": 16,
    "num_hidden_layers": 4,
    "full_attention_interval": 2,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "rope_parameters": MROPE | {"partial_rotary_factor": 1.0},
}
# Every other layer has linear attention, with a recurrent state.
QWEN3_5 = _qwen(
    "3",
    "qwen3_5",
    text("qwen3_5_text", **_LINEAR),
    _VISION3,
    final_norm=-0.5,  # 1 is added to it
)
QWEN3_5_MOE = _qwen(
    "3",
    "qwen3_5_moe",
    text(
        "qwen3_5_moe_text",
        **_LINEAR,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        shared_expert_intermediate_size=32,
    ),
    _VISION3,
    final_norm=-0.5,
)
