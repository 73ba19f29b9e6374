"""Results that follow from samples and answers, compared with hand-worked numbers and an enumeration of all draws."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from probes.answering.base import Reply
from probes.conflicts.shares import Outcome
from probes.harness.bootstrap import spearman
from probes.mc2 import report_conditions
from probes.mc2.derived import attention, by_size, words
from probes.mc2.evaluate import Evaluation, evaluate
from probes.reporting.report import Report
from tests.probes.mc2.pages import outcomes, tables
from tests.probes.mc2.scripted import STEERING, AskedQuestion, Scripted, balls, by_script, said


def test_words_stand_between_spaces() -> None:
    first, two, three = balls(3)
    samples = [
        replace(first, context="A dog's bowl, half-empty."),
        replace(two, context=""),
        replace(three, context="So."),
    ]
    assert words(samples) == {"color": (4 + 1) / 2, "shape": 0}


def test_smaller_evaluations_are_drawn_from_each_task() -> None:
    """Two of each task are drawn in all ways, from four in one task and three in the other."""
    first_task: list[Outcome] = ["vision", "vision", "text", "others"]
    second_task: list[Outcome] = ["vision", "text", "text"]
    sizes = by_size([*first_task, *second_task], ["a"] * 4 + ["b"] * 3, sizes=(2, 9))
    assert sizes is not None
    assert list(sizes.rows) == [2, 3]
    every = []
    for drawn in itertools.product(itertools.combinations(first_task, 2), itertools.combinations(second_task, 2)):
        drawn_outcomes = [*drawn[0], *drawn[1]]
        every.append(drawn_outcomes.count("vision") / (4 - drawn_outcomes.count("others")))
    mean, (low, high) = sizes.rows[2]
    assert mean == pytest.approx(np.mean(every), abs=0.02)
    assert np.mean(np.array(every) < low) <= 0.025 + 0.02 < np.mean(np.array(every) <= low) + 0.02
    assert high == pytest.approx(np.quantile(every, 0.975), abs=0.01)
    assert sizes.settled is None


def test_enough_samples_settle_the_ratio() -> None:
    alike = by_size(outcomes(300, 300, 0), ["a"] * 600, sizes=(10, 595))
    assert alike is not None
    assert alike.settled == 595
    assert (list(alike.rows), alike.most) == ([10, 595], 600)  # all samples are no smaller evaluation
    assert alike.rows[10][1][1] - alike.rows[10][1][0] > 0.4
    certain = by_size(outcomes(50, 0, 10), ["a"] * 60)
    assert certain is not None
    assert certain.settled == 5
    assert by_size(outcomes(0, 0, 4), ["a"] * 4) is None
    assert by_size(outcomes(4, 4, 0), ["a", "b"] * 4) is None


def test_ranks_correlate_as_textbooks_have_it() -> None:
    # d = 1, -1, 0, 1, -1: 1 - 6 * 4 / (5 * 24)
    assert spearman(np.array([3.0, 1, 4, 10, 7]), np.array([1.0, 2, 30, 40, 50])) == pytest.approx(0.8)
    # ranks 1.5 1.5 3 and 1 2 3: covariance .5 by the deviations 3 ** .5 / 2 and 1
    assert spearman(np.array([5.0, 5, 6]), np.array([1.0, 2, 3])) == pytest.approx(3**0.5 / 2)
    assert spearman(np.array([1.0, 1]), np.array([1.0, 2])) is None


def looked(question: AskedQuestion) -> Reply:
    """Answer by script; attention in two layers grows with the ball, and with a push toward the image."""
    ratio = {"vision": 0.3, "text": -0.1}.get(question.push.toward if question.push else "", 0.1) + question.ball / 100
    reply = by_script(question)
    return Reply(
        reply.text,
        {"modality": {"attention_ratio": ratio, "by_layer": [ratio, None if question.ball == 3 else ratio / 2]}},
    )


@pytest.fixture(scope="module")
def evaluation() -> Evaluation:
    return evaluate(Scripted(looked), balls(5), steering=STEERING, kinds=("plain", "steer"), quiet=True)


def test_checks_and_attention_by_task_by_hand(evaluation: Evaluation) -> None:
    # Balls 0, 2, 4 are colours, 1 and 3 shapes: image alone v v a and v a, context alone t t n and t v.
    by_task = evaluation.to_json()["plain"]["by_task"]
    assert by_task["color"]["no_conflict_accuracy"] == pytest.approx((1 + 1 + 0.5) / 3)
    assert by_task["color"]["context_only_accuracy"] == pytest.approx((1 + 1 + 0) / 3)
    assert by_task["shape"]["no_conflict_accuracy"] == pytest.approx((1 + 0.5) / 2)
    assert by_task["shape"]["context_only_accuracy"] == pytest.approx((1 + 0) / 2)
    assert by_task["color"]["attention_ratio"] == pytest.approx(0.1 + 0.02)
    assert by_task["shape"]["attention_ratio"] == pytest.approx(0.1 + 0.02)


def test_attention_by_layer_leaves_out_what_was_not_measured(evaluation: Evaluation) -> None:
    rows = evaluation.to_json()
    assert rows["plain"]["attention_by_layer"] == pytest.approx([0.12, np.mean([0.1, 0.11, 0.12, 0.14]) / 2])
    assert rows["vision"]["attention_by_layer"][0] == pytest.approx(0.32)
    low, high = rows["plain"]["attention_by_layer_95"][0]
    assert 0.1 <= low < 0.12 < high <= 0.14
    json.dumps(rows, allow_nan=False)


def test_attention_follows_preference_over_conditions(evaluation: Evaluation) -> None:
    attention_found = attention(evaluation)
    assert attention_found["conditions"] == {"spearman": pytest.approx(1), "n": 3}
    assert attention_found["tasks"] == {"spearman": None, "n": 2}  # two tasks are too few


def test_the_page_shows_tasks_and_layers(evaluation: Evaluation, tmp_path: Path) -> None:
    page, conditions = Report("Preference"), evaluation.to_json()
    report_conditions.alone(page, conditions)
    report_conditions.attention_by_task(page, conditions, {"color": 5.0, "shape": 4.5}, attention(evaluation))
    report_conditions.attention_by_layer(page, conditions, [1])
    alone, tasks, layers = tables(page)
    assert alone["plain"] == {"condition": "plain", "shown": "image only", "color": "0.833", "shape": "0.750"}
    assert tasks["shape"] == {
        "task": "shape", "Vision Ratio": "1.000", "attention ratio": "0.120", "words of a context": "4.500",
    }  # fmt: skip
    assert layers["0"]["plain"].startswith("0.120 (")
    assert "Over 3 conditions the ranks of attention ratio and Vision Ratio correlate by 1.00" in page.markdown()
    page.write(tmp_path)
    assert "steered" in (tmp_path / "attention-layers.svg").read_text()
    assert "Vision Ratio" in (tmp_path / "attention-tasks.svg").read_text()


def test_layers_are_not_marked_by_numbers_that_the_axis_does_not_have(evaluation: Evaluation, tmp_path: Path) -> None:
    """The axis has only the layers with attention weights, of a model where others have linear attention."""
    page, conditions = Report("Preference"), evaluation.to_json()
    report_conditions.attention_by_layer(page, conditions, [1], layers=8)
    page.write(tmp_path)
    assert "2 of the model's 8 layers have attention weights" in page.markdown()
    assert "steered" not in (tmp_path / "attention-layers.svg").read_text().replace("steered toward", "")


def test_without_readouts_attention_is_left_out() -> None:
    only = evaluate(
        Scripted(lambda question: Reply(said("v", question.swapped))), balls(2), kinds=["plain"], quiet=True
    ).to_json()
    page = Report("Preference")
    report_conditions.attention_by_layer(page, only, [1])
    report_conditions.attention_by_task(page, only, {}, {})
    assert page.markdown() == "# Preference\n"


def test_the_page_shows_sizes() -> None:
    page, sizes = Report("Preference"), by_size(outcomes(30, 10, 0), ["a"] * 40, sizes=(5,))
    assert sizes is not None
    report_conditions.sizes(page, sizes.to_json())
    (table,) = tables(page)
    assert list(table) == ["5"]
    assert "No smaller number is enough." in page.markdown()


def test_instruction_and_steering_combine() -> None:
    answerer = Scripted(by_script)
    conditions = evaluate(answerer, balls(2), steering=STEERING, kinds=("both",), quiet=True).conditions
    assert list(conditions) == ["both_vision", "both_text"]
    assert {(question.setting, question.push.toward if question.push else None) for question in answerer.asked} == {
        ("vision", "vision"), ("text", "text"),
    }  # fmt: skip
