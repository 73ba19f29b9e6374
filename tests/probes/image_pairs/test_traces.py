"""Traces of two answers inside a model, compared with hand-worked cases and the plain model's own states."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

import steering
from probes.image_pairs.traces import Trace, alike, divergence, faithfulness, traces
from steering.model.processing.processor import load_processor

CHAT = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": Image.new("RGB", (56, 56), "red")},
            {"type": "text", "text": "Are the two pictures the same?"},
        ],
    }
]


def trace(directions: list[list[float]], updates: list[float]) -> Trace:
    return Trace(torch.tensor([directions, directions]), np.array(updates))


def test_the_score_by_hand() -> None:
    first, second = trace([[1, 0], [1, 0]], [0.5, 1.0]), trace([[2, 0], [0, 3]], [0.25, 1.5])
    assert alike(first, second) == [1.0, 0.0]
    assert divergence(first, second) == (0.25 + 0.5) / 2
    assert faithfulness(first, second) == 0.5 * (1 - 0.375)
    assert faithfulness(first, first) == 1.0
    assert faithfulness(first, trace([[2, 0], [0, 3]], [9, 9])) == 0.0  # a divergence above 1 counts as 1


def test_traces_are_those_of_the_plain_model(model: str, tiny: steering.Engine) -> None:
    answers = ("They are the same.", "One star is blue")
    found_traces = list(traces(tiny, ((CHAT, answer) for answer in answers)))
    plain = AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32).eval()
    processor = load_processor(model)
    for answer, got in zip(answers, found_traces, strict=True):
        prompt = processor.apply_chat_template(
            CHAT, add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
        )
        answer_ids = torch.tensor([processor.tokenizer.encode(answer, add_special_tokens=False)])
        start = prompt["input_ids"].shape[1]
        pictures = {name: prompt[name] for name in ("pixel_values", "image_grid_thw")}
        layers: list[tuple[torch.Tensor, torch.Tensor]] = []

        def keep(_: Any, inputs: Any, out: Any, layers: Any = layers) -> None:
            layers.append((inputs[0], out[0] if isinstance(out, tuple) else out))

        hooks = [layer.register_forward_hook(keep) for layer in plain.model.language_model.layers]
        with torch.inference_mode():
            ids = torch.cat([prompt["input_ids"], answer_ids], 1)
            kinds = torch.nn.functional.pad(prompt["mm_token_type_ids"], (0, answer_ids.shape[1]))
            plain(input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=kinds, **pictures)
        for hook in hooks:
            hook.remove()
        rows = slice(start - 1, None)  # the last of the answer generates its end
        states = torch.stack([out[0, rows].mean(0) for _, out in layers])
        sizes = [float((out - entering)[0, rows].norm(dim=-1).mean()) for entering, out in layers]
        assert torch.allclose(got.states[0], states, atol=1e-4)
        assert got.updates == pytest.approx(np.array(sizes), rel=1e-4)
