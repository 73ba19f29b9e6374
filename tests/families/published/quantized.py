"""Quantized weights as checkpoints hold them, worked by hand, and the numbers that they stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Quantized = dict[str, torch.Tensor]
"""The tensors of one weight by their suffixes, "" for its own name; with "../" they are names in its place."""
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


def _with_zeros(
    weight: torch.Tensor, bits: int, groups: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return levels (in, out), and zeros and steps (groups, out), for groups of inputs."""
    inputs, top = weight.t(), 2**bits - 1
    parts = [inputs[groups == group] for group in range(int(groups.max()) + 1)]
    steps = torch.stack([(part.amax(0) - part.amin(0)) / top for part in parts]).half().float()
    zeros = torch.stack([(-part.amin(0) / step).round().clamp(1, top) for part, step in zip(parts, steps, strict=True)])
    return (inputs / steps[groups] + zeros[groups]).round().clamp(0, top).long(), zeros.long(), steps


def _joined(levels: torch.Tensor, bits: int, order: list[int]) -> torch.Tensor:
    """Join each 32 / bits levels of a row in an integer; the first of `order` is its lowest."""
    integers = torch.zeros(len(levels), levels.shape[1] * bits // 32, dtype=torch.long)
    for place, number in enumerate(order):
        integers += levels[:, number :: len(order)] << bits * place
    return integers.to(torch.uint32).view(torch.int32)


def as_awq(weight: torch.Tensor, group: int = 32) -> tuple[Quantized, torch.Tensor]:
    """Quantize in 4 bits as AutoAWQ does."""
    groups = torch.arange(weight.shape[1]) // group
    levels, zeros, steps = _with_zeros(weight, 4, groups)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    tensors = {"q": _joined(levels, 4, order), "zeros": _joined(zeros, 4, order), "scales": steps.half()}
    return _in_place_of(tensors), ((levels - zeros[groups]) * steps[groups]).t()


def as_gptq(weight: torch.Tensor, bits: int, version: int, reordered: bool) -> tuple[Quantized, torch.Tensor]:
    """Quantize in groups of 32 inputs as AutoGPTQ does, of which the first version holds zeros less one."""
    groups = torch.arange(weight.shape[1]) // 32
    groups = groups[torch.randperm(len(groups), generator=torch.Generator().manual_seed(0))] if reordered else groups
    levels, zeros, steps = _with_zeros(weight, bits, groups)
    order = list(range(32 // bits))
    tensors = {
        "q": _joined(levels.t(), bits, order).t(),
        "zeros": _joined(zeros - int(version == 1), bits, order),
        "scales": steps.half(),
        "g_idx": groups.int(),
    }
    return _in_place_of(tensors), ((levels - zeros[groups]) * steps[groups]).t()


def _in_place_of(tensors: Quantized) -> Quantized:
    names = {"q": "qweight", "zeros": "qzeros"}
    return {f"../{names.get(name, name)}": tensor for name, tensor in tensors.items()}


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
        return self._edit(folder, lambda name, tensors, values: {_named(name, end): t for end, t in tensors.items()})

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


def _named(name: str, end: str) -> str:
    return name.removesuffix("weight") + end.removeprefix("../") if end.startswith("../") else name + end


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
AWQ = Quantization(as_awq, {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"})
GPTQ = Quantization(partial(as_gptq, bits=4, version=1, reordered=False), {"quant_method": "gptq", "bits": 4})
GPTQ_REORDERED = Quantization(
    partial(as_gptq, bits=8, version=2, reordered=True),
    {"quant_method": "gptq", "bits": 8, "checkpoint_format": "gptq_v2", "desc_act": True},
)
