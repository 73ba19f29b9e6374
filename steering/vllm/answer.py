"""One answer that a vLLM server generates, on the client's side."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from steering.logprobs import TopLogprobs
from steering.messages.messages import Ended, Output
from steering.protocol.sequence import AnswerTimes
from steering.protocol.sequence import Sequence as Answered
from steering.protocol.signals import Signal
from steering.timing import Timing
from steering.vllm.bodies import Body
from steering.vllm.measurements import prompt_scores_of
from steering.vllm.servers import AnswerStream, Server

Top = Sequence[tuple[int, float]]
"""The likeliest tokens in a token's place, (id, log-probability), best first."""


class RemoteAnswer:
    """An answer from its request to its last output.

    `server` works on it, None while it waits; `avoided` have lost it, and `waited` is True once it was put
    back to wait for any of them. One thread reads its stream; any may cancel it.
    """

    def __init__(self, sequence: Answered, body: Body, stop_ids: Collection[int]):
        self.sequence = sequence
        self.body = body
        self.number = sequence.output.request
        self.rows = sequence.rows
        self.server: Server | None = None
        self.avoided: list[Server] = []
        self.waited = False
        self.ended: Ended | None = None
        self.reused = 0
        self.cancelled = False
        self.stream: AnswerStream | None = None
        self._forced = sequence.spec.forced
        self._held: list[Mapping[str, Any]] = []  # messages of an answer that begins with forced tokens
        self._stop_ids = frozenset() if sequence.spec.sampling.ignore_eos else frozenset(stop_ids)
        self.restart()

    def restart(self) -> None:
        """Forget the tokens of a lost server, of which none was put out."""
        sequence, sampling = self.sequence, self.sequence.spec.sampling
        sequence.times = AnswerTimes(queued=sequence.times.queued)
        sequence.tokens, sequence.output.scores = [], []
        sequence.output.logprobs = None if sampling.logprobs is None else TopLogprobs()
        self.stream, self._held = None, []

    @property
    def retriable(self) -> bool:
        """True while nothing was put out, so that another server may answer instead."""
        return self.sequence.output.sent == 0

    def begin(self, stream: AnswerStream) -> None:
        """Read a stream from now on, which a cancelled answer closes."""
        self.stream = stream
        if self.cancelled:
            stream.close()

    def cancel(self) -> None:
        """End the answer: its server notices that the stream is closed."""
        self.cancelled = True
        if self.stream is not None:
            self.stream.close()

    def take(self, message: Mapping[str, Any], now: float) -> int:
        """Take in a message of the server, and return how many tokens it brings."""
        ended, times = message.get("ended"), self.sequence.times
        tokens: list[int] = message.get("tokens", [])
        if self._forced:
            self._held.append(message)
            if ended is None:
                return 0
            tokens = self._add_forced(ended)
        else:
            self._add(tokens, message.get("logprobs", ()), message.get("top", ()))
        if tokens:
            times.first, times.last = times.first or now, now
        if ended is not None:
            self.ended = self._end_of(ended)
        return len(tokens)

    def _add(self, tokens: Sequence[int], logprobs: Sequence[float], tops: Sequence[Top]) -> None:
        """Add tokens with their log-probabilities, where they are asked for; one that ends the answer has none."""
        output = self.sequence.output
        self.sequence.tokens += tokens
        for token, logprob, top in zip(tokens, logprobs, tops, strict=False):
            if token not in self._stop_ids:
                if output.logprobs is not None:
                    output.logprobs.append(logprob, [(other, value) for other, value in top])
                if self.sequence.wants(Signal.LOGPROBS):
                    output.scores.append(logprob)

    def _add_forced(self, ended: Mapping[str, Any]) -> list[int]:
        """Add the forced tokens, which the server has read behind the prompt, and those generated after them."""
        spec, before = self.sequence.spec, len(self.sequence.tokens)
        start, most = spec.prompt.length - 1, spec.sampling.logprobs or 0
        scores = prompt_scores_of(ended["taken"]["prompt_logprobs"])
        tops = [
            list(zip(ids, values, strict=True))
            for ids, values in zip(
                scores.top_ids[start:, :most].tolist(), scores.top_logprobs[start:, :most].tolist(), strict=True
            )
        ]
        self._add(self._forced, scores.logprobs[start:].tolist(), tops)
        room = spec.max_tokens - len(self._forced)
        for message in self._held:
            tokens = message.get("tokens", [])[:room]
            room -= len(tokens)
            self._add(tokens, message.get("logprobs", ()), message.get("top", ()))
        return self.sequence.tokens[before:]

    def _end_of(self, ended: Mapping[str, Any]) -> Ended:
        """Return the end of the answer from that of the server."""
        sequence, reason = self.sequence, self.body.reason or ended["reason"]
        fed = max(len(sequence.tokens) - 1, 0)
        measurements = self.body.taken(ended.get("taken", {}), fed)
        self.reused = int(ended.get("reused", 0))
        return Ended(reason, None, self.timing, measurements, sequence.output.scores, fed)

    def output(self) -> list[Output]:
        """Return the tokens since the last output, with the answer's end; nothing where there is neither."""
        out, tokens = self.sequence.output, self.sequence.tokens[self.sequence.output.sent :]
        if not tokens and self.ended is None:
            return []
        logprobs = None if out.logprobs is None else out.logprobs.since(out.sent)
        first_at = self.sequence.times.first if not out.sent else 0.0
        out.sent = len(self.sequence.tokens)
        return [Output(out.request, out.answer, tokens, logprobs, first_at, self.reused, self.ended)]

    @property
    def timing(self) -> Timing:
        times = self.sequence.times
        return Timing(times.queued, times.admitted, times.first, times.last)
