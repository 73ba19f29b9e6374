"""Guarded answers: an answer that meets a guard's conditions is given again, and the better one is kept."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import steering
from server.engine.runtime import Serving
from server.engine.served import ServedCompletion
from server.journal.scalars import scalars
from server.requests.guarding import GuardPlan
from steering import CallPiece, Choice, Chunk, Request, Result, answer_seed
from steering.readouts.drift import ROWS, drift

log = logging.getLogger("helmsight")

Outcome = Literal["quiet", "first", "cut", "retry", "same", "failed"]
"""The outcome of a guard.

No condition held; new answers met one; a new answer met none, but was cut; it was kept; it could only be the same; it could
not be given.
"""
Begin = Callable[[ServedCompletion], Iterator[Chunk | None]]


class GivenRequest(NamedTuple):
    """A request as it was answered, and the tokens of its prompt."""

    request: Request
    prompt_tokens: int


class GuardTry(NamedTuple):
    """An answer, the conditions that it met, its seed, and the request that it answers, None for the first one."""

    choice: Choice
    raised: list[str]
    seed: int | None
    given: GivenRequest | None


@dataclass
class _Tries:
    """The answers to one choice: `last` is the last chunk of the first, `held` those before it."""

    held: list[Chunk] = field(default_factory=list)
    last: Chunk | None = None
    answers: list[GuardTry] = field(default_factory=list)
    kept: int = 0
    failed: str | None = None

    @property
    def outcome(self) -> Outcome:
        """The outcome, as the choice reports it."""
        first, *others = self.answers
        if self.kept:
            return "retry"
        if self.failed is not None:
            return "failed"
        if not first.raised:
            return "quiet"
        if not others:
            return "same"
        return "cut" if any(not answer.raised for answer in others) else "first"


def calls_of(choice: Choice) -> list[dict[str, str]]:
    """Return the tool calls of an answer, as the report of a guard has them."""
    return [{"name": call.name, "arguments": call.arguments} for call in choice.tool_calls]


def with_drift(choice: Choice, baseline: Choice | None, request: Request) -> Choice:
    """Return an answer with its drift from a baseline that another request gave, if it asks for one and has none."""
    report, readouts = choice.diagnostics, request.readouts
    if report is None or readouts is None or baseline is None or report.get("drift", baseline) is not None:
        return choice
    if choice.answer_states is None or baseline.answer_states is None:
        return choice
    rows = readouts[ROWS]
    found = {"to": "baseline", "rows": rows, "cosine": drift(choice.answer_states, baseline.answer_states, rows)}
    return replace(choice, diagnostics={**report, "drift": found})


def _result(completion: ServedCompletion, n: int) -> Result:
    """Return the result of a try, of one that was cancelled or failed only the tokens."""
    try:
        return completion.result()
    except steering.SteeringError:
        generated = sum(map(completion.generated, range(n)))
        return Result((), completion.prompt_tokens, generated, completion.cached_tokens, 0)


class GuardedCompletion:
    """A completion whose choices are given again where a guard's conditions hold for them; see `ServedCompletion`.

    `seed` is that of the first request. `again` is the request to give again, submitted in the queue of `group`; with
    `alike` it has the first one's answer, so that nothing is given again. A greedy one is given again once, since further
    answers would be the same.

    With `hold`, nothing of a choice is sent before it is decided; otherwise the first answer is streamed, and the last chunk
    of a choice may hold another one.
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
        alike: bool = False,
    ):
        self.prompt_tokens, self.max_tokens, self.prompt_end = first.prompt_tokens, first.max_tokens, first.prompt_end
        self._first, self._seed, self._again, self._plan = first, seed, again, plan
        self._serving, self._group, self._hold = serving, group, hold
        self._tries = [_Tries() for _ in range(n)]
        self._retries = 0 if alike else 1 if again.sampling.greedy else plan.retries
        self._given: list[tuple[ServedCompletion, int]] = [(first, n)]
        self._again_running: list[ServedCompletion] = []
        self._ended: str | None = None
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
        results = [_result(*given) for given in self._given]
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
            len(answer.choice.token_ids) for answer in self._tries[index].answers[1:]
        )

    def text_of(self, index: int) -> str:
        """Return the text of the first try of a choice so far."""
        return self._first.text_of(index)

    def cancel(self) -> None:
        """Stop generating."""
        with self._lock:
            self._cancelled = True
            completions = [self._first, *self._again_running]
        for completion in completions:
            completion.cancel()

    def end(self, why: str) -> None:
        """Give nothing again any more, so that choices which are not decided keep their first answers; `why` is reported.

        Where a first answer is still running, there is nothing to keep, and all are cancelled.
        """
        if any(tries.last is None for tries in self._tries):
            self.cancel()
            return
        with self._lock:
            self._ended = why
            completions = [*self._again_running]
        for completion in completions:
            completion.cancel()

    def kept(self, index: int) -> GivenRequest | None:
        """Return the request whose answer a decided choice has; None if that is the first one's."""
        tries = self._tries[index]
        given = tries.answers[tries.kept].given
        return None if given is None else GivenRequest(replace(given.request, n=len(self._tries)), given.prompt_tokens)

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
        for attempt in range(self._retries):
            pending = [index for index, tries in enumerate(self._tries) if index not in self._choices and tries.last]
            if not pending or self._cancelled or self._ended is not None:
                break
            yield from self._retry(pending, attempt, begin, resume)
        if not self._cancelled:
            for index, tries in enumerate(self._tries):
                if index not in self._choices and tries.last is not None:
                    tries.failed = self._ended
                    yield from self._decided(index)

    def _judge(
        self, tries: _Tries, choice: Choice, seed: int | None, number: int, given: GivenRequest | None = None
    ) -> list[str]:
        """Return the conditions that an answer meets; `seed` is that of its request, in which it has this number."""
        raised = self._plan.raised(scalars(choice.applied, choice.diagnostics))
        tries.answers.append(GuardTry(choice, raised, None if seed is None else answer_seed(seed, number), given))
        return raised

    def _retry(
        self, pending: list[int], attempt: int, begin: Begin, resume: Callable[[], object] | None
    ) -> Iterator[Chunk | None]:
        """Give the pending choices again; yield those that are decided, and None while there is nothing."""
        try:
            if resume is None:
                completion, given = self._submit(len(pending), attempt)
            else:
                completion, given = yield from self._submitted_aside(len(pending), attempt, resume)
            for chunk in begin(completion):
                if chunk is None:
                    yield None
                    continue
                if chunk.choice is None:
                    continue
                index = pending[chunk.index]
                tries = self._tries[index]
                first = tries.answers[0].choice
                choice = with_drift(replace(chunk.choice, index=index), first.baseline, given.request)
                raised = self._judge(tries, choice, self._seed_of(attempt), chunk.index, given)
                if not raised and (chunk.choice.finish_reason != "length" or first.finish_reason == "length"):
                    tries.kept = len(tries.answers) - 1
                    yield from self._decided(index)
        except steering.SteeringError as error:
            if self._cancelled:
                raise
            log.info("a guarded answer could not be given again: %s", error)
            for index in pending:
                if index not in self._choices:
                    self._tries[index].failed = self._ended or str(error)
                    yield from self._decided(index)

    def _submit(self, n: int, attempt: int) -> tuple[ServedCompletion, GivenRequest]:
        request = replace(self._again, n=n)
        request = replace(request, sampling=replace(request.sampling, seed=self._seed_of(attempt)))
        with self._serving.engine.turn(self._group) as turn:
            while steering.next_prelude(request) is not None:
                request = turn.decide(request, self._began)
            completion = turn.submit(request)
        self._began(completion)
        self._given.append((completion, n))
        return completion, GivenRequest(request, completion.prompt_tokens)

    def _seed_of(self, attempt: int) -> int | None:
        """Return the seed of a retry's request, counted from the first one's so that no two tries draw alike."""
        seed = self._again.sampling.seed
        return None if seed is None else (seed + attempt + 1 + 2**63) % 2**64 - 2**63  # as int64, like `answer_seed`

    def _began(self, completion: ServedCompletion) -> None:
        with self._lock:
            self._again_running.append(completion)
            unwanted = self._cancelled or self._ended is not None
        if unwanted:
            completion.cancel()

    def _submitted_aside(
        self, n: int, attempt: int, resume: Callable[[], object]
    ) -> Generator[None, None, tuple[ServedCompletion, GivenRequest]]:
        """Submit in a thread of its own, since preparing a request takes long; yield None meanwhile."""
        outcome: list[tuple[ServedCompletion, GivenRequest] | Exception] = []

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
        first, chosen = tries.answers[0].choice, tries.answers[tries.kept].choice
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
            for choice, raised, seed, _ in tries.answers
        ]
        failed = {} if tries.failed is None else {"failed": tries.failed}
        return {"outcome": tries.outcome, "kept": tries.kept, "answers": answers, **failed}
