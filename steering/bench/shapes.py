"""Random models as large as real ones, made in place: of Qwen's families, with the embedded model's tokenizer."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText, GenerationConfig

from steering.decoder import attention
from steering.model.checkpoint.folder import embedded
from steering.model.mllm import MLLM, fingerprint_of
from steering.model.processing.processor import load_processor
from steering.vectors.vector import PREFERENCE, SteeringVector

PATCH = 28
"""Pixels of a picture per token, along each side."""
_PROCESSING = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "preprocessor_config.json")


@dataclass(frozen=True)
class ModelShape:
    """The size of a model, and of the questions to it.

    text, vision: settings of its two configs, of this model_type. image: tokens of a large picture, (columns, rows).
    prompt, long: words of a prompt without pictures, and of one that comes in several chunks. batches: numbers of answers
    that decode at once. callers: numbers of callers at once; picture: tokens of the picture that each sends, as `image`;
    answer: tokens of each caller's answer. tokens: of an answer. copied: bytes of the tensor whose copy measures the
    bandwidth.
    """

    name: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    image: tuple[int, int]
    prompt: int
    long: int
    batches: tuple[int, ...]
    tokens: int
    copied: int
    callers: tuple[int, ...] = (1, 2)
    picture: tuple[int, int] = (2, 2)
    answer: int = 6
    model_type: str = "qwen2_5_vl"

    @property
    def length(self) -> int:
        """Columns of a slot: a prompt, with the texts that interventions insert, and its answer; without `long` prompts."""
        return max(self.prompt, self.image[0] * self.image[1]) + 2 * self.tokens + max(self.batches) + 256


def _text(heads: int, kv_heads: int, width: int, layers: int, ffn: int, vocabulary: int) -> dict[str, Any]:
    quarter = width // 8
    return {
        "hidden_size": heads * width,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "num_hidden_layers": layers,
        "intermediate_size": ffn,
        "vocab_size": vocabulary,
        "max_position_embeddings": 32768,
        "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e6,
            "mrope_section": [quarter, (width // 2 - quarter) // 2, (width // 2 - quarter) // 2],
        },
    }


def _vision(hidden: int, heads: int, ffn: int, depth: int) -> dict[str, Any]:
    every = max(1, depth // 4)
    full_attention = list(range(every - 1, depth, every))
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "intermediate_size": ffn,
        "depth": depth,
        "fullatt_block_indexes": full_attention,
    }


_QWEN35_VISION = {"patch_size": PATCH // 2, "num_position_embeddings": 2304}
"""Qwen3.5's patches are larger, but the embedded model's processor cuts these."""


SHAPES = {
    shape.name: shape
    for shape in (
        ModelShape(
            "7b",
            _text(28, 4, 128, 28, 18944, 152064),
            _vision(1280, 16, 3420, 32),
            image=(50, 30),
            prompt=1000,
            long=7000,
            batches=(1, 32),
            tokens=32,
            copied=2**31,
            callers=(1, 16, 64),
            picture=(20, 20),
            answer=64,
        ),
        ModelShape(
            "9b",
            {
                **_text(16, 4, 256, 32, 12288, 248320),
                "head_dim": 256,
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25,
                    "mrope_section": [11, 11, 10], "mrope_interleaved": True,
                },
            },
            {"hidden_size": 1152, "num_heads": 16, "intermediate_size": 4304, "depth": 27, **_QWEN35_VISION},
            image=(50, 30), prompt=1000, long=7000, batches=(1, 32), tokens=32, copied=2**31,
            callers=(1, 16, 64), picture=(20, 20), answer=64, model_type="qwen3_5",
        ),
        ModelShape(
            "small",
            _text(8, 2, 64, 8, 1536, 8192),
            _vision(256, 4, 512, 4),
            image=(20, 10),
            prompt=200,
            long=3000,
            batches=(1, 8),
            tokens=24,
            copied=2**28,
        ),
        ModelShape(
            "tiny",
            _text(4, 2, 16, 4, 96, 1024),
            _vision(32, 2, 64, 2),
            image=(4, 3),
            prompt=20,
            long=80,
            batches=(1, 2),
            tokens=8,
            copied=2**20,
        ),
    )
}  # fmt: skip
"""Shapes by name: Qwen2.5-VL-7B, Qwen3.5-9B, one that two processors can run, and one for tests."""


def random_model(
    shape: ModelShape,
    device: torch.device,
    dtype: torch.dtype,
    seed: int = 0,
    weights: Mapping[str, torch.Tensor] | None = None,
) -> MLLM:
    """Return a model of that shape with random weights, or with `weights` of another such model.

    It generates only tokens that the embedded model's tokenizer knows.
    """
    attention.register()
    with tempfile.TemporaryDirectory() as folder:
        write_processor(Path(folder))
        processor = load_processor(folder)
    model = _draw_model(shape, device, dtype, seed, len(processor.tokenizer))
    if weights is not None:
        model.load_state_dict(weights)
    return MLLM(model.eval().requires_grad_(False), processor, f"random-{shape.name}", None)


def write_checkpoint(shape: ModelShape, device: torch.device, dtype: torch.dtype, folder: Path) -> None:
    """Write such a model, made on the device, as a checkpoint with a steering vector."""
    attention.register()
    write_processor(folder)
    model = _draw_model(shape, device, dtype, 0, len(load_processor(str(folder)).tokenizer))
    model.save_pretrained(folder, max_shard_size="4GB")
    layers, width = shape.text["num_hidden_layers"], shape.text["hidden_size"]
    ones = torch.ones(layers)
    direction = torch.randn(layers, width, generator=torch.Generator().manual_seed(0)) * 1e-3
    (folder / "vectors").mkdir()
    vector = SteeringVector(
        PREFERENCE, direction, ones, ones.clone(), ones.clone(), (layers // 2,), fingerprint_of(model)
    )
    vector.save(folder / "vectors" / f"{PREFERENCE}.safetensors")


def _draw_model(shape: ModelShape, device: torch.device, dtype: torch.dtype, seed: int, vocabulary: int) -> Any:
    """Return the model itself, which never generates tokens from `vocabulary` on."""
    embedded_config = json.loads((embedded() / "config.json").read_text())
    names = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")
    ends = {name: embedded_config["text_config"][name] for name in ("bos_token_id", "eos_token_id", "pad_token_id")}
    config = AutoConfig.for_model(
        shape.model_type,
        text_config={**shape.text, **ends},
        vision_config={**shape.vision, "out_hidden_size": shape.text["hidden_size"]},
        tie_word_embeddings=False,
        **{name: embedded_config[name] for name in names},
    )
    torch.manual_seed(seed)
    with torch.device(device):
        model = AutoModelForImageTextToText.from_config(
            config, dtype=dtype, attn_implementation={"text_config": attention.NAME}
        )
    model.get_output_embeddings().weight.data[vocabulary:] = 0  # never the likeliest
    model.generation_config = GenerationConfig(eos_token_id=ends["eos_token_id"], pad_token_id=ends["pad_token_id"])
    return model


def write_processor(folder: Path) -> None:
    """Write the embedded model's tokenizer and image processor, which keeps pictures at their size."""
    for name in _PROCESSING:
        shutil.copy(embedded() / name, folder / name)
    file = folder / "preprocessor_config.json"
    least, most = (2 * PATCH) ** 2, PATCH**2 * 4096
    pictures = {"size": {"shortest_edge": least, "longest_edge": most}, "min_pixels": least, "max_pixels": most}
    file.write_text(json.dumps(json.loads(file.read_text()) | pictures))
