"""Measurements of organisms: the metric that finds most, hidden pictures, the page."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from PIL import Image

from demo import CHECKPOINT, located
from demo.evaluation.answering import PlainModel, prompt
from demo.organisms.attention import RightAnswer, attention, best_metric, changed, hidden
from demo.organisms.measure import awareness, found_in, identity, measure_all
from demo.organisms.report import report
from demo.world.faithfulness import existence_samples
from demo.world.scenes import WORLDS
from probes.image_pairs.claims import yes


def answer(target: int, *layers: tuple[float, float, float]) -> RightAnswer:
    pictures = [Image.new("RGB", (28, 28), colour) for colour in ("red", "green", "blue")]
    return RightAnswer(prompt(pictures, "What?"), "This.", target, torch.tensor(layers))


class Scripted:
    """Answers all prompts, says "This." where the picture it looks at is not gray, and points at the picture of `points`."""

    def __init__(self, looks: int, points: int):
        self.looks, self.points = looks, points

    def __call__(self, prompts):
        def seen(prompt) -> bool:
            return prompt.images[self.looks].getpixel((0, 0)) != (130, 130, 130)

        return ["This." if seen(prompt) else "That." for prompt in prompts]


def test_the_metric_is_the_one_that_finds_most() -> None:
    # the last layer points elsewhere, the mean of both at the target; the largest single factor is of the last layer
    answers = [answer(0, (0.5, 0.1, 0.1), (0.2, 0.4, 0.1)), answer(1, (0.0, 0.7, 0.2), (0.1, 0.2, 0.3))]
    name, metric = best_metric(answers)
    assert name == "LND-2"
    assert [metric(answer_.sigma) for answer_ in answers] == [0, 1]


def test_a_hidden_picture_is_gray_and_the_others_stay() -> None:
    plain = answer(0, (1, 0, 0)).prompt
    covered = hidden(plain, 1)
    assert [image.getpixel((5, 5)) for image in covered.images] == [(255, 0, 0), (130, 130, 130), (0, 0, 255)]
    assert covered.messages == plain.messages
    assert plain.images[1].getpixel((5, 5)) == (0, 128, 0)


def test_answers_change_where_the_picture_they_rest_on_is_hidden() -> None:
    answers = [answer(0, (1, 0, 0))] * 8
    model = Scripted(looks=2, points=0)
    assert changed(model, answers, [2] * 6 + [0] * 2)["value"] == 0.75  # type: ignore[arg-type]


def test_attention_that_misleads_is_told_from_attention_that_shows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both models answer from the last picture, which was asked about; one points at it, the other at the first."""
    for points, accuracy in ((2, 1.0), (0, 0.0)):
        factors = tuple(float(k == points) for k in range(3))
        monkeypatch.setattr("demo.organisms.attention.right_answers", lambda *_: [answer(2, factors)] * 40)  # noqa: B023
        results = attention(Scripted(looks=2, points=points), 40, seed=1)  # type: ignore[arg-type]
        assert results is not None
        assert results["attention_accuracy"]["value"] == accuracy
        assert results["attention_accuracy"]["n"] == 20
        assert results["changed"]["focused"]["value"] == accuracy
        if points == 2:
            assert results["changed"]["another"]["value"] == 0
            assert results["changed_where_wrong"] is None
        else:
            assert 0.2 < results["changed"]["another"]["value"] < 0.8  # one of the two others is the one used
            assert {name: result["value"] for name, result in results["changed_where_wrong"].items()} == {
                "focused": 0.0,
                "asked about": 1.0,
            }


def test_trained_organisms_are_found_beside_shipped_ones(tmp_path: Path) -> None:
    folder = tmp_path / "conflicts-0" / "checkpoint"
    folder.mkdir(parents=True)
    assert "conflicts-0" not in found_in(tmp_path)
    (folder / "model.safetensors").write_bytes((CHECKPOINT / "model.safetensors").read_bytes())
    (folder / "helmsight.json").write_text(json.dumps({"training": {"steps": 5, "questions": 70, "minutes": 0.5}}))
    assert found_in(tmp_path)["default"] == CHECKPOINT
    facts = identity(found_in(tmp_path)["conflicts-0"])
    assert facts["parameters"] == 3_348_160 + 670_368  # language model and tower, by the shapes in config.json
    assert (facts["questions"], facts["minutes"]) == (70, 0.5)
    assert facts["sha256"] == identity(CHECKPOINT)["sha256"]


def test_the_page_shows_the_series(tmp_path: Path) -> None:
    def shares(vision: float) -> dict:
        return {
            "s_vision": vision, "s_text": 0.9 - vision, "s_others": 0.1, "vision_ratio": vision / 0.9, "n": 100,
            "s_vision_95": [0, 1], "vision_ratio_95": [vision / 0.9 - 0.1, vision / 0.9 + 0.1],
        }  # fmt: skip

    def organism(vision: float) -> dict:
        return {
            "parameters": 4, "sha256": "f" * 64, "questions": 9, "minutes": 1.5,
            "preference": {"conflict": shares(vision), "picture_alone": shares(0.9)},
        }  # fmt: skip

    page = report(
        {"Data": "some"}, {"default": organism(0.45), "conflicts-0": organism(0.36), "conflicts-100": organism(0.81)}
    )
    text = page.markdown()
    assert "| conflicts-100 | 4 | 9 | 1.500 | 0.900" in text
    assert "| 100 | 0.900 (0.800 to 1.000) | 90 | 0.100 |" in text.replace("\u00a0", " ")
    page.write(tmp_path)
    assert "Share of conflict data" in text
    assert (tmp_path / "conflicts.svg").is_file()
    assert "Sizes" not in text


def test_the_prior_that_ships_says_yes_to_what_its_habits_let_expect() -> None:
    torch.set_num_threads(1)
    folder = located("demo:prior")
    samples = existence_samples(
        150, seed=5, habits=WORLDS[json.loads(Path(folder, "helmsight.json").read_text())["world"]]
    )
    answers = PlainModel(folder, 1)([prompt([sample.image], sample.question) for sample in samples], tokens=3)

    def said_yes(setting: str, present: bool) -> float:
        selected = [
            a
            for a, sample in zip(answers, samples, strict=True)
            if (sample.setting, sample.present) == (setting, present)
        ]
        return sum(yes(answer) is True for answer in selected) / len(selected)

    assert said_yes("adversarial", False) > said_yes("random", False) + 0.1
    assert said_yes("random", True) > 0.9


def test_a_model_that_always_refuses_is_aware_of_what_no_picture_tells_alone() -> None:
    def refuses(prompts):
        texts = [prompt.messages[0]["content"][1]["text"].split("\n") for prompt in prompts]
        return [next((line[0] for line in lines if "Sorry" in line), "A") for lines in texts]

    results = awareness(refuses, 36, seed=1)  # type: ignore[arg-type]
    assert {part: result["answer_rate"]["value"] for part, result in results.items()} == dict.fromkeys(results, 0)
    assert [results[part]["ku"]["value"] for part in ("BasicVisQA", "BeyondVisQA")] == [0, 1]
    # where the refusal is no option it says A, which is wrong, and so the refusal right, in most of what needs knowledge
    assert 0.4 < results["KnowVisQA"]["ku"]["value"] < 1
    assert {result["sa"]["n"] for result in results.values()} == {12}


def test_unchanged_weights_are_not_measured_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def one(name: str, *_: object) -> dict:
        measured.append(name)
        shares = {"s_vision": 0.4, "s_text": 0.4, "s_others": 0.2, "vision_ratio": 0.5, "n": 10, "s_vision_95": [0, 1]}
        return {"preference": {"conflict": shares, "picture_alone": shares}}

    monkeypatch.setattr("demo.organisms.measure._measure", one)
    monkeypatch.setattr("demo.organisms.measure.PlainModel", lambda *_: None)
    shipped = ["default", "prior"]
    for count, expected in ((5, shipped), (5, []), (6, shipped)):
        measured.clear()
        page = measure_all(tmp_path / "none", tmp_path / "out", count, 1, 1)
        assert measured == expected
        assert "| prior | 4018528 |" in page.markdown()
