"""The engine core: messages with tokens and tensors in, tokens and measurements out.

It makes no text, except where a stop string may end an answer, and does not know who asks.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace

from steering.core.admission import AdmissionControl
from steering.core.budget import StepBudget
from steering.core.steps import Steps
from steering.core.tensor_parallel import RankMessages, StepEvents
from steering.errors import SHUTTING_DOWN, Fault
from steering.grammar.compiled import Grammars
from steering.histogram import Histogram
from steering.logprobs import TopLogprobs
from steering.messages.messages import Add, Output
from steering.model.mllm import MLLM
from steering.protocol.sequence import Pair, PendingOutput, PrefillState, QueuePlace, Sequence
from steering.protocol.text import TextStream
from steering.runner.runner import Runner
from steering.runner.sampler import answer_seed


class EngineCore:
    """Answers requests with continuous batching: `add`, `abort`, `step` and `take_outputs`.

    Any thread may call it; one thread steps. `prefill_budget` bounds the prompt tokens of one step. `max_waiting` answers
    may wait for a slot; a request is refused where it is expected to wait longer than `max_wait` seconds. Where several
    processes run the model together, the first rank's core takes requests and the others `follow` it.
    """

    def __init__(self, mllm: MLLM, runner: Runner, prefill_budget: int, max_waiting: int, max_wait: float | None):
        self.mllm = mllm
        self.runner = runner
        self.max_waiting = max_waiting
        self.changed = threading.Condition()
        self._grammars = Grammars(mllm)
        self._rank_messages = RankMessages(mllm.ranks) if mllm.ranks.size > 1 else None
        failed = () if self._rank_messages is None else (self._rank_messages.failed,)
        self.steps = Steps(mllm, runner, runner.pool.slots, prefill_budget, self.changed, *failed)
        self.scheduler = self.steps.scheduler
        queued = (self.scheduler, self.steps.rate, self.steps.alive, self._incoming, self.steps.allowance)
        self.admission = AdmissionControl(*queued, max_waiting, max_wait)
        self._closed: Fault | None = None

    # -- requests ------------------------------------------------------------------------------------------------------

    def check(self, answers: int, group: str) -> None:
        """Raise Busy where a group's `answers` may not join the queue now, Fault where the core is closed."""
        with self.changed:
            self._refuse(answers, group)

    def add(self, request: Add) -> list[Sequence]:
        """Queue a request and return the sequences of its answers.

        Raises RequestError where its grammar cannot be compiled, and what `check` raises.
        """
        if self._rank_messages is not None and self.mllm.ranks.rank:
            raise RuntimeError("Requests are for the first rank's engine, which this one follows.")
        sequences = self._sequences(request)
        with self.changed:
            if request.admitted:
                self._refuse_when_closed()
            else:
                self._refuse(len(sequences), request.group)
            if self._rank_messages is None:
                self._join(sequences)
            else:
                self._rank_messages.submit(sequences, request)
            self.changed.notify_all()
        return sequences

    def abort(self, number: int) -> None:
        """End the answers of a request; their slots are free at the next step. Harmless where it has ended."""
        with self.changed:
            if self._rank_messages is None:
                self._end(number)
            else:
                self._rank_messages.cancel(number)
            self.changed.notify_all()

    def put_out_whole(self, number: int) -> None:
        """Put out the tokens of a request's answers only when each ends."""
        with self.changed:
            for sequence in (*self.steps.alive, *self._incoming()):
                if sequence.output.request == number:
                    sequence.output.in_pieces = False

    def close(self) -> None:
        """Refuse new requests and end those that run, with a Fault, at the next step."""
        with self.changed:
            self._closed = Fault(SHUTTING_DOWN)
            if self._rank_messages is None:
                self._end_all()
            else:
                self._rank_messages.end()
            self.changed.notify_all()

    # -- steps ---------------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Admit and prefill, decode, put out tokens; sequences leave as they finish."""
        allowance = self.steps.next_allowance(bool(self._incoming()))
        if self._rank_messages is not None:
            with self.changed:
                events, joined = self._rank_messages.drain()
            self._rank_messages.broadcast(events, self.steps.alive, allowance)
            self._apply(events, joined)
        with self.mllm.stepping:
            self.steps.step(allowance)

    def follow(self) -> None:
        """Take the same steps as the first rank's core until that ends; for the cores of the other ranks."""
        if self._rank_messages is None or self.mllm.ranks.rank == 0:
            raise RuntimeError("Only the engines of a tensor-parallel model's other ranks follow the first one's.")
        while True:
            events, allowance = self._rank_messages.receive(self.steps.alive)
            if events.over:
                return
            self._apply(events, [self._sequences(request) for request in events.added])
            self.steps.step(allowance)
            self.take_outputs()

    def end_following(self) -> None:
        """Tell the other ranks, unless they are gone, that there is no further step."""
        if self._rank_messages is not None:
            with suppress(RuntimeError):
                self._rank_messages.broadcast(StepEvents(over=True), self.steps.alive)

    def take_outputs(self) -> list[Output]:
        """Return the outputs since the last call; for the thread that steps."""
        return self.steps.outputs.take()

    def fail(self, error: BaseException) -> list[Output]:
        """Refuse new requests for good, and return the last outputs of all that run, which end with a Fault."""
        self._closed = Fault(f"The engine died: {error}")
        with self.changed:
            for sequence in [*self.steps.alive, *self._incoming()]:
                sequence.error = self._closed
                self.steps.outputs.put_out(sequence)
            self.changed.notify_all()
        return self.take_outputs()

    @property
    def closed(self) -> bool:
        """True once it takes no more requests."""
        return self._closed is not None

    @property
    def has_work(self) -> bool:
        """True while requests run or wait."""
        return bool(self.steps.alive or self._incoming())

    # -- numbers -------------------------------------------------------------------------------------------------------

    @property
    def slots(self) -> int:
        return self.scheduler.slots

    @property
    def waiting(self) -> int:
        """The number of answers in the queue."""
        return self.admission.waiting

    @property
    def bins(self) -> Mapping[str, Histogram]:
        """The distributions of times and batches since the start, in seconds and answers."""
        return self.steps.bins

    def stats(self) -> dict[str, float]:
        """Return counters since the start and current gauges."""
        return {
            "running": len(self.scheduler.running) + (self.scheduler.filling is not None),
            "waiting": self.waiting,
            "slots": self.slots,
            "max_waiting": self.max_waiting,
            **self.runner.stats(),
            "kv_tokens": sum(sequence.length for sequence in list(self.scheduler.running)),
            **self.steps.counts,
            **self.steps.budget.stats(len(self.scheduler.running)),
        }

    def count_anew(self, budget: StepBudget | None = None) -> None:
        """Set all counters to 0; from now on steps keep to `budget`, where one is given."""
        self.steps.counts.update(dict.fromkeys(self.steps.counts, 0))
        for bins in self.bins.values():
            bins.clear()
        self.steps.budget = budget or self.steps.budget

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _sequences(self, request: Add) -> list[Sequence]:
        """Return a sequence for each of a request's answers, then for each baseline."""
        start = None if request.grammar is None else self._grammars.start(request.grammar)
        sequences: list[Sequence] = []
        for baseline in (False, True)[: 1 + request.baseline]:
            spec, first = request.spec, len(sequences)
            if baseline:
                spec = replace(spec, prompt=request.baseline_prompt or spec.prompt, asked={})
            for index in range(request.n):
                own = replace(spec, seed=answer_seed(spec.seed, index))
                logprobs = None if spec.sampling.logprobs is None else TopLogprobs()
                numbers = (request.number, len(sequences))
                sequence = Sequence(
                    own,
                    PendingOutput(*numbers, self._stops(request), request.in_pieces, logprobs=logprobs),
                    QueuePlace(request.group, request.waited),
                    PrefillState(sequences[first] if index else None, expects_forks=not index and request.n > 1),
                    matcher=None if start is None else start.copy(),
                )
                if own.contrast is not None:
                    sequence.pair = Pair(sequence, request.twin_prompt)
                sequences.append(sequence)
        return sequences

    def _stops(self, request: Add) -> TextStream | None:
        stop = request.spec.sampling.stop
        return request.text_stream(self.mllm.tokenizer) if stop else None

    def _join(self, sequences: list[Sequence]) -> None:
        now = time.monotonic()
        for sequence in sequences:
            sequence.times.queued = now
        self.scheduler.enqueue(sequences)
        self.steps.alive.update(dict.fromkeys(sequences))

    def _apply(self, events: StepEvents, joined: list[list[Sequence]]) -> None:
        """Apply the events that all ranks received."""
        if events == StepEvents():
            return
        with self.changed:
            for sequences in joined:
                self._join(sequences)
            for number in events.cancelled:
                self._end(number)
            if events.ended:
                self._end_all()

    def _end(self, number: int) -> None:
        for sequence in self.steps.alive:
            if sequence.output.request == number and not sequence.is_twin:
                sequence.cancelled = sequence.cancelled or sequence.finish_reason is None

    def _end_all(self) -> None:
        unfinished = [sequence for sequence in self.steps.alive if not sequence.done]
        for sequence in unfinished:
            sequence.error = self._closed or Fault(SHUTTING_DOWN)

    def _incoming(self) -> list[Sequence]:
        """Return the sequences that join the queue at the next step of all ranks."""
        return [] if self._rank_messages is None else self._rank_messages.incoming

    def _refuse(self, answers: int, group: str) -> None:
        self._refuse_when_closed()
        self.admission.check(answers, group)

    def _refuse_when_closed(self) -> None:
        if self._closed is not None:
            raise Fault(str(self._closed))
