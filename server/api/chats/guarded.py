"""Guarded answers: an answer that meets a guard's conditions is given again, and the better one is kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import steering
from server.engine.runtime import Serving
from server.engine.served import ServedCompletion
from server.journal.scalars import scalars
from server.requests.guarding import GuardPlan
from steering import CallPiece, Choice, Chunk, Request, Result, answer_seed

log = logging.getLogger("helmsight")

Outcome = Literal["quiet", "first", "cut", "retry", "failed"]
"""No condition held; new answers met one; a new answer met none, but was cut; it was kept; it could not be given."""
Begin = Callable[[ServedCompletion], Iterator[Chunk | None]]


@dataclass
class _Tries:
    """The answers to one choice: `last` is the last chunk of the first, `held` those before it.

    answers: each with the conditions that it met, and its seed.
    """

    held: list[Chunk] = field(default_factory=list)
    last: Chunk | None = None
    answers: list[tuple[Choice, list[str], int | None]] = field(default_factory=list)
    kept: int = 0
    failed: str | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome, as the choice reports it."""
        (_, raised, _), *others = self.answers
        if self.kept:
            return "retry"
        if self.failed is not None:
            return "failed"
        if not raised:
            return "quiet"
        return "cut" if any(not still for _, still, _ in others) else "first"


def calls_of(choice: Choice) -> list[dict[str, str]]:
    """Return the tool calls of an answer, as the report of a guard has them."""
    return [{"name": call.name, "arguments": call.arguments} for call in choice.tool_calls]


class GuardedCompletion:
    """A completion whose choices are given again where a guard's conditions hold for them; see `ServedCompletion`.

    `seed` is that of the first request. `again` is the request to give again, submitted in the queue of `group`. With
    `hold`, nothing of a choice is sent before it is decided; otherwise the first answer is streamed, and the last chunk of a
    choice may hold another one.
    """

    def __init__(
        self,
        first: ServedCompletion,
        seed: int | None,
        again: Request,
        plan: GuardPlan,
        serving: Serving,
        group: str,
        hold: bool,
        n: int,
    ):
        self.prompt_tokens, self.max_tokens, self.prompt_end = first.prompt_tokens, first.max_tokens, first.prompt_end
        self._first, self._seed, self._again, self._plan = first, seed, again, plan
        self._serving, self._group, self._hold = serving, group, hold
        self._tries = [_Tries() for _ in range(n)]
        self._given: list[ServedCompletion] = [first]
        self._lock = threading.Lock()
        self._cancelled = False
        self._choices: dict[int, Choice] = {}

    # -- as any completion ---------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Chunk]:
        """Yield chunks as they arrive."""
        return (chunk for chunk in self._chunks(iter, None) if chunk is not None)

    def whole(self) -> Iterator[Chunk]:
        """Yield the last chunk of each choice."""
        chunks = self._chunks(lambda completion: completion.whole(), None)
        return (chunk for chunk in chunks if chunk is not None and chunk.choice is not None)

    def paused(self, resume: Callable[[], object]) -> Iterator[Chunk | None]:
        """Yield chunks without waiting, and None whenever there is none yet."""
        return self._chunks(lambda completion: completion.paused(resume), resume)

    def result(self) -> Result:
        """Return the kept choices, and the tokens of all tries."""
        results = [completion.result() for completion in self._given]
        counts = (
            sum(result.prompt_tokens for result in results),
            sum(result.completion_tokens for result in results),
            sum(result.cached_tokens for result in results),
            sum(result.reasoning_tokens for result in results),
        )
        return Result(tuple(self._choices[index] for index in sorted(self._choices)), *counts)

    @property
    def first_at(self) -> float | None:
        """The time of the first token of the first try."""
        return self._first.first_at

    @property
    def cached_tokens(self) -> int:
        """The tokens of the first try's prompt that came from a cache."""
        return self._first.cached_tokens

    def generated(self, index: int) -> int:
        """Return how many tokens all tries of a choice have so far."""
        return self._first.generated(index) + sum(
            len(choice.token_ids) for choice, *_ in self._tries[index].answers[1:]
        )

    def text_of(self, index: int) -> str:
        """Return the text of the first try of a choice so far."""
        return self._first.text_of(index)

    def cancel(self) -> None:
        """Stop generating."""
        with self._lock:
            self._cancelled = True
            completions = [*self._given]
        for completion in completions:
            completion.cancel()

    # -- tries ---------------------------------------------------------------------------------------------------------

    def _chunks(self, begin: Begin, resume: Callable[[], object] | None) -> Iterator[Chunk | None]:
        for chunk in begin(self._first):
            if chunk is None:
                yield None
                continue
            tries = self._tries[chunk.index]
            if chunk.choice is None:
                if self._hold:
                    tries.held.append(chunk)
                else:
                    yield chunk
                continue
            tries.last = chunk
            if not self._judge(tries, chunk.choice, self._seed, chunk.index):
                yield from self._decided(chunk.index)
        for attempt in range(self._plan.retries):
            pending = [index for index, tries in enumerate(self._tries) if index not in self._choices and tries.last]
            if not pending or self._cancelled:
                break
            yield from self._retry(pending, attempt, begin, resume)
        if not self._cancelled:
            for index, tries in enumerate(self._tries):
                if index not in self._choices and tries.last is not None:
                    yield from self._decided(index)

    def _judge(self, tries: _Tries, choice: Choice, seed: int | None, number: int) -> list[str]:
        """Return the conditions that an answer meets; `seed` is that of its request, in which it has this number."""
        raised = self._plan.raised(scalars(choice.applied, choice.diagnostics))
        tries.answers.append((choice, raised, None if seed is None else answer_seed(seed, number)))
        return raised

    def _retry(
        self, pending: list[int], attempt: int, begin: Begin, resume: Callable[[], object] | None
    ) -> Iterator[Chunk | None]:
        """Give the pending choices again; yield those that are decided, and None while there is nothing."""
        try:
            if resume is None:
                completion = self._submit(len(pending), attempt)
            else:
                completion = yield from self._submitted_aside(len(pending), attempt, resume)
            for chunk in begin(completion):
                if chunk is None:
                    yield None
                    continue
                if chunk.choice is None:
                    continue
                index = pending[chunk.index]
                tries = self._tries[index]
                choice, first = replace(chunk.choice, index=index), tries.answers[0][0]
                raised = self._judge(tries, choice, self._seed_of(attempt), chunk.index)
                if not raised and (chunk.choice.finish_reason != "length" or first.finish_reason == "length"):
                    tries.kept = len(tries.answers) - 1
                    yield from self._decided(index)
        except steering.SteeringError as error:
            if self._cancelled:
                raise
            log.info("a guarded answer could not be given again: %s", error)
            for index in pending:
                if index not in self._choices:
                    self._tries[index].failed = str(error)
                    yield from self._decided(index)

    def _submit(self, n: int, attempt: int) -> ServedCompletion:
        request = replace(self._again, n=n)
        request = replace(request, sampling=replace(request.sampling, seed=self._seed_of(attempt)))
        with self._serving.engine.turn(self._group) as turn:
            while steering.next_prelude(request) is not None:
                request = turn.decide(request, self._began)
            completion = turn.submit(request)
        self._began(completion)
        with self._lock:
            self._given.append(completion)
        return completion

    def _seed_of(self, attempt: int) -> int | None:
        """Return the seed of a retry's request, counted from the first one's so that no two tries draw alike."""
        seed = self._again.sampling.seed
        return None if seed is None else (seed + attempt + 1 + 2**63) % 2**64 - 2**63  # as int64, like `answer_seed`

    def _began(self, completion: ServedCompletion) -> None:
        if self._cancelled:
            completion.cancel()

    def _submitted_aside(
        self, n: int, attempt: int, resume: Callable[[], object]
    ) -> Generator[None, None, ServedCompletion]:
        """Submit in a thread of its own, since preparing a request takes long; yield None meanwhile."""
        outcome: list[ServedCompletion | Exception] = []

        def submit() -> None:
            try:
                outcome.append(self._submit(n, attempt))
            except Exception as error:
                outcome.append(error)
            resume()

        threading.Thread(target=submit, name="helmsight-guard", daemon=True).start()
        while not outcome:
            yield None
        if isinstance(outcome[0], Exception):
            raise outcome[0]
        return outcome[0]

    def _decided(self, index: int) -> Iterator[Chunk]:
        """Yield what is still to be sent of a choice."""
        tries = self._tries[index]
        assert tries.last is not None
        first, chosen = tries.answers[0][0], tries.answers[tries.kept][0]
        choice = replace(chosen, baseline=first.baseline, guard=self._report(tries))
        self._choices[index] = choice
        if not tries.kept:
            yield from tries.held
            yield replace(tries.last, choice=choice)
        elif self._hold:
            calls = [CallPiece(number, call.name, call.arguments) for number, call in enumerate(chosen.tool_calls)]
            yield Chunk(index, chosen.text, chosen.logprobs or (), choice, tuple(calls))
        else:  # the first answer was sent already
            yield replace(tries.last, choice=choice)
        tries.held = []

    def _report(self, tries: _Tries) -> dict[str, Any]:
        answers = [
            {
                "raised": raised,
                "numbers": self._plan.numbers(scalars(choice.applied, choice.diagnostics)),
                "text": choice.text,
                **({"tool_calls": calls_of(choice)} if choice.tool_calls else {}),
                "finish_reason": choice.finish_reason,
                "completion_tokens": len(choice.token_ids),
                "seed": seed,
                "applied": choice.applied,
            }
            for choice, raised, seed in tries.answers
        ]
        failed = {} if tries.failed is None else {"failed": tries.failed}
        return {"outcome": tries.outcome, "kept": tries.kept, "answers": answers, **failed}
