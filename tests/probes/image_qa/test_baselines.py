"""The ways of asking that steering is compared with: an instruction, a chain of thought, four solved examples."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from probes.ambigcaps.samples import Translated
from probes.ambigcaps.task import TASK as AMBIGCAPS
from probes.answering.base import Question, Reply
from probes.harness.comparison import BASELINE, compare
from probes.harness.conditions import Wanted, pushes
from probes.image_qa.baselines import CHAIN_TOKENS, Instructed, concluded
from probes.image_qa.yes_no import YesNo, part
from probes.phd.task import FOLLOW
from probes.phd.task import TASK as PHD
from probes.tallyqa.task import TASK as TALLYQA
from probes.vsr.task import TASK as VSR
from tests.probes.conftest import Scripted

PICTURE = Image.new("RGB", (8, 8))
SAMPLES = [YesNo(PICTURE, f"Question {number}?", number % 2 == 0, "random") for number in range(10)]
CHANGES = Instructed("Look well.").changes(SAMPLES[6:])


def texts(question: Question) -> list[str]:
    return [
        turn["content"] if isinstance(turn["content"], str) else turn["content"][-1]["text"] for turn in question.chat
    ]


def test_each_baseline_changes_the_prompt_alone_and_is_compared_with_plain_answers() -> None:
    asked: dict[int, list[Question]] = {}

    def answer(question: Question) -> Reply:
        asked.setdefault(len(question.chat) * 1000 + question.max_tokens, []).append(question)
        if question.max_tokens == CHAIN_TOKENS:
            return Reply("No, at first sight.\nBut there is one.\nAnswer: Yes.")
        return Reply("No.", odds=0.5)

    conditions = {BASELINE: (), **dict.fromkeys(CHANGES, ())}
    results = compare(
        Scripted(answer), conditions, [part("questions", SAMPLES[:6])], max_tokens=4, changes=CHANGES, quiet=True
    )
    accuracy = {name: result["questions"]["all"]["accuracy"] for name, result in results.items()}
    assert [row["value"] for row in accuracy.values()] == [0.5] * 4
    assert results["chain of thought"]["questions"]["all"]["recall"]["value"] == 1  # what stands behind "Answer:"
    assert results["instruction"]["questions"]["all"]["recall"]["difference"] == 0
    assert results["chain of thought"]["questions"]["all"]["auroc"]["value"] is None
    short = [texts(question) for question in asked[1004]]
    assert short == [[sample.question] for sample in SAMPLES[:6]] + [
        [f"{sample.question}\nLook well."] for sample in SAMPLES[:6]
    ]
    assert all(texts(question)[0].startswith("Question") for question in asked[1000 + CHAIN_TOKENS])
    first = texts(asked[9004][0])
    assert first == [
        "Question 6?",
        "yes",
        "Question 7?",
        "no",
        "Question 8?",
        "yes",
        "Question 9?",
        "no",
        "Question 0?",
    ]


def test_without_four_examples_none_are_shown() -> None:
    assert list(Instructed("Look.").changes(SAMPLES[:3])) == ["instruction", "chain of thought"]


@pytest.mark.parametrize(
    ("answer", "end"),
    [
        ("First 2, then 3.\nAnswer: 5.", "5."),
        ("Answer: 1? No.\nThe answer is: 4", "4"),
        ("I see two.\nSo 2", "So 2"),
        ("", ""),
    ],
)
def test_what_a_chain_of_thought_concludes(answer: str, end: str) -> None:
    assert concluded(answer) == end


def test_the_papers_benchmarks_have_them_and_phd_asks_without_its_instruction() -> None:
    assert all(task.instructed for task in (TALLYQA, VSR, PHD, AMBIGCAPS))
    assert PHD.instructed is not None
    assert PHD.instructed.text == FOLLOW


def test_a_caption_to_translate_is_a_context_and_no_instruction_is_part_of_it() -> None:
    sample = Translated(PICTURE, "English", "a bat", "bir yarasa")
    ((turn,),) = sample.chats()
    assert turn["content"][-1] == {"type": "text", "text": "a bat", "span": "context"}
    assert AMBIGCAPS.instructed is not None
    (changed,) = AMBIGCAPS.instructed.changes([])["instruction"].chat([turn])
    asked: list[Any] = [part["text"] for part in changed["content"][1:]]
    assert asked[0].endswith("alone.\nRely on the text of the caption rather than on the image content.\n")
    assert asked[1] == "a bat"


def test_only_chats_that_mark_a_context_are_steered_toward_the_found_side() -> None:
    assert list(pushes("v")) == ["toward vision", "toward text"]
    assert "toward the found side" in pushes("v", automatic=True)
    with pytest.raises(ValueError, match="found side"):
        Wanted(("toward the found side",), (), lambda: ())
    Wanted(("toward the found side",), (), lambda: (), automatic=True)
