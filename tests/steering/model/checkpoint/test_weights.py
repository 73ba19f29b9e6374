"""Checkpoints whose weights are quantized or incomplete."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

import steering
from steering.model import loading
from tests import families
from tests.families.published import quantized
from tests.families.published.quantized import Quantization

QUANTIZATIONS = {
    "fp8, a scale for a block": quantized.FP8_BLOCKS,
    "fp8, a scale for a weight": quantized.FP8_WHOLE,
    "compressed-tensors, float8": quantized.COMPRESSED_FP8,
    "compressed-tensors, 4 bits": quantized.COMPRESSED_INT4,
    "awq": quantized.AWQ,
    "gptq": quantized.GPTQ,
    "gptq, 8 bits, inputs reordered": quantized.GPTQ_REORDERED,
    "mxfp4": quantized.MXFP4,
}


def copied(root: Path, folder: Path, family: str = "qwen2_vl") -> Path:
    return Path(shutil.copytree(families.checkpoint(family, root), folder))


@pytest.mark.parametrize("quantization", QUANTIZATIONS.values(), ids=QUANTIZATIONS.keys())
def test_quantized_weights_are_read_as_the_numbers_that_they_stand_for(
    quantization: Quantization, root: Path, tmp_path: Path
) -> None:
    family = "gpt_oss" if quantization is quantized.MXFP4 else "qwen2_vl"
    read = steering.load(quantization.apply(copied(root, tmp_path / "quantized", family)))
    meant = steering.load(quantization.round(copied(root, tmp_path / "meant", family)))
    for (name, ours), theirs in zip(read.model.named_parameters(), meant.model.parameters(), strict=True):
        assert torch.allclose(ours, theirs, rtol=1e-6, atol=0), name
    assert read.fingerprint != steering.load(families.checkpoint(family, root)).fingerprint
    built = steering.load(tmp_path / "quantized", unread=read.fingerprint)
    assert built.model.config.to_dict() == read.model.config.to_dict()
    assert not hasattr(read.model.config, "quantization_config")
    assert read.model.generation_config.to_dict() == meant.model.generation_config.to_dict()


@pytest.mark.parametrize(
    ("stated", "reason"),
    [
        (
            {"quant_method": "one of later"},
            "by one of later; only unquantized ones are read, and those quantized by fp8",
        ),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "by awq in another layout than gemm"),
        ({"quant_method": "gptq", "bits": 3}, "by gptq with other than 2, 4 or 8 bits"),
    ],
)
def test_other_quantizations_are_refused(stated: dict[str, Any], reason: str, root: Path, tmp_path: Path) -> None:
    other = Quantization(quantized.whole, stated)
    with pytest.raises(steering.UnsupportedModel, match=reason):
        steering.load(other.apply(copied(root, tmp_path / "model")))


def test_quantized_weights_are_not_divided_among_processes() -> None:
    config = AutoConfig.for_model("qwen2_vl", quantization_config={"quant_method": "fp8"})
    with pytest.raises(steering.UnsupportedModel, match="its quantized weights cannot be divided"):
        loading.refuse_split(config, 2)


def test_scales_that_nothing_reads_are_refused(root: Path, tmp_path: Path) -> None:
    folder = quantized.FP8_BLOCKS.apply(copied(root, tmp_path / "model"), state=False)
    with pytest.raises(steering.UnsupportedModel, match=r"_scale_inv and \d+ more tensors would be left out"):
        steering.load(folder)


def test_a_checkpoint_without_one_of_its_weights_is_refused(root: Path, tmp_path: Path) -> None:
    file = copied(root, tmp_path / "model") / "model.safetensors"
    weights = load_file(file)
    del weights[next(name for name in weights if name.endswith("1.mlp.down_proj.weight"))]
    save_file(weights, file, {"format": "pt"})
    with pytest.raises(steering.UnsupportedModel, match=r"1 are missing, such as .*1\.mlp\.down_proj\.weight"):
        steering.load(file.parent)
