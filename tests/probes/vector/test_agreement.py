"""Cosines of directions across wordings and positions, against plain transformers and by hand."""

from __future__ import annotations

import functools
import random
from collections.abc import Iterable, Iterator
from pathlib import Path

import pytest
import torch

import steering
from probes.conflicts import samples as mc2
from probes.vector.agreement import agreement
from probes.vector.build import Recipe
from tests import families
from tests.probes.conftest import make_samples
from tests.probes.vector.test_build import plainly


@pytest.mark.parametrize("recipe", [Recipe(), Recipe("v1", -2), Recipe("v2", -4)])
def test_cosines_are_those_of_plain_transformers_states(root: Path, tiny: steering.Engine, recipe: Recipe) -> None:
    folder, samples = families.checkpoint("qwen2_vl", root), make_samples(3)
    found = agreement(tiny, samples, recipe, seed=5, quiet=True)
    rng = random.Random(5)
    orders = [rng.random() < 0.5 for _ in samples]

    @functools.cache
    def direction(wording: mc2.Wording, position: int) -> torch.Tensor:
        text, vision = (plainly(folder).states(orders, side, wording, position) for side in mc2.SIDES[::-1])
        return (text - vision).double().mean(0)

    own = direction(recipe.wording, recipe.position)
    wordings: tuple[mc2.Wording, ...] = ("paper", "v2", "v1")
    wanted = {(wording, position) for wording in wordings for position in {-1, -2, recipe.position}}
    assert set(found.cosines) == wanted
    assert found.own == (recipe.wording, recipe.position)
    assert found.n == 3
    for wording, position in wanted:
        other = direction(wording, position)
        expected = [float(a @ b / (a.norm() * b.norm())) for a, b in zip(own, other, strict=True)]
        assert found.cosines[wording, position] == pytest.approx(expected, abs=1e-4), (wording, position)
    assert found.cosines[found.own] == pytest.approx([1.0] * 3)
    # the vectors do differ, or agreement would say little
    assert min(found.cosines["v1" if recipe.wording != "v1" else "v2", -1]) < 0.999


def test_an_instruction_that_wordings_share_is_read_once(tiny: steering.Engine) -> None:
    taken: list[steering.Request] = []

    class Watched:
        def stream(self, requests: Iterable[steering.Request]) -> Iterator[steering.Result]:
            def counted() -> Iterator[steering.Request]:
                for request in requests:
                    taken.append(request)
                    yield request

            return tiny.stream(counted())

    found = agreement(Watched(), make_samples(2), Recipe(), quiet=True)  # type: ignore[arg-type]
    assert len(taken) == 2 * 2 * (1 + 3)  # samples, positions, prompts
    assert found.to_json()["own"] == "paper, -1"
    assert set(found.to_json()["cosines"]) == {"v2, -1", "v1, -1", "paper, -2", "v2, -2", "v1, -2"}
