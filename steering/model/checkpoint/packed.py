"""Weights that AWQ or GPTQ packed into integers, as the numbers that they stand for.

AWQ (Lin et al. 2024) in AutoAWQ's layout "gemm", GPTQ (Frantar et al. 2023) in AutoGPTQ's: `qweight` holds the levels of a
weight (out, in) as (in, out), `qzeros` the levels of zero and `scales` the steps, of each group of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

METHODS = ("awq", "gptq")
AWQ_PLACES = [0, 4, 1, 5, 2, 6, 3, 7]
"""The places of 8 levels within an integer of AWQ's, from its low end."""


def unreadable(stated: Mapping[str, Any]) -> str | None:
    """Return the reason for which weights that were packed so cannot be read, None where they can."""
    method, bits = stated["quant_method"], stated.get("bits")
    if method == "awq" and (bits != 4 or stated.get("version", "gemm") != "gemm" or not stated.get("zero_point", True)):
        return "its weights are quantized by awq in another layout than gemm, of 4 bits with zero points"
    if method == "gptq" and (bits not in (2, 4, 8) or stated.get("dynamic")):
        return "its weights are quantized by gptq with other than 2, 4 or 8 bits, or with several numbers of them"
    return None


def unpack(
    path: str | Path, stated: Mapping[str, Any], dtype: torch.dtype, local_files_only: bool
) -> dict[str, torch.Tensor]:
    """Return all tensors of a checkpoint on the CPU, by the names in its files; packed weights are of `dtype`."""
    folder = Path(path)
    if not folder.is_dir():
        folder = Path(snapshot_download(str(path), allow_patterns="*.safetensors", local_files_only=local_files_only))
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(file)
    read: Any = _awq if stated["quant_method"] == "awq" else _gptq
    for name in [name.removesuffix("qweight") for name in tensors if name.endswith(".qweight")]:
        parts = {part: tensors.pop(name + part, None) for part in ("qweight", "qzeros", "scales", "g_idx")}
        tensors[name + "weight"] = read(stated, **parts).to(dtype).contiguous()
    return tensors


def _levels(packed: torch.Tensor, bits: int) -> torch.Tensor:
    """Return the levels in rows of integers, (rows, columns * 32 / bits) in uint8, from the low end of each."""
    shifts = bits * torch.arange(8 // bits, dtype=torch.uint8)
    return ((packed.contiguous().view(torch.uint8).unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1)


def _awq(
    stated: Mapping[str, Any], qweight: torch.Tensor, qzeros: torch.Tensor, scales: torch.Tensor, **_: Any
) -> torch.Tensor:
    """Return a weight (out, in) in float32."""
    levels, zeros = (
        _levels(packed, 4).unflatten(1, (-1, 8))[..., AWQ_PLACES].flatten(1) for packed in (qweight, qzeros)
    )
    groups = levels.unflatten(0, (len(scales), -1)).float()
    return ((groups - zeros[:, None]) * scales[:, None]).flatten(0, 1).t()


def _gptq(
    stated: Mapping[str, Any],
    qweight: torch.Tensor,
    qzeros: torch.Tensor,
    scales: torch.Tensor,
    g_idx: torch.Tensor | None,
) -> torch.Tensor:
    """Return a weight (out, in) in float32; `g_idx` is the group of each input, where these were reordered."""
    levels, zeros = _levels(qweight.t(), stated["bits"]), _levels(qzeros, stated["bits"])
    if stated.get("checkpoint_format", "gptq") != "gptq_v2":
        zeros = (zeros + 1) & (2 ** stated["bits"] - 1)  # the first version holds them less one
    inputs = levels.shape[1]
    groups = torch.arange(inputs) // (inputs // len(scales)) if g_idx is None else g_idx.long()
    return (levels.float() - zeros.t()[:, groups]) * scales.t()[:, groups]
