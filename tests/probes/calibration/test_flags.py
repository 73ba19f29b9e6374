"""Thresholds from answers whose maps are known, so that every rate can be counted."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from probes.calibration.flags import FLAGS, NUMBERS, RATE, SEVERITIES, Answered, ask, calibrate, choose, halves
from probes.calibration.flags_report import report
from probes.calibration.measure import calibrate_flags
from probes.harness.bootstrap import area
from server import cli
from steering import Engine, Request
from steering.model.calibration import Calibration
from steering.model.thresholds import Thresholds
from tests.probes.conftest import make_samples

pytestmark = pytest.mark.usefixtures("few_resamples", "undrawn")


def answers(right: Sequence[bool], **values: Sequence[float]) -> Answered:
    count = len(right)
    known = {name: np.asarray(values.get(name, np.linspace(0, 1, count)), float) for name in NUMBERS}
    return Answered(np.asarray(right, bool), np.array(["color"] * count), np.zeros(count), known)


def drawn(count: int, gap: float, seed: int = 0) -> Answered:
    """Half of them wrong, whose maps agree less by `gap` standard deviations."""
    rng = np.random.default_rng(seed)
    right = rng.random(count) < 0.5
    agreement = rng.normal(size=count) - gap * ~right
    found = answers(right, attention=rng.random(count), activation=rng.random(count), agreement=agreement)
    return replace(found, task=rng.choice(["color", "shape"], count), severity=rng.choice(SEVERITIES, count))


def test_neither_flag_is_raised_on_more_right_answers_than_allowed_and_nearly_on_as_many() -> None:
    found = drawn(2000, gap=0)
    raised = found.raised(Thresholds(*choose(found), answers=0, raised={}))
    for flag in FLAGS:
        assert RATE - 0.01 <= raised[flag][found.right].mean() <= RATE


def test_blindness_takes_the_same_quantile_of_both_maps() -> None:
    found = drawn(2000, gap=0)
    attention, activation, _ = choose(found)
    shares = [(found.values[name][found.right] < least).mean() for name, least in
              (("attention", attention), ("activation", activation))]  # fmt: skip
    assert shares[0] == pytest.approx(shares[1], abs=0.01)
    assert shares[0] == pytest.approx(RATE**0.5, abs=0.03)  # independent maps: both are so low in the square of that


def test_wrong_answers_do_not_move_the_thresholds() -> None:
    found = drawn(1000, gap=0)
    other = {name: np.where(found.right, values, -9.0) for name, values in found.values.items()}
    assert choose(found) == choose(replace(found, values=other))


def test_rates_are_of_the_half_that_chose_nothing() -> None:
    found = drawn(4000, gap=2)
    thresholds = calibrate(found)
    first, held_out = halves(found)
    assert thresholds.answers == len(first.right) == len(held_out.right) == 2000
    assert not {*first.values["agreement"]} & {*held_out.values["agreement"]}
    assert thresholds == replace(calibrate(found), raised=thresholds.raised)
    apart = [
        held_out.values["attention"] >= thresholds.attention, held_out.values["agreement"] < thresholds.agreement,
    ]  # fmt: skip
    wrong, low, high = thresholds.raised["dissociation"]["wrong"]
    assert wrong == pytest.approx((apart[0] & apart[1])[~held_out.right].mean(), abs=1e-4)
    assert low < wrong < high
    assert thresholds.raised["dissociation"]["right"][0] == pytest.approx(RATE, abs=0.02)


def test_a_flag_that_tells_nothing_says_so() -> None:
    telling, silent = drawn(3000, gap=2), drawn(3000, gap=0, seed=2)
    kept = calibrate(telling)
    assert (kept.raised["dissociation"]["separates"], kept.raised["perceptual_blindness"]["separates"]) == (True, False)
    page = report("a model", "some questions", telling, kept).markdown()
    assert "perceptual_blindness does NOT tell wrong answers from right ones" in page
    assert "dissociation does NOT" not in page
    assert calibrate(silent).raised["dissociation"]["separates"] is False


def test_a_flag_that_only_tells_hard_questions_from_easy_ones_tells_nothing_about_an_answer() -> None:
    rng = np.random.default_rng(0)
    found, hard = drawn(4000, gap=0), rng.random(4000) < 0.3
    found = replace(
        found, right=rng.random(4000) < np.where(hard, 0.3, 0.9), task=np.where(hard, "counting", "color"),
        values=dict(found.values) | {"agreement": rng.normal(size=4000) - 2 * hard},
    )  # fmt: skip
    rates = calibrate(found).raised["dissociation"]
    assert rates["wrong"][1] > rates["right"][2]  # raised on more of the wrong answers, beyond doubt
    assert rates["area"][1] < 0.5 < rates["area"][2]
    assert rates["separates"] is False


def test_the_report_tells_each_number_alone_within_tasks_and_severities() -> None:
    page = report("a model", "some questions", drawn(2000, gap=2), calibrate(drawn(2000, gap=2))).markdown()
    line = next(line for line in page.splitlines() if line.startswith("| agreement |"))
    for cell in line.split("|")[2:4]:  # Phi(2 / sqrt(2)) = .921
        assert float(cell.split()[0]) == pytest.approx(0.921, abs=0.03)
    silent = next(line for line in page.splitlines() if line.startswith("| attention |"))
    assert float(silent.split("|")[2].split()[0]) == pytest.approx(0.5, abs=0.05)


def test_the_area_by_hand() -> None:
    values, wanted = np.array([3.0, 1, 2, 2]), np.array([True, True, False, False])
    assert area(values, wanted) == 0.5  # 3 beats both, 1 neither
    assert area(np.array([2.0, 2, 2, 1]), wanted) == 0.75  # equal ones count half
    assert area(values, wanted, np.array(["a", "b", "a", "b"])) == 0.5
    assert area(values, wanted, np.array(["a", "b", "a", "a"])) == 1  # 3 against both; 1 has nobody to compare with
    assert np.isnan(area(values, np.ones(4, bool)))


@dataclass
class Scripted:
    """Answers the samples in order; what it is asked is kept."""

    texts: list[str]
    asked: list[Request]

    def generate(self, requests: Iterable[Request]) -> list[Any]:
        self.asked = list(requests)
        numbers = dict.fromkeys(NUMBERS, 0.5)
        results = []
        for text in self.texts:
            found = {"concentration": numbers | ({"agreement": None} if "flat" in text else {})}
            results.append(SimpleNamespace(choices=[SimpleNamespace(text=text, diagnostics={"flags": found})]))
        return results


def test_questions_are_open_with_pictures_of_every_severity_and_judged_by_their_options() -> None:
    said = ["It is red.", "It is blue.", "A green one.", "Red, not blue.", "red", "It is red, flat."]
    engine = Scripted(said, [])
    found = ask(cast("Engine", engine), make_samples(6))
    assert found.right.tolist() == [True, False, False, False, True]  # a flat map tells nothing
    assert found.task.tolist() == ["color", "shape", "color", "shape", "color"]
    parts = [request.messages[0]["content"] for request in engine.asked]
    assert {text["text"] for _, text in parts} == {"What color is the ball?"}
    assert set(found.severity) <= set(SEVERITIES)
    for (image, _), severity in zip(parts, found.severity, strict=False):  # clean pictures have one colour
        assert (len(image["image"].getcolors(64 * 64)) == 1) == (severity == 0)


def test_answers_that_are_all_right_are_refused() -> None:
    with pytest.raises(ValueError, match="Of 2 answers 2 are right"):
        ask(cast("Engine", Scripted(["red", "red"], [])), make_samples(2))


def test_a_calibration_keeps_what_was_known_before() -> None:
    known = Calibration("f", samples=7)
    engine = Scripted(["red", "blue"] * 20, [])
    engine.mllm = SimpleNamespace(calibration=known, fingerprint="f")  # type: ignore[attr-defined]
    made, found = calibrate_flags(cast("Engine", engine), make_samples(40))
    assert replace(made, flags=None) == known
    assert made.flags == calibrate(found)


def test_the_command_refuses_a_report_of_what_it_does_not_measure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["probe", "--markdown", "x.md", "--model", str(tmp_path)]) == 1
    assert "--markdown goes with --calibrate-flags" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_refused_before_there_is_any_work(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "vectors").write_text("no folder")
    monkeypatch.setenv("HELMSIGHT_VECTORS", str(tmp_path / "vectors"))
    assert cli.main(["probe", "--calibrate-sage", "--model", str(tmp_path), "--samples", "1"]) == 1
    assert "cannot be written to" in capsys.readouterr().err
