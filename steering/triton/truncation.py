"""The kernel of a device that truncates distributions, where there is one that agrees with sorting."""

from __future__ import annotations

import functools
import importlib.util
import logging
from collections.abc import Callable

import torch

ThresholdsFunction = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
"""The type of `steering.triton.triton_truncation.thresholds`."""

VOCABULARY = 20_000
"""A vocabulary of several blocks that 16 divides, as it does those of models: for others, Triton compiles once more."""

log = logging.getLogger(__name__)


@functools.cache
def thresholds_kernel(device: torch.device) -> ThresholdsFunction | None:
    """Return the kernel; None without a GPU or Triton, and where it fails or is wrong, of which the log tells."""
    if device.type != "cuda" or importlib.util.find_spec("triton") is None:
        return None
    from steering.triton import triton_truncation  # noqa: PLC0415 -- only torch's builds for GPUs can import it

    try:
        right = is_right(triton_truncation.thresholds, device)
    except Exception as reason:  # triton also needs a C compiler
        log.warning("top_p and top_k sort the vocabulary: %s: %s", type(reason).__name__, reason)
        return None
    if not right:
        log.warning("top_p and top_k sort the vocabulary: the kernel keeps other tokens")
        return None
    return triton_truncation.thresholds


@torch.inference_mode()
def is_right(kernel: ThresholdsFunction, device: torch.device) -> bool:
    """Return True where a kernel keeps the tokens that sorting in float64 keeps, for rows of all limits."""
    scaled = 3 * torch.randn(8, VOCABULARY, generator=torch.Generator().manual_seed(0))
    scaled[6:, 40:] = -torch.inf
    top_k = torch.tensor([0, 40, 0, 0, 300, 9000, 0, 100])[:, None]
    top_p = torch.tensor([1.0, 1.0, 0.9, 1.0, 0.7, 0.2, 0.95, 1.0])[:, None]
    min_p = torch.tensor([0.0, 0.0, 0.0, 0.05, 0.0, 0.5, 0.0, 0.0])[:, None]
    least = kernel(*(tensor.to(device) for tensor in (scaled, top_k, top_p, min_p))).cpu()
    ordered = scaled.double().sort(descending=True).values
    kth = ordered.gather(1, torch.where(top_k > 0, top_k, VOCABULARY).clamp(max=VOCABULARY) - 1)
    probabilities = ordered.masked_fill(ordered < kth, -torch.inf).softmax(-1)
    outside = (probabilities.cumsum(-1) - probabilities >= top_p) & (top_p < 1)
    by_mass = ordered.masked_fill(outside, torch.inf).amin(-1, keepdim=True)
    by_greatest = ordered[:, :1] + min_p.log()
    expected = torch.stack([kth, by_mass, by_greatest]).amax(0)
    return torch.equal(scaled >= least, scaled >= expected)
