"""Questions to models: noise pictures, and words of one token each."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
from PIL import Image

from steering.interventions.steer import Steer
from steering.model.mllm import MLLM
from steering.vectors.vector import SteeringVector

WORDS = ("red", "green", "blue", "circle", "square", "star", "heart", "left", "top", "picture", "color", "shape")


def noise(size: tuple[int, int]) -> Image.Image:
    """Return a new random picture, (width, height), so that caches help no more than in production."""
    return Image.frombytes("RGB", size, os.urandom(size[0] * size[1] * 3))


def words(rng: random.Random, count: int) -> str:
    """Return `count` random words."""
    return " ".join(rng.choice(WORDS) for _ in range(count))


def chat(text: str, *pictures: Image.Image) -> list[dict[str, Any]]:
    """Return a chat with a question after pictures."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def pushes(mllm: MLLM, count: int) -> list[tuple[Steer, ...]]:
    """Return `count` different interventions: each its own direction, layer and strength, small against the states."""
    generator = torch.Generator().manual_seed(0)
    steers: list[tuple[Steer, ...]] = []
    for i in range(count):
        direction = torch.randn(mllm.num_layers, mllm.hidden_size, generator=generator) * 1e-3
        ones = torch.ones(mllm.num_layers)
        vector = SteeringVector(
            f"v{i}", direction, ones, ones.clone(), ones.clone(), (i % mllm.num_layers,), mllm.fingerprint
        )
        steers.append((Steer(vector, 0.5 + 0.1 * i),))
    return steers
