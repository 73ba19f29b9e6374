"""Tiny random checkpoints of many model families: what the tests load instead of real ones.

`build` writes a complete folder (config, weights, tokenizer, chat template, processor, generation config) from scratch
and offline. The layout is that of the published checkpoints, so that the folders load through the Auto classes; special
tokens and chat templates follow the real ones, shortened, with the quirks that a server meets: some templates move the
images before the text, some write the bos token themselves, some trim the text or know only lists of parts.

The weights are random but not tame: attention is far from uniform, so that a wrong mask, position or scale changes the
logits visibly, and special tokens are never generated greedily, so that texts do not end by chance.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

Json = dict[str, Any]

HIDDEN = 64
LAYERS = 3


@dataclass(frozen=True)
class Family:
    """What distinguishes one family's checkpoint folder from another's."""

    config: Json  # config.json; ids of special tokens are written as the tokens
    image_processor: Json  # preprocessor_config.json
    template: str  # chat_template.jinja
    specials: tuple[str, ...]  # besides bos, eos and pad
    eos: str
    pad: str
    bos: str | None = None
    adds_bos: bool = True  # the tokenizer itself puts bos first
    processor: Json = field(default_factory=dict)  # processor_config.json
    video_processor: Json = field(default_factory=dict)  # video_preprocessor_config.json
    named_tokens: Mapping[str, str] = field(default_factory=dict)  # what the processor reads off the tokenizer by name
    word_std: float = 0.5  # spread of the word embeddings
    final_norm: float | None = None  # weight of the last norm, where not as initialised
    max_images: int | None = None


def build(family: str, folder: Path, *, seed: int = 0) -> Path:
    """Write the checkpoint of `family` with weights drawn from `seed` into `folder`, and return `folder`."""
    spec = _ALL[family]
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(spec)
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(spec.template)
    name = spec.processor["processor_class"]
    _write(folder / "processor_config.json", spec.processor)
    _write(folder / "preprocessor_config.json", spec.image_processor | {"processor_class": name})
    if spec.video_processor:
        _write(folder / "video_preprocessor_config.json", spec.video_processor)

    config = _resolve(spec.config, tokenizer)
    model_type = config.pop("model_type")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(model_type, **config), dtype=torch.float32)
    _randomise(model, spec, tokenizer, seed)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder)
    return folder


@functools.cache
def checkpoint(family: str, root: Path) -> Path:
    """The folder of `family` under `root`, built the first time it is asked for."""
    return build(family, root / family)


def example_messages(
    family: str,
    images: int = 1,
    *,
    text: str = "What colour is the small ball?",
    system: str | None = None,
    seed: int = 0,
) -> list[Json]:
    """A user turn with `images` deterministic images of different sizes and a question, after an optional system turn.

    Every content is a list of parts: the only form that all chat templates understand.
    """
    limit = _ALL[family].max_images
    if limit is not None and images > limit:
        raise ValueError(f"{family} takes at most {limit} images, not {images}")
    parts: list[Json] = [{"type": "image", "image": example_image(i, seed=seed)} for i in range(images)]
    messages = [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": [{"type": "text", "text": system}]})
    return messages


def example_image(index: int, *, seed: int = 0) -> Image.Image:
    """Noise over a gradient; sizes differ so that families that keep sizes or cut tiles get different layouts."""
    width, height = [(56, 40), (28, 60), (44, 44), (64, 24)][index % 4]
    rng = np.random.default_rng([seed, index])
    ramp = np.linspace(0, 120, width)[None, :, None] + np.linspace(0, 60, height)[:, None, None]
    pixels = ramp * rng.uniform(0.3, 1.0, 3) + rng.uniform(0, 70, (height, width, 3))
    return Image.fromarray(pixels.astype(np.uint8))


def images_of(messages: list[Json]) -> list[Image.Image]:
    """The images of a conversation in order."""
    return [part["image"] for message in messages for part in message["content"] if part["type"] == "image"]


# --- tokenizer -------------------------------------------------------------------------------------------------------

_CORPUS = (
    "What colour is the small ball? The small ball is red, and the large cube behind it is blue.",
    "How many people are in the second image? There are three people next to the table.",
    "Describe the difference between the two pictures. In the first one the cat sleeps on the chair.",
    "You are a helpful assistant. Answer with one word, look at the image and think step by step.",
    "Text context: the sign on the door says that the shop is closed on Monday and on Tuesday.",
    "user assistant system model User: Assistant: USER: ASSISTANT:",
)


def _tokenizer(spec: Family) -> PreTrainedTokenizerFast:
    """Byte-level BPE over a few sentences, with the family's special tokens."""
    core = [t for t in (spec.pad, spec.bos, spec.eos) if t is not None]
    specials = list(dict.fromkeys([*core, *spec.specials]))
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        _CORPUS,
        trainers.BpeTrainer(
            vocab_size=len(specials) + len(alphabet) + 140,
            special_tokens=specials,
            initial_alphabet=alphabet,
            show_progress=False,
        ),
    )
    if spec.bos is not None and spec.adds_bos:
        bos = (spec.bos, bpe.token_to_id(spec.bos))
        bpe.post_processor = processors.TemplateProcessing(
            single=f"{spec.bos} $A", pair=f"{spec.bos} $A {spec.bos} $B", special_tokens=[bos]
        )
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=spec.bos,
        eos_token=spec.eos,
        pad_token=spec.pad,
        model_specific_special_tokens=dict(spec.named_tokens),
        model_max_length=4096,
        clean_up_tokenization_spaces=False,
    )


def _resolve(value: Any, tokenizer: PreTrainedTokenizerFast, key: str = "") -> Any:
    """`value` with token names replaced by ids and the tokenizer's facts filled in."""
    if isinstance(value, dict):
        filled = {k: _resolve(v, tokenizer, k) for k, v in value.items()}
        if "vocab_size" in filled:
            ids = {f"{n}_token_id": getattr(tokenizer, f"{n}_token_id") for n in ("bos", "eos", "pad")}
            filled |= ids | {"vocab_size": _vocabulary(tokenizer)}
        return filled
    if key.endswith(("_token_id", "_token_index")) and isinstance(value, str):
        found = tokenizer.convert_tokens_to_ids(value)
        assert found is not None, f"{value} is not in the tokenizer"
        return found
    return value


def _vocabulary(tokenizer: PreTrainedTokenizerFast) -> int:
    """Rows of the embedding: as in published models a few more than there are tokens."""
    return (len(tokenizer) + 31) // 32 * 32


def _write(path: Path, content: Json) -> None:
    path.write_text(json.dumps(content, indent=2))


# --- weights ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def _randomise(model: PreTrainedModel, spec: Family, tokenizer: PreTrainedTokenizerFast, seed: int) -> None:
    """Draw matrices, tables and biases anew; norms and the like keep what they were made with."""
    generator = torch.Generator().manual_seed(seed)
    words = [model.get_input_embeddings().weight, model.get_output_embeddings().weight]
    if words[0] is words[1]:
        words.pop()
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    for name, weight in model.named_parameters():
        if any(weight is w for w in words):
            std = spec.word_std
        elif any(weight is table for table in tables):
            std = 0.5
        elif weight.ndim > 1:
            # Expert weights are stacked along the first dimension, convolutions have their kernel after the second.
            fan_in = weight.shape[-1] if "experts" in name else weight[0].numel()
            std = 1.5 / fan_in**0.5
        elif "bias" in name:
            std = 0.1
        elif weight.numel() == 1 and name.endswith("gate"):
            weight.fill_(1.0)  # made closed, as for the start of a training
            continue
        else:
            continue
        weight.normal_(0, std, generator=generator)
    if spec.final_norm is not None:
        model.get_decoder().norm.weight.fill_(spec.final_norm)
    for weight in words:
        weight[sorted(tokenizer.added_tokens_decoder)] *= 0.1
        weight[len(tokenizer) :] *= 0.1


# --- configs ---------------------------------------------------------------------------------------------------------


def _text(model_type: str, **more: Any) -> Json:
    """A small text model with grouped-query attention; vocabulary and token ids are filled in by `_resolve`."""
    base: Json = {
        "model_type": model_type,
        "vocab_size": None,
        "hidden_size": HIDDEN,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
    }
    return base | more


_VISION: Json = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 7,
}
_CLIP = _VISION | {"model_type": "clip_vision_model", "projection_dim": 32}
_SIGLIP = _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
_PATCHES: Json = {"patch_size": 7, "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3, "num_heads": 2}
_MROPE: Json = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_SQUARE: Json = {"height": 28, "width": 28}

# --- Qwen: 2x2 patches of 7 pixels are one token, so sizes are kept in steps of 14 pixels -------------------------------

_QWEN_IDS: Json = {
    "image_token_id": "<|image_pad|>",
    "video_token_id": "<|video_pad|>",
    "vision_start_token_id": "<|vision_start|>",
    "vision_end_token_id": "<|vision_end|>",
}
_CHATML = ("<|im_start|>", "<|im_end|>")
_QWEN_SPECIALS = (*_CHATML, "<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>")
_QWEN_TURNS = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{- message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}
{{- '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- elif part.type == 'text' -%}
{{- part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|im_start|>assistant\\n' }}
{%- endif -%}
"""
_QWEN_DEFAULT_SYSTEM = """\
{%- if messages[0].role != 'system' -%}
{{- '<|im_start|>system\\nYou are a helpful assistant.<|im_end|>\\n' }}
{%- endif -%}
"""
_QWEN2_VISION = _PATCHES | {"depth": 2, "embed_dim": 32, "hidden_size": HIDDEN, "mlp_ratio": 2}
_QWEN25_VISION = _PATCHES | {
    "depth": 2,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "intermediate_size": 64,
    "fullatt_block_indexes": [1],
    "window_size": 28,
}
_QWEN3_VISION = _PATCHES | {
    "depth": 3,
    "hidden_size": 32,
    "out_hidden_size": HIDDEN,
    "intermediate_size": 64,
    "num_position_embeddings": 64,
}
_DEEPSTACK = _QWEN3_VISION | {"deepstack_visual_indexes": [0, 1]}


def _qwen(generation: str, model_type: str, text: Json, vision: Json, template: str = _QWEN_TURNS) -> Family:
    sizes = {"size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56}}
    patches = {"patch_size": 7, "merge_size": 2, "temporal_patch_size": 2}
    return Family(
        config={"model_type": model_type, "text_config": text, "vision_config": vision} | _QWEN_IDS,
        image_processor={"image_processor_type": "Qwen2VLImageProcessorFast"} | sizes | patches,
        video_processor={"video_processor_type": f"Qwen{generation[0]}VLVideoProcessor"} | sizes | patches,
        processor={"processor_class": f"Qwen{generation}VLProcessor"},
        template=template,
        specials=_QWEN_SPECIALS,
        eos="<|im_end|>",
        pad="<|endoftext|>",
    )


# --- the others' templates ----------------------------------------------------------------------------------------------

_LLAVA_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role != 'system' -%}{{- message.role.upper() + ': ' }}{%- endif -%}
{%- for part in message.content | selectattr('type', 'equalto', 'image') -%}{{- '<image>\\n' }}{%- endfor -%}
{%- for part in message.content | selectattr('type', 'equalto', 'text') -%}{{- part.text + ' ' }}{%- endfor -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'ASSISTANT:' }}{%- endif -%}
"""
_LLAVA_NEXT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '<<SYS>>\\n' + message.content[0].text + '\\n<</SYS>>\\n\\n' }}
{%- elif message.role == 'user' -%}
{{- '[INST] ' }}
{%- for part in message.content | selectattr('type', 'equalto', 'image') -%}{{- '<image>\\n' }}{%- endfor -%}
{%- for part in message.content | selectattr('type', 'equalto', 'text') -%}{{- part.text }}{%- endfor -%}
{{- ' [/INST]' }}
{%- else -%}
{{- ' ' + message.content[0].text + '</s> ' }}
{%- endif -%}
{%- endfor -%}
"""
_ONEVISION_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + ' ' }}
{%- for part in message.content | selectattr('type', 'equalto', 'image') -%}{{- '<image>' }}{%- endfor -%}
{%- for part in message.content | selectattr('type', 'equalto', 'text') -%}{{- '\\n' + part.text }}{%- endfor -%}
{{- '<|im_end|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""
_INTERNVL_TEMPLATE = """\
{%- for message in messages -%}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}
{{- message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<IMG_CONTEXT>\\n' }}
{%- elif part.type == 'text' -%}{{- part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' }}{%- endif -%}
"""


_GEMMA_TEMPLATE = """\
{{- bos_token }}
{%- if messages[0].role == 'system' -%}
{%- set first = messages[0].content if messages[0].content is string else messages[0].content[0].text -%}
{%- set prefix = first + '\\n\\n' -%}
{%- set turns = messages[1:] -%}
{%- else -%}
{%- set prefix = '' -%}
{%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
{%- if (message.role == 'user') != (loop.index0 % 2 == 0) -%}
{{- raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
{%- endif -%}
{{- '<start_of_turn>' + ('model' if message.role == 'assistant' else message.role) + '\\n' }}
{{- prefix if loop.first else '' }}
{%- if message.content is string -%}
{{- message.content | trim }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<start_of_image>' }}
{%- elif part.type == 'text' -%}{{- part.text | trim }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<end_of_turn>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<start_of_turn>model\\n' }}{%- endif -%}
"""
# PaliGemma is no chat model and has no template. Its processor wants all images first and adds bos and newline itself.
_PALIGEMMA_TEMPLATE = """\
{%- for message in messages -%}
{%- for part in message.content -%}{%- if part.type == 'image' -%}{{- '<image>' }}{%- endif -%}{%- endfor -%}
{%- endfor -%}
{%- for message in messages -%}
{{- '' if loop.first else '\\n' }}
{%- for part in message.content -%}{%- if part.type == 'text' -%}{{- part.text }}{%- endif -%}{%- endfor -%}
{%- endfor -%}
"""
_GLM_TEMPLATE = """\
{%- macro visible(content) -%}
{%- if content is string -%}
{{- content }}
{%- else -%}
{%- for part in content -%}
{%- if part.type == 'image' -%}{{- '<|begin_of_image|><|image|><|end_of_image|>' }}
{%- elif part.type == 'text' -%}{{- part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{%- endmacro -%}
{{- '[gMASK]<sop>' }}
{%- for message in messages -%}
{{- '<|' + message.role + '|>\\n' + visible(message.content) }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>\\n' }}{%- endif -%}
"""
_IDEFICS_TEMPLATE = """\
{{- '<|begin_of_text|>' }}
{%- for message in messages -%}
{{- message.role.capitalize() + (':' if message.content[0].type == 'image' else ': ') }}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text }}
{%- elif part.type == 'image' -%}{{- '<image>' }}
{%- endif -%}
{%- endfor -%}
{{- '<end_of_utterance>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- 'Assistant:' }}{%- endif -%}
"""
_MISTRAL_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages -%}
{%- if message.role == 'system' -%}
{{- '[SYSTEM_PROMPT]' + (message.content if message.content is string else message.content[0].text) }}
{{- '[/SYSTEM_PROMPT]' }}
{%- elif message.role == 'user' -%}
{{- '[INST]' }}
{%- if message.content is string -%}
{{- message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{- part.text }}
{%- elif part.type in ['image', 'image_url'] -%}{{- '[IMG]' }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '[/INST]' }}
{%- else -%}
{{- (message.content if message.content is string else message.content[0].text) + eos_token }}
{%- endif -%}
{%- endfor -%}
"""
_AYA_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages -%}
{{- '<|START_OF_TURN_TOKEN|>' }}
{{- {'system': '<|SYSTEM_TOKEN|>', 'user': '<|USER_TOKEN|>', 'assistant': '<|CHATBOT_TOKEN|>'}[message.role] }}
{{- '<|START_RESPONSE|>' if message.role == 'assistant' else '' }}
{%- if message.content is string -%}
{{- message.content }}
{%- else -%}
{%- for part in message.content | selectattr('type', 'equalto', 'image') -%}{{- '<image>' }}{%- endfor -%}
{%- for part in message.content | selectattr('type', 'equalto', 'text') -%}{{- part.text }}{%- endfor -%}
{%- endif -%}
{{- '<|END_RESPONSE|>' if message.role == 'assistant' else '' }}
{{- '<|END_OF_TURN_TOKEN|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|><|START_RESPONSE|>' }}
{%- endif -%}
"""
_LLAMA3_TEMPLATE = """\
{{- bos_token }}
{%- for message in messages -%}
{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\\n\\n' }}
{%- if message.content is string -%}
{{- message.content }}
{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'image' -%}{{- '<|image|>' }}
{%- elif part.type == 'text' -%}{{- part.text }}
{%- endif -%}
{%- endfor -%}
{%- endif -%}
{{- '<|eot_id|>' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif -%}
"""

# --- the families ----------------------------------------------------------------------------------------------------

_GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
# Gemma multiplies embeddings by sqrt(HIDDEN) and shares them with the head. Unless both are made up for, the last token
# outweighs all that attention adds, and every text is one token repeated. (Norm weights count from 1.)
_GEMMA_WEIGHTS: Json = {"word_std": 0.25 / HIDDEN**0.5, "final_norm": 2 * HIDDEN**0.5 - 1}
_PALIGEMMA = Family(
    config={
        "model_type": "paligemma",
        "text_config": _text("gemma", head_dim=16, tie_word_embeddings=True),
        "vision_config": _SIGLIP,
        "image_token_index": "<image>",
        "projection_dim": HIDDEN,
        "tie_word_embeddings": True,
    },
    image_processor={"image_processor_type": "SiglipImageProcessor", "size": _SQUARE, "image_seq_length": 16},
    processor={"processor_class": "PaliGemmaProcessor"},
    template=_PALIGEMMA_TEMPLATE,
    # The processor adds the location and segmentation tokens when it loads; published embeddings have rows for them.
    specials=("<image>", *(f"<loc{i:04}>" for i in range(1024)), *(f"<seg{i:03}>" for i in range(128))),
    bos="<bos>",
    eos="<eos>",
    pad="<pad>",
    adds_bos=False,
    **_GEMMA_WEIGHTS,
)

_SUPPORTED: dict[str, Family] = {
    "qwen2_vl": _qwen(
        "2",
        "qwen2_vl",
        _text("qwen2_vl_text", rope_parameters=_MROPE),
        _QWEN2_VISION,
        _QWEN_DEFAULT_SYSTEM + _QWEN_TURNS,
    ),
    "qwen2_5_vl": _qwen(
        "2_5_",
        "qwen2_5_vl",
        _text("qwen2_5_vl_text", rope_parameters=_MROPE),
        _QWEN25_VISION,
        _QWEN_DEFAULT_SYSTEM + _QWEN_TURNS,
    ),
    "qwen3_vl": _qwen("3", "qwen3_vl", _text("qwen3_vl_text", head_dim=16, rope_parameters=_MROPE), _DEEPSTACK),
    "qwen3_vl_moe": _qwen(
        "3",
        "qwen3_vl_moe",
        _text(
            "qwen3_vl_moe_text",
            head_dim=16,
            rope_parameters=_MROPE,
            num_experts=4,
            num_experts_per_tok=2,
            moe_intermediate_size=32,
        ),
        _DEEPSTACK,
    ),
    "llava": Family(
        config={
            "model_type": "llava",
            "text_config": _text("llama"),
            "vision_config": _CLIP,
            "image_token_index": "<image>",
            "image_seq_length": 16,
        },
        image_processor={
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": _SQUARE,
        },
        processor={
            "processor_class": "LlavaProcessor",
            "patch_size": 7,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
        template=_LLAVA_TEMPLATE,
        specials=("<unk>", "<image>"),
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    # Tiles of 28 pixels, four patches each: an image is 8 to 24 tokens.
    "llava_next": Family(
        config={
            "model_type": "llava_next",
            "text_config": _text("mistral", sliding_window=None),
            "vision_config": _CLIP | {"patch_size": 14},
            "image_token_index": "<image>",
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        image_processor={
            "image_processor_type": "LlavaNextImageProcessor",
            "size": {"shortest_edge": 28},
            "crop_size": _SQUARE,
            "image_grid_pinpoints": [[28, 56], [56, 28], [56, 56]],
        },
        processor={
            "processor_class": "LlavaNextProcessor",
            "patch_size": 14,
            "vision_feature_select_strategy": "default",
            "num_additional_image_tokens": 1,
            "image_token": "<image>",
        },
        template=_LLAVA_NEXT_TEMPLATE,
        specials=("<unk>", "<image>"),
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    "llava_onevision": Family(
        config={
            "model_type": "llava_onevision",
            "text_config": _text("qwen2"),
            "vision_config": _SIGLIP | {"patch_size": 14},
            "image_token_index": "<image>",
            "video_token_index": "<video>",
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]],
        },
        image_processor={
            "image_processor_type": "LlavaOnevisionImageProcessor",
            "size": _SQUARE,
            "image_grid_pinpoints": [[28, 28], [28, 56], [56, 28], [56, 56]],
        },
        video_processor={"video_processor_type": "LlavaOnevisionVideoProcessor", "size": _SQUARE},
        processor={
            "processor_class": "LlavaOnevisionProcessor",
            "num_image_tokens": 4,
            "vision_feature_select_strategy": "full",
            "image_token": "<image>",
            "video_token": "<video>",
        },
        template=_ONEVISION_TEMPLATE,
        specials=(*_CHATML, "<image>", "<video>"),
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    # Tiles of 28 pixels, four tokens each after the pixel shuffle.
    "internvl": Family(
        config={
            "model_type": "internvl",
            "text_config": _text("qwen2"),
            "vision_config": _VISION | {"model_type": "internvl_vision", "image_size": [28, 28], "patch_size": [7, 7]},
            "image_token_id": "<IMG_CONTEXT>",
            "image_seq_length": 4,
        },
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessorFast",
            "size": _SQUARE,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
        video_processor={"video_processor_type": "InternVLVideoProcessor", "size": _SQUARE},
        processor={"processor_class": "InternVLProcessor", "image_seq_length": 4},
        template=_INTERNVL_TEMPLATE,
        specials=(*_CHATML, "<img>", "</img>", "<IMG_CONTEXT>", "<video>"),
        named_tokens={
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        eos="<|im_end|>",
        pad="<|endoftext|>",
    ),
    "gemma3": Family(
        config={
            "model_type": "gemma3",
            "text_config": _text(
                "gemma3_text",
                head_dim=16,
                query_pre_attn_scalar=16,
                sliding_window=8,  # shorter than any prompt
                layer_types=["sliding_attention", "full_attention", "sliding_attention"],
                tie_word_embeddings=True,
            ),
            "vision_config": _SIGLIP,
            "mm_tokens_per_image": 4,
            "image_token_index": "<image_soft_token>",
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
        },
        image_processor={"image_processor_type": "Gemma3ImageProcessor", "size": _SQUARE, "do_pan_and_scan": None},
        processor={"processor_class": "Gemma3Processor", "image_seq_length": 4},
        template=_GEMMA_TEMPLATE,
        specials=(*_GEMMA_TURNS, "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        named_tokens={
            "image_token": "<image_soft_token>",
            "boi_token": "<start_of_image>",
            "eoi_token": "<end_of_image>",
        },
        bos="<bos>",
        eos="<end_of_turn>",
        pad="<pad>",
        **_GEMMA_WEIGHTS,
    ),
    "glm4v": Family(
        config={
            "model_type": "glm4v",
            "text_config": _text("glm4v_text", rope_parameters=_MROPE | {"partial_rotary_factor": 1.0}),
            "vision_config": _PATCHES
            | {
                "depth": 2,
                "hidden_size": 32,
                "out_hidden_size": HIDDEN,
                "intermediate_size": 64,
                "image_size": 56,
            },
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "image_start_token_id": "<|begin_of_image|>",
            "image_end_token_id": "<|end_of_image|>",
            "video_start_token_id": "<|begin_of_video|>",
            "video_end_token_id": "<|end_of_video|>",
        },
        # The bounds count both frames of a temporal patch.
        image_processor={
            "image_processor_type": "Glm4vImageProcessor",
            "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 56 * 56},
            "patch_size": 7,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
        video_processor={
            "video_processor_type": "Glm4vVideoProcessor",
            "size": {"shortest_edge": 2 * 28 * 28, "longest_edge": 2 * 56 * 56},
            "patch_size": 7,
            "merge_size": 2,
            "temporal_patch_size": 2,
        },
        processor={"processor_class": "Glm4vProcessor"},
        template=_GLM_TEMPLATE,
        specials=(
            *("[gMASK]", "<sop>", "<|system|>", "<|user|>", "<|assistant|>", "<|image|>", "<|video|>"),
            *("<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>"),
        ),
        eos="<|user|>",
        pad="<|endoftext|>",
    ),
    # Tiles of 28 pixels, four tokens each, and one more tile for the whole image.
    "idefics3": Family(
        config={
            "model_type": "idefics3",
            "text_config": _text("llama"),
            "vision_config": _VISION,
            "scale_factor": 2,
            "image_token_id": "<image>",
        },
        image_processor={
            "image_processor_type": "Idefics3ImageProcessor",
            "size": {"longest_edge": 56},
            "max_image_size": {"longest_edge": 28},
            "do_image_splitting": True,
        },
        processor={"processor_class": "Idefics3Processor", "image_seq_len": 4},
        template=_IDEFICS_TEMPLATE,
        specials=(
            *("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"),
            *(f"<row_{row}_col_{col}>" for row in range(1, 7) for col in range(1, 7)),
        ),
        bos="<|begin_of_text|>",
        eos="<end_of_utterance>",
        pad="<pad>",
    ),
    "paligemma": _PALIGEMMA,
    "paligemma2": Family(
        **vars(_PALIGEMMA)
        | {
            "config": _PALIGEMMA.config
            | {
                "text_config": _text(
                    "gemma2",
                    head_dim=16,
                    query_pre_attn_scalar=16,
                    sliding_window=4096,
                    attn_logit_softcapping=50.0,
                    final_logit_softcapping=30.0,
                    tie_word_embeddings=True,
                )
            }
        }
    ),
    "mistral3": Family(
        config={
            "model_type": "mistral3",
            "text_config": _text("mistral", head_dim=16, sliding_window=None),
            "vision_config": _VISION | {"model_type": "pixtral", "image_size": 56, "head_dim": 16},
            "image_token_index": "[IMG]",
            "spatial_merge_size": 2,
            "vision_feature_layer": -1,
            "tie_word_embeddings": False,
        },
        image_processor={
            "image_processor_type": "PixtralImageProcessorFast",
            "size": {"longest_edge": 56},
            "patch_size": {"height": 7, "width": 7},
        },
        processor={
            "processor_class": "PixtralProcessor",
            "patch_size": 7,
            "spatial_merge_size": 2,
            "image_token": "[IMG]",
            "image_break_token": "[IMG_BREAK]",
            "image_end_token": "[IMG_END]",
        },
        template=_MISTRAL_TEMPLATE,
        specials=("[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"),
        bos="<s>",
        eos="</s>",
        pad="<pad>",
    ),
    # Tiles of 28 pixels, four tokens each; attention and feed-forward run in parallel.
    "aya_vision": Family(
        config={
            "model_type": "aya_vision",
            "text_config": _text(
                "cohere2",
                sliding_window=16,
                layer_types=["sliding_attention", "sliding_attention", "full_attention"],
                logit_scale=1.0,
                tie_word_embeddings=True,
            ),
            "vision_config": _SIGLIP,
            "image_token_index": "<|IMG_PATCH|>",
            "downsample_factor": 2,
            "vision_feature_layer": -1,
            "vision_feature_select_strategy": "full",
            "tie_word_embeddings": True,
        },
        image_processor={
            "image_processor_type": "GotOcr2ImageProcessor",
            "size": _SQUARE,
            "crop_to_patches": True,
            "min_patches": 1,
            "max_patches": 4,
        },
        processor={
            "processor_class": "AyaVisionProcessor",
            "patch_size": 7,
            "img_size": 28,
            "downsample_factor": 2,
            "image_token": "<image>",
        },
        template=_AYA_TEMPLATE,
        specials=(
            *("<|START_OF_TURN_TOKEN|>", "<|END_OF_TURN_TOKEN|>", "<|SYSTEM_TOKEN|>", "<|USER_TOKEN|>"),
            *("<|CHATBOT_TOKEN|>", "<|START_RESPONSE|>", "<|END_RESPONSE|>", "<image>", "<|START_OF_IMG|>"),
            *("<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE", "TILE_GLOBAL"),
        ),
        bos="<BOS_TOKEN>",
        eos="<|END_OF_TURN_TOKEN|>",
        pad="<PAD>",
    ),
}

# Models that an engine with one key-value slot per layer and token must refuse.
_REFUSED: dict[str, Family] = {
    # Three of four layers are linear attention with a recurrent state.
    "qwen3_5": _qwen(
        "3",
        "qwen3_5",
        _text(
            "qwen3_5_text",
            head_dim=16,
            num_hidden_layers=4,
            linear_num_value_heads=4,
            linear_num_key_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
            rope_parameters=_MROPE | {"partial_rotary_factor": 1.0},
        ),
        _QWEN3_VISION,
    ),
    # Images are no tokens: some layers attend to them crosswise.
    "mllama": Family(
        config={
            "model_type": "mllama",
            "text_config": _text("mllama_text_model", num_hidden_layers=4, cross_attention_layers=[1, 3]),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_global_layers": 1,
                "attention_heads": 2,
                "image_size": 28,
                "patch_size": 7,
                "max_num_tiles": 4,
                "intermediate_layers_indices": [0, 1],
                "vision_output_dim": 96,
                "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
            },
            "image_token_index": "<|image|>",
        },
        image_processor={"image_processor_type": "MllamaImageProcessor", "size": _SQUARE, "max_image_tiles": 4},
        processor={"processor_class": "MllamaProcessor"},
        template=_LLAMA3_TEMPLATE,
        specials=("<|start_header_id|>", "<|end_header_id|>", "<|python_tag|>", "<|image|>"),
        bos="<|begin_of_text|>",
        eos="<|eot_id|>",
        pad="<|finetune_right_pad_id|>",
        max_images=1,
    ),
    # The last two layers reuse the keys and values of earlier ones.
    "gemma4": Family(
        config={
            "model_type": "gemma4",
            "text_config": _text(
                "gemma4_text",
                head_dim=16,
                global_head_dim=16,
                num_hidden_layers=4,
                num_kv_shared_layers=2,
                layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
                sliding_window=8,
                hidden_size_per_layer_input=8,
                vocab_size_per_layer_input=512,
                tie_word_embeddings=True,
            ),
            "vision_config": {
                "hidden_size": 32,
                "intermediate_size": 64,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "patch_size": 7,
                "pooling_kernel_size": 2,
                "position_embedding_size": 64,
            },
            "audio_config": None,
            "image_token_id": "<|image|>",
            "video_token_id": "<|video|>",
            "audio_token_id": "<|audio|>",
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "boa_token_id": "<|audio>",
            "eoa_token_index": "<audio|>",
        },
        image_processor={
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 7,
            "max_soft_tokens": 70,
            "pooling_kernel_size": 2,
            "feature_extractor_type": "Gemma4AudioFeatureExtractor",
        },
        video_processor={"video_processor_type": "Gemma4VideoProcessor", "patch_size": 7, "pooling_kernel_size": 2},
        processor={"processor_class": "Gemma4Processor", "image_seq_length": 70},
        template=_GEMMA_TEMPLATE.replace("<start_of_image>", "<|image|>"),
        specials=(*_GEMMA_TURNS, "<|image|>", "<|video|>", "<|audio|>", "<|image>", "<image|>", "<|audio>", "<audio|>"),
        named_tokens={
            "image_token": "<|image|>",
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "audio_token": "<|audio|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
        },
        bos="<bos>",
        eos="<end_of_turn>",
        pad="<pad>",
        **_GEMMA_WEIGHTS,
    ),
}

_ALL: dict[str, Family] = _SUPPORTED | _REFUSED
FAMILIES: tuple[str, ...] = tuple(_SUPPORTED)
UNSUPPORTED: tuple[str, ...] = tuple(_REFUSED)
