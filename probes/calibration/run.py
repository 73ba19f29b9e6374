"""One run of `helmsight probe --calibrate-...`: a part of the model's calibration is measured and kept in its folder."""

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
from probes.harness.options import ModelOptions, check_writable
from steering import Engine
from steering.files import write_atomically
from steering.model.calibration import FILE, SURPRISE, Calibration, measured

CalibrationPart = Literal["flags", "sinks", "surprise", "sage"]
_KEPT: dict[CalibrationPart, str] = {"flags": "flags", "sinks": "sinks", "surprise": "surprise", "sage": "divergence"}
"""The part's name in the file."""
_MEASURES: dict[CalibrationPart, Callable[[Engine, Sequence[ConflictSample], bool], Calibration]] = {
    "sinks": calibrate_sinks,
    "surprise": calibrate_surprise,
    "sage": calibrate_think,
}


@dataclass(frozen=True)
class CalibrationOptions:
    """Which part is measured on how many samples; `markdown` is a file for the report of the flags."""

    part: CalibrationPart
    model: ModelOptions
    data: Data
    samples: int
    replace: bool
    markdown: Path | None
    quiet: bool


def check_place(model: str, name: str, *, replaced: bool) -> Path:
    """The folder of a model, where the part of this name can be kept; raises ValueError, FileExistsError or PermissionError
    where it cannot."""
    folder = Path(model)
    if not folder.is_dir():
        raise ValueError(f"--model {model}: the calibration is kept in the model's folder, and this is none")
    if name in measured(folder) and not replaced:
        raise FileExistsError(f"{folder / FILE} has the {name} already; --replace measures it anew")
    check_writable(folder)
    return folder


def run(options: CalibrationOptions) -> None:
    """Measure the part, keep it, and print what was measured."""
    folder = check_place(options.model.path, _KEPT[options.part], replaced=options.replace)  # before there was any work
    if options.part == "flags":
        check_statistics()
    samples = options.data.draw(options.samples, PROBE_SEEDS + options.data.seed)
    engine = options.model.engine(options.quiet)
    if options.part == "flags":
        _flags(options, folder, engine, samples)
        return
    calibration = _MEASURES[options.part](engine, samples, options.quiet)
    print("\n".join(_said(options.part, calibration, calibration.save(folder))))


def _said(part: CalibrationPart, found: Calibration, path: Path) -> list[str]:
    if part == "surprise":
        bound = f"{found.surprise:.2f} nats"
        return [f"{path}: {SURPRISE:.0%} of {found.contexts} contexts surprise by at most {bound}"]
    if part == "sinks":
        return [
            f"{path}: attention to places of {found.images} images, greatest by layer, in average patches",
            *(
                f"layer {layer:>3}  {max(max(row) for row in places):.2f}"
                for layer, places in enumerate(found.sinks or ())
            ),
        ]
    return [
        f"{path}: divergence on {found.tokens} tokens of {found.samples} prompts",
        *(
            f"layer {layer:>3}  0.9 quantile {quantiles[90]:.4f}"
            for layer, quantiles in enumerate(found.divergence or ())
        ),
    ]


def _flags(options: CalibrationOptions, folder: Path, engine: Engine, samples: Sequence[ConflictSample]) -> None:
    calibration, answers = calibrate_flags(engine, samples, options.data.seed, options.quiet)
    assert calibration.flags is not None
    data_from = origin(options.data, samples, PROBE_SEEDS + options.data.seed)
    page = flags_report.report(engine.mllm.name, data_from, answers, calibration.flags)
    path = calibration.save(folder)
    if options.markdown is not None:
        write_atomically(options.markdown, page.markdown().encode())
    print(page.markdown())
    print(f"{path}: thresholds of the flags from {calibration.flags.answers} answers")
