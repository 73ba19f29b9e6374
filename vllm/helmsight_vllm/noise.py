"""VCD's twin: the same prompt with pictures behind a step of forward diffusion (VCD paper, section 3.2)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

STEPS = 1000
CHANNELS = 3
PIXELS = "pixel_values"


def diffusion(step: int) -> tuple[float, float]:
    """Return the factors of the picture and of standard noise after a step.

    They are the square roots of the cumulative product of 1 - b and of its complement; b rises from 1e-5 to 5e-3 along a
    sigmoid (the authors' schedule).
    """
    b = torch.linspace(-6, 6, STEPS, dtype=torch.float64).sigmoid() * (0.5e-2 - 1e-5) + 1e-5
    kept = float((1 - b)[: step + 1].prod())
    return kept**0.5, (1 - kept) ** 0.5


def noised(pixels: torch.Tensor, step: int, seed: int, frames: int) -> torch.Tensor:
    """Return a picture's pixel values with noise of a seed; the `frames` of a still picture have the same noise."""
    signal, added = diffusion(step)
    shape, still = pixels.shape, pixels.ndim == 2 and frames > 1
    if still:
        shape = torch.Size((len(pixels), CHANNELS, 1, pixels.shape[1] // (CHANNELS * frames)))
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(pixels.dtype)
    if still:
        noise = noise.expand(-1, -1, frames, -1).reshape(pixels.shape)
    return signal * pixels + added * noise


def with_pixels(item: Any, pixels: torch.Tensor) -> Any:
    """Return a picture of vLLM's inputs with other pixel values."""
    return type(item)({**item, PIXELS: dataclasses.replace(item[PIXELS], data=pixels)})


def add_noise(inputs: Any, step: int, seeds: Sequence[int], frames: int) -> None:
    """Add noise to the pictures of vLLM's inputs, whose hashes change, so that no cache takes them for the plain ones.

    Raises ValueError where there are no pixel values or not as many pictures as seeds.
    """
    items = inputs.get("mm_kwargs", {}).get("image", ())
    if len(items) != len(seeds) or not all(item is not None and PIXELS in item for item in items):
        raise ValueError(f"There must be pixel values of {len(seeds)} pictures.")
    if not all(item[PIXELS].data.is_floating_point() for item in items):
        raise ValueError("Pictures must come normalised: start vLLM without --mm-device-do-normalize.")
    # vLLM keeps the items for the next prompt with these pictures, so that they must stay as they are.
    noisy = [
        with_pixels(item, noised(item[PIXELS].data, step, seed, frames))
        for item, seed in zip(items, seeds, strict=True)
    ]
    inputs["mm_kwargs"] = {**inputs["mm_kwargs"], "image": noisy}
    hashes = inputs["mm_hashes"]["image"]
    inputs["mm_hashes"] = {
        **inputs["mm_hashes"],
        "image": [f"{name}-noise-{step}-{seed}" for name, seed in zip(hashes, seeds, strict=True)],
    }
