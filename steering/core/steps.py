"""The steps of an engine core: admit and prefill, decode, put out tokens, release ended sequences."""

from __future__ import annotations

import logging
import threading
import time
import traceback
from collections.abc import Callable
from functools import partial

import torch

from steering.core.admission import Rate
from steering.core.budget import Allowance, StepBudget, StepTotals
from steering.core.outputs import Outputs
from steering.core.price import PassClock
from steering.core.scheduler import Scheduler
from steering.devices import lost
from steering.errors import Fault, RequestError
from steering.histogram import Histogram
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.runner.contrastive import ContrastiveBranches, rows_of
from steering.runner.runner import Runner
from steering.runner.sampler import Sampled

log = logging.getLogger(__name__)

SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_BINS = {
    "queue_seconds": SECONDS,
    "prefill_seconds": SECONDS,
    "inter_token_seconds": SECONDS,
    "batch_size": tuple(2**power for power in range(11)),
}
"""Bounds of the histograms: time until an answer gets its slot, until its first token, between tokens; rows of a decode."""


class Steps:
    """The work of the stepping thread.

    `alive` holds the sequences from submission to the end, in order of arrival; any thread may read and extend it with the
    lock `changed`, which is notified when one has left. `budget` limits what a step takes in. `meanwhile` is called where
    first tokens are ready, and returns True where requests have come that may run in the same step.

    With `overlap`, the host reads the tokens of a pass after it has launched the next one, so that a device need not wait
    for the host. Rows whose answer turns out to have ended then have no part in what follows that pass.
    """

    def __init__(
        self,
        mllm: MLLM,
        runner: Runner,
        slots: int,
        budget: int,
        changed: threading.Condition,
        failed: Callable[[Exception], None] = lambda error: None,
    ):
        self.mllm = mllm
        self.runner = runner
        self.scheduler = Scheduler(slots, budget, runner.move, runner.prefixes.known, runner.prefixes.awaits)
        self.branches = ContrastiveBranches(runner.changes, self._enqueue_twin, self._dismiss_twin)
        self.alive: dict[Sequence, None] = {}
        self.counts = dict.fromkeys(
            ("steps", "prompt_tokens", "generated_tokens", "finished", "faults", "refused", "cancelled"), 0
        )
        self.bins = {name: Histogram(bounds) for name, bounds in _BINS.items()}
        self.outputs = Outputs(mllm, runner, self.branches, self.counts, self.bins)
        self.rate = Rate()
        self.budget = StepBudget(budget)
        self.meanwhile: Callable[[], bool] = lambda: False
        self.overlap = False
        self._clock = PassClock(mllm.device)
        self._ended = 0.0
        self._decoded = self._clock.mark()
        self._changed = changed
        self._failed = failed

    def allowance(self) -> Allowance:
        """Return the limits of a step."""
        return self.budget.allowance(len(self.scheduler.running))

    def next_allowance(self, coming: bool) -> Allowance:
        """Return the limits of the next step: nothing where no prompts wait or are `coming`, or where they should wait."""
        running = len(self.scheduler.running)
        if running and not (coming or self.scheduler.waiting or self.scheduler.filling):
            return Allowance()  # no arithmetic: a decode may be as short as a millisecond
        self.budget.refresh()
        waiting = list(self.scheduler.waiting) if self.scheduler.filling is None else []
        if waiting and running:
            waiting = waiting[: self.scheduler.slots - running]
            tokens = sum(sequence.prompt.length for sequence in waiting)
            if self.budget.holds_back(running, len(waiting), tokens, time.monotonic()):
                return Allowance()
        return self.allowance()

    @torch.inference_mode()
    def step(self, allowance: Allowance) -> None:
        """Admit and prefill within the allowance, decode, put out tokens; sequences leave as they finish."""
        began = time.monotonic()
        beside = bool(self.scheduler.running)
        last = totals = self._take_in(allowance)
        while last.prompts and not last.copied and self.meanwhile():
            remaining = (allowance if beside else self.allowance()).after(totals)
            if remaining is None:
                break
            last = self._take_in(remaining)
            totals = totals.plus(last)
        between = time.monotonic()
        running = len(self.scheduler.running)
        decodes = any(not (sequence.held or sequence.complete) for sequence in self.scheduler.running)
        if decodes:
            start = self._clock.mark() if totals.prompts or totals.values or not beside else self._decoded
            self._decode()
            self._decoded = self._clock.mark()
        else:
            self.outputs.read()
            self._let_go(list(self.scheduler.running))
        self.counts["steps"] += 1
        now = time.monotonic()
        self.rate.step(now - began, totals.tokens)
        self._clock.settle()
        if decodes and self.overlap:
            self._clock.passed(self.budget.decode, running, start)
        elif decodes and totals.waited:  # the time between two steps is part of the gap between two tokens
            self.budget.decode.learn(running, now - between + (began - self._ended if beside else 0.0))
        self._ended = now

    def _take_in(self, allowance: Allowance) -> StepTotals:
        """Admit and prefill within the allowance."""
        with self._changed:  # callers queue at any time
            self._leave_if_done(list(self.alive))
            self.scheduler.budget = allowance.tokens()
            forks = self.scheduler.next_forks()
            upcoming = self.scheduler.upcoming() if allowance.most and not forks else []
        start = self._clock.mark()
        # Copies of a prompt need no embedding.
        reading = [sequence for sequence in upcoming if sequence.prefill.fork_of not in upcoming]
        values, complete = self._embed_what_fits(reading, allowance)
        if values:
            self._clock.passed(self.budget.picture, values, start)
            start = self._clock.mark()
        with self._changed:
            self.scheduler.budget = allowance.tokens(values)
            runs = complete and bool(allowance.most)
            batch = forks or (self.scheduler.next_prefill(self._divisible) if runs else [])
        if not batch:
            return StepTotals(values=values, waited=self._clock.waits or not values)
        before = [sequence.computed for sequence in batch]
        part = allowance.part(self.scheduler.unread(batch[0]), values)
        self._prefill(batch, part, forks=bool(forks))
        ran = [
            sequence.computed - max(start, sequence.prefill.reused)
            for sequence, start in zip(batch, before, strict=True)
        ]
        tokens = 0 if forks else len(batch) * max(0, *ran)
        if tokens:
            self._clock.passed(self.budget.prompt, tokens, start)
        waited = self._clock.waits or self.scheduler.filling is None
        return StepTotals(tokens, len(batch), values, bool(forks), waited)

    def _prefill(self, batch: list[Sequence], part: int, forks: bool) -> None:
        try:
            logits = self.runner.fork(batch) if forks else self.runner.prefill(batch, part)
            if logits is None:
                return
            rows = list(zip(batch, logits, strict=True))
            leaders = [(sequence, row) for sequence, row in rows if sequence.is_leader]
            ready = [(sequence, row) for sequence, row in rows if sequence.pair is None]
            resumed = (self.branches.resumed(sequence, row) for sequence, row in rows if sequence.is_twin)
            ready += [leader for leader in resumed if leader is not None]
            first = [sequence for sequence, _ in ready]
            sampled = self.runner.next_tokens(first, torch.stack([row for _, row in ready])) if ready else None
            for sequence, row in ready:
                if sequence.held:
                    self.branches.end_wait(sequence, row)
        except Exception as error:
            self._end_if_fatal(error)
            if len(batch) == 1:
                self._fail(batch, error)
            else:
                log.warning("A prefill of %d prompts failed; they will run one by one.", len(batch), exc_info=error)
                with self._changed:
                    self.scheduler.retry_alone(batch)
            return
        for sequence in batch:
            self.scheduler.prefilled(sequence)
            if not sequence.is_twin:
                self.counts["prompt_tokens"] += sequence.prompt.length
                self.bins["queue_seconds"].add(sequence.times.admitted - sequence.times.queued)
        for leader, row in leaders:
            self.branches.hold(leader, self.runner.choice.masked([leader], row[None])[0])
            self._pair(leader)
        if sampled is not None:
            self._sampled(first, sampled)
        self._keep(self.runner.prefixes.keep, batch)
        self._let_go([*first, *batch])

    def _decode(self) -> None:
        running = list(self.scheduler.running)
        decode = partial(self.runner.decode, running, self.branches, lambda: self._goes_on(running))
        try:
            decoded = decode()
        except Exception as first:
            self._end_if_fatal(first)
            log.warning("A step failed for %d sequences; it will run again.", len(running), exc_info=first)
            traceback.clear_frames(first.__traceback__)  # frees tensors of the failed step
            try:
                decoded = decode()
            except Exception as error:
                self._end_if_fatal(error)
                self._fail(self.runner.blamed(error, running), error)
                return
        self.bins["batch_size"].add(len(running))
        due = [sequence for sequence in running if sequence.due and not sequence.done]
        if decoded is not None:
            for leader in due:
                self.branches.hold(leader, decoded.logits[leader.slot])
            for sequence, reason in decoded.spoilt.items():
                self._end_if_fatal(reason)
                self._fail([sequence], reason)
            self._sampled(running, decoded.sampled)
        self._let_go(running)
        for leader in due:
            if not leader.done:
                self._pair(leader)

    def _goes_on(self, running: list[Sequence]) -> bool:
        """Read the tokens that their pass is fed; return True where some answer goes on behind them."""
        self.outputs.read()
        return not all(sequence.done or sequence.is_twin for sequence in running)

    def _sampled(self, sequences: list[Sequence], sampled: Sampled) -> None:
        """Put out the sampled tokens now or, with overlap, behind the next launch, which is the time for earlier ones."""
        self.outputs.read()
        self.outputs.sampled(sequences, sampled)
        if not self.overlap:
            self.outputs.read()

    def _embed_what_fits(self, sequences: list[Sequence], allowance: Allowance) -> tuple[int, bool]:
        """Embed the waiting prompts that fit.

        Where the new pictures of the first one do not fit into a step, they are encoded over several. Returns the values of
        the pictures that were encoded, and whether prompts may run.
        """
        new = [self.runner.embedder.new_values(sequence) for sequence in sequences]
        tokens = [self.scheduler.unread(sequence) for sequence in sequences]
        plan = allowance.plan(list(zip(tokens, new, strict=True)))
        if plan.prompts or not new:
            self._embed(sequences[: plan.prompts])
            return sum(new[: plan.prompts]), plan.runs or not new
        try:
            encoded = self.runner.embedder.encode_next(sequences[0], allowance.values())
        except Exception as error:  # it is raised again where the whole prompt is embedded
            self._failed(error)
            encoded = 0
        return encoded, not encoded

    def _embed(self, sequences: list[Sequence]) -> None:
        """Embed waiting prompts, their images together; one whose images cannot be encoded does not stop the others."""
        try:
            self.runner.embed(sequences)
        except Exception as error:
            self._end_if_fatal(error)
            for sequence in sequences if len(sequences) > 1 else ():
                self._embed([sequence])

    @staticmethod
    def _divisible(sequence: Sequence) -> bool:
        """Return True where a waiting prompt may share a prefill; one that could not be embedded runs, and fails, alone."""
        return sequence.prefill.embedded is not None and sequence.prefill.embedded.divisible

    def _keep(self, keep: Callable[[Sequence], None], sequences: list[Sequence]) -> None:
        """Cache prefixes from the sequences' slots for later prompts; where that fails, pause the cache for a while."""
        try:
            for sequence in sequences:
                if sequence.error is None:
                    keep(sequence)
        except Exception as error:
            self._end_if_fatal(error)
            log.exception("The prefix cache failed: %d prompts will run without it.", self.runner.prefixes.rest())

    def _let_go(self, sequences: list[Sequence]) -> None:
        """Release the sequences that are done."""
        finished = [sequence for sequence in sequences if sequence.finish_reason is not None]
        self._keep(self.runner.prefixes.keep_answer, finished)
        with self._changed:
            self._leave_if_done(sequences)

    def _leave_if_done(self, sequences: list[Sequence]) -> None:
        """Free slots, with the lock held; clear those of faulty sequences and their twins before any is moved."""
        done = [sequence for sequence in sequences if sequence.done]
        for sequence in rows_of(sequence for sequence in done if sequence.error is not None):
            if sequence.slot >= 0:
                self.runner.clear(sequence.slot)
        for sequence in done:
            self._leave(sequence)

    def _leave(self, sequence: Sequence) -> None:
        if sequence not in self.alive:
            return
        del self.alive[sequence]
        slot = sequence.slot
        if not sequence.is_twin:  # counted first, because statistics are read without the lock
            self.counts[_ending(sequence)] += 1
        self.scheduler.release(sequence)
        sequence.release()
        if sequence.is_twin:
            return
        if sequence.twin is not None:
            self._dismiss_twin(sequence.twin)
        if slot >= 0:
            self.rate.ended(len(sequence.tokens))
        if sequence.finish_reason is None:
            self.outputs.put_out(sequence)
        self._changed.notify_all()

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """End sequences whose step raised."""
        log.error("A step failed for %d sequences.", len(sequences), exc_info=error)
        with self._changed:
            failed = [sequence if sequence.pair is None else sequence.pair.leader for sequence in sequences]
            for sequence in failed:
                sequence.error = sequence.error or Fault(f"The request failed in the engine: {error}")
            self._leave_if_done(failed)

    def _enqueue_twin(self, twin: Sequence) -> None:
        with self._changed:
            self.scheduler.enqueue_twin(twin)
            self.alive[twin] = None

    def _dismiss_twin(self, twin: Sequence) -> None:
        with self._changed:
            twin.cancelled = True
            self._leave(twin)

    def _pair(self, leader: Sequence) -> None:
        """Give a waiting leader its next twin; where that fails, end the leader."""
        try:
            self.branches.pair(leader)
        except Exception as error:
            self._end_if_fatal(error)
            self._fail([leader], error)

    def _end_if_fatal(self, error: Exception) -> None:
        """Raise an error by which a device is lost: nothing works after it, so no other request may be tried."""
        if lost(error, self.mllm.devices):
            raise error
        self._failed(error)


def _ending(sequence: Sequence) -> str:
    """Return the counter of how it ended; a wrong request is not a fault, over which an operator would be called."""
    if sequence.error is not None:
        return "refused" if isinstance(sequence.error, RequestError) else "faults"
    return "cancelled" if sequence.finish_reason is None else "finished"
