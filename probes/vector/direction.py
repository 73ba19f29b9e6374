"""The measurements of a probe in one pass over the states of queries, resumable after an interruption."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from steering.files import write_atomically

RELIABLE = 0.5
"""The least agreement |mean v| / mean |v| of a reliable direction.

It is 1 if all queries agree, and about 1 / sqrt(queries) if they have nothing in common.
"""

LEAST = 16
"""The least number of different queries, or pairs, of a vector.

Differences that have nothing in common agree by 1 / sqrt(queries): by 0.25 here, half of `RELIABLE`; four would reach that
by chance.
"""

DUST = 1e-5
"""The share of mean |h| below which differences are rounding errors.

There is no direction then (a window that ends before the instruction, say), and a weight would amplify the rounding.
"""

SMALL = 0.1
"""The least size of a layer's differences, relative to its states and to the largest layer, for a rank by score.

Tiny differences that are the same for all queries have the best scores, and steer nothing.
"""

Size = Literal["queries", "mean", "l2"]
States = Literal["plain", "instructed"]
_log = logging.getLogger(__name__)


class Moments:
    """The running mean and standard deviation of tensors of one shape (Welford); memory does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: torch.Tensor | None = None
        self._squares: torch.Tensor | None = None

    def add(self, value: torch.Tensor) -> None:
        """Add one value, in float64."""
        value = value.double()
        if self._mean is None or self._squares is None:
            self._mean, self._squares = torch.zeros_like(value), torch.zeros_like(value)
        self.count += 1
        step = value - self._mean
        self._mean = self._mean + step / self.count
        self._squares = self._squares + step * (value - self._mean)

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the tensors from which, with the count, the moments can be restored."""
        if self._squares is None:
            raise ValueError("No value was added.")
        return self.mean, self._squares

    @classmethod
    def restored(cls, count: int, mean: torch.Tensor, squares: torch.Tensor) -> Moments:
        """Restore the moments from what `tensors` returned."""
        moments = cls()
        moments.count, moments._mean, moments._squares = count, mean, squares
        return moments

    @property
    def mean(self) -> torch.Tensor:
        if self._mean is None:
            raise ValueError("No value was added.")
        return self._mean

    @property
    def std(self) -> torch.Tensor:
        """The population standard deviation (divided by the number of values)."""
        if self._squares is None:
            raise ValueError("No value was added.")
        return (self._squares / self.count).sqrt()


@dataclass(frozen=True)
class Direction:
    """The measurements of a probe, per layer.

    v: (layers, d) the mean difference. mean_abs, std: (layers,) mean and standard deviation over queries of the per-query
    mean |v|. plain, instructed: (layers,) mean |h| over the plain prompts, and over both instructed ones, of all queries.
    agreement: (layers,) norm of the mean difference divided by the mean norm of the differences. queries: their number.
    lengths: (3, layers) the mean L2 norms of v, of the plain states and of the instructed ones.
    """

    v: torch.Tensor
    mean_abs: torch.Tensor
    std: torch.Tensor
    plain: torch.Tensor
    instructed: torch.Tensor
    agreement: torch.Tensor
    queries: int
    lengths: torch.Tensor

    def weight(self, size: Size = "queries", states: States = "plain") -> torch.Tensor:
        """Return w_l = mean|h_l| / mean|v_l| (layers,) in one of its readings (see `Recipe`); 0 where v is zero."""
        if size == "l2":
            of, plain, instructed = self.lengths
        else:
            of, plain, instructed = self.mean_abs, self.plain, self.instructed
        if size == "mean":
            of = self.v.abs().mean(-1)
        state = plain if states == "plain" else instructed
        return torch.where(of > DUST * instructed, state / of.clamp_min(1e-30), 0.0)

    @property
    def score(self) -> torch.Tensor:
        """The ratio mean / std of |v| (layers,): large and stable is good.

        It is 0 where v is zero, and for a single query, which has no deviation.
        """
        return torch.where(self.present & (self.queries > 1), self.mean_abs / self.std.clamp_min(1e-12), 0.0)

    @property
    def present(self) -> torch.Tensor:
        """True for each layer that has any direction (layers,)."""
        return self.mean_abs > DUST * self.instructed

    @property
    def small(self) -> torch.Tensor:
        """True for each layer with negligible differences compared with other layers (layers,): see `SMALL`."""
        relative = self.mean_abs / self.instructed.clamp_min(1e-30)
        return relative < SMALL * relative.max()

    def ranking(self, layers: Sequence[int] | None = None) -> list[int]:
        """Return layers in order of score, with ties in order of size.

        Small layers come after all others, and layers whose queries disagree come last.
        """
        score, size, agreement = self.score.tolist(), self.mean_abs.tolist(), self.agreement.tolist()
        small = self.small.tolist()
        candidates = range(len(score)) if layers is None else layers
        return sorted(
            candidates, key=lambda layer: (agreement[layer] < RELIABLE, small[layer], -score[layer], -size[layer])
        )


class Tally:
    """A pass over the states of queries: their running moments, and a digest of their inputs."""

    _NAMES = ("difference", "magnitude", "norm", "plain", "instructed", "plain_norm", "instructed_norm")

    def __init__(self) -> None:
        self._moments = {name: Moments() for name in self._NAMES}
        self.digest = ""

    @property
    def count(self) -> int:
        return self._moments["difference"].count

    def add(
        self, toward_text: torch.Tensor, toward_vision: torch.Tensor, plain: torch.Tensor, read: bytes = b""
    ) -> None:
        """Add a query's states (layers, d) under the two instructions and under none, and a digest of the model's input."""
        v = toward_text.double() - toward_vision.double()
        read_states = [state.double() for state in (toward_text, toward_vision, plain)]
        text, vision, without = (state.abs().mean(-1) for state in read_states)
        lengths = [state.norm(dim=-1) for state in read_states]
        norms = lengths[2], (lengths[0] + lengths[1]) / 2
        values = (v, v.abs().mean(-1), v.norm(dim=-1), without, (text + vision) / 2, *norms)
        for name, value in zip(self._NAMES, values, strict=True):
            self._moments[name].add(value)
        self.digest = hashlib.sha256(self.digest.encode() + read).hexdigest()

    def direction(self) -> Direction:
        """Return the measurements so far."""
        difference, magnitude, norm, plain, instructed, *lengths = (self._moments[name] for name in self._NAMES)
        length = difference.mean.norm(dim=-1)
        agreement = torch.where(norm.mean > 0, length / norm.mean.clamp_min(1e-30), 0.0)
        return Direction(
            difference.mean.float(), magnitude.mean.float(), magnitude.std.float(), plain.mean.float(),
            instructed.mean.float(), agreement.float(), self.count,
            torch.stack([moment.mean.float() for moment in (norm, *lengths)]),
        )  # fmt: skip

    def save(self, path: Path, key: str) -> None:
        """Save the tally, so that a run that is killed continues from here."""
        tensors = {}
        for name, moments in self._moments.items():
            for part, tensor in zip(("mean", "squares"), moments.tensors(), strict=True):
                tensors[f"{name}.{part}"] = tensor.clone()
        write_atomically(path, save(tensors, {"key": key, "count": str(self.count), "digest": self.digest}))

    @classmethod
    def resumed(cls, path: Path, key: str) -> Tally:
        """Return the tally saved under that key; an empty one if there is none, or it is damaged or another probe's."""
        tally = cls()
        if not path.exists():
            return tally
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about.get("key") != key:
                    _log.warning("%s belongs to another probe and is replaced.", path)
                    return tally
                count = int(about["count"])
                for name in cls._NAMES:
                    parts = (file.get_tensor(f"{name}.{part}") for part in ("mean", "squares"))
                    tally._moments[name] = Moments.restored(count, *parts)
                tally.digest = about["digest"]
        except (SafetensorError, ValueError, KeyError) as error:
            _log.warning("%s is damaged; the probe starts over: %s", path, error)
            return cls()
        return tally
