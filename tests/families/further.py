"""Families that few tests ask, each with something that the others lack in the layers, the encoder or the processor."""

from __future__ import annotations

from dataclasses import replace

from tests.families import llava, native, qwen, tiled
from tests.families.family import Family, Json
from tests.families.parts import CHATML, HIDDEN, MROPE, SIGLIP, SQUARE, TILES, VISION, chatml, text

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


_SIZES: Json = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}, "patch_size": 7, "merge_size": 2}
_IMAGES: Json = {"image_token_id": "<|image_pad|>", "video_token_id": "<|video_pad|>"}
_EXPERTS: Json = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "moe_intermediate_size": 32}
_LATENT: Json = _EXPERTS | {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "n_group": 1,
    "topk_group": 1,
}


def _in_mistral3(model_type: str, **more: object) -> Family:
    return replace(native.MISTRAL3, config=native.MISTRAL3.config | {"text_config": text(model_type, **more)})


GLM4V_MOE = replace(
    native.GLM4V,
    config=native.GLM4V.config
    | {
        "model_type": "glm4v_moe",
        "text_config": text(
            "glm4v_moe_text",
            head_dim=16,
            first_k_dense_replace=1,
            rope_parameters=MROPE | {"partial_rotary_factor": 1.0},
            **_EXPERTS,
        ),
    },
)
# Attention sinks, windows in every other layer, YaRN, and experts with biases whose gate and up projections alternate.
GPT_OSS = replace(
    tiled.INTERNVL,
    config=tiled.INTERNVL.config
    | {
        "text_config": text(
            "gpt_oss",
            head_dim=16,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=16,
        )
    },
)
# Latent attention, here with keys of 24 dimensions and values of 16.
LATENT = _in_mistral3("deepseek_v3", first_k_dense_replace=1, v_head_dim=16, **_LATENT)
MISTRAL4 = _in_mistral3("mistral4", first_k_dense_replace=0, v_head_dim=24, **_LATENT)
EXAONE4_5 = replace(
    qwen.QWEN25_VL,
    config=qwen.QWEN25_VL.config
    | {
        "model_type": "exaone4_5",
        "text_config": text(
            "exaone4",
            num_hidden_layers=4,
            sliding_window=16,
            layer_types=["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
        ),
        "vision_config": qwen.QWEN25_VL.config["vision_config"] | {"num_key_value_heads": 1},
    },
    processor={"processor_class": "Exaone4_5_Processor"},
    template=chatml("<|vision_start|><|image_pad|><|vision_end|>"),
)
PADDLEOCR_VL = replace(
    qwen.QWEN2_VL,
    config=qwen.QWEN2_VL.config
    | {
        "model_type": "paddleocr_vl",
        "text_config": text("paddleocr_vl_text", head_dim=16, rope_parameters=MROPE),
        "vision_config": VISION | {"spatial_merge_size": 2, "image_size": 56},
    },
    image_processor={"image_processor_type": "PaddleOCRVLImageProcessor", "temporal_patch_size": 1} | _SIZES,
    video_processor={},
    processor={"processor_class": "PaddleOCRVLProcessor"},
    named_tokens={"image_token": "<|image_pad|>"},
)
# Its config does not state how many patches become a token.
VIDEO_LLAMA_3 = replace(
    qwen.QWEN2_VL,
    config={
        "model_type": "video_llama_3",
        "text_config": text("qwen2"),
        "vision_config": VISION | {"model_type": "video_llama_3_vision"},
        **_IMAGES,
    },
    image_processor={"image_processor_type": "VideoLlama3ImageProcessor"} | _SIZES,
    video_processor={"video_processor_type": "VideoLlama3VideoProcessor", "patch_size": 7},
    processor={"processor_class": "VideoLlama3Processor"},
    template=chatml("<|image_pad|>"),
)
# Positions on four axes, and images whose rows end in tokens of the image.
HUNYUAN_VL = replace(
    qwen.QWEN2_VL,
    config={
        "model_type": "hunyuan_vl",
        "text_config": text(
            "hunyuan_vl_text",
            head_dim=16,
            rope_parameters={
                "rope_type": "xdrope",
                "rope_theta": 10000.0,
                "factor": 1.0,
                "alpha": 1000.0,
                "beta_fast": 32,
                "beta_slow": 1,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "xdrope_section": [2, 2, 2, 2],
            },
        ),
        "vision_config": VISION | {"spatial_merge_size": 2, "out_hidden_size": HIDDEN, "max_image_size": 56},
        "tie_word_embeddings": False,
        "image_token_id": "<|image_pad|>",
    },
    image_processor={"image_processor_type": "HunYuanVLImageProcessor"} | _SIZES,
    video_processor={},
    processor={"processor_class": "HunYuanVLProcessor"},
    template=chatml("<|vision_start|><|image_pad|><|vision_end|>"),
    named_tokens={
        "image_token": "<|image_pad|>",
        "image_start_token": "<|vision_start|>",
        "image_end_token": "<|vision_end|>",
    },
)
_ERNIE_TOKENS = {
    f"{kind}{part}_token": f"<|{kind}{part}|>" for kind in ("image", "video") for part in ("", "_start", "_end")
}
# Tokens of images have experts of their own.
ERNIE4_5_VL_MOE = replace(
    qwen.QWEN2_VL,
    config={
        "model_type": "ernie4_5_vl_moe",
        "text_config": text(
            "ernie4_5_vl_moe_text",
            rope_parameters=MROPE | {"mrope_section": [3, 3, 2]},
            moe_intermediate_size=[32, 16],
            moe_k=2,
            moe_num_experts=4,
            moe_num_shared_experts=1,
        ),
        "vision_config": {
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 7,
            "spatial_merge_size": 2,
            "temporal_merge_size": 2,
        },
        "tie_word_embeddings": False,
        **{f"{name}_id": token for name, token in _ERNIE_TOKENS.items()},
    },
    image_processor={"image_processor_type": "Ernie4_5_VLMoeImageProcessor", "temporal_patch_size": 1} | _SIZES,
    video_processor={"video_processor_type": "Ernie4_5_VLMoeVideoProcessor", "draw_on_frames": False},
    processor={"processor_class": "Ernie4_5_VLMoeProcessor"},
    template=chatml("Picture:<|image_start|><|image|><|image_end|>"),
    specials=(*CHATML, *_ERNIE_TOKENS.values()),
    named_tokens=_ERNIE_TOKENS,
)
_OVIS_MARKS = ("<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>")
# The encoder gives features of the tokens around tiles, too.
OVIS2 = replace(
    tiled.INTERNVL,
    config={
        "model_type": "ovis2",
        "text_config": text("qwen2"),
        "vision_config": VISION | {"model_type": "ovis2_vision", "vocab_size": 40, "hidden_stride": 2},
        "hidden_size": HIDDEN,
        "vocab_size": None,
        "tie_word_embeddings": False,
        "image_token_id": "<IMG_ATOM>",
        "visual_indicator_token_ids": _OVIS_MARKS,
    },
    image_processor={"image_processor_type": "Ovis2ImageProcessor", **TILES},
    video_processor={},
    processor={"processor_class": "Ovis2Processor", "image_seq_length": 4},
    template=chatml("<image>\\n"),
    specials=(*CHATML, "<image>", "<IMG_ATOM>", *_OVIS_MARKS),
    named_tokens={},
)
# Features enter in front of several layers, and none in the embeddings.
GRANITE4_VISION = replace(
    llava.LLAVA_NEXT,
    config=llava.LLAVA_NEXT.config
    | {
        "model_type": "granite4_vision",
        "text_config": text(
            "granite4_vision_text",
            attention_multiplier=0.25,
            embedding_multiplier=2.0,
            residual_multiplier=0.22,
            logits_scaling=2.0,
        ),
        "vision_config": SIGLIP | {"hidden_size": 64},
        "vision_feature_select_strategy": "full",
        "downsample_rate": "1/2",
        "deepstack_layer_map": [[-2, 1], [-1, 0]],
        "spatial_target_layers": [0, 1, 1, 2],
        "qformer_config": {
            "model_type": "blip_2_qformer",
            "num_hidden_layers": 1,
            "intermediate_size": 64,
            "cross_attention_frequency": 1,
            "use_qformer_text_input": False,
        },
    },
    processor={
        "processor_class": "Granite4VisionProcessor",
        "patch_size": 7,
        "vision_feature_select_strategy": "full",
        "downsample_rate": "1/2",
    },
)
LLAMA4 = replace(
    tiled.MLLAMA,
    config={
        "model_type": "llama4",
        "text_config": text(
            "llama4_text", head_dim=16, num_hidden_layers=4, num_local_experts=4, intermediate_size_mlp=96
        ),
        "vision_config": VISION
        | {"intermediate_size": 128, "vision_output_dim": 64, "projector_input_dim": 64, "projector_output_dim": 64},
        "image_token_index": "<|patch|>",
    },
    image_processor={"image_processor_type": "Llama4ImageProcessor", "size": SQUARE},
    processor={"processor_class": "Llama4Processor", "patch_size": 7},
    specials=(*tiled.MLLAMA.specials, "<|image_start|>", "<|image_end|>", "<|patch|>"),
)
