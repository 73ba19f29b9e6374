"""Calibrations: numbers that were measured on a model and hold for no other.

They are kept beside the user's vectors, by the model's fingerprint, and a model may come with some in `calibration.json` of
its folder.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from steering.errors import UnsupportedModel
from steering.files import write_atomically
from steering.model.alarm import Alarm
from steering.model.thresholds import Thresholds

FORMAT = "helmsight.calibration/1"
FILE = "calibration.json"
CALIBRATIONS = "calibrations"
"""The name of the calibrations' folder within that of the vectors."""
FOLDER = f"~/.helmsight/vectors/{CALIBRATIONS}"
"""The user's folder of calibrations, unless another is named."""
SHARES = tuple(i / 100 for i in range(101))
"""The shares of tokens whose quantiles are kept."""
SURPRISE = 0.98
"""The share of clean text contexts that are to be within the bound of surprise."""


@dataclass(frozen=True)
class Calibration:
    """The calibrations of one model; each part is None, or 0, until it is measured.

    divergence: for each layer the quantiles of D (see `interventions.think`) at `SHARES`, over `tokens` prompt tokens of
    `samples` prompts. sinks: (layers, rows, columns) as `diagnostics.sinks.attraction`, over `images`. flags: the thresholds
    of the map flags. alarm: the alarm for answers that may be wrong. surprise: the `SURPRISE` quantile of the surprise of
    clean text contexts (see `surprise`), over `contexts`.
    """

    fingerprint: str
    divergence: tuple[tuple[float, ...], ...] | None = None
    samples: int = 0
    tokens: int = 0
    sinks: tuple[tuple[tuple[float, ...], ...], ...] | None = None
    images: int = 0
    flags: Thresholds | None = None
    alarm: Alarm | None = None
    surprise: float | None = None
    contexts: int = 0

    @cached_property
    def digest(self) -> str | None:
        """A hash of its numbers; None while nothing is measured."""
        if not self.parts:
            return None
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def parts(self) -> tuple[str, ...]:
        """The names of the parts that are measured, as `PARTS` orders them."""
        return tuple(name for name in PARTS if getattr(self, name) is not None)

    def with_divergence(self, values: torch.Tensor, samples: int) -> Calibration:
        """Return the calibration with the quantiles of D.

        values: (layers, tokens), D of every prompt token.
        """
        quantiles = values.double().quantile(torch.tensor(SHARES, dtype=torch.float64), dim=1).T
        rounded = tuple(tuple(round(value, 6) for value in row) for row in quantiles.tolist())
        return replace(self, divergence=rounded, samples=samples, tokens=values.shape[1])

    def with_sinks(self, values: torch.Tensor, images: int) -> Calibration:
        """Return the calibration with attention sinks. values: (layers, rows, columns)."""
        rounded = tuple(tuple(tuple(round(x, 4) for x in row) for row in layer) for layer in values.tolist())
        return replace(self, sinks=rounded, images=images)

    def with_surprise(self, values: torch.Tensor) -> Calibration:
        """Return the calibration with the bound of surprise. values: (contexts,), the surprise of each in nats."""
        return replace(self, surprise=round(float(values.double().quantile(SURPRISE)), 4), contexts=len(values))

    def thresholds(self, quantile: float) -> torch.Tensor | None:
        """Return the D, (layers,), that a share of `quantile` of the tokens does not exceed; None if not measured.

        Values between the kept shares are interpolated linearly.
        """
        if self.divergence is None:
            return None
        table = torch.tensor(self.divergence)
        place = quantile * (len(SHARES) - 1)
        below = int(place)
        above = min(below + 1, len(SHARES) - 1)
        return table[:, below] + (place - below) * (table[:, above] - table[:, below])

    def save(self, folder: Path) -> Path:
        """Write the file of a model's folder atomically."""
        return self._write(folder / FILE)

    def keep(self, calibrations: Path) -> Path:
        """Write the file of this model in a folder of several models' files, which is created if missing."""
        calibrations.mkdir(parents=True, exist_ok=True)
        return self._write(place_of(self.fingerprint, calibrations))

    def _write(self, path: Path) -> Path:
        return write_atomically(path, json.dumps({"format": FORMAT, **asdict(self)}).encode())

    def beside(self, other: Calibration) -> Calibration:
        """Return this calibration with its missing parts taken from another of the same model."""
        lacking = [group for group in _GROUPS if getattr(self, group[0]) is None]
        return replace(self, **{name: getattr(other, name) for group in lacking for name in group})

    @classmethod
    def load(
        cls,
        folder: Path | None,
        fingerprint: str,
        layers: int,
        calibrations: Path | None = None,
        attending: int | None = None,
    ) -> Calibration | None:
        """Return the calibrations of a model; None where there are none, or the fingerprint "" is not known.

        The user's, in `calibrations`, come before those in the model's own folder. attending: how many of its `layers` have
        softmax attention, None for all. Raises UnsupportedModel when a file is another model's or damaged.
        """
        if not fingerprint:
            return None
        counts = layers, layers if attending is None else attending
        loaded = [
            _read(path, fingerprint, *counts) for path in places(folder, fingerprint, calibrations) if path.is_file()
        ]
        return None if not loaded else loaded[0].beside(loaded[-1])


_GROUPS = (("divergence", "samples", "tokens"), ("sinks", "images"), ("flags",), ("alarm",), ("surprise", "contexts"))
"""Fields that are measured together, each group headed by the one that is None until then."""
PARTS = tuple(group[0] for group in _GROUPS)
"""The parts that are measured one by one."""


def places(folder: Path | None, fingerprint: str, calibrations: Path | None) -> list[Path]:
    """Return the files of a model's calibrations, the user's first; they need not exist."""
    paths = [] if calibrations is None else [place_of(fingerprint, calibrations)]
    return paths if folder is None else [*paths, folder / FILE]


def place_of(fingerprint: str, calibrations: Path) -> Path:
    """Return the file of a model among those of several."""
    return calibrations / f"{fingerprint}.json"


def _read(path: Path, fingerprint: str, layers: int, attending: int) -> Calibration:
    try:
        content: dict[str, Any] = json.loads(path.read_text())
        if not isinstance(content, dict):
            raise ValueError("it holds no object")
        if content.pop("format") != FORMAT:
            raise ValueError("unknown format")
        table, sinks = content.pop("divergence"), content.pop("sinks", None)
        if table is not None:
            table = tuple(tuple(map(float, row)) for row in table)
            if len(table) != layers or any(len(row) != len(SHARES) for row in table):
                raise ValueError(f"must hold {layers} layers of {len(SHARES)} quantiles")
        if sinks is not None:
            sinks = tuple(tuple(tuple(map(float, row)) for row in layer) for layer in sinks)
            if len(sinks) != attending or len({(len(layer), len(layer[0])) for layer in sinks}) != 1:
                raise ValueError(f"must hold the sinks of {attending} layers")
        flags, alarm, surprise = content.pop("flags", None), content.pop("alarm", None), content.get("surprise")
        if surprise is not None and not (isinstance(surprise, float) and math.isfinite(surprise)):
            raise ValueError("must hold a bound of surprise that is a number")
        loaded = Calibration(
            flags=None if flags is None else Thresholds.of(flags),
            alarm=None if alarm is None else Alarm.of(alarm),
            divergence=table,
            sinks=sinks,
            **content,
        )
    except (OSError, ValueError, TypeError, KeyError, AttributeError, IndexError) as error:
        raise UnsupportedModel(f"{path} is not a valid calibration: {error}. Create it again or remove it.") from error
    if loaded.fingerprint != fingerprint:
        raise UnsupportedModel(f"{path} belongs to another model. Create it again or remove it.")
    return loaded


def measured(path: Path) -> set[str]:
    """Return the parts ("divergence", "sinks", ...) that a calibration's file holds, without loading a model.

    Empty where there is no file, or it is damaged; `Calibration.load` reports details.
    """
    try:
        content = json.loads(path.read_text())
        return {part for part, value in content.items() if value is not None}
    except (OSError, ValueError, AttributeError):
        return set()
