"""Layers in 8-bit integers, compared with hand-worked sums, and whole models with plain ones rounded in float."""

from __future__ import annotations

import logging
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForImageTextToText

import steering
from steering import Engine, Request, Sampling, See, UnsupportedModel
from steering.decoder.int8 import Int8Linear, narrow, prepare
from steering.model.processing.processor import load_processor
from steering.runner import selfcheck
from tests import families
from tests.steering.decoder.integers import NEEDS_VNNI

CHECKPOINT = Path(__file__).parents[3] / "demo" / "checkpoint"


def linear(weight: torch.Tensor, bias: torch.Tensor | None = None) -> Int8Linear:
    layers = nn.Sequential(nn.Linear(*weight.shape[::-1], bias=bias is not None)).requires_grad_(False).to(weight.dtype)
    layers[0].weight.copy_(weight)
    if bias is not None:
        layers[0].bias.copy_(bias)
    prepare(layers)
    narrow(layers)
    assert isinstance(layers[0], Int8Linear)
    return layers[0]


def rounded(values: torch.Tensor) -> torch.Tensor:
    """Each row by multiples of a 127th of its largest, in float."""
    scale = values.abs().amax(-1, keepdim=True) / 127
    return torch.round(values / scale) * scale


@NEEDS_VNNI
def test_a_product_by_hand() -> None:
    layer = linear(torch.tensor([[127.0, 63.6], [-2.54, 1.28]]), torch.tensor([0.0, 10.0]))
    assert layer.weight.tolist() == [[127, 64], [-127, 64]]
    # the row becomes 127 and 50, hundredths of 2.54 / 127 each
    (out,) = layer(torch.tensor([[2.54, 1.004]])).tolist()
    assert out == pytest.approx([0.02 * (127 * 127 + 50 * 64), 10 + 0.02 * 0.02 * (-127 * 127 + 50 * 64)], rel=1e-6)


@NEEDS_VNNI
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_row_depends_on_nothing_but_itself(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, rows = (torch.randn(n, 48, generator=generator).to(dtype) for n in (40, 21))
    layer = linear(weight)
    out = layer(rows.view(3, 7, 48)).view(21, 40)
    assert out.dtype == dtype
    exact = rounded(rows.float()) @ rounded(weight.float()).T
    assert torch.allclose(out.float(), exact, rtol=2 * torch.finfo(dtype).eps, atol=1e-5)
    assert torch.equal(torch.cat([layer(row[None]) for row in rows]), out)
    spoilt = rows.clone()
    spoilt[4, 0] = torch.nan
    spoilt[9] = 0
    again = layer(spoilt)
    assert again[4].isnan().all()
    assert torch.equal(again[[0, 20]], out[[0, 20]])
    assert not again[9].any()


def test_a_cpu_on_which_sums_overflow_is_found(root: Path) -> None:
    load = f"""
import steering
try:
    steering.load({str(families.checkpoint("qwen2_vl", root))!r}, device="cpu", quantization="int8")
except steering.UnsupportedModel as error:
    print(error)
"""
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    done = subprocess.run([sys.executable, "-c", load], env=environment, capture_output=True, text=True, check=True)
    overflows = "int8 needs a CPU with VNNI: on this one, sums of integers overflow.\n"
    assert done.stdout == (overflows if platform.machine() == "x86_64" else "")


def in_words(model: Any, chat: Any, tokens: list[int]) -> torch.Tensor:
    """Log-probabilities (tokens, vocabulary) of a plain model along an answer."""
    inputs = load_processor(CHECKPOINT).apply_chat_template(
        chat, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
    )
    start = inputs["input_ids"].shape[1]
    ids = torch.cat([inputs["input_ids"], torch.tensor([tokens])], 1)
    kinds = nn.functional.pad(inputs["mm_token_type_ids"], (0, len(tokens)))
    pictures = {name: inputs[name] for name in ("pixel_values", "image_grid_thw")}
    with torch.inference_mode():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **pictures).logits
    return logits[0, start - 1 : -1].log_softmax(-1)


@NEEDS_VNNI
def test_an_answer_is_that_of_a_plain_model_whose_numbers_are_rounded(caplog: pytest.LogCaptureFixture) -> None:
    picture = families.example_image(0).resize((84, 84))
    chat = [
        {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "What do you see?"}]}
    ]
    mllm = steering.load(CHECKPOINT, device="cpu", quantization="int8")
    with caplog.at_level(logging.INFO, logger="steering"):
        engine = Engine(mllm, slots=2, max_length=256)
    assert "tokens are those of float32" in caplog.text
    choice = engine.generate([Request(chat, Sampling(max_tokens=12, logprobs=0))])[0].choices[0]
    assert choice.logprobs is not None
    plain = AutoModelForImageTextToText.from_pretrained(CHECKPOINT, dtype=torch.float32).eval().requires_grad_(False)
    ours = torch.tensor([token.logprob for token in choice.logprobs])
    tokens = torch.tensor(choice.token_ids)[:, None]
    exact = in_words(plain, chat, list(choice.token_ids)).gather(1, tokens)[:, 0]
    for layer in plain.model.language_model.layers:
        for module in layer.modules():
            if isinstance(module, nn.Linear):
                module.weight.copy_(rounded(module.weight))
                module.register_forward_pre_hook(lambda _, inputs: (rounded(inputs[0]),))
    logprobs = in_words(plain, chat, list(choice.token_ids))
    assert logprobs.argmax(-1).tolist() == list(choice.token_ids)
    plain_logprobs = logprobs.gather(1, tokens)[:, 0]
    # What differs in the last bit is rounded apart now and then, and layer upon layer more of it.
    assert (ours - plain_logprobs).norm() < 0.4 * (plain_logprobs - exact).norm()


@NEEDS_VNNI
@pytest.mark.parametrize(("family", "dtype"), [("qwen2_5_vl", "float32"), ("gemma3", "bfloat16")])
def test_interventions_and_readouts_are_exact_in_int8(family: str, dtype: str, root: Path) -> None:
    folder, read = families.checkpoint(family, root), ["residual", "modality"]
    chat = families.example_messages(family)
    results = []
    for quantization in (None, "int8"):
        mllm = steering.load(folder, dtype=dtype, device="cpu", quantization=quantization)
        fingerprint = mllm.fingerprint
        engine = Engine(mllm, slots=2, max_length=512, self_check=False)
        request = Request(chat, Sampling(max_tokens=3, ignore_eos=True), [See(alpha=0.2)], read)
        choice = engine.generate([request])[0].choices[0]
        assert choice.diagnostics is not None
        results.append((fingerprint, mllm.ffn_widths, choice.diagnostics))
    (*floating, exact), (*integers, coarse) = results
    assert floating == integers  # so that vectors fit
    assert coarse["residual"] != exact["residual"]
    assert coarse["residual"]["mha_cosine"] == pytest.approx(exact["residual"]["mha_cosine"], abs=0.1)
    assert coarse["residual"]["gate_ratio"] == pytest.approx(exact["residual"]["gate_ratio"], abs=0.05)


@NEEDS_VNNI
def test_an_engine_that_rounds_otherwise_than_the_plain_model_is_refused(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mllm = steering.load(families.checkpoint("qwen2_vl", root), device="cpu", quantization="int8")
    real = selfcheck._engine_logits

    def coarser(*arguments: Any, **kwargs: Any) -> Any:
        for module in mllm.layers.modules():
            if isinstance(module, Int8Linear):
                module.weight.copy_(module.weight // 16 * 16)
        return real(*arguments, **kwargs)

    monkeypatch.setattr(selfcheck, "_engine_logits", coarser)
    with pytest.raises(UnsupportedModel, match="cannot be served exactly"):
        Engine(mllm, slots=2, max_length=256)


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"quantization": "int4"}, "must be one of int8"),
        ({"quantization": "int8", "device_map": "auto"}, "mutually exclusive"),
    ],
)
def test_unsupported_uses_of_int8_are_refused(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UnsupportedModel, match=why):
        steering.load(CHECKPOINT, **options)
