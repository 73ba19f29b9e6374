"""A steering vector from pairs of prompts, learned for every layer from the states at the last token.

By default it is the mean difference, measured as in a probe (modality-preference paper, section 5.1) without the third,
plain prompt; `learners` has the others.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from probes.answering.engine import with_picture
from probes.answering.progress import Tracker
from probes.pairs.file import KeptStates, PromptPair
from probes.pairs.learners import Learner, PairStates, learned
from probes.vector import verdict
from probes.vector.build import check_layers, made_of, reading, state_of
from probes.vector.direction import Tally
from steering import Engine, SteeringVector

KIND = "pairs"
"""The kind of these vectors, which is no modality preference: a signed scale steers, and the wire names no side."""

LEAST_PICTURES = 4
"""The least number of different pictures, if any are shown: a picture that all pairs share is no part of a contrast."""

_KEEP_EVERY = 32


def build(
    engine: Engine,
    pairs: Sequence[PromptPair],
    *,
    name: str,
    sides: tuple[str, str],
    layers: Sequence[int] | None = None,
    learner: Learner = "mean",
    seed: int = 0,
    state: Path | None = None,
    quiet: bool = False,
) -> SteeringVector:
    """Build the vector whose plus leads to the first of the sides, at the best ranked layer (of `layers`, if given).

    Its weight is the published one, of the states of both sides. The measurement of a mean difference is saved in `state`
    while it runs; other learners need all states at once, which stay in memory. `seed` is that of their draws. Raises
    ValueError for layers that the model does not have, and for states of another model's shape.
    """
    check_layers(engine, layers)
    inputs = json.dumps(
        [engine.mllm.fingerprint, str(engine.mllm.quantization or engine.mllm.dtype), *(pair.digest for pair in pairs)]
    )
    key = hashlib.sha256(inputs.encode()).hexdigest()
    if learner != "mean":
        state = None
    pair_states: list[tuple[torch.Tensor, torch.Tensor]] = []
    tally = Tally() if state is None else Tally.resumed(state, key)
    with Tracker("Reading the pairs", {"": len(pairs)}, unit="pairs", quiet=quiet) as progress:
        progress.advance(by=tally.count, kept=True)
        unread = pairs[tally.count :]
        states = _states(engine, unread)
        for pair, toward, away in zip(unread, states, states, strict=True):
            both = (toward.double().abs() + away.double().abs()) / 2
            tally.add(toward, away, both, pair.digest.encode())
            if learner != "mean":
                pair_states.append((toward, away))
            progress.advance()
            if state is not None and (tally.count % _KEEP_EVERY == 0 or tally.count == len(pairs)):
                tally.save(state, key)
    about = {"sides": list(sides), "recipe": {"position": -1, "size": "queries", "states": "instructed"}}
    vector = made_of(
        engine, tally, name=name, layers=layers, size="queries", states="instructed", about=about, kind=KIND
    )
    if learner == "mean":
        return vector
    of_pairs = PairStates(*(torch.stack(side).double().numpy() for side in zip(*pair_states, strict=True)))
    return learned(vector, learner, of_pairs, layers, seed)


def too_few(pairs: Sequence[PromptPair], held_back: int = 0) -> list[str]:
    """Return the reasons why these different pairs are too few for a reliable vector, one sentence each.

    held_back: the number of further pairs that were reserved for its calibration.
    """
    reasons = verdict.too_few(len(pairs), "different pairs", held_back)
    pictures = {picture for pair in pairs for prompt in (pair.toward, pair.away) for picture in prompt.pictures}
    if 0 < len(pictures) < LEAST_PICTURES:
        shown = "one image" if len(pictures) == 1 else f"{len(pictures)} images"
        reasons.append(f"All pairs show {shown}; at least {LEAST_PICTURES} different images are needed.")
    return reasons


def _states(engine: Engine, pairs: Sequence[PromptPair]) -> Iterator[torch.Tensor]:
    """Yield the states (layers, d) of either side of each pair, from its file or read by the engine."""
    sides = [side for pair in pairs for side in (pair.toward, pair.away)]
    requests = (
        reading(with_picture(engine.mllm, side.chat()), -1) for side in sides if not isinstance(side, KeptStates)
    )
    answers = engine.stream(requests)
    shape = engine.mllm.num_layers, engine.mllm.hidden_size
    for side in sides:
        states = side.read() if isinstance(side, KeptStates) else state_of(next(answers))
        if tuple(states.shape) != shape:
            raise ValueError(
                f"{getattr(side, 'file', 'a prompt')} has states of {tuple(states.shape)}, the model of {shape}."
            )
        yield states
