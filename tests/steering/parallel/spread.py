"""Answers of a model on one device, and on two that pretend to be; in a process of its own, because the devices stay."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

import steering
from tests.steering.parallel import pretend
from tests.steering.parallel.asking import LAYERS, requests, told

LANGUAGE = "model.language_model"
WITHIN = ("text only", "steered", "see, transferred", "icd", "reply")
"""Requests that do nothing which others do not: an operation of a pretended device takes long."""


def halves(layers: int) -> dict[str, str]:
    """Map the second half of the layers and the last norm to the second device, and all else to the first."""
    home, far = (f"{pretend.NAME}:{index}" for index in range(2))
    parts = ("model.visual", f"{LANGUAGE}.embed_tokens", f"{LANGUAGE}.rotary_emb", "lm_head")
    laid = {f"{LANGUAGE}.layers.{index}": home if index < layers // 2 else far for index in range(layers)}
    return dict.fromkeys(parts, home) | laid | {f"{LANGUAGE}.norm": far}


def spread(model: Path) -> list[dict[str, Any]]:
    torch.set_num_threads(1)
    pretend.install()
    apart = []
    for options in ({"device": "cpu"}, {"device_map": halves(LAYERS)}):
        mllm = steering.load(model, dtype="float32", **options)
        engine = steering.Engine(mllm, slots=24, max_length=512, prefill_budget=100, self_check="device_map" in options)
        all_requests = {name: request for name, request in requests(mllm).items() if name not in WITHIN}
        apart.append(told(engine, all_requests))
    return apart
