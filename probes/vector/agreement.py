"""Dependence of a direction on the wording of the instructions and on the token whose state is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from probes.answering.progress import tracked
from probes.conflicts.samples import PUBLISHED, SIDES, ConflictSample, Setting, Wording, messages, prompt
from probes.vector.build import Recipe, drawn, reading, state_of
from steering import Engine, Request

POSITIONS = (-1, -2)
"""The positions read: the prompt's last token (the paper) and the one before (the authors' plots)."""


@dataclass(frozen=True)
class Agreement:
    """Cosines between mean differences under other wordings and positions and that of the probe's `own`.

    `cosines`: by (wording, position), one per layer (layers,), all from the same `n` samples; 0 where either difference is
    zero.
    """

    own: tuple[Wording, int]
    cosines: dict[tuple[Wording, int], list[float]]
    n: int

    def to_json(self) -> dict[str, Any]:
        """Return rows by name, such as "v2, -1", without the probe's own."""
        rows = {
            name_of(key): [round(cosine, 4) for cosine in row] for key, row in self.cosines.items() if key != self.own
        }
        return {"own": name_of(self.own), "n": self.n, "cosines": rows}


def name_of(key: tuple[Wording, int]) -> str:
    """Return a report's name for a wording and a position."""
    return f"{key[0]}, {key[1]}"


def agreement(
    engine: Engine, samples: Sequence[ConflictSample], recipe: Recipe, *, seed: int = 0, quiet: bool = False
) -> Agreement:
    """Read every sample under the published wordings at all positions; options are swapped as in a probe with that seed."""
    own = recipe.wording, recipe.position
    words = dict.fromkeys((*PUBLISHED, recipe.wording))
    keys = [(word, place) for place in dict.fromkeys((*POSITIONS, recipe.position)) for word in words]
    queries = drawn(samples, seed)

    def prompts(sample: ConflictSample, swapped: bool) -> dict[tuple[str, int], tuple[Setting, Wording]]:
        """Return the prompts and positions to read of a sample; an instruction that wordings share is read once."""
        return {
            (prompt(sample, setting, swapped, wording), position): (setting, wording)
            for wording, position in keys
            for setting in SIDES
        }

    def requests() -> Iterator[Request]:
        for sample, swapped in queries:
            for (_, position), (setting, wording) in prompts(sample, swapped).items():
                yield reading(messages(sample, setting, swapped, wording=wording), position)

    total = sum(len(prompts(*query)) for query in queries)
    results = iter(tracked(engine.stream(requests()), total, "Wordings", unit="prompts", quiet=quiet))
    sums: dict[tuple[Wording, int], torch.Tensor] = {}
    for sample, swapped in queries:
        read = {key: state_of(next(results)).double() for key in prompts(sample, swapped)}
        for wording, position in keys:
            vision, text = (read[prompt(sample, side, swapped, wording), position] for side in SIDES)
            sums[wording, position] = sums.get((wording, position), torch.zeros(())) + text - vision
    next(results, None)  # ends the stream, and closes its resources
    cosines = {key: torch.cosine_similarity(direction, sums[own], dim=-1).tolist() for key, direction in sums.items()}
    return Agreement(own, cosines, len(samples))
