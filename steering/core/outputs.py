"""The outputs of an engine core: the tokens of each step, and the ends of answers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Mapping

from steering.devices import lost
from steering.errors import Fault, RequestError, panics_raise
from steering.histogram import Histogram
from steering.messages.messages import Ended, Output
from steering.model.mllm import MLLM
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.runner.contrastive import ContrastiveBranches
from steering.runner.runner import Runner
from steering.runner.sampler import HostCopy, Read, Sampled
from steering.timing import Timing

log = logging.getLogger(__name__)


class Outputs:
    """Appends sampled tokens to answers, and collects outputs until they are taken; for the thread that steps."""

    def __init__(
        self,
        mllm: MLLM,
        runner: Runner,
        branches: ContrastiveBranches,
        counts: dict[str, int],
        bins: Mapping[str, Histogram],
    ):
        self._mllm, self._runner, self._branches = mllm, runner, branches
        self._counts, self._bins = counts, bins
        self._outputs: list[Output] = []
        self._unread: deque[tuple[list[tuple[int, Sequence]], HostCopy]] = deque()

    def take(self) -> list[Output]:
        """Return the outputs since the last call."""
        outputs, self._outputs = self._outputs, []
        return outputs

    def sampled(self, sequences: list[Sequence], sampled: Sampled) -> None:
        """Begin to copy the sampled tokens, of every sequence that is neither done, held nor a twin, to the host."""
        rows = [
            (row, sequence)
            for row, sequence in enumerate(sequences)
            if not (sequence.done or sequence.held or sequence.is_twin)
        ]
        for _, sequence in rows:
            for branch in _branches(sequence):
                branch.output.in_flight += 1
        self._unread.append((rows, sampled.to_host()))

    def read(self) -> None:
        """Wait for the tokens that were sampled, and append them to their answers."""
        while self._unread:
            rows, copied = self._unread[0]
            numbers = copied.read()  # the only place where the host waits for the device
            self._unread.popleft()
            self._hand_out(rows, numbers)

    def _hand_out(self, rows: list[tuple[int, Sequence]], numbers: Read) -> None:
        tokens, finite, alternatives = numbers
        now = time.monotonic()
        for row, sequence in rows:
            if sequence.done:
                continue
            if not finite[row]:
                sequence.error = Fault("The model produced logits that are not finite for this request.")
                continue
            try:
                with panics_raise(lambda panic: Fault(f"The tokenizer panicked: {panic}")):
                    self._append(sequence, tokens[row], None if alternatives is None else alternatives[row], now)
            except RequestError as error:  # its grammar is too expensive
                sequence.error = error
            except Exception as error:
                if lost(error, self._mllm.devices):
                    raise
                log.exception("A token could not be handed out.")
                sequence.error = Fault(f"The request failed in the engine: {error}")
                sequence.finish_reason = None  # the failed token may have been the last one

    def _append(
        self, sequence: Sequence, token: int, scored: tuple[float, list[int], list[float]] | None, now: float
    ) -> None:
        """Add a token to an answer and its twin; end the answer where that was its last token.

        scored: the token's log-probability, and the likeliest tokens with theirs, where some row of the batch needs them.
        """
        self._counts["generated_tokens"] += 1
        if sequence.matcher is not None:
            sequence.matcher.advance(token)
        if sequence.times.first:
            self._bins["inter_token_seconds"].add(now - sequence.times.last)
        else:
            self._bins["prefill_seconds"].add(now - sequence.times.admitted)
            sequence.times.first = now
        sequence.times.last = now
        for branch in _branches(sequence):
            branch.tokens.append(token)
            branch.output.in_flight -= 1
        sampling, stops = sequence.spec.sampling, sequence.output.stops
        ends = token in self._mllm.stop_ids and not sampling.ignore_eos
        if not ends:
            if stops is not None:
                stops.feed(token)
            if scored is not None:
                logprob, ids, values = scored
                if sequence.output.logprobs is not None:
                    sequence.output.logprobs.append(logprob, list(zip(ids, values, strict=True))[: sampling.logprobs])
                if sequence.wants(Signal.LOGPROBS):
                    sequence.output.scores.append(logprob)
        if ends or (stops is not None and stops.stopped):
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.spec.max_tokens:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            self._runner.read(sequence, self._branches)
        if sequence.output.in_pieces or sequence.finish_reason is not None:
            self.put_out(sequence)

    def put_out(self, sequence: Sequence) -> None:
        """Add an output with an answer's tokens since its last output and, if the answer is done, its end."""
        out, tokens = sequence.output, sequence.tokens[sequence.output.sent :]
        logprobs = None if out.logprobs is None else out.logprobs.since(out.sent)
        first_at, reused = (0.0, 0) if out.sent else (sequence.times.first, sequence.prefill.reused)
        ended = _end_of(sequence) if sequence.done else None
        out.sent = len(sequence.tokens)
        self._outputs.append(Output(out.request, out.answer, tokens, logprobs, first_at, reused, ended))


def _branches(sequence: Sequence) -> list[Sequence]:
    return [sequence] if sequence.twin is None else [sequence, sequence.twin]


def _end_of(sequence: Sequence) -> Ended:
    times, out = sequence.times, sequence.output
    timing = Timing(times.queued, times.admitted, times.first, times.last)
    reason = None if sequence.error is not None else sequence.finish_reason
    return Ended(reason, sequence.error, timing, out.taken, out.scores, sequence.fed)
