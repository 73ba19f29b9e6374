"""Conversations whose next questions depend on earlier answers, held side by side so that they share batches."""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from typing import TypeVar

from probes.answering.base import Answerer, Question, Reply

T = TypeVar("T")

Talk = Generator[Sequence[Question], Sequence[Reply], T]
"""A generator that yields the independent questions of a round, receives their replies, and returns its result."""


def hold(answerer: Answerer, talks: Iterable[Talk[T]], heard: Callable[[Reply], None] = lambda reply: None) -> list[T]:
    """Hold all talks and return their results in order; `heard` is called with every reply.

    Each round of all talks is one stream of questions. They are made when they are taken, so that the pictures of thousands
    need no memory.
    """
    open_talks = dict(enumerate(talks))
    answered: dict[int, Sequence[Reply]] = {}
    results: dict[int, T] = {}
    while open_talks:
        counts: list[tuple[int, int]] = []
        replies = []
        for reply in answerer.answers(_round(open_talks, answered, counts, results)):
            heard(reply)
            replies.append(reply)
        answered = _dealt(iter(replies), counts)
        open_talks = {number: talk for number, talk in open_talks.items() if number not in results}
    return [results[number] for number in sorted(results)]


def together(talks: Iterable[Talk[T]]) -> Talk[list[T]]:
    """Combine several talks into one that asks their rounds together."""
    open_talks = dict(enumerate(talks))
    answered: dict[int, Sequence[Reply]] = {}
    results: dict[int, T] = {}
    while open_talks:
        counts: list[tuple[int, int]] = []
        questions = list(_round(open_talks, answered, counts, results))
        replies = iter((yield questions) if questions else ())
        answered = _dealt(replies, counts)
        open_talks = {number: talk for number, talk in open_talks.items() if number not in results}
    return [results[number] for number in sorted(results)]


def _dealt(replies: Iterator[Reply], counts: Iterable[tuple[int, int]]) -> dict[int, Sequence[Reply]]:
    """Return for every talk as many replies as it asked for."""
    return {number: [next(replies) for _ in range(count)] for number, count in counts}


def _round(
    talks: dict[int, Talk[T]],
    answered: dict[int, Sequence[Reply]],
    counts: list[tuple[int, int]],
    results: dict[int, T],
) -> Iterator[Question]:
    """Yield the next questions of every talk.

    `counts` receives the number of questions of each talk, `results` those of talks that have ended.
    """
    for number, talk in talks.items():
        try:
            questions = talk.send(answered[number]) if number in answered else next(talk)
        except StopIteration as ended:
            results[number] = ended.value
            continue
        counts.append((number, len(questions)))
        yield from questions
