"""A model that transformers loaded, in the form that an engine needs, over the same weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from steering.decoder import attention
from steering.errors import UnsupportedModel
from steering.model import calibration
from steering.model.chat.template_file import set_template
from steering.model.loading import refuse_offloaded, refuse_structure
from steering.model.mllm import MLLM


def share(model: Any, processor: Any) -> MLLM:
    """Return an MLLM over the weights of a model that transformers loaded, and leave that model as it is.

    An MLLM alters the modules of its model, so these are copied; parameters and buffers are the same memory. The processor
    is copied, too. Where an MLLM would keep a second form of the weights for speed, it keeps none here. Raises
    UnsupportedModel for a model that cannot be served, or whose weights are quantized.
    """
    if not isinstance(model, nn.Module) or not hasattr(model, "get_decoder") or not hasattr(model, "config"):
        raise UnsupportedModel(f"An image-text-to-text model of transformers is needed; got {type(model).__name__}.")
    refuse_structure(model.config)
    if getattr(model, "hf_quantizer", None) is not None or getattr(model, "is_quantized", False):
        raise UnsupportedModel("The model's weights are quantized; load it in its own dtype.")
    if hasattr(model, "hf_device_map"):
        refuse_offloaded(model)
    attention.register()
    copied: Any = copy.deepcopy(model, dict(_same_memory(model))).eval().requires_grad_(False)
    copied.set_attn_implementation({"text_config": attention.NAME})
    processor = copy.deepcopy(processor)
    config = copied.config
    if not set_template(processor, config.model_type, None):
        raise UnsupportedModel("The processor has no chat template, by which prompts are read.")
    source = str(config.name_or_path or "")
    path = Path(source) if source and (Path(source) / "config.json").is_file() else None
    try:
        name = None if source else config.model_type
        return MLLM(copied, processor, name, path, calibrations=Path(calibration.FOLDER).expanduser(), shared=True)
    except (AttributeError, TypeError) as error:
        raise UnsupportedModel(
            f"{config.model_type} cannot be served: it has no decoder that reads image tokens: {error}."
        ) from error


def _same_memory(model: nn.Module) -> Iterator[tuple[int, Any]]:
    """Yield what a copy holds in place of each parameter and buffer, by its id, as `copy.deepcopy` looks them up."""
    for parameter in model.parameters():
        yield id(parameter), nn.Parameter(parameter.detach(), requires_grad=False)
    for buffer in model.buffers():
        yield id(buffer), buffer
