"""The evaluation: what is asked under each condition, and what the answers are worth."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from probes.harness.comparison import BASELINE
from probes.image_pairs.metrics import Claim, score
from probes.image_pairs.questions import DIFFERENT, EXPLAINED_DIFFERENT, EXPLAINED_SAME, SAME, WHAT
from probes.spd.asking import AS_JSON, COUNT, OWN, SEVERAL, Manner, Presentation, find, most, talk
from probes.spd.evaluate import answer, evaluated
from probes.spd.judging.agreement import agreement
from probes.spd.judging.rules import ruled
from probes.spd.report import DEFINED, report
from probes.spd.samples import PicturePair
from probes.spd.scoring import SEVERAL_SHARES, SINGLE_SHARES
from steering import See
from tests.probes.conftest import Scripted, text_of

SHAPES = ("star", "ring", "heart")
FORM = Presentation(categories=SHAPES)
PICTURE = Image.new("RGB", (56, 56), "red")
SINGLE = PicturePair("s", (Claim("color", "star", "blue"),), PICTURE, PICTURE, difficulty="easy")
TWO = PicturePair("m", (Claim("color", "star", "blue"), Claim("remove", "ring")), PICTURE, PICTURE)

ANSWERS = {
    COUNT: "There are 3 differences.",
    WHAT: "The star turned to blue. The heart moved to the top.",
    SAME: "No.",
    DIFFERENT: "Yes.",
    EXPLAINED_SAME: "The star turned to blue.",
    EXPLAINED_DIFFERENT: "The star turned to green. The ring was removed.",
    find(3): "The star turned to red. The ring is gone. The heart was removed. The star turned to blue.",
}


def run(manners: dict[str, Manner], pairs: list[PicturePair], **more: Any) -> tuple[dict[str, Any], Scripted]:
    answerer = Scripted(lambda question: ANSWERS.get(text_of(question), "No."), ahead=3)
    form = replace(FORM, **more)
    answered = answer(
        answerer,
        manners,
        pairs,
        form,
        lambda statements: [ruled(statement, SHAPES) for statement in statements],
        quiet=True,
    )
    return evaluated(answered), answerer


def values(results: dict[str, Any], part: str, setting: str = "all", name: str = BASELINE) -> dict[str, Any]:
    scores = results[name][part][setting]
    return {metric: score["value"] for metric, score in scores.items() if isinstance(score, dict)}


def test_several_differences_by_hand() -> None:
    results, answerer = run({BASELINE: Manner()}, [TWO])
    assert [text_of(question) for question in answerer.asked] == [
        *SEVERAL,
        "There are 3 differences in the picture. Can you find them?",
    ]
    got = values(results, "several")
    # three are counted where there are two; the star's colour is right, the heart is not among them
    assert (got["dqr_exact"], got["dqr_ratio"], got["ds_tolerance"], got["ds_detect"]) == (0, 1.5, 0.5, 1)
    assert (got["tf1"], got["cf1"]) == (pytest.approx(2 * 1 / (2 + 2)), pytest.approx(2 * 1 / (2 + 2)))
    # blue against green, and a ring without a counterpart
    assert got["cr"] == pytest.approx((-1 + 0.5) / 2)
    # blue and the ring are so; then the red of a star that has its claim already, and the heart's removal
    assert (got["drf"], got["drf_claims"], got["fabrication"]) == (0.5, 0.5, 0.5)
    assert (got["quantity_error"], got["counted"], got["drf_pairs"]) == (1, 1, 1)
    assert list(results[BASELINE]["several"]) == ["all", "2"]


def test_a_single_difference_by_difficulty() -> None:
    hard = [replace(SINGLE, id=str(i), difficulty="hard") for i in range(3)]
    results, _ = run({BASELINE: Manner()}, [SINGLE, *hard])
    assert values(results, "single") == {
        "contradictions": 0, "yes_same": 0, "right": 1, "unread": 0, "yes_no_consistency": 1,
    }  # fmt: skip
    assert [results[BASELINE]["single"][setting]["samples"] for setting in ("all", "easy", "hard")] == [4, 1, 3]
    replies = {**ANSWERS, SAME: "Yes.", DIFFERENT: "Well"}
    answerer = Scripted(lambda question: replies[text_of(question)])
    results = evaluated(answer(answerer, {BASELINE: Manner()}, [SINGLE], FORM, lambda _: [], quiet=True))
    assert values(results, "single") == {
        "contradictions": 0, "yes_same": 1, "right": 0, "unread": 1, "yes_no_consistency": 0.5,
    }  # fmt: skip


def test_the_counted_number_of_differences_decides_the_next_question() -> None:
    assert find(1) == "There is 1 difference in the picture. Can you find it?"
    assert find(None) == "There are differences in the picture. Can you find them?"
    answerer = Scripted(lambda question: "There is no difference.")
    answer(
        answerer,
        {BASELINE: Manner()},
        [TWO],
        FORM,
        lambda statements: [ruled(statement, SHAPES) for statement in statements],
        quiet=True,
    )
    assert [text_of(question) for question in answerer.asked] == list(SEVERAL)


def test_each_condition_asks_about_its_own_set() -> None:
    manners = {
        BASELINE: Manner(),
        "See": Manner((See(),)),
        **{name: OWN[name] for name in ("SR", "wrong hint", "implicit hint")},
    }
    results, answerer = run(manners, [SINGLE, TWO])
    assert {name: list(parts) for name, parts in results.items()} == {
        BASELINE: ["single", "several"],
        "See": ["single", "several"],
        "SR": ["several"],
        "wrong hint": ["single"],
        "implicit hint": ["single"],
    }
    assert len([question for question in answerer.asked if question.interventions == (See(),)]) == 2 + 7
    texts = [text_of(question) for question in answerer.asked]
    assert texts[-4:] == [
        f"{SAME} The answer is yes.",
        f"{DIFFERENT} The answer is no.",
        f"<question>{SAME}</question>\n<answer>",
        f"<question>{DIFFERENT}</question>\n<answer>",
    ]
    questions_left = len(answerer.asked) - 2 * 9 - 4
    assert questions_left == most("several", OWN["SR"]) == 21
    page = report(
        {"model": "m", "data": "two pairs", "left_out": {"no modifications": 2}, "shown": "", "versions": {}},
        results,
        {"agreement": agreement()},
    )
    assert "- Judge: rules\n" in page.markdown()
    assert "| claims | by hand | by rules | 30 |" in page.markdown()
    assert "- Left out: 2 with no modifications\n" in page.markdown()
    assert "| implicit hint | 0.000" in page.markdown().replace("\u00a0", " ")


def test_pictures_may_be_shown_as_one_and_differences_asked_for_as_json() -> None:
    _, answerer = run({BASELINE: Manner()}, [TWO], merged=True, as_json=True)
    assert {sum(part["type"] == "image" for part in question.chat[0]["content"]) for question in answerer.asked} == {1}
    json_questions = [text_of(question) for question in answerer.asked if text_of(question).endswith(AS_JSON)]
    assert json_questions[0] == WHAT + AS_JSON
    assert len(json_questions) == 4
    hidden = next(talk(SINGLE, "single", OWN["100 % hidden"], FORM))
    assert {part["image"].getpixel((5, 5)) for part in hidden[0].chat[0]["content"][:2]} == {(128, 128, 128)}


def test_every_number_is_defined_where_the_report_says_so() -> None:
    page, title = re.findall(r'^(\S+), "(.+)", defines', DEFINED)[0]
    section = (Path(__file__).parents[3] / page).read_text().split(f"### {title}\n")[1].split("\n#")[0]
    defined = re.findall(r"`(\w+)`", "".join(re.findall(r"(?m)^\| (.*?) \|", section)))
    assert sorted(defined) == sorted({*score([]), *SEVERAL_SHARES, *SINGLE_SHARES, "drf"})
