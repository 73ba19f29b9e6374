"""Questions asked with a bar that shows how far they are."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from tqdm import tqdm

from probes.answering.base import Answerer, Question, Reply


def replies(
    answerer: Answerer, questions: Iterable[Question], total: int, *, title: str = "", quiet: bool = False
) -> Iterator[Reply]:
    """The replies in the order of the questions, of which there are `total`. Whoever takes them should take all, so that the
    stream, and what it keeps open, ends."""
    return iter(
        tqdm(
            answerer.answers(questions), total=total, desc=title, unit=" answers", disable=quiet or None,
            dynamic_ncols=True, smoothing=0.05,
        )
    )  # fmt: skip
