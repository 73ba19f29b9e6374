"""The embedded model: its configuration, its initial weights, and its export as a Hugging Face folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    GenerationConfig,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from demo.model.forward import IMAGE_MEAN, IMAGE_STD
from demo.model.tokenizer import CHAT_TEMPLATE, IMAGE_TOKEN, TURN_END, VISION_END, VISION_START
from demo.world.scenes import SIDE

# Matrices that write into the residual stream start at half the scale of the others.
WRITERS = ("o_proj", "down_proj", "fc2", "attn.proj")
EMBEDDING_STD = 0.07


def make_config(
    tokenizer: PreTrainedTokenizerFast, hidden: int = 192, layers: int = 8, heads: int = 6, groups: int = 2
) -> Qwen2VLConfig:
    """Return the config of a Qwen2-VL of 4 M parameters.

    It has heads of 32, MLP 512 (8/3 hidden), mrope [4, 6, 6], and a vision encoder of depth 3 and width 96.
    """
    text = {
        "vocab_size": (len(tokenizer) + 15) // 16 * 16,
        "hidden_size": hidden,
        "intermediate_size": hidden * 8 // 3,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "max_position_embeddings": 2048,
        "rms_norm_eps": 1e-6,
        "bos_token_id": tokenizer.convert_tokens_to_ids("<|endoftext|>"),
    }
    vision = {
        "depth": 3,
        "embed_dim": 96,
        "num_heads": 3,
        "mlp_ratio": 4,
        "patch_size": 14,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
        "in_channels": 3,
    }
    return config_of(tokenizer, text, vision, width=hidden // heads, theta=10000.0)


def config_of(
    tokenizer: PreTrainedTokenizerBase, text: dict[str, Any], vision: dict[str, Any], width: int, theta: float
) -> Qwen2VLConfig:
    """Return the config of a Qwen2-VL with these settings, heads of that width, and the tokens of the embedded model."""
    half = width // 2
    turn = half * 3 // 8
    ids = tokenizer.convert_tokens_to_ids
    sections = [half - 2 * turn, turn, turn]
    return Qwen2VLConfig(
        text_config={
            **text,
            "rope_parameters": {"rope_type": "default", "rope_theta": theta, "mrope_section": sections},
            "eos_token_id": ids(TURN_END),
            "pad_token_id": ids("<|endoftext|>"),
            "tie_word_embeddings": True,
        },
        vision_config=vision | {"hidden_size": text["hidden_size"]},
        image_token_id=ids(IMAGE_TOKEN),
        video_token_id=ids("<|video_pad|>"),
        vision_start_token_id=ids(VISION_START),
        vision_end_token_id=ids(VISION_END),
        tie_word_embeddings=True,
    )


def new_model(config: Qwen2VLConfig, seed: int) -> Qwen2VLForConditionalGeneration:
    """Return a freshly initialised float32 model; every key head starts equal to its group's first query head."""
    torch.manual_seed(seed)
    model = Qwen2VLForConditionalGeneration(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "embed_tokens" in name:
                parameter.normal_(0, EMBEDDING_STD, generator=generator)
            elif parameter.dim() == 2:
                scale = 0.5 if any(part in name for part in WRITERS) else 1.0
                parameter.normal_(0, scale * parameter.shape[1] ** -0.5, generator=generator)
        text = config.text_config
        head, per_group = (
            text.hidden_size // text.num_attention_heads,
            text.num_attention_heads // text.num_key_value_heads,
        )
        for layer in model.model.language_model.layers:
            for group in range(text.num_key_value_heads):
                first = group * per_group * head
                source = layer.self_attn.q_proj.weight[first : first + head]
                layer.self_attn.k_proj.weight[group * head : (group + 1) * head] = source
    return model


def trainable_matrices(
    model: Qwen2VLForConditionalGeneration,
) -> tuple[list[nn.Parameter], list[nn.Parameter], nn.Parameter]:
    """Return the language model's trained parameters: matrices (for Muon), vectors, and the word embeddings."""
    matrices: list[nn.Parameter] = []
    vectors: list[nn.Parameter] = []
    embeddings = model.model.language_model.embed_tokens.weight
    for parameter in model.parameters():
        if parameter.requires_grad and parameter is not embeddings:
            (matrices if parameter.dim() == 2 else vectors).append(parameter)
    return matrices, vectors, embeddings


def export(
    model: Qwen2VLForConditionalGeneration,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    card: str,
    settings: Mapping[str, Any],
) -> None:
    """Write a checkpoint folder (fp16) that the Auto classes load; the folder is replaced as a whole.

    `settings` go into its helmsight.json.
    """
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    half = Qwen2VLForConditionalGeneration(model.config)
    half.load_state_dict(model.state_dict())
    half.half()
    eos, pad = model.config.text_config.eos_token_id, model.config.text_config.pad_token_id
    half.generation_config = GenerationConfig(do_sample=False, bos_token_id=pad, eos_token_id=eos, pad_token_id=pad)
    half.save_pretrained(fresh)
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(fresh)
    _write_json(fresh / "preprocessor_config.json", preprocessor_config())
    _write_json(fresh / "helmsight.json", settings)
    (fresh / "README.md").write_text(card)
    old = folder.with_name(folder.name + ".old")
    if folder.exists():
        os.replace(folder, old)
    os.replace(fresh, folder)
    shutil.rmtree(old, ignore_errors=True)


def preprocessor_config() -> dict[str, Any]:
    """Return the image processor's settings: every square picture becomes 84 x 84 pixels."""
    return {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": "Qwen2VLProcessor",
        "do_convert_rgb": True,
        "do_normalize": True,
        "do_rescale": True,
        "do_resize": True,
        "image_mean": list(IMAGE_MEAN),
        "image_std": list(IMAGE_STD),
        "size": {"shortest_edge": SIDE * SIDE, "longest_edge": SIDE * SIDE},
        "min_pixels": SIDE * SIDE,
        "max_pixels": SIDE * SIDE,
        "merge_size": 2,
        "patch_size": 14,
        "temporal_patch_size": 2,
        "resample": 3,
        "rescale_factor": 1 / 255,
    }


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
