"""The client of vLLM servers: it queues answers, sends each to one server, and turns the streams into outputs."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from steering.core.admission import AdmissionControl, Rate
from steering.core.budget import Allowance
from steering.core.scheduler import Scheduler
from steering.core.steps import SECONDS
from steering.errors import SHUTTING_DOWN, Busy, Fault, RequestError, SteeringError
from steering.front.client import Client
from steering.front.completion import Completion
from steering.front.input_processor import Admitted, Limits
from steering.front.turn import Turn
from steering.grammar.compiled import Grammars
from steering.histogram import Histogram
from steering.messages.messages import Add, Ended, Output
from steering.model.mllm import MLLM
from steering.protocol.request import Request
from steering.protocol.sequence import Pair, PendingOutput, QueuePlace, Sequence
from steering.runner.sampler import answer_seed
from steering.vllm.answer import RemoteAnswer
from steering.vllm.bodies import Bodies
from steering.vllm.servers import EVERY, RESTART, AnswerFailed, Server, ServerLost, Servers, error_of
from steering.vllm.supported import Supported

log = logging.getLogger(__name__)

THREADS = 4096
"""Most threads that read streams; as many exist as answers ran at once."""
GONE = 30.0
"""Seconds after which the answers of a server that says nothing any more are given up."""
GRACE = RESTART
"""Seconds that answers wait in the queue where no server is well: one that is back by then was busy, or its network was."""
_UNBOUNDED = 2**62


class VllmClient(Client):
    """A client whose core is one of several vLLM servers with the plugin; the model `mllm` has no weights.

    At most `slots` answers, counted with their twins, run on all servers at once, as many as these run if that is less;
    `max_waiting` and `max_wait` are those of an engine. An answer whose server is lost before anything of it was put out
    runs again on another one, or on the first that is back.
    """

    def __init__(
        self,
        mllm: MLLM,
        limits: Limits,
        servers: Servers,
        supported: Supported,
        max_waiting: int = 64,
        max_wait: float | None = None,
    ):
        super().__init__(mllm, limits)
        self.interventions, self.readouts = supported.interventions, supported.readouts
        self.grammars = supported.grammars
        self.servers = servers
        self._supported = supported
        self._grammars = Grammars(mllm)
        self._bodies = self.processor = Bodies(mllm, limits)
        self._lock, self._delivering = threading.RLock(), threading.RLock()
        self._alive: dict[Sequence, RemoteAnswer] = {}
        self._rate = Rate()
        self._scheduler = Scheduler(0, _UNBOUNDED, lambda source, target, length: None)
        endless = Allowance(most=_UNBOUNDED)
        self._admission = AdmissionControl(
            self._scheduler, self._rate, self._alive.keys(), list, lambda: endless, max_waiting, max_wait
        )
        self._max_waiting = max_waiting
        self._threads = ThreadPoolExecutor(THREADS, "helmsight-vllm")
        self._closed = threading.Event()
        self._counts = dict.fromkeys(
            ("prompt_tokens", "generated_tokens", "prefix_cache_tokens", "finished", "faults", "refused", "cancelled"),
            0,
        )
        self._bins = {name: Histogram(SECONDS) for name in ("queue_seconds", "prefill_seconds", "inter_token_seconds")}
        self._set_slots()

    def start(self) -> None:
        """Look at the servers from now on."""
        for server in self.servers:
            threading.Thread(target=self._watch, args=(server,), name="helmsight-look", daemon=True).start()

    @property
    def stepped(self) -> bool:
        return True

    @property
    def healthy(self) -> bool:
        """True while a server answers."""
        return not self._stopping and bool(self.servers.well)

    def stats(self) -> Mapping[str, float]:
        with self._lock:
            return {
                "running": sum(answer.rows for answer in self._alive.values() if answer.server is not None),
                "waiting": self._admission.waiting,
                "slots": self._scheduler.slots,
                "max_waiting": self._max_waiting,
                "servers": len(list(self.servers)),
                "servers_ready": len(self.servers.well),
                "seconds_gone": self.servers.seconds_gone,
                **self._counts,
                **self.mllm.seen.stats(),
            }

    @property
    def bins(self) -> Mapping[str, Histogram]:
        return self._bins

    def receive(self, outputs: Iterable[Output]) -> None:
        """Hand outputs to their completions, one at a time: each answer has a thread of its own, and a request several."""
        with self._delivering:
            super().receive(outputs)

    # -- requests ------------------------------------------------------------------------------------------------------

    def inspect(self, request: Request) -> Admitted:
        self._supported.check(request)
        return super().inspect(request)

    def _enqueue(self, request: Request, turn: Turn | None = None, whole: bool = False) -> Completion:
        self._supported.check(request)
        return super()._enqueue(request, turn, whole)

    def _add(self, request: Add) -> None:
        answers = self._answers(request)
        with self._lock:
            self._refuse_when_closed()
            if not request.admitted:
                self._refuse(len(answers), request.group)
            sequences = [answer.sequence for answer in answers]
            self._alive.update(zip(sequences, answers, strict=True))
            self._scheduler.enqueue(sequences)
            self._dispatch()

    def _answers(self, request: Add) -> list[RemoteAnswer]:
        """Return an answer for each of a request's, then for each baseline."""
        if request.grammar is not None:
            self._grammars.start(request.grammar)  # refused here as by an engine, and within its time
        bodies = self._bodies.of(request)
        answers: list[RemoteAnswer] = []
        for index in range(request.answers):
            spec = request.spec
            if index >= request.n:
                spec = replace(spec, prompt=request.baseline_prompt or spec.prompt, asked={})
            sequence = Sequence(
                replace(spec, seed=answer_seed(spec.seed, index % request.n)),
                PendingOutput(request.number, index, in_pieces=request.in_pieces),
                QueuePlace(request.group, request.waited),
            )
            if spec.contrast is not None:
                sequence.pair = Pair(sequence, request.twin_prompt)
            answers.append(RemoteAnswer(sequence, bodies[index >= request.n], self.mllm.stop_ids))
        return answers

    def _check(self, answers: int, group: str) -> None:
        with self._lock:
            self._refuse(answers, group)

    def _refuse(self, answers: int, group: str) -> None:
        try:
            self._admission.check(answers, group)
        except Busy:
            self._counts["refused"] += 1
            raise

    def _abort(self, number: int) -> None:
        with self._lock:
            answers = [answer for answer in self._alive.values() if answer.number == number]
            self._counts["cancelled"] += any(not answer.cancelled for answer in answers)
            for answer in answers:
                answer.cancel()
            waiting = [answer for answer in answers if answer.server is None]
        for answer in waiting:
            self._end(answer)

    def _put_out_whole(self, number: int) -> None:
        with self._lock:
            for answer in self._alive.values():
                if answer.number == number:
                    answer.sequence.output.in_pieces = False

    def _close(self) -> None:
        self._closed.set()
        error = Fault(SHUTTING_DOWN)
        with self._lock:
            answers = list(self._alive.values())
            for answer in answers:
                answer.cancel()
        self.fail(error)
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _advance(self) -> None:
        with self._changed:
            self._refuse_when_closed()
            self._changed.wait(timeout=0.1)

    @property
    def _is_full(self) -> bool:
        return len(self._scheduler.waiting) >= max(1, self._scheduler.slots)

    # -- answers on servers --------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        """Send waiting answers to servers that have room; called with the lock held."""
        if self._closed.is_set() or (not self.servers.well and self.servers.seconds_gone < GRACE):
            return
        for sequence in self._scheduler.next_prefill(lambda divisible: True):
            self._scheduler.prefilled(sequence)
            answer = self._alive[sequence]
            answer.server = self.servers.take(answer.rows, answer.body.home, answer.avoided)
            if answer.server is None:
                self._threads.submit(self._end, answer, ServerLost("No vLLM server is well that could answer."))
            else:
                self._threads.submit(self._run, answer, answer.server)

    def _run(self, answer: RemoteAnswer, server: Server) -> None:
        """Let a server answer; put it back into the queue where that fails before anything was put out."""
        error: BaseException | None = None
        try:
            if not answer.cancelled:
                self._read(answer, server)
        except (ServerLost, AnswerFailed) as lost:
            if (
                isinstance(lost, ServerLost) and not answer.cancelled
            ):  # the stream of a cancelled answer breaks off here
                server.lose(lost)
            if not answer.cancelled and answer.retriable and self._retry(answer, server, lost):
                return
            error = lost
        except RequestError as refusal:
            error = answer.body.named(refusal)
        except SteeringError as refusal:
            error = refusal
        except Exception as fault:
            log.exception("an answer of a vLLM server cannot be read")
            error = Fault(f"The answer of {server.url} cannot be read: {fault}")
        self._end(answer, error)

    def _read(self, answer: RemoteAnswer, server: Server) -> None:
        self._bins["queue_seconds"].add(time.monotonic() - answer.sequence.times.queued)
        with server.answer(self._bodies.path, answer.body.written(answer.sequence)) as stream:
            answer.begin(stream)
            for message in stream:
                server.heard_at = time.monotonic()
                if (failure := message.get("error")) is not None:
                    raise error_of(failure)
                now = time.monotonic()
                before = answer.sequence.times
                first, last = before.first, before.last
                count = answer.take(message, now)
                if count:
                    self._count(answer, count, first, last, now)
                if answer.ended is None and answer.sequence.output.in_pieces:
                    self.receive(answer.output())
        if answer.ended is None and not answer.cancelled:
            raise ServerLost(f"{server.url} ended the stream before the answer.")

    def _count(self, answer: RemoteAnswer, count: int, first: float, last: float, now: float) -> None:
        """Count new tokens of an answer, whose first and last one before came at these times."""
        self._counts["generated_tokens"] += count
        if not first:
            self._bins["prefill_seconds"].add(now - answer.sequence.times.admitted)
        else:
            self._bins["inter_token_seconds"].add((now - last) / count)
            self._rate.step((now - last) / count, 0)

    def _retry(self, answer: RemoteAnswer, server: Server, lost: SteeringError) -> bool:
        """Put an answer back at the head of the queue; return False where it is not to be asked again.

        Where no other server is well, it waits for the first one to be back, once: it may be what ends the servers.
        """
        with self._lock:
            answer.avoided.append(server)
            if answer.waited:
                return False
            if not any(other not in answer.avoided for other in self.servers.well):
                if isinstance(lost, AnswerFailed):
                    return False
                answer.waited = True
            self._release(answer)
            answer.restart()
            self._scheduler.retry_alone([answer.sequence])
            self._set_slots()
            self._dispatch()
        log.warning("an answer is asked for again, as %s has failed it", server.url)
        return True

    def _release(self, answer: RemoteAnswer) -> None:
        """Free the slots of an answer; called with the lock held."""
        self._scheduler.release(answer.sequence)
        if answer.server is not None:
            answer.server.running -= answer.rows
            answer.server = None

    def _end(self, answer: RemoteAnswer, error: BaseException | None = None) -> None:
        """Put out the last output of an answer, and let the next ones run."""
        with self._lock:
            if self._alive.pop(answer.sequence, None) is None:
                return
            self._release(answer)
            self._rate.ended(len(answer.sequence.tokens))
            ended = answer.ended
            if error is not None and not answer.cancelled:
                self._counts["faults"] += 1
            elif ended is not None:
                self._counts["finished"] += 1
                self._counts["prompt_tokens"] += answer.sequence.prompt.length
                self._counts["prefix_cache_tokens"] += answer.reused
            self._set_slots()
            self._dispatch()
        if ended is None:
            failed = None if answer.cancelled else error
            answer.ended = Ended(None, failed, answer.timing, fed=answer.sequence.fed)
        self.receive(answer.output())

    # -- servers that come and go --------------------------------------------------------------------------------------

    def _set_slots(self) -> None:
        """Let as many answers run as servers that are well take; where none is for long, those that wait go on to fail."""
        slots = min(self.limits.slots, self.servers.slots)
        self._scheduler.slots = slots or self.limits.slots

    def _watch(self, server: Server) -> None:
        gone, refused = math.inf, ""
        while not self._closed.wait(EVERY):
            try:
                changed = server.look()
            except Exception as error:  # whatever it is, the server may be well later
                changed = False
                if str(error) != refused:
                    log.error("a vLLM server is not used: %s", error, exc_info=not isinstance(error, SteeringError))
                refused = str(error)
            if changed:
                log.info("the vLLM server %s is %s", server.url, "well" if server.well else "not well")
            if changed or not server.well:  # what waits for it goes on to fail after a while
                with self._lock:
                    self._set_slots()
                    self._dispatch()
            gone = math.inf if server.well else min(gone, time.monotonic())
            if time.monotonic() - max(gone, server.heard_at) > GONE:
                self._give_up(server)

    def _give_up(self, server: Server) -> None:
        """End the streams of a server whose machine is gone, which no connection tells."""
        with self._lock:
            streams = [answer.stream for answer in self._alive.values() if answer.server is server]
        for stream in streams:
            if stream is not None:
                stream.close()
