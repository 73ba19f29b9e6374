"""Thresholds for SAGE's Think: how far the updates of attention and FFN diverge on ordinary prompts of a model."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from tqdm import tqdm

from probes.mc2 import Sample
from probes.mc2 import messages as messages_of
from steering import Engine, Request, Sampling
from steering.calibration import Calibration


def calibrate_think(engine: Engine, samples: Sequence[Sample], quiet: bool = False) -> Calibration:
    """Quantiles of D per layer over all tokens of the samples' plain prompts; raises ValueError without samples."""
    if not samples:
        raise ValueError("A calibration needs at least one sample.")
    requests = (
        Request(messages_of(sample, "plain", swapped=False), Sampling(max_tokens=1), divergence=True)
        for sample in tqdm(samples, desc="divergence", disable=quiet or None)
    )
    values = [result.choices[0].divergence for result in engine.generate(requests)]
    return Calibration.of(
        engine.mllm.fingerprint, torch.cat([value for value in values if value is not None], 1), len(samples)
    )
