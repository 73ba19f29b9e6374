"""Build a modality-preference vector from paired prompts (modality-preference paper, section 5.1; method.md, section 2).

For every query the model reads the same prompt with the instruction toward the text and with the one toward the image.
v_l = mean over queries of h_l(text)[last] - h_l(vision)[last], for every layer at once, in one pass over the samples.
"""

from __future__ import annotations

import hashlib
import logging
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from tqdm import tqdm

from probes.mc2 import Sample, messages, prompt
from steering import Engine, Request, Sampling
from steering.vectors import SteeringVector

RELIABLE = 0.5
"""Least agreement |mean v| / mean |v| of a direction that is called reliable: 1 where all queries agree, about
1 / sqrt(queries) where they have nothing in common."""

DUST = 1e-5
"""Differences below this share of mean |h| are rounding: there is no direction (a window that ends before the
instruction, say), and a weight would blow the rounding up."""

_BATCH = 256
_log = logging.getLogger(__name__)


class Moments:
    """Running mean and standard deviation of tensors of one shape (Welford); memory does not grow with their number."""

    def __init__(self) -> None:
        self.count = 0
        self._mean: torch.Tensor | None = None
        self._squares: torch.Tensor | None = None

    def add(self, value: torch.Tensor) -> None:
        """Take one more value into account, in float64."""
        value = value.double()
        if self._mean is None or self._squares is None:
            self._mean, self._squares = torch.zeros_like(value), torch.zeros_like(value)
        self.count += 1
        step = value - self._mean
        self._mean = self._mean + step / self.count
        self._squares = self._squares + step * (value - self._mean)

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
    """What a probe measures, per layer.

    v: (layers, d) the mean difference. mean_abs, std: (layers,) mean and standard deviation over queries of the
    per-query mean |v|. state: (layers,) mean |h| over both prompts of all queries. agreement: (layers,) norm of the mean
    difference over the mean norm of the differences. queries: how many pairs.
    """

    v: torch.Tensor
    mean_abs: torch.Tensor
    std: torch.Tensor
    state: torch.Tensor
    agreement: torch.Tensor
    queries: int

    @property
    def weight(self) -> torch.Tensor:
        """w_l = mean|h_l| / mean|v_l|, which gives v the mean magnitude of the states (layers,); 0 where v is none."""
        return torch.where(self.present, self.state / self.mean_abs.clamp_min(1e-30), 0.0)

    @property
    def score(self) -> torch.Tensor:
        """mean / std of |v| (layers,): large and stable is good; 0 where v is none."""
        return torch.where(self.present, self.mean_abs / self.std.clamp_min(1e-12), 0.0)

    @property
    def present(self) -> torch.Tensor:
        """Whether there is any direction at a layer (layers,)."""
        return self.mean_abs > DUST * self.state

    def ranking(self, layers: Sequence[int] | None = None) -> list[int]:
        """Layers, best score first; those whose queries disagree come after all others."""
        score, agreement = self.score.tolist(), self.agreement.tolist()
        candidates = range(len(score)) if layers is None else layers
        return sorted(candidates, key=lambda layer: (agreement[layer] < RELIABLE, -score[layer]))


def measure(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Direction:
    """One pass over (h(text instruction), h(vision instruction)) pairs of last-token states, each (layers, d)."""
    difference, magnitude, norm, state = Moments(), Moments(), Moments(), Moments()
    for toward_text, toward_vision in pairs:
        v = toward_text.double() - toward_vision.double()
        difference.add(v)
        magnitude.add(v.abs().mean(-1))
        norm.add(v.norm(dim=-1))
        state.add((toward_text.double().abs().mean(-1) + toward_vision.double().abs().mean(-1)) / 2)
    length = difference.mean.norm(dim=-1)
    agreement = torch.where(norm.mean > 0, length / norm.mean.clamp_min(1e-30), 0.0)
    return Direction(
        difference.mean.float(), magnitude.mean.float(), magnitude.std.float(), state.mean.float(), agreement.float(),
        difference.count,
    )  # fmt: skip


def build(
    engine: Engine,
    samples: Sequence[Sample],
    *,
    name: str = "modality-preference",
    layers: Sequence[int] | None = None,
    seed: int = 0,
    quiet: bool = False,
) -> SteeringVector:
    """The vector of the engine's model from these samples; its layer is the best ranked one (of `layers`, if given).

    Its weight is the published one; `probes.calibrate` finds the dose that this model bears. A direction on which the
    queries do not agree is logged as such and marked in `info["reliable"]`. Raises ValueError without samples and for
    layers that the model does not have.
    """
    if not samples:
        raise ValueError("A probe needs at least one sample.")
    count = engine.mllm.num_layers
    if layers is not None and (not layers or any(not 0 <= layer < count for layer in layers)):
        raise ValueError(f"'layers' must be layer numbers from 0 to {count - 1}; got {list(layers)}.")
    swaps = random.Random(seed)
    queries = [(sample, swaps.random() < 0.5) for sample in samples]
    digest = hashlib.sha256()
    direction = measure(_states(engine, queries, digest, quiet))
    ranking = direction.ranking(layers)
    best = ranking[0]
    reliable = float(direction.agreement[best]) >= RELIABLE
    if not reliable:
        _log.warning(
            "No reliable direction: at the best layer (%d) the queries' differences agree by %.2f only (at least %.2f "
            "wanted). The model may not follow the two instructions, or the samples are too few.",
            best, float(direction.agreement[best]), RELIABLE,
        )  # fmt: skip
    info: dict[str, Any] = {
        "samples": len(samples),
        "tasks": sorted({sample.task for sample in samples}),
        "seed": seed,
        "data_sha256": digest.hexdigest(),
        "std": "over queries, of the per-query mean |v|",
        "state_mean_abs": _rounded(direction.state),
        "agreement": _rounded(direction.agreement),
        "score": _rounded(direction.score),
        "ranking": ranking,
        "reliable": reliable,
        "versions": _versions(),
    }
    return SteeringVector(
        name=name, direction=direction.v, weight=direction.weight, mean_abs=direction.mean_abs, std=direction.std,
        layers=(best,), fingerprint=engine.mllm.fingerprint, info=info,
    )  # fmt: skip


def _states(
    engine: Engine, queries: Sequence[tuple[Sample, bool]], digest: hashlib._Hash, quiet: bool
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """The pair of last-token states (layers, d) of every query; the digest covers prompts and pictures."""
    with tqdm(total=len(queries), desc="Probing", unit=" pairs", disable=quiet or None, dynamic_ncols=True) as bar:
        for begin in range(0, len(queries), _BATCH):
            requests = []
            for sample, swapped in queries[begin : begin + _BATCH]:
                digest.update(sample.picture().tobytes())
                for setting in ("text", "vision"):
                    digest.update(prompt(sample, setting, swapped).encode())
                    chat = messages(sample, setting, swapped)
                    requests.append(Request(messages=chat, sampling=Sampling(max_tokens=1), states=True))
            states = [result.choices[0].states for result in engine.generate(requests)]
            for toward_text, toward_vision in zip(states[::2], states[1::2], strict=True):
                assert toward_text is not None
                assert toward_vision is not None
                yield toward_text, toward_vision
                bar.update()


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]


def _versions() -> dict[str, str]:
    found = {}
    for package in ("helmsight", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
