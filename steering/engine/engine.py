"""The engine: requests in, answers out. One step is: admit and prefill, decode, hand out tokens."""

from __future__ import annotations

import logging
import math
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache

import torch

from steering.engine.admission import admit
from steering.engine.completion import Completion
from steering.engine.runner import Runner
from steering.engine.sampler import Sampled, answer_seed
from steering.engine.scheduler import Scheduler
from steering.engine.selfcheck import check_model, picture
from steering.engine.turn import Turn
from steering.engine.twins import Twins, paired
from steering.errors import Busy, Fault, RequestError, UnsupportedModel, panics_raise
from steering.model.images import ImageCache
from steering.model.mllm import MLLM
from steering.prompt.layout import Layout, pictures_of
from steering.prompt.tiles import tiling_of
from steering.protocol import intervention, readout
from steering.protocol.readout import Diagnose, Surroundings
from steering.protocol.request import Request, Result, Sampling, TokenLogprob
from steering.protocol.sequence import Sequence, Spec
from steering.protocol.text import TextStream, token_bytes

log = logging.getLogger(__name__)


class Engine:
    """Serves one patched model with continuous batching; any thread may submit, one thread steps.

    `slots` sequences run at once, each with at most `max_length` tokens of prompt and answer; `prefill_budget` bounds the
    prompt tokens of one step; `focus_layers` is N of the focus metrics (default: the model's own). What was
    registered by now can be asked for: `interventions` and `readouts` are its names. `compiled` has torch
    compile the decode step, which takes about a minute at first and makes every later step shorter.
    Raises UnsupportedModel when the self-check finds a difference from the plain model, or when compiling fails.
    """

    def __init__(
        self,
        mllm: MLLM,
        *,
        slots: int = 16,
        max_length: int | None = None,
        max_waiting: int = 64,
        max_images: int = 16,
        prefill_budget: int = 1024,
        image_cache_bytes: int = 256 * 2**20,
        focus_layers: int | None = None,
        threads: int | None = None,
        self_check: bool = True,
        compiled: bool = False,
    ):
        if threads is not None:
            torch.set_num_threads(threads)
        self.mllm = mllm
        self.max_length = min(mllm.context_length, max_length or 4096)
        self.max_waiting = max_waiting
        self.max_images = max_images
        self.focus_layers = focus_layers or mllm.focus_layers
        self.interventions = frozenset(intervention.REGISTRY)
        self.readouts = frozenset(readout.REGISTRY)
        if self_check:
            check_model(mllm, compiled)
        self._runner = Runner(mllm, slots, self.max_length, max_images, ImageCache(image_cache_bytes), compiled)
        self._scheduler = Scheduler(slots, prefill_budget, self._runner.move)
        self._twins = Twins(self._runner.rules, self._enqueue_twin)
        self._prefill_budget = prefill_budget
        self._changed = threading.Condition()
        self._alive: dict[Sequence, None] = {}  # in order of arrival, from submission to the end
        self._turns: set[Turn] = set()  # from the first request that was taken to the end
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._fatal: BaseException | None = None
        self._counts = dict.fromkeys(
            ("steps", "prompt_tokens", "generated_tokens", "finished", "faults", "cancelled"), 0
        )
        self._rate = _Rate()
        self._token_text = lru_cache(maxsize=100_000)(lambda token: token_bytes(mllm.tokenizer, token))
        if compiled:
            self._compile()

    # -- for callers ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, turn: Turn | None = None) -> Completion:
        """Queue a request; it is prepared (tokenised, validated) in the calling thread. `turn` is whose place it takes.

        Raises RequestError, ContextOverflow or VectorError when it is wrong, Busy when the queue is full.
        """
        contrasts = any(one.twin for one in request.asked.values())
        answers = request.n * (1 + request.baseline + contrasts)
        if request.n < 1:
            raise RequestError(f"'n' must be at least 1; got {request.n}.", param="n")
        if answers > self._scheduler.slots:
            raise RequestError(
                f"'n' is too large: this server runs {self._scheduler.slots} answers at once (baselines and twins count).",
                param="n",
            )
        with self._changed:
            self._refuse(answers, turn)  # before the work of preparing
        return self._enqueue(request, lambda answers: self._refuse(answers, turn), turn)

    @contextmanager
    def turn(self) -> Iterator[Turn]:
        """A place in the queue for several requests that depend on one another. The engine counts them as one that runs,
        from the first that it takes to the end of the block: they are answered while it drains, too."""
        turn = Turn(self)
        try:
            yield turn
        finally:
            with self._changed:
                self._turns.discard(turn)
                self._changed.notify_all()

    def generate(
        self, requests: Iterable[Request], begun: Callable[[Completion], object] | None = None
    ) -> list[Result]:
        """Answer requests in order, batched; steps in the calling thread unless the engine was started.

        Requests are prepared as the queue drains, so that memory does not grow with their number. `begun` is given each of
        them as it is queued, so that another thread can cancel it; raises Fault then.
        """
        return list(self.stream(requests, begun))

    def stream(
        self, requests: Iterable[Request], begun: Callable[[Completion], object] | None = None
    ) -> Iterator[Result]:
        """As `generate`, but every result is handed over, in order, as soon as it is there; whoever stops listening
        cancels the rest."""
        pending: deque[Completion] = deque()
        try:
            for request in requests:
                while len(self._scheduler.waiting) >= self._scheduler.slots:
                    self._advance()
                pending.append(self._enqueue(request, lambda answers: self._refuse_when_closed()))
                if begun is not None:
                    begun(pending[-1])
                while pending and self._left(pending[0]):
                    yield pending.popleft().result()
            while pending:
                yield self.result_of(pending.popleft())
        finally:
            for completion in pending:
                completion.cancel()

    def result_of(self, completion: Completion) -> Result:
        """Its result, stepping in the calling thread unless the engine was started; raises Fault as `Completion.result`."""
        while self._thread is None and not self._left(completion):
            self.step()
        return completion.result()

    def start(self) -> None:
        """Step in a background thread from now on; raises RuntimeError when one does already."""
        if self._thread is not None:
            raise RuntimeError("The engine was started before.")
        self._thread = threading.Thread(target=self._run, name="helmsight-engine", daemon=True)
        self._thread.start()

    def stop(self, drain: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain` seconds, cancel the rest, end the thread."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle() or self._fatal is not None, timeout=drain)
            for sequence in self._alive:
                if not sequence.done:
                    sequence.error = Fault("The server is shutting down.")
            self._turns.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()

    @property
    def healthy(self) -> bool:
        """Whether requests are being worked on."""
        return self._fatal is None and not self._stopping and self._thread is not None and self._thread.is_alive()

    def stats(self) -> dict[str, float]:
        """Counters since the start and gauges of now."""
        cache = self._runner.image_cache
        return {
            "running": len(self._scheduler.running) + (self._scheduler.filling is not None),
            "waiting": len(self._scheduler.waiting),
            "slots": self._scheduler.slots,
            "max_waiting": self.max_waiting,
            "image_cache_hits": cache.hits,
            "image_cache_misses": cache.misses,
            "image_cache_bytes": cache.bytes,
            **self._counts,
        }

    # -- one step ------------------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def step(self) -> None:
        """Admit and prefill, decode, hand out tokens; sequences leave as they finish."""
        with self._changed:
            for sequence in [s for s in self._alive if s.done]:
                self._leave(sequence)
        forks = self._scheduler.next_forks()
        if not forks:
            self._embed(self._scheduler.upcoming())
        batch = forks or self._scheduler.next_prefill(self._divisible)
        if batch:
            self._prefill(batch, forks=bool(forks))
        if self._scheduler.running:
            self._decode()
        self._counts["steps"] += 1

    def _prefill(self, batch: list[Sequence], forks: bool) -> None:
        try:
            logits = self._runner.fork(batch) if forks else self._runner.prefill(batch, self._prefill_budget)
            if logits is None:
                return
            leaders = [(sequence, row) for sequence, row in zip(batch, logits, strict=True) if sequence.is_leader]
            ready = [(sequence, row) for sequence, row in zip(batch, logits, strict=True) if sequence.pair is None]
            twins = [(sequence, row) for sequence, row in zip(batch, logits, strict=True) if sequence.is_twin]
            ready += [found for twin, row in twins if (found := self._twins.resumed(twin, row)) is not None]
            first = [sequence for sequence, _ in ready]
            sampled = self._runner.next_tokens(first, torch.stack([row for _, row in ready])) if ready else None
        except Exception as error:
            _end_if_fatal(error)
            if len(batch) == 1:
                self._fail(batch, error)
            else:
                log.warning("A prefill of %d prompts failed; they run one by one.", len(batch), exc_info=error)
                self._scheduler.retry_alone(batch)
            return
        for sequence in batch:
            self._scheduler.prefilled(sequence)
            self._counts["prompt_tokens"] += 0 if sequence.is_twin else sequence.prompt.length
        for sequence, row in ready:
            if sequence.held:
                self._twins.end_wait(sequence, row)
        for leader, row in leaders:
            self._twins.hold(leader, row)
            self._pair(leader)
        if sampled is not None:
            self._hand_out(first, sampled)

    def _decode(self) -> None:
        running = list(self._scheduler.running)
        if all(sequence.held for sequence in running):
            return
        due = [sequence for sequence in running if sequence.due]
        try:
            sampled, logits = self._runner.decode(running, self._twins)
        except Exception as first:
            _end_if_fatal(first)
            log.warning("A step failed for %d sequences; it is run again.", len(running), exc_info=first)
            try:
                sampled, logits = self._runner.decode(running, self._twins)
            except Exception as error:
                _end_if_fatal(error)
                self._fail(running, error)
                return
        for leader in due:
            self._twins.hold(leader, logits[leader.slot])
        self._hand_out(running, sampled)
        for leader in due:
            if not leader.done and leader.twin is not None:
                self._leave_twin(leader)
                self._pair(leader)

    def _embed(self, sequences: list[Sequence]) -> None:
        """Embed waiting prompts, their images together; one whose images cannot be encoded does not stop the others."""
        try:
            self._runner.embed(sequences)
        except Exception:
            for sequence in sequences if len(sequences) > 1 else ():
                self._embed([sequence])

    @staticmethod
    def _divisible(sequence: Sequence) -> bool:
        """Whether a waiting prompt may share a prefill; one that could not be embedded runs, and fails, alone."""
        return sequence.embedded is not None and sequence.embedded.divisible

    def _hand_out(self, sequences: list[Sequence], sampled: Sampled) -> None:
        """Give every sequence its token."""
        # The only place where the host waits for the device.
        tokens = sampled.tokens.tolist()
        finite = sampled.finite.tolist()
        alternatives = None
        if sampled.logprob is not None and sampled.top_logprob is not None and sampled.top_id is not None:
            alternatives = list(
                zip(sampled.logprob.tolist(), sampled.top_id.tolist(), sampled.top_logprob.tolist(), strict=True)
            )
        for row, sequence in enumerate(sequences):
            if sequence.done or sequence.held or sequence.is_twin:
                continue
            if not finite[row]:
                sequence.error = Fault("The model produced logits that are not finite for this request.")
                continue
            try:
                with panics_raise(lambda panic: Fault(f"The tokenizer panicked: {panic}")):
                    logprobs = []
                    if alternatives is not None and sequence.spec.sampling.logprobs is not None:
                        logprobs.append(
                            self._logprob(tokens[row], *alternatives[row], keep=sequence.spec.sampling.logprobs)
                        )
                    self._append(sequence, tokens[row], logprobs)
            except Exception as error:
                log.exception("A token could not be handed out.")
                sequence.error = Fault(f"The request failed in the engine: {error}")
        with self._changed:
            for sequence in [s for s in sequences if s.done]:
                self._leave(sequence)

    def _append(self, sequence: Sequence, token: int, logprobs: list[TokenLogprob]) -> None:
        self._counts["generated_tokens"] += 1
        for one in (sequence, sequence.twin):
            if one is not None:
                one.tokens.append(token)
        ended = token in self.mllm.stop_ids and not sequence.spec.sampling.ignore_eos
        if not ended:
            sequence.logprobs.extend(logprobs)
        piece = "" if ended else sequence.text.feed(token)
        if ended or sequence.text.stopped:
            sequence.finish_reason = "stop"
        elif len(sequence.tokens) >= sequence.spec.max_tokens:
            sequence.finish_reason = "length"
        if sequence.finish_reason is not None:
            piece += sequence.text.finish()
            self._runner.read(sequence, self._twins)
        sequence.notify(sequence, piece, [] if ended else logprobs)

    def _leave(self, sequence: Sequence) -> None:
        """Free the slot; called with the lock held."""
        if sequence not in self._alive:
            return
        del self._alive[sequence]
        slot = sequence.slot
        if sequence.error is not None and slot >= 0:
            self._runner.pool.clear(slot)
        self._scheduler.release(sequence)
        sequence.release()
        if sequence.is_twin:
            return
        if sequence.twin is not None:
            sequence.twin.cancelled = True
            self._leave(sequence.twin)
        self._counts["faults" if sequence.error else "finished" if sequence.finish_reason else "cancelled"] += 1
        self._rate.tick()
        if sequence.finish_reason is None:
            sequence.notify(sequence, "", [])
        self._changed.notify_all()

    def _fail(self, sequences: list[Sequence], error: Exception) -> None:
        """End sequences whose step raised."""
        log.error("A step failed for %d sequences.", len(sequences), exc_info=error)
        with self._changed:
            for sequence in [one.pair.leader if one.pair is not None else one for one in sequences]:
                sequence.error = sequence.error or Fault(f"The request failed in the engine: {error}")
                self._leave(sequence)

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _enqueue_twin(self, twin: Sequence) -> None:
        with self._changed:
            self._scheduler.enqueue_twin(twin)
            self._alive[twin] = None

    def _pair(self, leader: Sequence) -> None:
        """Queue a leader's twin; where that fails, the leader ends."""
        try:
            self._twins.pair(leader)
        except Exception as error:
            _end_if_fatal(error)
            self._fail([leader], error)

    def _leave_twin(self, leader: Sequence) -> None:
        """End a leader's twin, which was given another mask."""
        assert leader.twin is not None
        with self._changed:
            leader.twin.cancelled = True
            self._leave(leader.twin)

    def _compile(self) -> None:
        """Answer small requests of every kind that has code of its own: one row and several, with captures or without."""
        message = {
            "role": "user",
            "content": [{"type": "image", "image": picture()}, {"type": "text", "text": "?"}],
        }
        sampling = Sampling(max_tokens=3, ignore_eos=True)
        for rows in (1, 2)[: self._scheduler.slots]:
            for diagnose in (None, Diagnose()):
                try:
                    self.generate([Request([message], sampling, diagnose=diagnose)] * rows)
                except Fault as fault:
                    raise UnsupportedModel(f"{self.mllm.name}: its decode step cannot be compiled: {fault}") from fault
        self._counts = dict.fromkeys(self._counts, 0)

    def _enqueue(self, request: Request, refuse: Callable[[int], None], turn: Turn | None = None) -> Completion:
        admitted = admit(self.mllm, request, self.max_length, self.max_images)
        around = self._surroundings(request, admitted.prompt.layout)
        completion = Completion(admitted.prompt.length, request.n, request.baseline, self._wake, around)
        seed = request.sampling.seed if request.sampling.seed is not None else secrets.randbits(63)

        def sequence(index: int, baseline: bool, first: Sequence | None) -> Sequence:
            spec = Spec.of(
                admitted.prompt,
                {} if baseline else request.asked,
                request.diagnose,
                sampling=request.sampling,
                max_tokens=admitted.max_tokens,
                seed=answer_seed(seed, index),
                signals=request.signals,
                state_position=request.state_position,
                forced=request.forced,
            )
            made = Sequence(
                spec,
                TextStream(self.mllm.tokenizer, request.sampling.stop),
                completion.receive,
                fork_of=first,
                expects_forks=first is None and request.n > 1,
                waited=turn is not None and turn.served,
            )
            if spec.contrast is not None:
                made.pair = paired(made, spec.contrast, admitted.twin_prompt)
            return made

        for baseline in (False, True)[: 1 + request.baseline]:
            first = None
            for index in range(request.n):
                made = sequence(index, baseline, first)
                first = first or made
                completion.expect(made, index, baseline)
        with self._changed:
            refuse(len(completion.sequences))
            if turn is not None:
                self._turns.add(turn)
            self._scheduler.enqueue(completion.sequences)
            self._alive.update(dict.fromkeys(completion.sequences))
            self._changed.notify_all()
        return completion

    def _logprob(self, token: int, logprob: float, top: list[int], values: list[float], keep: int) -> TokenLogprob:
        alternatives = tuple(
            TokenLogprob(other, *self._token_text(other), value)
            for other, value in list(zip(top, values, strict=True))[:keep]
            if value > -math.inf  # a contrast leaves only what is plausible
        )
        return TokenLogprob(token, *self._token_text(token), logprob, alternatives)

    def _surroundings(self, request: Request, layout: Layout) -> Surroundings:
        readouts = () if request.diagnose is None else request.diagnose.readouts
        pictures = [] if request.diagnose is None else pictures_of(request.messages)
        tilings = [tiling_of(self.mllm, *one) for one in zip(pictures, layout.images, strict=bool(pictures))]
        discounts = request.diagnose is not None and request.diagnose.discount_sinks
        sinks = self.mllm.calibration.sinks if discounts and self.mllm.calibration is not None else None
        return Surroundings(
            self.focus_layers,
            lambda token: self._token_text(token)[0],
            tilings,
            pictures if any(one.needs_pictures for one in readouts) else (),
            None if sinks is None else torch.tensor(sinks),
            self.mllm.calibration.flags if self.mllm.calibration is not None else None,
        )

    def _free_slots(self) -> int:
        return self._scheduler.slots - (len(self._alive) - len(self._scheduler.waiting))

    def _left(self, completion: Completion) -> bool:
        """Whether it has heard the last of all its sequences, which one that was cancelled does at the next step."""
        return not any(sequence in self._alive for sequence in completion.sequences)

    def _idle(self) -> bool:
        return not self._alive and not self._turns

    def _refuse(self, answers: int, turn: Turn | None = None) -> None:
        """Raise Fault when the engine is closed, Busy when so many more answers do not fit; called with the lock held. A
        turn of which something was taken is refused nothing while anything is answered."""
        if turn in self._turns and self._fatal is None:
            return
        self._refuse_when_closed()
        waiting = len(self._scheduler.waiting)
        if waiting + answers > self.max_waiting + self._free_slots():
            raise Busy(waiting, self._rate.seconds_for(waiting))

    def _refuse_when_closed(self) -> None:
        if self._stopping or self._fatal is not None:
            raise Fault("The server is shutting down.")

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def _advance(self) -> None:
        """One step, or, where a thread steps, a moment's wait for it."""
        if self._thread is None:
            self.step()
        else:
            with self._changed:
                self._refuse_when_closed()
                self._changed.wait(timeout=0.1)

    def _run(self) -> None:
        try:
            while True:
                with self._changed:
                    self._changed.wait_for(lambda: self._alive or (self._stopping and self._idle()))
                    if not self._alive:
                        return
                self.step()
        except BaseException as error:
            log.critical("The engine thread died.", exc_info=error)
            self._fatal = error
            with self._changed:
                for sequence in list(self._alive):
                    sequence.error = Fault(f"The engine died: {error}")
                    sequence.notify(sequence, "", [])
                self._changed.notify_all()


def _end_if_fatal(error: Exception) -> None:
    """Raise a fault of the device again: nothing works behind it, so that no other request may be tried."""
    if isinstance(error, torch.AcceleratorError):
        raise error


class _Rate:
    """Sequences ended per second, smoothed, to tell a refused client when to come back."""

    def __init__(self) -> None:
        self._seconds = 1.0
        self._last = time.monotonic()

    def tick(self) -> None:
        now = time.monotonic()
        self._seconds += 0.1 * (min(now - self._last, 60.0) - self._seconds)
        self._last = now

    def seconds_for(self, count: int) -> float:
        return min(max(1.0, count * self._seconds), 60.0)
