"""Checkpoint folders with what published ones say: their `config.json` in its own form, shrunk, and the files beside it.

A shape is that of this family's tiny model; scales, soft caps, windows, rotary settings, lists of end tokens, tied weights,
shards, and the places and keys of templates and bounds are those that the named repositories have on the Hugging Face hub.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.families.family import Json
from tests.families.parts import SIGLIP
from tests.families.published.quantized import AWQ, FP8_BLOCKS, FP8_WHOLE, Quantization
from tests.families.registry import ALL

_QWEN35: Json = {
    "full_attention_interval": 4, "head_dim": 32,
    "rope_parameters": {"mrope_interleaved": True, "mrope_section": [2, 1, 1], "partial_rotary_factor": 0.25},
}  # fmt: skip
_MROPE: Json = {"type": "mrope", "mrope_section": [2, 3, 3]}  # sums to half of the head's width; [16, 24, 24] there
_QWEN2: Json = {"sliding_window": 32768, "use_sliding_window": False, "max_window_layers": 28, "rope_theta": 1e6}
_PIXELS: Json = {"min_pixels": 3136, "max_pixels": 12845056}
_GRANITE: Json = {
    "attention_multiplier": 0.015625, "embedding_multiplier": 12.0, "residual_multiplier": 0.22, "logits_scaling": 8.0,
    "tie_word_embeddings": True,
}  # fmt: skip

_YARN: Json = {
    "rope_type": "yarn", "type": "yarn", "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
    "llama_4_scaling_beta": 0.1,
}  # fmt: skip


@dataclass(frozen=True)
class Published:
    """Properties of one repository that its family's tests do not cover.

    `text` replaces keys of the language model's config, None leaves one out; `flat` puts them at the top, as older
    files have it; `top` is beside them. `image_processor` and `processor` work like `text`. `eos` are the names of the
    end tokens in generation_config.json. `template` is the file that has the chat template, None where there is none.
    `shards` lays the weights out in several files with an index, `quantization` quantizes them. `told` are the settings that
    are named in the table, and `refused` is what its refusal must say.
    """

    family: str
    text: Json = field(default_factory=dict)
    flat: bool = False
    top: Json = field(default_factory=dict)
    image_processor: Json = field(default_factory=dict)
    processor: Json = field(default_factory=dict)
    eos: tuple[str, ...] = ()
    template: str | None = "chat_template.jinja"
    shards: bool = False
    quantization: Quantization | None = None
    told: str = ""
    refused: str | None = None


PUBLISHED: Mapping[str, Published] = {
    "Qwen/Qwen2-VL-7B-Instruct": Published(
        "qwen2_vl",
        _QWEN2 | {"rope_parameters": None, "rope_scaling": _MROPE},
        flat=True, image_processor=_PIXELS | {"size": None}, eos=("<|im_end|>", "<|endoftext|>"),
        template="chat_template.json", shards=True,
        told="flat config, `rope_scaling` of type mrope, bounds as `min_pixels` and `max_pixels`, two end tokens, shards",
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct": Published(
        "qwen2_5_vl",
        _QWEN2 | {"rope_parameters": None, "rope_scaling": _MROPE},
        flat=True, image_processor=_PIXELS | {"size": None}, eos=("<|im_end|>", "<|endoftext|>"),
        template="chat_template.json", shards=True,
        told="the same; a window of 32,768 that is switched off",
    ),
    "Qwen/Qwen2.5-VL-7B-Instruct-AWQ": Published(
        "qwen2_5_vl",
        _QWEN2 | {"rope_parameters": None, "rope_scaling": _MROPE},
        flat=True, image_processor=_PIXELS | {"size": None}, eos=("<|im_end|>", "<|endoftext|>"),
        template="chat_template.json", quantization=AWQ, told="the same; AWQ",
    ),
    "Qwen/Qwen2.5-VL-3B-Instruct": Published(
        "qwen2_5_vl",
        _QWEN2 | {"rope_parameters": None, "rope_scaling": _MROPE, "tie_word_embeddings": True},
        flat=True, top={"tie_word_embeddings": True}, image_processor=_PIXELS | {"size": None},
        eos=("<|im_end|>", "<|endoftext|>"), template="tokenizer_config.json",
        told="tied embeddings; the template in `tokenizer_config.json`, as some copies have it",
    ),
    "Qwen/Qwen3-VL-4B-Instruct": Published(
        "qwen3_vl",
        {
            "rope_parameters": None, "rope_theta": 5e6, "tie_word_embeddings": True,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default"},
        },
        top={"tie_word_embeddings": True}, eos=("<|im_end|>", "<|endoftext|>"), template="chat_template.json",
        told="interleaved mrope, DeepStack, tied embeddings",
    ),
    "Qwen/Qwen3-VL-8B-Instruct-FP8": Published(
        "qwen3_vl",
        {
            "rope_parameters": None, "rope_theta": 5e6,
            "rope_scaling": {"mrope_interleaved": True, "mrope_section": [3, 3, 2], "rope_type": "default"},
        },
        eos=("<|im_end|>", "<|endoftext|>"), template="chat_template.json", quantization=FP8_BLOCKS,
        told="the same, untied; FP8 with a scale for each block of a weight",
    ),
    "llava-hf/llava-1.5-7b-hf": Published(
        "llava",
        top={"vision_feature_layer": -2, "vision_feature_select_strategy": "default", "ignore_index": -100},
        template="chat_template.json",
        told="the second to last layer's features",
    ),
    "llava-hf/llava-v1.6-mistral-7b-hf": Published(
        "llava_next", {"sliding_window": None, "rope_theta": 1e6},
        top={"vision_feature_layer": -2, "use_image_newline_parameter": True}, template="chat_template.json",
        told="tiles with a token that ends their rows",
    ),
    "ibm-granite/granite-vision-3.3-2b": Published(
        "granite_vision", _GRANITE,
        processor={"vision_feature_select_strategy": "full", "num_additional_image_tokens": 0},
        top={
            "vision_config": SIGLIP | {"patch_size": 14},
            "vision_feature_layer": [-2, -1], "vision_feature_select_strategy": "full", "tie_word_embeddings": True,
        },
        shards=True, told="`logits_scaling` 8, `residual_multiplier` .22; features of several layers",
    ),
    "CohereLabs/aya-vision-8b": Published(
        "aya_vision",
        {"logit_scale": 0.25, "rope_theta": 50000, "use_qk_norm": False, "sliding_window": 4096},
        told="`logit_scale` .25, windows of 4,096 in three of four layers, tied embeddings",
    ),
    "google/paligemma-3b-mix-224": Published("paligemma", template=None, told="no chat template"),
    "google/paligemma2-3b-mix-448": Published(
        "paligemma2",
        {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "eos_token_id": [1, 107]},
        top={"_vocab_size": 257152}, template=None,
        told="soft caps of 50 and 30, no chat template, a list of end tokens in the text's config",
    ),
    "google/gemma-3-4b-it": Published(
        "gemma3",
        {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "rope_theta": 1e6, "rope_local_base_freq": 1e4},
        eos=("<end_of_turn>", "<pad>"),
        told="linear rotary scaling of global layers alone, windows in five of six, two end tokens",
    ),
    "zai-org/GLM-4.1V-9B-Thinking": Published(
        "glm4v",
        {
            "rope_parameters": None, "partial_rotary_factor": 0.5, "rope_theta": 1e4, "attention_bias": True,
            "rope_scaling": {"mrope_section": [1, 2, 1], "rope_type": "default", "type": "default"},
        },
        eos=("<|endoftext|>", "<|user|>"),
        told="half of each head rotates, norms behind the sub-blocks, a list of end tokens",
    ),
    "zai-org/GLM-4.5V": Published(
        "glm4v_moe",
        {
            "rope_parameters": None, "partial_rotary_factor": 0.5, "rope_theta": 1e4, "attention_bias": True,
            "rope_scaling": {"mrope_section": [1, 2, 1], "rope_type": "default"}, "norm_topk_prob": True,
        },
        eos=("<|endoftext|>", "<|user|>"),
        told="experts with a shared one behind a first dense layer, half of each head rotates",
    ),
    "OpenGVLab/InternVL3-38B-hf": Published(
        "internvl",
        {"rope_scaling": {"factor": 2.0, "rope_type": "dynamic", "type": "dynamic"}, "rope_theta": 1e6},
        shards=True, template="chat_template.json",
        told="rotary scaling that depends on the length of the prompt",
    ),
    "OpenGVLab/InternVL3_5-GPT-OSS-20B-A4B-Preview-HF": Published(
        "internvl",
        {
            "model_type": "gpt_oss", "head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2,
            "sliding_window": 128, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
        told="attention sinks in every head, windows of 128 in every other layer",
    ),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": Published(
        "mistral3", {"rope_theta": 1e9, "sliding_window": None}, template="chat_template.json",
        told="heads narrower than the width divided by their number",
    ),
    "mistralai/Ministral-3-8B-Instruct-2512": Published(
        "mistral3",
        {
            "model_type": "ministral3",
            "rope_parameters": _YARN
            | {"factor": 16.0, "rope_theta": 1e9, "original_max_position_embeddings": 16384},
        },
        quantization=FP8_WHOLE, told="queries scaled by their position; FP8 with a scale for each weight",
    ),
    "mistralai/Mistral-Small-4-119B-2603": Published(
        "mistral4",
        {
            "rope_parameters": _YARN
            | {"factor": 128.0, "rope_theta": 1e4, "original_max_position_embeddings": 8192},
        },
        told="latent attention, experts, queries scaled by their position",
    ),
    "LGAI-EXAONE/EXAONE-4.5-33B": Published(
        "exaone4_5",
        {
            "model_type": "exaone4_5_text", "sliding_window": 4096, "sliding_window_pattern": "LLLG", "rope_theta": 1e6,
            "rope_scaling": {
                "factor": 16.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
        },
        told="windows of 4,096 in three of four layers, the others without rotary positions, norms behind the sub-blocks",
    ),
    "PaddlePaddle/PaddleOCR-VL": Published(
        "paddleocr_vl",
        {
            "rope_parameters": None, "rope_theta": 5e5, "head_dim": 32,
            "rope_scaling": {"mrope_section": [4, 6, 6], "rope_type": "default", "type": "default"},
        },
        flat=True, told="flat config, heads wider than the width divided by their number",
    ),
    "tencent/HunyuanOCR": Published(
        "hunyuan_vl",
        {
            "rope_parameters": None, "rope_theta": 1e4,
            "rope_scaling": {
                "type": "xdrope", "factor": 1.0, "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "mscale": 1.0,
                "mscale_all_dim": 1.0, "xdrope_section": [2, 2, 2, 2],
            },
        },
        flat=True,
        told="flat config, `rope_scaling` of type xdrope on four axes; rows of an image end in tokens of it",
    ),
    "HuggingFaceM4/Idefics3-8B-Llama3": Published("idefics3", told="tiles and the whole picture"),
    "HuggingFaceTB/SmolVLM2-2.2B-Instruct": Published(
        "smolvlm", template="chat_template.json", told="its processor needs `num2words`",
    ),
    "meta-llama/Llama-3.2-11B-Vision-Instruct": Published(
        "mllama", told="layers that attend to images crosswise", refused="cross-attention",
    ),
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": Published(
        "llama4", {"attention_chunk_size": 8192, "no_rope_layers": []},
        told="attention within chunks of 8,192 in three of four layers", refused="chunked_attention",
    ),
    "LiquidAI/LFM2-VL-1.6B": Published(
        "lfm2_vl",
        {
            "num_hidden_layers": 6, "full_attn_idxs": [2, 5], "conv_bias": False, "conv_L_cache": 3, "rope_theta": 1e6,
            "block_auto_adjust_ff_dim": True, "block_multiple_of": 32, "block_ff_dim": 192, "intermediate_size": None,
            "tie_word_embeddings": True,
        },
        top={"tie_word_embeddings": True, "projector_use_layernorm": False},
        told="short convolutions in ten of 16 layers, FFNs of adjusted width, tied embeddings, tiles and the whole picture",
    ),
    "Qwen/Qwen3.5-9B": Published(
        "qwen3_5",
        _QWEN35,
        told="linear attention in three of four layers, gated attention in the others, a quarter of each head rotates",
    ),
    "Qwen/Qwen3.5-35B-A3B": Published(
        "qwen3_5_moe",
        _QWEN35,
        told="the same with experts, and a gated shared one",
    ),
    "google/gemma-4-E4B-it": Published(
        "gemma4",
        {"num_hidden_layers": 6, "layer_types": [*["sliding_attention"] * 2, "full_attention"] * 2,
         "num_kv_shared_layers": 2, "final_logit_softcapping": 30.0},
        told="last layers that reuse the keys and values of earlier ones; further embeddings for each layer",
    ),
    "google/gemma-4-31B-it": Published(
        "gemma4_large", {"final_logit_softcapping": 30.0},
        told="keys that are the values too, in wider heads, of global layers; images whose tokens see each other",
    ),
}  # fmt: skip


def config_of(published: Published) -> Json:
    """Return the config.json of such a repository, with the names of tokens where their ids belong."""
    config: dict[str, Any] = dict(ALL[published.family].config)
    text = _merged(config["text_config"], published.text)
    if published.flat:
        del config["text_config"]
        text.pop("model_type")
        return text | config | published.top
    return config | {"text_config": text} | published.top


def image_processor_of(published: Published) -> Json:
    """Return the preprocessor_config.json of such a repository."""
    return _merged(ALL[published.family].image_processor, published.image_processor)


def _merged(own: Json, other: Json) -> Json:
    return {key: value for key, value in (own | other).items() if value is not None or key == "vocab_size"}
