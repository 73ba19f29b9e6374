"""What a model's calibration holds: thresholds for SAGE's Think, attention sinks and how surprising a clean text context may
be, all on ordinary prompts, and thresholds of the flags, on questions that it answers rightly and wrongly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from probes.answering.progress import Tracker, tracked
from probes.answering.requests import request
from probes.calibration import flags
from probes.calibration.flags import Answered
from probes.conflicts.samples import ConflictSample
from probes.conflicts.samples import messages as messages_of
from steering import Diagnose, Engine, surprises
from steering.model.calibration import Calibration
from steering.readouts.maps import attraction


def calibrate_think(engine: Engine, samples: Sequence[ConflictSample], quiet: bool = False) -> Calibration:
    """Quantiles of D per layer over all tokens of the samples' plain prompts; raises ValueError without samples."""
    if not samples:
        raise ValueError("A calibration needs at least one sample.")
    requests = (
        request(messages_of(sample, "plain", swapped=False), divergence=True)
        for sample in tracked(samples, len(samples), "Divergence", unit="samples", quiet=quiet)
    )
    values = [result.choices[0].divergence for result in engine.generate(requests)]
    return known(engine).with_divergence(torch.cat([value for value in values if value is not None], 1), len(samples))


def calibrate_sinks(engine: Engine, samples: Sequence[ConflictSample], quiet: bool = False) -> Calibration:
    """How much attention each place of an image gets on the samples' plain prompts; raises ValueError where no image's
    tokens are a grid."""
    diagnose = Diagnose(frozenset({"patches"}))
    requests = (
        request(messages_of(sample, "plain", swapped=False), diagnose=diagnose)
        for sample in tracked(samples, len(samples), "Sinks", unit="samples", quiet=quiet)
    )
    maps = []
    for result in engine.generate(requests):
        readout = result.choices[0].diagnostics or {}
        for image, patches in zip(readout["images"], readout["patches"], strict=True):
            if image["grid"] is not None:
                maps.append(torch.tensor(patches["rho"]).unflatten(1, tuple(image["grid"])))
    if not maps:
        raise ValueError("No sample holds an image whose tokens are a grid.")
    return known(engine).with_sinks(attraction(maps), len(maps))


def calibrate_flags(
    engine: Engine, samples: Sequence[ConflictSample], seed: int = 0, quiet: bool = False
) -> tuple[Calibration, Answered]:
    """Thresholds of the flags, and the answers that they were chosen and measured on; raises ValueError where these are all
    right or all wrong."""
    answers = flags.ask(engine, samples, seed, quiet)
    return replace(known(engine), flags=flags.calibrate(answers)), answers


def calibrate_surprise(
    engine: Engine, samples: Sequence[ConflictSample], quiet: bool = False, batch: int = 64
) -> Calibration:
    """The bound of surprise, on the samples' contexts as they are, asked in both orders; raises ValueError where none has
    two tokens, RequestError where the model cannot read a text without an image."""
    values: list[float] = []
    with Tracker("Surprise", {"": len(samples)}, unit="samples", quiet=quiet) as bar:
        for begin in range(0, len(samples), batch):
            part = samples[begin : begin + batch]
            chats = [messages_of(sample, "plain", swapped) for sample in part for swapped in (False, True)]
            values += [value for value, _ in surprises(engine, chats) if value is not None]
            bar.advance(by=len(part))
    if not values:
        raise ValueError("No sample has a text context of two tokens.")
    return known(engine).with_surprise(torch.tensor(values))


def known(engine: Engine) -> Calibration:
    """What was measured before, to which a calibration adds."""
    return engine.mllm.calibration or Calibration(engine.mllm.fingerprint)
