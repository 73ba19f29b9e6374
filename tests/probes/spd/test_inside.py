"""Contradicting answers inside the model, beside consistent ones."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

import steering
from probes.answering.base import Question
from probes.harness.comparison import BASELINE
from probes.image_pairs.metrics import Claim
from probes.image_pairs.questions import DIFFERENT
from probes.image_pairs.traces import faithfulness, traces
from probes.reproduce.readings.spd import contradicting
from probes.spd.asking import OWN, Manner, Presentation, talk
from probes.spd.evaluate import answer
from probes.spd.inside import NUMBERS, inside
from probes.spd.samples import PicturePair
from tests.probes.conftest import Scripted, text_of

FORM = Presentation()
PICTURES = [Image.new("RGB", (56, 56), colour) for colour in ("red", "green", "blue")]
PAIRS = [
    PicturePair(str(i), (Claim("remove", "ring"),), picture, picture, difficulty="easy")
    for i, picture in enumerate(PICTURES)
]


def said(question: Question) -> str:
    """Answer yes twice about the first picture and hidden ones, and "different" about the others."""
    colour = question.chat[0]["content"][0]["image"].getpixel((5, 5))
    if text_of(question).startswith(DIFFERENT):
        return "Yes."
    return "Yes." if colour == PICTURES[0].getpixel((5, 5)) else "No."


def test_each_condition_gives_as_many_of_either_kind(tiny: steering.Engine) -> None:
    manners = {BASELINE: Manner(), "hint": OWN["hint"]}
    answered = answer(Scripted(said), manners, PAIRS, FORM, lambda _: [], quiet=True)["single"]
    results = inside(tiny, {BASELINE: answered[BASELINE]})
    chats = [[question.chat for question in next(talk(pair, "single", Manner(), FORM))] for pair in PAIRS]
    pairs = [(chats[0][0], "Yes."), (chats[0][1], "Yes."), (chats[1][0], "No."), (chats[1][1], "Yes.")]
    first, second, third, fourth = traces(tiny, pairs)
    for kind, traces_of_pair in (("contradicting", (first, second)), ("consistent", (third, fourth))):
        assert results[kind]["pairs"] == 1
        assert results[kind]["faithfulness"]["value"] == pytest.approx(faithfulness(*traces_of_pair), abs=1e-5)
    assert {name: result["pairs"] for name, result in inside(tiny, answered).items()} == {
        "contradicting": 2,
        "consistent": 2,
    }


def test_where_nothing_contradicts_there_is_nothing_to_compare(tiny: steering.Engine) -> None:
    answered = answer(Scripted(said), {BASELINE: Manner()}, PAIRS[1:], FORM, lambda _: [], quiet=True)["single"]
    none = {"value": None, "value_95": None}
    expected = {"pairs": 0} | dict.fromkeys(("cosine", "last layer", "divergence", "faithfulness"), none)
    assert inside(tiny, answered) == {"contradicting": expected, "consistent": expected}


@pytest.mark.parametrize(("high", "appears"), [(0.5, True), (0.7, False)])
def test_the_row_by_hand(high: float, appears: bool) -> None:
    def one(value: float, low: float, high: float) -> dict[str, Any]:
        return {"pairs": 4} | {name: {"value": value, "value_95": [low, high]} for name in NUMBERS}

    row = contradicting({"inside": {"contradicting": one(0.4, 0.3, high), "consistent": one(0.8, 0.6, 0.9)}})
    assert (row.appears, row.n) == (appears, 8)
    assert row.ours["contradicting, faithfulness"] == 0.4
