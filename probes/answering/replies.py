"""Questions asked with a progress display."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from probes.answering.base import Answerer, Question, Reply
from probes.answering.progress import Tracker


def replies(
    answerer: Answerer,
    questions: Iterable[Question],
    parts: Sequence[str],
    *,
    title: str = "",
    quiet: bool = False,
) -> Iterator[Reply]:
    """Yield the replies in the order of the questions, with progress; `parts` names the part of each question.

    Take all replies, so that the stream, and the resources that it holds open, end.
    """
    with Tracker(title, Counter(parts), quiet=quiet) as progress:
        yield from counted(answerer, questions, parts, progress)


def counted(
    answerer: Answerer, questions: Iterable[Question], parts: Sequence[str], progress: Tracker
) -> Iterator[Reply]:
    """Yield the replies as `replies` does, counting them in an existing progress display."""
    for part, reply in zip(parts, answerer.answers(questions), strict=True):
        progress.advance(part, kept=reply.kept)
        yield reply
