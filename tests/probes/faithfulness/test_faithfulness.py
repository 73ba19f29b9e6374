"""Given answers: what is compared, by hand; what is read, against plain transformers; files that are wrong."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import steering
from demo import CHECKPOINT
from demo.world.forced_answers import forced_answer_samples
from probes.answering.base import Question, Reply
from probes.answering.engine import InProcess
from probes.faithfulness.evaluate import LAYERED, apart, compared, decay_curve, read, separated
from probes.faithfulness.report import report
from probes.faithfulness.samples import ForcedAnswerSample, load
from steering import Engine, Request, Sampling

IMAGE = Image.new("RGB", (84, 84), "red")


@pytest.fixture(scope="module")
def demo_engine() -> Engine:
    return Engine(steering.load(CHECKPOINT, device="cpu"), slots=4)


SAMPLES = [ForcedAnswerSample((IMAGE,), f"What is it, {number}?", "It is red.", "It is blue.") for number in range(6)]


class Scripted:
    """Says what a residual stream and a decay of two layers would be: the unfaithful answer is 0.5 lower in layer 1."""

    identity = "scripted"

    def __init__(self) -> None:
        self.asked: list[Question] = []

    def answers(self, questions: Any) -> Iterator[Reply]:
        for number, question in enumerate(questions):
            self.asked.append(question)
            wrong = 0.5 if "blue" in question.force else 0.0
            layers = {name: [number * 0.125, 1.0 - wrong] for name in LAYERED}
            vision = [0.5, 0.25] if wrong else [0.5, 0.5, 0.5, 0.5]
            by_layer = {span: [[0.5, share] for share in vision] for span in ("vision", "system", "user")}
            decay = {"vision": vision, "system": vision, "user": vision, "slope": -wrong, "by_layer": by_layer}
            maps = {"concentration": {"attention": 0.25, "activation": 0.75 + wrong, "agreement": None}}
            yield Reply(question.force, {"residual": layers, "decay": decay, "flags": maps}, None, [-1.0 - wrong, -1.0])


def test_both_answers_are_given_and_compared_pair_by_pair() -> None:
    scripted = Scripted()
    said = read(scripted, SAMPLES, quiet=True)
    assert [question.force for question in scripted.asked[:3]] == ["It is red.", "It is blue.", "It is red."]
    found = compared(said)
    assert (found["samples"], found["prefers_faithful"]) == (6, 1.0)
    one = found["by_layer"]["kl"]
    assert one["difference"] == pytest.approx([0.125, -0.5])  # the unfaithful answer is asked right behind the other
    assert one["difference_95"][1] == pytest.approx([-0.5, -0.5])
    assert found["scalars"]["logprob"]["unfaithful"]["mean"] == pytest.approx(-1.25)
    assert found["scalars"]["vision_share"]["difference"] == pytest.approx([0.375 - 0.5])
    assert found["shares_by_layer"]["vision"]["faithful"] == pytest.approx([0.5, 0.5])
    assert found["shares_by_layer"]["vision"]["unfaithful"] == pytest.approx([0.5, 0.375])
    assert found["maps"]["activation"]["mean"] == pytest.approx(0.75)
    assert found["maps"]["agreement"]["mean"] is None
    best = separated(said)["kl"]
    assert (best["layer"], best["share"]) in ((0, 1.0), (1, 0.0))


def test_a_curve_goes_as_far_as_half_of_the_answers() -> None:
    def of(*vision: float) -> Reply:
        return Reply("", {"decay": {"vision": vision, "system": vision, "user": vision}})

    curve = decay_curve([of(1.0), of(0.5, 0.25), of(0.0, 0.75, 9.0)])
    assert curve["steps"] == 2
    assert curve["vision"] == [0.5, 0.5]
    assert curve["answers"] == [3, 2]


def test_readouts_of_a_given_answer_are_those_of_the_same_one_generated(demo_engine: Engine) -> None:
    (sample,) = forced_answer_samples(1, seed=0)
    result = demo_engine.generate([Request(sample.chat(), Sampling(max_tokens=20))])[0].choices[0]
    given = ForcedAnswerSample(sample.images, sample.question, result.text, sample.unfaithful)
    said = read(InProcess(demo_engine), [given], quiet=True)["faithful"][0]
    again = demo_engine.generate([Request(sample.chat(), Sampling(max_tokens=20), diagnose=["residual", "decay"])])
    plain = again[0].choices[0].diagnostics
    assert plain is not None
    assert said.text == result.text
    assert said.diagnostics is not None
    for name in LAYERED:
        assert said.diagnostics["residual"][name] == pytest.approx(plain["residual"][name], rel=1e-4, abs=1e-5)
    assert said.diagnostics["decay"]["vision"] == pytest.approx(plain["decay"]["vision"], abs=1e-5)
    found = apart(demo_engine, [sample, sample])
    assert all(value < 1 for value in found["same question"]["mean"])
    assert found["other questions"]["mean"] == pytest.approx([1.0] * demo_engine.mllm.num_layers, abs=1e-4)


def test_the_report_has_every_part(tmp_path: Path) -> None:
    said = read(Scripted(), SAMPLES, quiet=True)
    apart = {"same question": {"mean": [1.0, 0.5], "mean_95": [[1.0, 1.0], [0.4, 0.6]]}}
    about = {"model": "m", "data": "d", "versions": {}}
    page = report(about, {"read": compared(said), "separated": separated(said), "apart": apart})
    text = page.markdown().replace("\u00a0", " ")
    assert "-0.500 (-0.500 to -0.500)" in text
    assert "100.0 %" in text
    page.write(tmp_path, {})
    assert len(list(tmp_path.glob("*.svg"))) == len(LAYERED) + 3


def test_what_is_drawn_differs_in_a_claim() -> None:
    samples = forced_answer_samples(40, seed=1)
    assert {sample.kind for sample in samples} == {"fact", "description"}
    for sample in samples:
        right, wrong = sample.faithful.split(), sample.unfaithful.split()
        differ = sum(a != b for a, b in zip(right, wrong, strict=False)) + abs(len(right) - len(wrong))
        assert 1 <= differ <= 4, (sample.faithful, sample.unfaithful)
    again = forced_answer_samples(40, seed=1)
    assert [one.unfaithful for one in samples] == [one.unfaithful for one in again]


ROW: dict[str, Any] = {"images": "a.png", "question": "What?", "faithful": "Red.", "unfaithful": "Blue."}


def written(folder: Path, rows: Sequence[Any]) -> Path:
    IMAGE.save(folder / "a.png")
    file = folder / "told.jsonl"
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return file


def test_a_file_is_read(tmp_path: Path) -> None:
    one, two = load(written(tmp_path, [ROW, ROW | {"images": ["a.png", "a.png"], "kind": "pair"}]))
    assert (one.images, one.kind) == ((tmp_path / "a.png",), "answers")
    assert (len(two.images), two.kind, two.faithful) == (2, "pair", "Red.")
    assert np.asarray(one.chat()[0]["content"][0]["image"]).shape == (84, 84, 3)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("{", "not JSON"),
        ([], "it is not an object"),
        ({"images": "a.png"}, "it has no 'question'"),
        (ROW | {"faithful": " "}, "'faithful' must be a string"),
        (ROW | {"faithful": ["Red.", "Crimson."]}, "must be strings"),
        (ROW | {"unfaithful": "Red."}, "the two answers are the same"),
        (ROW | {"images": []}, "'images' must be a string, or a list of strings"),
        (ROW | {"images": "b.png"}, "there is no image .*b.png"),
    ],
)
def test_a_wrong_line_is_named(tmp_path: Path, row: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"2: .*{said}"):
        load(written(tmp_path, [ROW, row]))
