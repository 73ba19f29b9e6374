"""Checkpoint folders written from scratch and offline.

The weights are random but not tame: attention is far from uniform, so that a wrong mask, position or scale changes the
logits visibly, and special tokens are never generated greedily, so that texts do not end by chance.
"""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from tests.families.family import Family, Json
from tests.families.published.repositories import PUBLISHED, config_of, image_processor_of
from tests.families.registry import ALL


def build(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    specials: tuple[str, ...] = (),
    layers: int | None = None,
    text: Json | None = None,
    vision: Json | None = None,
) -> Path:
    """Write the checkpoint of `family` with weights drawn from `seed` into `folder`, and return `folder`.

    specials: more special tokens. layers: the decoder's number of layers, where it is not the family's. text, vision:
    changes of the configs of the text model, whose embeddings the whole model ties, and of the vision encoder.
    """
    spec = replace(ALL[family], specials=(*ALL[family].specials, *specials))
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(spec)
    config = _resolve(spec.config, tokenizer)
    if layers is not None:
        config["text_config"] |= {"num_hidden_layers": layers}
    config["text_config"] |= text or {}
    config |= {key: value for key, value in (text or {}).items() if key == "tie_word_embeddings"}
    config["vision_config"] = config.get("vision_config", {}) | (vision or {})
    model_type = config.pop("model_type")
    _written(AutoConfig.for_model(model_type, **config), spec, tokenizer, folder, seed)
    return folder


def _written(
    config: Any,
    spec: Family,
    tokenizer: PreTrainedTokenizerFast,
    folder: Path,
    seed: int,
    shard_size: str | None = None,
) -> PreTrainedModel:
    """Build the model of a config, write its folder, and return the model."""
    tokenizer.save_pretrained(folder)
    (folder / "chat_template.jinja").write_text(spec.template)
    name = spec.processor["processor_class"]
    _write(folder / "processor_config.json", spec.processor)
    _write(folder / "preprocessor_config.json", spec.image_processor | {"processor_class": name})
    if spec.video_processor:
        _write(folder / "video_preprocessor_config.json", spec.video_processor)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
    _randomise(model, spec, tokenizer, seed)
    model.generation_config = GenerationConfig(
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id, pad_token_id=tokenizer.pad_token_id
    )
    model.save_pretrained(folder, **({} if shard_size is None else {"max_shard_size": shard_size}))
    return model


def build_published(name: str, folder: Path) -> Path:
    """Write a checkpoint as the repository of that name has it, shrunk, into `folder`, and return `folder`."""
    published = PUBLISHED[name]
    spec = replace(ALL[published.family], image_processor=image_processor_of(published))
    spec = replace(spec, processor=spec.processor | published.processor)
    tokenizer = _tokenizer(spec)
    config = _resolve(config_of(published), tokenizer)
    folder.mkdir(parents=True)
    _write(folder / "config.json", config)
    model = _written(
        AutoConfig.from_pretrained(folder), spec, tokenizer, folder, 0, "300KB" if published.shards else None
    )
    ids = tokenizer.convert_tokens_to_ids(list(published.eos)) or tokenizer.eos_token_id
    model.generation_config = GenerationConfig(bos_token_id=tokenizer.bos_token_id, eos_token_id=ids)
    model.generation_config.save_pretrained(folder)
    _write(folder / "config.json", config)  # which saving brought into today's form
    (folder / "chat_template.jinja").unlink()
    if published.template == "chat_template.jinja":
        (folder / published.template).write_text(spec.template)
    elif published.template is not None:
        file = folder / published.template
        content = json.loads(file.read_text()) if file.is_file() else {}
        _write(file, content | {"chat_template": spec.template})
    return folder if published.quantization is None else published.quantization.apply(folder)


@functools.cache
def checkpoint(family: str, root: Path) -> Path:
    """Return the folder of `family` under `root`, built at the first call."""
    return build(family, root / family)


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
    if isinstance(value, list | tuple):
        return [_resolve(one, tokenizer, key.removesuffix("s")) for one in value]
    if key.endswith(("_token_id", "_token_index", "_patch_id")) and isinstance(value, str):
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
        elif name.endswith("sinks"):
            weight.normal_(4.0, 1.5, generator=generator)  # so that they get a good part of the attention
            continue
        elif name.endswith(
            "A_log"
        ):  # states that fade at once are single products, whose norm magnifies their rounding
            weight.uniform_(-4, 0, generator=generator)
            continue
        elif weight.numel() == 1 and name.endswith("gate"):
            weight.fill_(1.0)  # made closed, as for the start of a training
            continue
        else:
            continue
        weight.normal_(0, std, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.3, generator=generator)
    if spec.final_norm is not None:
        model.get_decoder().norm.weight.fill_(spec.final_norm)
    for weight in words:
        weight[sorted(tokenizer.added_tokens_decoder)] *= 0.1
        weight[len(tokenizer) :] *= 0.1
