"""Build a modality-preference vector from paired prompts (modality-preference paper, section 5.1; method.md, section 2).

For every query the model reads the same prompt with the instruction toward the text, with the one toward the image, and
without any. v_l = mean over queries of h_l(text)[last] - h_l(vision)[last], for every layer at once, in one pass over the
samples; the weight of a direction is aligned to the plain states.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import random
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import torch

from probes.answering.progress import Tracker
from probes.answering.requests import request
from probes.answering.versions import versions
from probes.conflicts.samples import ConflictSample, Setting, Wording, messages, prompt
from probes.vector.direction import RELIABLE, Size, States, Tally
from steering import Engine, Request, Result, SteeringVector
from steering.vectors.vector import PREFERENCE

READ: tuple[Setting, Setting, Setting] = ("text", "vision", "plain")
"""The settings that are read for every query."""

_KEEP_EVERY = 32
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recipe:
    """The choices by which states become a vector, where the paper leaves them open or its authors' scripts differ.

    wording: the wording of the two instructions. position: the token whose state is read, counted from the prompt's end: -1
    is its last token (section 5.1), -2 the one before, which the authors' pca.py plots.

    The weight (equation 2) is the size of the states divided by that of the direction. `size` is the mean over queries of
    |v(q)| ("queries"); or |mean v| ("mean"), which is smaller where queries disagree and makes the added vector exactly as
    large as the states; or the mean over queries of L2 norms, of the states as well ("l2", the default of an option that the
    authors' script has and does not use). `states` are those of the plain prompts ("plain", the paper's original
    distribution) or of the instructed ones ("instructed").

    Raises ValueError for another choice.
    """

    wording: Wording = "paper"
    position: int = -1
    size: Size = "queries"
    states: States = "plain"

    def __post_init__(self) -> None:
        for name, allowed in (("wording", Wording), ("size", Size), ("states", States)):
            if (value := getattr(self, name)) not in get_args(allowed):
                raise ValueError(f"'{name}' must be one of {', '.join(get_args(allowed))}; got {value!r}.")
        if self.position > -1:
            raise ValueError(f"'position' counts from the prompt's end: use -1, -2 and so on; got {self.position}.")

    @classmethod
    def of(cls, vector: SteeringVector) -> Recipe:
        """Return the recipe of a vector; the default if the vector does not record one."""
        try:
            return cls(**vector.info.get("recipe", {}))
        except TypeError as error:
            raise ValueError(f"Steering vector {vector.name!r} has an unreadable recipe: {error}") from error


def build(
    engine: Engine,
    samples: Sequence[ConflictSample],
    *,
    name: str = "modality-preference",
    layers: Sequence[int] | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    state: Path | None = None,
    quiet: bool = False,
) -> SteeringVector:
    """Build the vector of the engine's model from these samples; its layer is the best ranked one (of `layers`, if given).

    Its weight is the published one, as the recipe reads it; `vector.calibrate` finds the strength that this model tolerates.
    A direction on which the queries do not agree is logged as such and marked in `info["reliable"]`. The measurement is
    saved in `state` while it runs. Raises ValueError without samples and for layers that the model does not have.
    """
    sizes = [len(samples)]
    return grow(engine, samples, sizes, name=name, layers=layers, recipe=recipe, seed=seed, state=state, quiet=quiet)[0]


def grow(
    engine: Engine,
    samples: Sequence[ConflictSample],
    sizes: Sequence[int],
    *,
    name: str = "modality-preference",
    layers: Sequence[int] | None = None,
    recipe: Recipe | None = None,
    seed: int = 0,
    state: Path | None = None,
    quiet: bool = False,
) -> list[SteeringVector]:
    """Build a vector, as `build` does, from the first samples of each of these rising sizes, in one pass over the last."""
    if not sizes or sizes[0] < 1:
        raise ValueError("A probe needs at least one sample.")
    if list(sizes) != sorted(set(sizes)) or sizes[-1] > len(samples):
        raise ValueError(f"The sizes must rise, up to the {len(samples)} samples there are; got {list(sizes)}.")
    check_layers(engine, layers)
    recipe = recipe or Recipe()
    queries = drawn(samples, seed)
    key = _key(engine, queries, recipe)
    tally = Tally() if state is None else Tally.resumed(state, key)
    if tally.count > sizes[0]:  # the saved tally is past the smaller sizes
        tally = Tally()
    vectors = []
    with Tracker("Probing", {"": sizes[-1]}, unit="queries", quiet=quiet) as bar:
        bar.advance(by=tally.count, kept=True)
        done = tally.count
        states = _states(engine, queries[done : sizes[-1]], recipe)
        for size in sizes:
            for query_states in itertools.islice(states, size - tally.count):
                tally.add(*query_states)
                bar.advance()
                if state is not None and (tally.count % _KEEP_EVERY == 0 or tally.count == size):
                    tally.save(state, key)
            vectors.append(_vector(engine, tally, samples[:size], name, layers, recipe, seed))
    return vectors


def check_layers(engine: Engine, layers: Sequence[int] | None) -> None:
    """Raise ValueError for layers that the model does not have, and for none."""
    count = engine.mllm.num_layers
    if layers is not None and (not layers or any(not 0 <= layer < count for layer in layers)):
        raise ValueError(f"'layers' must be layer numbers from 0 to {count - 1}; got {list(layers)}.")


def drawn(samples: Sequence[ConflictSample], seed: int) -> list[tuple[ConflictSample, bool]]:
    """Return the samples as they are asked, with a random choice of whether the options are swapped."""
    swaps = random.Random(seed)
    return [(sample, swaps.random() < 0.5) for sample in samples]


def _key(engine: Engine, queries: Sequence[tuple[ConflictSample, bool]], recipe: Recipe) -> str:
    """Return a key of everything that a saved tally must have been measured on; samples identify their pictures unopened."""
    prompts = [(sample.id, _prompts(sample, swapped, recipe)) for sample, swapped in queries]
    text = json.dumps(
        [engine.mllm.fingerprint, str(engine.mllm.quantization or engine.mllm.dtype), recipe.position, prompts]
    )
    return hashlib.sha256(text.encode()).hexdigest()


def _prompts(sample: ConflictSample, swapped: bool, recipe: Recipe) -> list[str]:
    return [prompt(sample, setting, swapped, recipe.wording) for setting in READ]


def _vector(
    engine: Engine,
    tally: Tally,
    samples: Sequence[ConflictSample],
    name: str,
    layers: Sequence[int] | None,
    recipe: Recipe,
    seed: int,
) -> SteeringVector:
    orders = "".join(str(int(swapped)) for _, swapped in drawn(samples, seed))
    tasks = sorted({sample.task for sample in samples})
    about = {"tasks": tasks, "seed": seed, "orders": orders, "recipe": asdict(recipe)}
    return made_of(engine, tally, name=name, layers=layers, size=recipe.size, states=recipe.states, about=about)


def made_of(
    engine: Engine,
    tally: Tally,
    *,
    name: str,
    layers: Sequence[int] | None,
    size: Size,
    states: States,
    about: Mapping[str, Any],
    kind: str = PREFERENCE,
) -> SteeringVector:
    """Return the vector of a tally, with its published weight in the given reading; `about` is added to its info."""
    direction = tally.direction()
    ranking = direction.ranking(layers)
    best = ranking[0]
    reliable = float(direction.agreement[best]) >= RELIABLE
    if not reliable:
        _log.warning(
            "No reliable direction: at the best layer (%d) the queries' differences agree by %.2f only (at least %.2f "
            "wanted). The model may make no difference between the two sides, or the samples are too few.",
            best, float(direction.agreement[best]), RELIABLE,
        )  # fmt: skip
    info: dict[str, Any] = {
        **about,
        "samples": tally.count,
        "published": 1.0,
        "data_sha256": tally.digest,
        "std": "over queries, of the per-query mean |v|",
        "magnitudes": {
            "states": {"plain": _rounded(direction.plain), "instructed": _rounded(direction.instructed)},
            "direction": {"queries": _rounded(direction.mean_abs), "mean": _rounded(direction.v.abs().mean(-1))},
            "l2": {
                name: _rounded(length)
                for name, length in zip(("direction", "plain", "instructed"), direction.lengths, strict=True)
            },
        },
        "agreement": _rounded(direction.agreement),
        "score": _rounded(direction.score),
        "ranking": ranking,
        "reliable": reliable,
        "versions": versions(),
    }
    return SteeringVector(
        name=name, direction=direction.v, weight=direction.weight(size, states), mean_abs=direction.mean_abs,
        std=direction.std, layers=(best,), fingerprint=engine.mllm.fingerprint, kind=kind, info=info,
    )  # fmt: skip


def _states(
    engine: Engine, queries: Sequence[tuple[ConflictSample, bool]], recipe: Recipe
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, bytes]]:
    """Yield the states (layers, d) of every query in the order of READ, and a digest of the picture and prompts read."""
    reads: deque[bytes] = deque()

    def requests() -> Iterator[Request]:
        for sample, swapped in queries:
            read = hashlib.sha256(sample.picture().tobytes())
            read.update("".join(_prompts(sample, swapped, recipe)).encode())
            reads.append(read.digest())
            for setting in READ:
                chat = messages(sample, setting, swapped, wording=recipe.wording)
                yield reading(chat, recipe.position)

    states = (state_of(result) for result in engine.stream(requests()))
    for toward_text, toward_vision, plain in zip(states, states, states):  # noqa: B905 -- the same iterator three times
        yield toward_text, toward_vision, plain, reads.popleft()


def reading(chat: Sequence[Mapping[str, Any]], position: int) -> Request:
    """Return a request that reads the states at a position of a prompt and generates as little as possible."""
    return request(chat, states=True, state_position=position)


def state_of(result: Result) -> torch.Tensor:
    """Return the states (layers, d) that a `reading` request returned."""
    states = result.choices[0].states
    assert states is not None
    return states


def _rounded(values: torch.Tensor) -> list[float]:
    return [float(f"{value:.6g}") for value in values.tolist()]
