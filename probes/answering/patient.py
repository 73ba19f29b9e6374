"""A server whose failures cost one answer each, not the run: some of a judge's thousands of questions time out."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from probes.answering.base import Question, Reply
from probes.answering.endpoint import Endpoint


class Patient:
    """The answers of an endpoint, as many at once as it takes; an `Answerer`.

    A failed answer is replaced by a reply with the reason in its `error`.
    """

    def __init__(self, endpoint: Endpoint) -> None:
        self.endpoint = endpoint

    @property
    def identity(self) -> str:
        return self.endpoint.identity

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        pending: deque[Future[Reply]] = deque()
        with ThreadPoolExecutor(self.endpoint.concurrency, "helmsight-patient") as workers:
            for question in questions:
                pending.append(workers.submit(self._answer, question))
                while pending and (pending[0].done() or len(pending) >= 2 * self.endpoint.concurrency):
                    yield pending.popleft().result()
            while pending:
                yield pending.popleft().result()

    def _answer(self, question: Question) -> Reply:
        try:
            (reply,) = self.endpoint.answers([question])
        except ValueError as error:
            return Reply("", error=str(error))
        return reply
