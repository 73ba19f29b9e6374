"""Build a modality-preference vector from paired prompts (modality-preference paper, section 5.1; method.md, section 2).

For every query the model reads the same prompt with the instruction toward the text and with the one toward the image.
v_l = mean over queries of h_l(text)[last] - h_l(vision)[last], for every layer at once, in one pass over the samples.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import random
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from tqdm import tqdm

from probes.mc2 import Sample, Setting, messages, prompt
from probes.versions import versions
from steering import Engine, Request, Sampling
from steering.files import write_atomically
from steering.vectors import SteeringVector

RELIABLE = 0.5
"""Least agreement |mean v| / mean |v| of a direction that is called reliable: 1 where all queries agree, about
1 / sqrt(queries) where they have nothing in common."""

DUST = 1e-5
"""Differences below this share of mean |h| are rounding: there is no direction (a window that ends before the
instruction, say), and a weight would blow the rounding up."""

INSTRUCTED: tuple[Setting, Setting] = ("text", "vision")
_KEEP_EVERY = 32
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

    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """What, with the count, it can be restored from."""
        if self._squares is None:
            raise ValueError("No value was added.")
        return self.mean, self._squares

    @classmethod
    def restored(cls, count: int, mean: torch.Tensor, squares: torch.Tensor) -> Moments:
        """What `tensors` gave, taken up again."""
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


class Tally:
    """One pass over pairs of last-token states: their running moments, and a digest of what they were read from."""

    _NAMES = ("difference", "magnitude", "norm", "state")

    def __init__(self) -> None:
        self._moments = {name: Moments() for name in self._NAMES}
        self.digest = ""

    @property
    def count(self) -> int:
        return self._moments["difference"].count

    def add(self, toward_text: torch.Tensor, toward_vision: torch.Tensor, read: bytes = b"") -> None:
        """One query's states (layers, d) under the two instructions, and what the model read."""
        v = toward_text.double() - toward_vision.double()
        magnitude = (toward_text.double().abs().mean(-1) + toward_vision.double().abs().mean(-1)) / 2
        for name, value in zip(self._NAMES, (v, v.abs().mean(-1), v.norm(dim=-1), magnitude), strict=True):
            self._moments[name].add(value)
        self.digest = hashlib.sha256(self.digest.encode() + read).hexdigest()

    def direction(self) -> Direction:
        """What was measured so far."""
        difference, magnitude, norm, state = (self._moments[name] for name in self._NAMES)
        length = difference.mean.norm(dim=-1)
        agreement = torch.where(norm.mean > 0, length / norm.mean.clamp_min(1e-30), 0.0)
        return Direction(
            difference.mean.float(), magnitude.mean.float(), magnitude.std.float(), state.mean.float(),
            agreement.float(), self.count,
        )  # fmt: skip

    def save(self, path: Path, key: str) -> None:
        """Keep the tally, so that a run that is killed goes on from here."""
        tensors = {}
        for name, moments in self._moments.items():
            for part, tensor in zip(("mean", "squares"), moments.tensors(), strict=True):
                tensors[f"{name}.{part}"] = tensor.clone()
        write_atomically(path, save(tensors, {"key": key, "count": str(self.count), "digest": self.digest}))

    @classmethod
    def resumed(cls, path: Path, key: str) -> Tally:
        """The tally that was kept under that key; an empty one where there is none, or it is damaged or another's."""
        tally = cls()
        if not path.exists():
            return tally
        try:
            with safe_open(path, "pt") as file:
                about = file.metadata() or {}
                if about.get("key") != key:
                    _log.warning("%s is of another probe, which this one replaces.", path)
                    return tally
                count = int(about["count"])
                for name in cls._NAMES:
                    parts = (file.get_tensor(f"{name}.{part}") for part in ("mean", "squares"))
                    tally._moments[name] = Moments.restored(count, *parts)
                tally.digest = about["digest"]
        except (SafetensorError, ValueError, KeyError) as error:
            _log.warning("%s is damaged, the probe begins anew: %s", path, error)
            return cls()
        return tally


def measure(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> Direction:
    """One pass over (h(text instruction), h(vision instruction)) pairs of last-token states, each (layers, d)."""
    tally = Tally()
    for pair in pairs:
        tally.add(*pair)
    return tally.direction()


def build(
    engine: Engine,
    samples: Sequence[Sample],
    *,
    name: str = "modality-preference",
    layers: Sequence[int] | None = None,
    seed: int = 0,
    state: Path | None = None,
    quiet: bool = False,
) -> SteeringVector:
    """The vector of the engine's model from these samples; its layer is the best ranked one (of `layers`, if given).

    Its weight is the published one; `probes.calibrate` finds the dose that this model bears. A direction on which the
    queries do not agree is logged as such and marked in `info["reliable"]`. In `state` the measurement is kept while it
    runs. Raises ValueError without samples and for layers that the model does not have.
    """
    return grow(engine, samples, [len(samples)], name=name, layers=layers, seed=seed, state=state, quiet=quiet)[-1]


def grow(
    engine: Engine,
    samples: Sequence[Sample],
    sizes: Sequence[int],
    *,
    name: str = "modality-preference",
    layers: Sequence[int] | None = None,
    seed: int = 0,
    state: Path | None = None,
    quiet: bool = False,
) -> list[SteeringVector]:
    """As `build`, from the first samples of each of these rising sizes, in one pass over the last."""
    if not sizes or sizes[0] < 1:
        raise ValueError("A probe needs at least one sample.")
    if list(sizes) != sorted(set(sizes)) or sizes[-1] > len(samples):
        raise ValueError(f"The sizes must rise, up to the {len(samples)} samples there are; got {list(sizes)}.")
    count = engine.mllm.num_layers
    if layers is not None and (not layers or any(not 0 <= layer < count for layer in layers)):
        raise ValueError(f"'layers' must be layer numbers from 0 to {count - 1}; got {list(layers)}.")
    swaps = random.Random(seed)
    queries = [(sample, swaps.random() < 0.5) for sample in samples]
    key = _key(engine, queries)
    tally = Tally() if state is None else Tally.resumed(state, key)
    if tally.count > sizes[0]:  # the smaller sizes are not in what was kept
        tally = Tally()
    vectors = []
    with tqdm(
        total=sizes[-1], initial=tally.count, desc="Probing", unit=" pairs", disable=quiet or None, dynamic_ncols=True
    ) as bar:
        done = tally.count
        pairs = _states(engine, queries[done : sizes[-1]])
        for size in sizes:
            for toward_text, toward_vision, read in itertools.islice(pairs, size - tally.count):
                tally.add(toward_text, toward_vision, read)
                bar.update()
                if state is not None and (tally.count % _KEEP_EVERY == 0 or tally.count == size):
                    tally.save(state, key)
            vectors.append(_vector(engine, tally, samples[:size], name, layers, seed))
    return vectors


def _key(engine: Engine, queries: Sequence[tuple[Sample, bool]]) -> str:
    """What a kept tally must have been measured on. Pictures are told by their samples, so that none is opened."""
    asked = [(sample.id, prompt(sample, "text", swapped)) for sample, swapped in queries]
    text = json.dumps([engine.mllm.fingerprint, str(engine.mllm.dtype), asked])
    return hashlib.sha256(text.encode()).hexdigest()


def _vector(
    engine: Engine, tally: Tally, samples: Sequence[Sample], name: str, layers: Sequence[int] | None, seed: int
) -> SteeringVector:
    direction = tally.direction()
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
        "data_sha256": tally.digest,
        "std": "over queries, of the per-query mean |v|",
        "state_mean_abs": _rounded(direction.state),
        "agreement": _rounded(direction.agreement),
        "score": _rounded(direction.score),
        "ranking": ranking,
        "reliable": reliable,
        "versions": versions(),
    }
    return SteeringVector(
        name=name, direction=direction.v, weight=direction.weight, mean_abs=direction.mean_abs, std=direction.std,
        layers=(best,), fingerprint=engine.mllm.fingerprint, info=info,
    )  # fmt: skip


def _states(
    engine: Engine, queries: Sequence[tuple[Sample, bool]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor, bytes]]:
    """The pair of last-token states (layers, d) of every query, and the picture and the prompts they were read from."""
    reads: deque[bytes] = deque()

    def requests() -> Iterator[Request]:
        for sample, swapped in queries:
            read = hashlib.sha256(sample.picture().tobytes())
            read.update("".join(prompt(sample, setting, swapped) for setting in INSTRUCTED).encode())
            reads.append(read.digest())
            for setting in INSTRUCTED:
                yield Request(messages(sample, setting, swapped), Sampling(max_tokens=1), states=True)

    states = (result.choices[0].states for result in engine.stream(requests()))
    for toward_text, toward_vision in zip(states, states):  # noqa: B905 -- the same iterator twice
        assert toward_text is not None
        assert toward_vision is not None
        yield toward_text, toward_vision, reads.popleft()


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
