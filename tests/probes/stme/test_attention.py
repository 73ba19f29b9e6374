"""The focused picture by N, curves, quadrants and convergence, against cases worked by hand."""

from __future__ import annotations

import math

import pytest
import torch
from PIL import Image

from probes.answering.base import Reply
from probes.stme.attention import Curves, Look, convergence, halves, quadrants
from probes.stme.samples import ANCHOR, TargetSample

SIGMA = torch.tensor([[0.1, 0.1, 0.7], [0.1, 0.3, 0.2], [0.2, 0.1, 0.1], [0.0, 0.2, 0.1]])
"""Four layers, three pictures; the layers' focused ones are 3, 2, 1, 2. By hand, from the last layer on: LND 2, then a tie
of .2 that the earlier row wins, .3 of picture 2, .7 of picture 3. M-LND .2 of 2; sums .2 .3 .2; .3 .6 .4; .4 .7 1.1. MC-LND
2; one each for 1 and 2 with .2 each; two for 2; two for 2."""


def look(target: int, right: bool = True, sigma: torch.Tensor = SIGMA, n: int = 2) -> Look:
    return Look(sigma, target, right, n)


def test_the_focused_picture_by_the_last_layers() -> None:
    assert look(2).focused == {"lnd": [2, 1, 2, 3], "m_lnd": [2, 2, 2, 3], "mc_lnd": [2, 1, 2, 2]}
    assert look(2).image == 2


def test_curves_and_their_best_point() -> None:
    curves = Curves.of([look(2), look(2), look(3)], 4)
    shares = curves.to_json()["curves"]
    assert shares["lnd"] == pytest.approx([2 / 3, 0, 2 / 3, 1 / 3])
    assert shares["m_lnd"] == pytest.approx([2 / 3, 2 / 3, 2 / 3, 1 / 3])
    assert shares["mc_lnd"] == pytest.approx([2 / 3, 0, 2 / 3, 2 / 3])
    assert curves.best == ("lnd", 1)  # the least N, then the first metric, as in the authors' plots
    assert Curves.of([look(1)], 4).best == ("lnd", 2)
    assert Curves.of([], 4).to_json() == {"n": 0}


def test_halves_measure_where_they_did_not_choose() -> None:
    # The even ones are hit by LND-1 alone, the odd ones by LND-2 alone: chosen on the others, neither hits.
    assert halves([look(2), look(1), look(2), look(1)], 2)["value"] == 0
    assert halves([look(2), look(2), look(2)], 4) == {
        "value": 1,
        "value_95": pytest.approx([0.438, 1], abs=1e-3),
        "n": 3,
    }


def test_quadrants() -> None:
    four = [look(2), look(2), look(1), look(3, right=False), look(2, right=False)]
    counts = {"right_target": 2, "right_other": 1, "wrong_target": 1, "wrong_other": 1}
    assert quadrants(four, "m_lnd", 2) == counts


def test_convergence_is_1_where_all_pictures_get_the_same() -> None:
    even = torch.tensor([[0.2, 0.2], [0.1, 0.3]])
    assert convergence([look(2, sigma=even)]) == pytest.approx([1, 1.5])
    assert convergence([look(2, sigma=even), look(1, sigma=even)]) == pytest.approx([1, 1])
    dark = torch.tensor([[0.0, 0.0], [0.1, 0.3]])  # the window of the first layer holds no picture
    ratios = convergence([look(2, sigma=dark)])
    assert (ratios[0], ratios[1]) == (None, pytest.approx(1.5))
    assert math.isnan(look(2, sigma=dark).share[0])


def test_the_look_of_an_answer_is_read_from_its_readouts() -> None:
    pictures = tuple(Image.new("RGB", (8, 8)) for _ in range(3))
    readouts = {"focus": {"sigma": SIGMA.tolist(), "m_lnd": {"n": 2}}, "anchor": {"sigma": SIGMA[:, 1:].tolist()}}
    plain = TargetSample("1", "TQA", ("",) * 4, pictures, 3, "red")
    seen_look = Look.of(plain, Reply("red", readouts), right=True)
    assert seen_look is not None
    assert torch.equal(seen_look.sigma, SIGMA)
    assert (seen_look.target, seen_look.n, seen_look.text) == (3, 2, None)
    compared = Look.of(TargetSample("1", ANCHOR, ("",) * 4, pictures, 2, "2"), Reply("2", readouts), right=True)
    assert compared is not None
    assert compared.text is not None
    assert torch.equal(compared.sigma, SIGMA[:, 1:])  # the anchor's rows
    assert torch.equal(compared.text, SIGMA[:, :2])  # the text's, the anchor itself left out
    assert Look.of(plain, Reply("red"), right=True) is None
