"""What a model's calibration measured, in `calibration.json` of its folder: thresholds that no other model shares."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from steering.errors import UnsupportedModel
from steering.files import write_atomically

FORMAT = "helmsight.calibration/1"
FILE = "calibration.json"
SHARES = tuple(i / 100 for i in range(101))
"""The shares of tokens whose quantiles are kept."""


@dataclass(frozen=True)
class Calibration:
    """divergence: for each layer the quantiles of D (see `interventions.think`) at `SHARES`, over `tokens` prompt tokens
    of `samples` prompts."""

    fingerprint: str
    divergence: tuple[tuple[float, ...], ...]
    samples: int
    tokens: int

    @classmethod
    def of(cls, fingerprint: str, values: torch.Tensor, samples: int) -> Calibration:
        """values: (layers, tokens), D of every prompt token."""
        quantiles = values.double().quantile(torch.tensor(SHARES, dtype=torch.float64), dim=1).T
        rounded = tuple(tuple(round(value, 6) for value in row) for row in quantiles.tolist())
        return cls(fingerprint, rounded, samples, values.shape[1])

    def thresholds(self, quantile: float) -> torch.Tensor:
        """(layers,) D that a share of `quantile` of the tokens does not exceed, between the kept shares linearly."""
        table = torch.tensor(self.divergence)
        place = quantile * (len(SHARES) - 1)
        below = int(place)
        above = min(below + 1, len(SHARES) - 1)
        return table[:, below] + (place - below) * (table[:, above] - table[:, below])

    def save(self, folder: Path) -> Path:
        """Write the file atomically."""
        return write_atomically(folder / FILE, json.dumps({"format": FORMAT, **asdict(self)}).encode())

    @classmethod
    def load(cls, folder: Path | None, fingerprint: str, layers: int) -> Calibration | None:
        """The calibration in a model's folder, None where there is none; raises UnsupportedModel when it is another
        model's or damaged."""
        path = None if folder is None else folder / FILE
        if path is None or not path.is_file():
            return None
        try:
            content: dict[str, Any] = json.loads(path.read_text())
            if content.pop("format") != FORMAT:
                raise ValueError("unknown format")
            table = tuple(tuple(map(float, row)) for row in content.pop("divergence"))
            loaded = cls(divergence=table, **content)
            if len(table) != layers or any(len(row) != len(SHARES) for row in table):
                raise ValueError(f"must hold {layers} layers of {len(SHARES)} quantiles")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnsupportedModel(f"{path} is no calibration: {error}. Make it anew or remove it.") from error
        if loaded.fingerprint != fingerprint:
            raise UnsupportedModel(f"{path} belongs to another model. Make it anew or remove it.")
        return loaded
