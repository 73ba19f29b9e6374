"""The prompt-level methods, each on a scripted model."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from PIL import Image

from probes.answering.base import Question, Reply
from probes.answering.talks import hold
from probes.spd.methods import CRITICISE, DIM, DRAWN, LOCATE, METHODS, TEMPERATURE, region
from tests.probes.conftest import Scripted, text_of

SHAPES = ("star", "ring")
PICTURES = [Image.new("RGB", (100, 80), colour) for colour in ("red", "white")]
PARTS = [*({"type": "image", "image": picture} for picture in PICTURES), {"type": "text", "text": "What?"}]
QUESTION = Question([{"role": "user", "content": PARTS}], diagnose=None)


def by(name: str, answer: Callable[[Question], str | Reply]) -> tuple[str, list[Question]]:
    """Return the reply of a method, and the questions that it asked."""
    answerer = Scripted(answer)
    (reply,) = hold(answerer, [METHODS[name](QUESTION, SHAPES)])
    assert len(answerer.asked) <= METHODS[name].most
    return reply.text, answerer.asked


def pictures(question: Question) -> list[Image.Image]:
    return [part["image"] for part in question.chat[-1]["content"] if part["type"] == "image"]


def test_self_consistency_takes_what_most_say_however_they_word_it() -> None:
    drawn = ("The ring was removed.", "Perhaps.", "The star moved to the top.", "The ring is gone.", "Perhaps.")
    for replies, chosen in (
        ((*drawn[:4], "The ring is missing."), drawn[0]),
        (drawn, drawn[0]),
        ((*drawn[1:], "Perhaps."), "Perhaps."),
    ):
        text, questions = by("SC", lambda question, replies=replies: replies[question.seed])
        assert text == chosen
    assert [(question.temperature, question.seed) for question in questions] == [
        (TEMPERATURE, seed) for seed in range(DRAWN)
    ]


def test_self_refine_criticises_its_answer_and_answers_again() -> None:
    texts = iter(("The ring.", "It was the star.", "The star moved to the top."))
    text, questions = by("SR", lambda question: next(texts))
    assert text == "The star moved to the top."
    assert [part["text"] for message in questions[2].chat[1:] for part in message["content"]] == [
        "The ring.", CRITICISE, "It was the star.", "Answer the question again, better where that is needed. What?",
    ]  # fmt: skip
    assert pictures(Question(questions[2].chat[:1])) == PICTURES


def test_attention_prompting_darkens_what_was_not_attended_to() -> None:
    read = {
        "images": [{"grid": [2, 2]}] * 2,
        "patches": [{"rho": [[0, 1, 1, 0], [0, 3, 3, 0]]}, {"rho": [[5, 5, 5, 5]] * 2}],
    }
    text, questions = by("API", lambda question: Reply("first", read) if question.diagnose else "last")
    assert text == "last"
    darkened, even = map(np.asarray, pictures(questions[1]))
    assert tuple(darkened[0, 0]) == (round(255 * DIM), 0, 0)
    assert tuple(darkened[0, -1]) == (255, 0, 0)
    assert (even == 255).all()
    for nothing in (None, {"images": [{"grid": None}] * 2, "patches": [{}, {}]}):
        assert by("API", lambda question, nothing=nothing: Reply("first", nothing)) == ("first", questions[:1])


def test_zoom_refine_shows_the_region_that_the_model_names() -> None:
    def answer(question: Question) -> str:
        if text_of(question).startswith(LOCATE):
            return "It is [500, 0, 1000, 500]."
        return "last" if len(pictures(question)) == 4 else "first"

    text, questions = by("Zoom-Refine", answer)
    assert text == "last"
    assert "You answered: first" in text_of(questions[2])
    assert pictures(questions[2])[2].tobytes() == Image.new("RGB", (100, 80), "red").tobytes()
    text, questions = by("Zoom-Refine", lambda question: "nowhere")
    assert (text, len(questions)) == ("nowhere", 2)


@pytest.mark.parametrize(
    ("answer", "box"),
    [
        ("[100, 200, 300, 1000]", (0.1, 0.2, 0.3, 1.0)),
        ("box: [0,0,9999,500] or [1, 2, 3, 4]", (0.0, 0.0, 1.0, 0.5)),
        ("[300, 0, 100, 10]", None),
        ("the left", None),
    ],
)
def test_a_region_is_read_strictly(answer: str, box: object) -> None:
    assert region(answer) == box
