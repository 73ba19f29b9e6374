"""A checkpoint's weights, read into its model; quantized ones as the numbers that they stand for.

Projections that are fused, and hooks, need numbers.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, AutoModelForImageTextToText, GenerationConfig

from steering.errors import UnsupportedModel
from steering.model.checkpoint import packed

DEQUANTIZED = ("fp8", "compressed-tensors", "mxfp4")
"""The methods of quantization that transformers can undo while it reads weights."""
_QUANTIZED_NAME = re.compile(r"(weight|proj)_(scale|packed|block|zero)|qweight|qzeros")
"""The names of tensors that belong to a quantized weight."""


def _quantization_of(config: Any) -> Mapping[str, Any] | None:
    """Return the settings by which a checkpoint's weights were quantized, None where they were not."""
    text = config.get_text_config()
    stated = getattr(config, "quantization_config", None) or getattr(text, "quantization_config", None)
    return stated if isinstance(stated, dict) or stated is None else stated.to_dict()


def is_quantized(config: Any) -> bool:
    """Return whether a checkpoint's weights were quantized."""
    return _quantization_of(config) is not None


def unreadable(config: Any) -> str | None:
    """Return the reason for which quantized weights cannot be read, None where they can."""
    stated = _quantization_of(config)
    if stated is None or (method := stated.get("quant_method")) in DEQUANTIZED:
        return None
    if method not in packed.METHODS:
        return (
            f"its weights are quantized by {method}; only unquantized ones are read, and those quantized by "
            f"{', '.join((*DEQUANTIZED, *packed.METHODS))}"
        )
    return packed.unreadable(stated)


def read_weights(path: str | Path, config: Any, *, dtype: Any, local_files_only: bool, **options: Any) -> Any:
    """Build a checkpoint's model with its weights.

    Raises UnsupportedModel where these differ in size from those that its config states, where some are missing, which
    transformers would draw at random, and where it would skip tensors of quantized ones.
    """
    stated = _quantization_of(config)
    place: str | Path | None = path
    options |= {"config": config, "local_files_only": local_files_only}
    if stated is not None and stated["quant_method"] in packed.METHODS:
        dtype = (config.dtype or torch.float16) if dtype == "auto" else dtype
        number = getattr(torch, dtype) if isinstance(dtype, str) else dtype
        options["state_dict"], place = packed.unpack(path, stated, number, local_files_only), None
        _forget_quantization(config)
    elif stated is not None:
        config.quantization_config = {**stated, "dequantize": True}
    try:
        model, info = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].from_pretrained(
            place, dtype=dtype, use_safetensors=True, output_loading_info=True, **options
        )
    except RuntimeError as error:
        if "ignore_mismatched_sizes" not in str(error):
            raise
        raise UnsupportedModel(
            f"The weights of {path} differ in size from those that its config.json states."
        ) from error
    if place is None:
        model.config.name_or_path = str(path)
        _read_generation_config(model, path, local_files_only)
    if missing := sorted(info["missing_keys"]):
        raise UnsupportedModel(
            f"The weights of {path} are incomplete: {len(missing)} are missing, such as {missing[0]}."
        )
    if skipped := sorted(filter(_QUANTIZED_NAME.search, info["unexpected_keys"])):
        raise UnsupportedModel(
            f"The weights of {path} are quantized in a form that is not read: {skipped[0]} and {len(skipped) - 1} more "
            "tensors would be left out."
        )
    return model


def build_empty(
    path: str | Path,
    config: Any,
    device: torch.device,
    *,
    local_files_only: bool,
    dtype: Any,
    attn_implementation: Any,
    **_: Any,
) -> Any:
    """Build a checkpoint's model with uninitialised weights, which take no physical memory until they are written."""
    _forget_quantization(config)
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
    _read_generation_config(model, path, local_files_only)
    if device.type != "meta":
        model.to_empty(device="cpu").tie_weights()
    return model


def _forget_quantization(config: Any) -> None:
    for part in (config, config.get_text_config()):
        part.__dict__.pop("quantization_config", None)


def _read_generation_config(model: Any, path: str | Path, local_files_only: bool) -> None:
    with suppress(OSError):  # a checkpoint without such a file
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=local_files_only)
