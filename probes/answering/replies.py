"""Questions asked with bars that show how far they are."""

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
    """The replies in the order of the questions; `parts` are what each of them counts for. Whoever takes them should take
    all, so that the stream, and what it keeps open, ends."""
    with Tracker(title, Counter(parts), quiet=quiet) as progress:
        yield from counted(answerer, questions, parts, progress)


def counted(
    answerer: Answerer, questions: Iterable[Question], parts: Sequence[str], progress: Tracker
) -> Iterator[Reply]:
    """As `replies`, where there is a progress already."""
    for part, reply in zip(parts, answerer.answers(questions), strict=True):
        progress.advance(part, kept=reply.kept)
        yield reply
