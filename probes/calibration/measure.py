"""The measurements of a model's calibration.

On ordinary prompts these are thresholds for SAGE's Think, attention sinks and the normal surprise of a clean text context;
thresholds of the flags are measured on questions that it answers rightly and wrongly.
"""

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
    """Measure quantiles of D per layer over all tokens of the samples' plain prompts; raise ValueError without samples."""
    if not samples:
        raise ValueError("A calibration needs at least one sample.")
    requests = (
        request(messages_of(sample, "plain", swapped=False), divergence=True)
        for sample in tracked(samples, len(samples), "Divergence", unit="samples", quiet=quiet)
    )
    values = [result.choices[0].divergence for result in engine.generate(requests)]
    return calibration_of(engine).with_divergence(
        torch.cat([value for value in values if value is not None], 1), len(samples)
    )


def calibrate_sinks(engine: Engine, samples: Sequence[ConflictSample], quiet: bool = False) -> Calibration:
    """Measure the attention to each place of an image on the samples' plain prompts.

    Raises ValueError if no image's tokens form a grid.
    """
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
    return calibration_of(engine).with_sinks(attraction(maps), len(maps))


def calibrate_flags(
    engine: Engine, samples: Sequence[ConflictSample], seed: int = 0, quiet: bool = False
) -> tuple[Calibration, Answered]:
    """Measure the thresholds of the flags, and return them with the answers that chose and tested them.

    Raises ValueError if these are all right or all wrong.
    """
    answers = flags.ask(engine, samples, seed, quiet)
    return replace(calibration_of(engine), flags=flags.calibrate(answers)), answers


def calibrate_surprise(
    engine: Engine, samples: Sequence[ConflictSample], quiet: bool = False, batch: int = 64
) -> Calibration:
    """Measure the bound of surprise on the samples' undegraded contexts, asked in both orders.

    Raises ValueError if no context has two tokens, RequestError if the model cannot read a text without an image.
    """
    values: list[float] = []
    with Tracker("Surprise", {"": len(samples)}, unit="samples", quiet=quiet) as bar:
        for begin in range(0, len(samples), batch):
            part = samples[begin : begin + batch]
            chats = [messages_of(sample, "plain", swapped) for sample in part for swapped in (False, True)]
            values += [value for value, _ in surprises(engine, chats) if value is not None]
            bar.advance(by=len(part))
    if not values:
        raise ValueError("No sample has a text context of two tokens.")
    return calibration_of(engine).with_surprise(torch.tensor(values))


def calibration_of(engine: Engine) -> Calibration:
    """Return the model's earlier calibration, to which a new measurement is added."""
    return engine.mllm.calibration or Calibration(engine.mllm.fingerprint)
