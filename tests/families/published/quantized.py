"""Quantized weights as checkpoints hold them, worked by hand, and the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Quantized = dict[str, torch.Tensor]
"""The tensors of one weight by their suffixes; "" is in the weight's own place."""
FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])


def by_blocks(weight: torch.Tensor, side: int = 32) -> tuple[Quantized, torch.Tensor]:
    """Quantize in float8 with a scale for each block."""
    rows, columns = weight.shape
    blocks = weight.view(rows // side, side, columns // side, side)
    scales = blocks.abs().amax((1, 3), keepdim=True) / 448
    stored = (blocks / scales).to(torch.float8_e4m3fn)
    tensors = {"": stored.view(rows, columns), "_scale_inv": scales[:, 0, :, 0]}
    return tensors, (stored.float() * scales).view(rows, columns)


def whole(weight: torch.Tensor) -> tuple[Quantized, torch.Tensor]:
    """Quantize in float8 with one scale."""
    scale = weight.abs().max() / 448
    stored = (weight / scale).to(torch.float8_e4m3fn)
    return {"": stored, "_scale_inv": scale}, stored.float() * scale


def by_rows(weight: torch.Tensor) -> tuple[Quantized, torch.Tensor]:
    """Quantize in float8 with a scale for each output."""
    scales = weight.abs().amax(1, keepdim=True) / 448
    stored = (weight / scales).to(torch.float8_e4m3fn)
    return {"": stored, "_scale": scales}, stored.float() * scales


def in_four_bits(weight: torch.Tensor, group: int = 32) -> tuple[Quantized, torch.Tensor]:
    """Quantize in integers of 4 bits, eight in one of 32, with a scale for each group of inputs."""
    rows, columns = weight.shape
    groups = weight.view(rows, columns // group, group)
    scales = groups.abs().amax(-1) / 7
    levels = (groups / scales[..., None]).round().clamp(-8, 7)
    eights = ((levels + 8).long().view(rows, columns // 8, 8) << 4 * torch.arange(8)).sum(-1)
    tensors = {"_packed": eights.to(torch.uint32).view(torch.int32), "_scale": scales}
    return tensors | {"_shape": torch.tensor([rows, columns])}, (levels * scales[..., None]).view(rows, columns)


def in_fp4(experts: torch.Tensor) -> tuple[Quantized, torch.Tensor]:
    """Quantize the weights of experts in pairs of FP4 with a power of two for each 32 inputs."""
    count, inputs, outputs = experts.shape
    blocks = experts.transpose(1, 2).reshape(count, outputs, inputs // 32, 32)
    powers = (blocks.abs().amax(-1) / 6).log2().ceil()
    codes = ((blocks / 2 ** powers[..., None])[..., None] - FP4).abs().argmin(-1)
    tensors = {"_blocks": (codes[..., ::2] | codes[..., 1::2] << 4).byte(), "_scales": (powers + 127).byte()}
    return tensors, (FP4[codes] * 2 ** powers[..., None]).view(count, outputs, inputs).transpose(1, 2)


@dataclass(frozen=True)
class Quantization:
    """A checkpoint's quantization: how a weight is quantized, of which names, and what config.json says of it."""

    quantize: Callable[[torch.Tensor], tuple[Quantized, torch.Tensor]]
    stated: Mapping[str, Any]
    names: tuple[str, ...] = ("proj.weight",)
    """Ends of the names of the weights, in layers of the language model."""

    def apply(self, folder: Path, state: bool = True) -> Path:
        """Quantize the weights of a checkpoint in place; without `state` its config does not say so."""
        if state:
            config = json.loads((folder / "config.json").read_text())
            (folder / "config.json").write_text(json.dumps(config | {"quantization_config": self.stated}))
        return self._edit(folder, lambda name, tensors, values: {name + end: tensor for end, tensor in tensors.items()})

    def round(self, folder: Path) -> Path:
        """Replace the weights of a checkpoint by the numbers that their quantized form stands for."""
        return self._edit(folder, lambda name, tensors, values: {name: values})

    def _edit(self, folder: Path, new: Callable[[str, Quantized, torch.Tensor], Quantized]) -> Path:
        file = folder / "model.safetensors"
        weights = load_file(file)
        for name in [name for name in weights if "layers." in name and name.endswith(self.names)]:
            if "vision" not in name and "visual" not in name:
                weights |= {
                    place: t.contiguous() for place, t in new(name, *self.quantize(weights.pop(name).float())).items()
                }
        save_file(weights, file, {"format": "pt"})
        return folder


def _compressed(form: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"symmetric": True, "dynamic": False} | weights}}
    ignored = {"ignore": ["lm_head", "re:.*visual.*"], "quantization_status": "compressed"}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups} | ignored


_KEPT = {
    "quant_method": "fp8",
    "modules_to_not_convert": ["lm_head", "visual", "vision_tower", "multi_modal_projector"],
}
FP8_BLOCKS = Quantization(by_blocks, _KEPT | {"activation_scheme": "dynamic", "weight_block_size": [32, 32]})
FP8_WHOLE = Quantization(whole, _KEPT | {"activation_scheme": "static", "weight_block_size": None, "dequantize": False})
COMPRESSED_FP8 = Quantization(by_rows, _compressed("float-quantized", type="float", num_bits=8, strategy="channel"))
COMPRESSED_INT4 = Quantization(
    in_four_bits, _compressed("pack-quantized", type="int", num_bits=4, strategy="group", group_size=32)
)
MXFP4 = Quantization(in_fp4, {"quant_method": "mxfp4"}, ("experts.gate_up_proj", "experts.down_proj"))
