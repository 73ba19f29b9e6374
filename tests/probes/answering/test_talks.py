"""Conversations side by side: rounds, order, and how far ahead questions are made."""

from __future__ import annotations

from probes.answering.base import Question, Reply
from probes.answering.talks import Talk, hold, together
from tests.probes.conftest import Scripted, text_of


def asked(text: str) -> Question:
    return Question([{"role": "user", "content": text}])


def echo(question: Question) -> str:
    return text_of(question).upper()


def chain(*words: str) -> Talk[str]:
    """Asks word after word, each with what was answered before."""
    said = ""
    for word in words:
        (reply,) = yield [asked(said + word)]
        said = reply.text
    return said


def test_every_round_of_all_talks_is_one_stream_and_what_they_return_keeps_their_order() -> None:
    answerer = Scripted(echo, ahead=2)
    streams = []
    answers = answerer.answers
    answerer.answers = lambda questions: streams.append(1) or answers(questions)  # type: ignore[method-assign, assignment, func-returns-value]
    heard: list[Reply] = []
    assert hold(answerer, [chain("a", "b"), chain("c"), chain("d", "e", "f")], heard.append) == ["AB", "C", "DEF"]
    assert [text_of(one) for one in answerer.asked] == ["a", "c", "d", "Ab", "De", "DEf"]
    assert len(streams) == 4  # the last of which asks nothing
    assert [reply.text for reply in heard] == ["A", "C", "D", "AB", "DE", "DEF"]


def test_talks_within_a_talk_share_its_rounds() -> None:
    def both(name: str) -> Talk[list[str]]:
        return (yield from together([chain(name, "b", "c"), chain(f"{name}x"), chain(f"{name}y", "z")]))

    answerer = Scripted(echo)
    assert hold(answerer, [both("a"), both("p")]) == [["ABC", "AX", "AYZ"], ["PBC", "PX", "PYZ"]]
    rounds = [["a", "ax", "ay", "p", "px", "py"], ["Ab", "AYz", "Pb", "PYz"], ["ABc", "PBc"]]
    assert [text_of(one) for one in answerer.asked] == [text for one in rounds for text in one]


def test_questions_are_made_when_they_are_taken() -> None:
    made: list[int] = []

    def late(number: int) -> Talk[int]:
        made.append(number)
        yield [asked(str(number))]
        return number

    ahead: list[int] = []

    def answer(question: Question) -> str:
        ahead.append(len(made))
        return ""

    assert hold(Scripted(answer, ahead=1), map(late, range(5))) == [0, 1, 2, 3, 4]
    assert ahead == [2, 3, 4, 5, 5]
