"""A run of `helmsight probe --calibrate-...`, which measures a part of a model's calibration and keeps it by the vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from probes.calibration import flags_report
from probes.calibration.measure import calibrate_flags, calibrate_sinks, calibrate_surprise, calibrate_think
from probes.conflicts.options import PROBE_SEEDS, Data
from probes.conflicts.samples import ConflictSample
from probes.conflicts.words import origin
from probes.harness.bootstrap import check_statistics
from probes.harness.options import ModelOptions, check_file, check_writable
from steering import Engine
from steering.files import write_atomically
from steering.model.calibration import SURPRISE, Calibration, measured, place_of

CalibrationPart = Literal["flags", "sinks", "surprise", "sage"]
_KEPT: dict[CalibrationPart, str] = {"flags": "flags", "sinks": "sinks", "surprise": "surprise", "sage": "divergence"}
"""The name of each part in the file."""
_MEASURES: dict[CalibrationPart, Callable[[Engine, Sequence[ConflictSample], bool], Calibration]] = {
    "sinks": calibrate_sinks,
    "surprise": calibrate_surprise,
    "sage": calibrate_think,
}


@dataclass(frozen=True)
class CalibrationOptions:
    """The part to measure, and the number of samples; `markdown` is a file for the report of the flags."""

    part: CalibrationPart
    model: ModelOptions
    data: Data
    samples: int
    replace: bool
    markdown: Path | None
    quiet: bool


def check_place(fingerprint: str, calibrations: Path, name: str, *, replaced: bool) -> None:
    """Raise FileExistsError if this part was already measured for the model with this fingerprint."""
    path = place_of(fingerprint, calibrations)
    if name in measured(path) and not replaced:
        raise FileExistsError(f"{path} already has the {name}; --replace measures it again")


def run(options: CalibrationOptions) -> None:
    """Measure the part, keep it, and print the measurement."""
    folder = options.model.calibrations
    check_writable(folder)  # before any work
    if options.markdown is not None:
        check_file(options.markdown)
    if options.part == "flags":
        check_statistics()
    samples = options.data.draw(options.samples, PROBE_SEEDS + options.data.seed)
    engine = options.model.engine(options.quiet)
    check_place(engine.mllm.fingerprint, folder, _KEPT[options.part], replaced=options.replace)
    if options.part == "flags":
        _flags(options, folder, engine, samples)
        return
    calibration = _MEASURES[options.part](engine, samples, options.quiet)
    kept = calibration.keep(folder)
    print("\n".join(_summary(options.part, calibration, kept, engine.mllm.attention_layers)))
    engine.calibrate(calibration)


def _summary(part: CalibrationPart, calibration: Calibration, path: Path, attending: Sequence[int]) -> list[str]:
    """Return the lines about a measured part; attending: the numbers of the layers of which there are sinks."""
    if part == "surprise":
        bound = f"{calibration.surprise:.2f} nats"
        return [f"{path}: {SURPRISE:.0%} of {calibration.contexts} contexts surprise by at most {bound}"]
    if part == "sinks":
        return [
            f"{path}: attention to places of {calibration.images} images, greatest by layer, in average patches",
            *(
                f"layer {layer:>3}  {max(max(row) for row in places):.2f}"
                for layer, places in zip(attending, calibration.sinks or (), strict=True)
            ),
        ]
    return [
        f"{path}: divergence on {calibration.tokens} tokens of {calibration.samples} prompts",
        *(
            f"layer {layer:>3}  0.9 quantile {quantiles[90]:.4f}"
            for layer, quantiles in enumerate(calibration.divergence or ())
        ),
    ]


def _flags(options: CalibrationOptions, folder: Path, engine: Engine, samples: Sequence[ConflictSample]) -> None:
    calibration, answers = calibrate_flags(engine, samples, options.data.seed, options.quiet)
    assert calibration.flags is not None
    data_from = origin(options.data, samples, PROBE_SEEDS + options.data.seed)
    page = flags_report.report(engine.mllm.name, data_from, answers, calibration.flags)
    path = calibration.keep(folder)
    engine.calibrate(calibration)
    if options.markdown is not None:
        write_atomically(options.markdown, page.markdown().encode())
    print(page.markdown())
    print(f"{path}: thresholds of the flags from {calibration.flags.answers} answers")
