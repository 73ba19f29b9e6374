"""The scores of the lists, by hand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from PIL import Image

from demo.world import lists
from probes.ambigcaps import samples as translations
from probes.ambigcaps.samples import Translated
from probes.answering.base import Reply
from probes.chair import samples as descriptions
from probes.chair.samples import Described
from probes.chair.words import Vocabulary, coco
from probes.harness.comparison import BASELINE, compare
from probes.image_qa.report import report
from probes.mme import samples as pairs
from probes.mme.samples import MmePair
from probes.mme.task import TASK as MME
from probes.phd import samples as texts
from probes.phd.samples import PhdSample
from probes.tallyqa import task as numbers
from probes.tallyqa.task import Counted
from tests.probes.conftest import Scripted, text_of

PICTURE = Image.new("RGB", (8, 8))


def scored(module: Any, samples: Sequence[Any], answers: Sequence[Sequence[str]]) -> dict[str, float]:
    tallies = [
        module.tally(sample, [Reply(text) for text in answers_of_sample])
        for sample, answers_of_sample in zip(samples, answers, strict=True)
    ]
    sums = {name: np.array(sum(tally[name] for tally in tallies)) for name in tallies[0]}
    return {name: float(value) for name, value in module.scores(sums).items()}


def test_mme_scores_by_hand() -> None:
    samples = [
        MmePair(PICTURE, (("Two?", True), ("One?", False)), task) for task in ("count", "count", "code_reasoning")
    ]
    scores = scored(pairs, samples, [("Yes.", "No"), ("yes", "Yes"), ("Perhaps", "no.")])
    assert scores == {"acc": 4 / 6, "acc_plus": 1 / 3, "score": pytest.approx(100), "unread": 1 / 6}


def test_mmes_totals_are_sums_of_subtasks() -> None:
    samples = [
        MmePair(PICTURE, (("Two?", True), ("One?", False)), task) for task in ("count", "color", "code_reasoning")
    ]
    right = Scripted(lambda question: "Yes" if text_of(question) == "Two?" else "No")
    results = compare(right, {BASELINE: ()}, MME.parts(samples), max_tokens=4, quiet=True)
    totals = MME.totals(results)
    assert totals == {BASELINE: {"perception": 400, "cognition": 200}}
    page = report(MME, {"model": "m", "data": "d", "versions": {}}, results, totals).markdown()
    assert "| baseline | 400.000 | 200.000 |" in page
    assert "| baseline | color | 1.000" in page


def test_chair_scores_by_hand() -> None:
    vocabulary = Vocabulary.of([["star"], ["ring"], ["heart"]])
    samples = [Described(PICTURE, frozenset({"star", "ring"}), vocabulary) for _ in range(2)]
    scores = scored(descriptions, samples, [("A star and a heart, two stars.",), ("A ring.",)])
    assert scores == {
        "chair_s": 1 / 2, "chair_i": 1 / 4, "recall": 2 / 4, "mentions": 2, "words": 9 / 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "objects"),
    [
        ("Two ladies, men and a baby elephant.", ["person", "person", "elephant"]),
        ("A passenger jet, two buses, some knives.", ["airplane", "bus", "knife"]),
        ("The toilet seat is up; a seat.", ["toilet"]),
        ("A hot dog near home plate, by the train tracks.", ["hot dog"]),
        ("A teddy-bear in a catalogue.", ["teddy bear"]),
        ("People at a dining table with wine glasses", ["person", "dining table", "wine glass"]),
        ("He wears a bow tie and holds scissors.", ["tie", "scissors"]),
    ],
)
def test_which_of_cocos_objects_are_named(text: str, objects: list[str]) -> None:
    assert coco().mentioned(text) == objects


def test_our_words_have_cocos_eighty_categories() -> None:
    names = {name for name in coco().names.values() if name}
    assert len(names) == 80
    assert {"potted plant", "tv", "sports ball", "cell phone", "hair drier"} <= names


def test_phd_scores_by_hand() -> None:
    samples = [PhdSample(PICTURE, "", present, "counting", "icc") for present in (True, True, False, False, False)]
    scores = scored(texts, samples, [("Yes",), ("No",), ("No",), ("Yes",), ("Well",)])
    assert scores["recall"] == 1 / 2
    assert scores["recall_no"] == 1 / 3
    assert scores["index"] == pytest.approx(2 * (1 / 6) / (5 / 6))
    assert (scores["accuracy"], scores["unread"]) == (2 / 5, 1 / 5)
    assert [part.name for part in texts.parts(samples) if part.samples] == ["PhD-icc"]


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("There are 3 stars.", 3),
        ("Twelve", 12),
        ("No stars.", 0),
        ("I see two or 3", 2),
        ("many", None),
        ("3.", 3),
        ("9" * 5000, 10**9 - 1),
    ],
)
def test_a_number_is_read(answer: str, expected: int | None) -> None:
    assert numbers.number(answer) == expected


def test_tallyqa_scores_by_hand() -> None:
    samples = [Counted(PICTURE, "How many?", answer, True) for answer in (3, 2, 5)]
    scores = scored(numbers, samples, [("3",), ("four",), ("many",)])
    assert scores == {"accuracy": 1 / 3, "rmse": pytest.approx(2**0.5), "unread": 1 / 3}


def test_bleu_of_a_corpus_is_sacrebleus() -> None:
    sacrebleu = pytest.importorskip("sacrebleu")
    references = ["bir yarasa ağaçta asılı duruyor", "küçük bir kedi masanın üzerinde"]
    answers = ["bir yarasa ağaçta  duruyor", "küçük kedi masanın üzerinde uyuyor"]
    samples = [Translated(PICTURE, "English", "", reference) for reference in references]
    scores = scored(translations, samples, [(answer,) for answer in answers])
    assert scores["bleu"] == pytest.approx(sacrebleu.corpus_bleu(answers, [references]).score)


def test_without_sacrebleu_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("probes.ambigcaps.samples.find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"BLEU needs sacrebleu: pip install 'helmsight\[eval\]'"):
        translations.check_bleu()


@pytest.mark.parametrize("draw", [lists.mme_pairs, lists.phd_samples, lists.counted_samples, lists.described])
def test_the_demo_worlds_samples_are_those_of_their_seed(draw: Callable[[int, int], Sequence[Any]]) -> None:
    samples, again, different = draw(12, 3), draw(12, 3), draw(12, 4)
    assert len(samples) == 12
    assert [sample.image.tobytes() for sample in samples] == [sample.image.tobytes() for sample in again]
    assert [sample.image.tobytes() for sample in samples] != [sample.image.tobytes() for sample in different]


def test_the_demo_worlds_questions_are_balanced() -> None:
    samples = lists.phd_samples(30, 1)
    for mode in texts.MODES:
        assert [sample.present for sample in samples if sample.mode == mode] == [True, False] * 5
    for pair in lists.mme_pairs(10, 1):
        assert [answer for _, answer in pair.questions] == [True, False]
        assert pair.questions[0][0] != pair.questions[1][0]
