"""The engine: requests in, answers out. One step is: admit and prefill, decode, hand out tokens."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress

import torch

from steering.bins import Bins
from steering.engine.admission import Limits, check_request, count_answers, prepare, seeded
from steering.engine.budget import StepBudget
from steering.engine.compilation import Compilation, check_compilable
from steering.engine.completion import Completion
from steering.engine.gate import Gate
from steering.engine.lockstep import Lockstep, News
from steering.engine.steps import Steps
from steering.engine.turn import Turn
from steering.errors import Fault, RequestError
from steering.grammar.compiled import Grammars
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.protocol import intervention, readout
from steering.protocol.request import Request, Result
from steering.protocol.sequence import Sequence
from steering.protocol.wording import shown
from steering.relay import relay
from steering.runner.room import SHARE
from steering.runner.runner import Runner
from steering.runner.selfcheck import check_model

log = logging.getLogger(__name__)


class Engine:
    """An engine that serves one patched model with continuous batching.

    Any thread may submit; one thread steps. Engines that share a model take turns. `slots` sequences run at once, each with
    at most `max_length` tokens of prompt and answer; `prefill_budget` bounds the prompt tokens of one step. Once started, a
    step beside running answers takes at most about `max_gap` seconds, and `max_stall` times as long as one without prompts
    (`StepBudget`). `max_waiting` answers may wait for a slot; an answer expected to wait longer than `max_wait` seconds is
    refused. On a GPU the KV cache is allocated at once, in at most `kv_share` of the memory that the model leaves: where
    `slots` need more, there are fewer. `prefix_cache_bytes` bounds the prefix cache (0: none, so that no answer depends, by
    rounding, on earlier ones). `focus_layers` is N of the focus metrics (default: the model's own). Only methods registered
    before construction can be requested: `interventions` and `readouts` are their names. `compiled` compiles the decode step
    (`compilation`), kept in `compiled_folder` (None: the user's cache, "off": nowhere). `died` is called where the stepping
    thread ends by a fault; an engine is not `healthy` while a step exceeds `max_step` seconds. Raises UnsupportedModel where
    the self-check fails.
    """

    def __init__(
        self,
        mllm: MLLM,
        *,
        slots: int = 16,
        max_length: int | None = None,
        max_waiting: int = 64,
        max_wait: float | None = None,
        max_images: int = 16,
        prefill_budget: int = 1024,
        max_gap: float | None = 0.1,
        max_stall: float | None = None,
        image_cache_bytes: int = 256 * 2**20,
        prefix_cache_bytes: int = 0,
        kv_share: float = SHARE,
        focus_layers: int | None = None,
        threads: int | None = None,
        self_check: bool = True,
        compiled: bool = False,
        compiled_folder: str | None = None,
        max_step: float = math.inf,
        died: Callable[[], None] | None = None,
    ):
        if not isinstance(mllm, MLLM):
            raise TypeError(f"An Engine is made of the model that steering.load returns; got {shown(mllm)}.")
        if compiled:
            check_compilable(mllm)
        if threads is not None:
            torch.set_num_threads(threads)
        self.mllm = mllm
        self.max_length = min(mllm.context_length, max_length or 4096)
        self.max_waiting = max_waiting
        self.focus_layers = focus_layers or mllm.focus_layers
        self.limits = Limits(self.max_length, max_images, self.focus_layers)
        self.interventions = frozenset(intervention.REGISTRY)
        self.readouts = frozenset(readout.REGISTRY)
        if self_check:
            check_model(mllm, compiled)
        mllm.settle(compiled)
        self._grammars = Grammars(mllm)
        self.compilation = Compilation(mllm, compiled, compiled_folder)
        sizes = (slots, self.max_length, max_images, image_cache_bytes, prefix_cache_bytes)
        self._runner = Runner(mllm, *sizes, kv_share, self.compilation.steps)
        self._changed = threading.Condition()
        self._lockstep = Lockstep(mllm.ranks) if mllm.ranks.size > 1 else None
        failed = () if self._lockstep is None else (self._lockstep.failed,)
        self._steps = Steps(mllm, self._runner, self._runner.pool.slots, prefill_budget, self._changed, *failed)
        self._scheduler, self._alive = self._steps.scheduler, self._steps.alive
        queued = (self._scheduler, self._steps.rate, self._alive, self._incoming, self._steps.allowance)
        self._gate = Gate(*queued, max_waiting, max_wait)
        self._budget = StepBudget(prefill_budget, max_gap, max_stall)
        self._turns: set[Turn] = set()  # from a turn's first accepted request to its end
        self._thread: threading.Thread | None = None
        self._stopping, self._stepping_since = False, math.inf
        self._fatal: BaseException | None = None
        self._died, self._max_step = died, max_step
        if self.compilation.try_now(self.generate, self._scheduler.slots, mllm.name):
            self._count_anew()

    # -- for callers ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, turn: Turn | None = None, prompt: Prompt | None = None) -> Completion:
        """Queue a request; it is prepared (tokenised, validated) in the calling thread.

        `turn`: the place that it takes; `prompt`: a result of `read_prompt`. Raises as that, and Busy when the queue is
        full.
        """
        check_request(request)
        self.check(turn, count_answers(request, self._scheduler.slots))  # before the work of preparing
        return self._enqueue(request, lambda answers: self._refuse(answers, turn), turn, prompt)

    def check(self, turn: Turn | None, answers: int = 1) -> None:
        """Raise Busy where so many more answers, in a turn or without one, may not join now."""
        with self._changed:
            self._refuse(answers, turn)

    @contextmanager
    def turn(self, group: str = "") -> Iterator[Turn]:
        """Open a place in the queue for dependent requests, which count as one running request, even while it drains."""
        turn = Turn(self, group)
        try:
            yield turn
        finally:
            with self._changed:
                self._turns.discard(turn)
                self._changed.notify_all()

    def generate(
        self, requests: Iterable[Request], begun: Callable[[Completion], object] | None = None
    ) -> list[Result]:
        """Answer requests in order, batched; step in the calling thread unless the engine was started.

        They are prepared as the queue drains, to bound memory. `begun` gets each when queued, to cancel it; raises Fault
        then.
        """
        return list(self.stream(requests, begun))

    def stream(
        self, requests: Iterable[Request], begun: Callable[[Completion], object] | None = None
    ) -> Iterator[Result]:
        """Yield the results of `generate` in order, as soon as each is ready; closing the iterator cancels the rest."""
        pending: deque[Completion] = deque()
        if isinstance(requests, Request):
            raise RequestError("'requests' must be a list of them; got a single Request.", param="requests")
        try:
            for request in requests:
                check_request(request)
                while self._gate.waiting >= self._scheduler.slots:
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
        """Return the result as `Completion.result`, stepping in the calling thread unless the engine was started."""
        while self._thread is None and not self._left(completion):
            self.step()
        return completion.result()

    def step(self) -> None:
        """Admit and prefill, decode, hand out tokens; sequences leave as they finish."""
        self._stepping_since = time.monotonic()
        allowance = self._steps.next_allowance(bool(self._incoming()))
        if self._lockstep is not None:
            with self._changed:
                news, joined = self._lockstep.taken()
            self._lockstep.tell(news, self._alive, allowance)
            self._apply(self._lockstep, news, joined)
        with self.mllm.stepping:
            self._steps.step(allowance)
        self._stepping_since = math.inf

    def follow(self) -> None:
        """Take the same steps as the first rank's engine, until it stops; for the engines of all other ranks."""
        if self._lockstep is None or self.mllm.ranks.rank == 0:
            raise RuntimeError("Only the engines of a tensor-parallel model's other ranks follow the first one's.")
        while True:
            news, allowance = self._lockstep.hear(self._alive)
            if news.over:
                return
            joined = {one.number: self._prepared(relay.read(one.written), one.waited, one.group) for one in news.asked}
            self._apply(self._lockstep, news, joined)
            self._steps.step(allowance)

    def start(self) -> None:
        """Step in a background thread from now on; raise RuntimeError when one does already."""
        thread = threading.Thread(target=self._run, args=(self._await_work,), name="helmsight-engine", daemon=True)
        self._begin(thread)
        thread.start()

    def run(self, heed: Callable[[bool], object], said: Callable[[], bool]) -> None:
        """Step in the calling thread until the engine is stopped; raise RuntimeError as `start`.

        `heed(busy)` is called before each step, to submit and cancel what came in; unless `busy` it may wait. `said` is
        called within a step that has first tokens; it returns True where more came in, which the step may take in, too.
        """
        self._steps.said = said if self._lockstep is None else self._steps.said  # all ranks must take the same steps
        self._begin(threading.current_thread())
        self._run(heed)

    def stop(self, drain: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain` seconds, cancel the rest, end the thread."""
        self.compilation.stop()
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._idle() or self._fatal is not None, timeout=drain)
            if self._lockstep is None:
                self._end_all()
            else:
                self._lockstep.end()
            self._turns.clear()
            self._changed.notify_all()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join()
        else:
            self._release()

    @property
    def healthy(self) -> bool:
        """True while requests are being worked on."""
        works = self._thread is not None and self._thread.is_alive() and not self._stopping and self._fatal is None
        return works and time.monotonic() - self._stepping_since <= self._max_step

    def stats(self) -> dict[str, float]:
        """Return counters since the start and current gauges."""
        return {
            "running": len(self._scheduler.running) + (self._scheduler.filling is not None),
            "waiting": self._gate.waiting,
            "slots": self._scheduler.slots,
            "max_waiting": self.max_waiting,
            **self._runner.stats(),
            "kv_tokens": sum(sequence.length for sequence in list(self._scheduler.running)),
            **self._steps.counts,
            **self._steps.budget.stats(len(self._scheduler.running)),
            **self.compilation.stats(),
        }

    @property
    def bins(self) -> Mapping[str, Bins]:
        """The distributions of times and batches since the start, in seconds and answers."""
        return self._steps.bins

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _count_anew(self) -> None:
        self._steps.counts.update(dict.fromkeys(self._steps.counts, 0))
        for bins in self.bins.values():
            bins.clear()

    def _enqueue(
        self, request: Request, refuse: Callable[[int], None], turn: Turn | None = None, prompt: Prompt | None = None
    ) -> Completion:
        waited = turn is not None and turn.served
        group = "" if turn is None else turn.group
        written = b""
        if self._lockstep is not None:
            if self.mllm.ranks.rank:
                raise RuntimeError("Requests are for the first rank's engine, which this one follows.")
            request = seeded(request)
            written = relay.written(request)
        completion = self._prepared(request, waited, group, prompt)
        with self._changed:
            refuse(len(completion.sequences))
            if turn is not None:
                self._turns.add(turn)
            if self._lockstep is None:
                self._take(completion)
            else:
                self._lockstep.submit(completion, written, waited, group)
            self._changed.notify_all()
        return completion

    def _prepared(self, request: Request, waited: bool, group: str, prompt: Prompt | None = None) -> Completion:
        own = (self.limits, self._steps.token_text, self._cancel, self._grammars)
        return prepare(self.mllm, request, *own, waited, group, prompt)

    def _take(self, completion: Completion) -> None:
        self._scheduler.enqueue(completion.sequences)
        self._alive.update(dict.fromkeys(completion.sequences))

    def _cancel(self, completion: Completion) -> None:
        with self._changed:
            if self._lockstep is None:
                completion.end()
            else:
                self._lockstep.cancel(completion)
            self._changed.notify_all()

    def _end_all(self) -> None:
        for sequence in [one for one in self._alive if not one.done]:
            sequence.error = Fault("The server is shutting down.")

    def _apply(self, lockstep: Lockstep, news: News, joined: Mapping[int, Completion]) -> None:
        """Apply the news that all ranks received."""
        if news == News():
            return
        with self._changed:
            for completion in joined.values():
                self._take(completion)
            lockstep.known.update(joined)
            for number in news.cancelled:
                if number in lockstep.known:
                    lockstep.known[number].end()
            if news.ended:
                self._end_all()
            for number in [number for number, one in lockstep.known.items() if self._left(one)]:
                del lockstep.known[number]

    def _release(self) -> None:
        """Tell the other ranks, unless they are gone, that there is no further step."""
        if self._lockstep is not None and self._fatal is None:
            with suppress(RuntimeError):
                self._lockstep.tell(News(over=True), self._alive)

    def _incoming(self) -> list[Sequence]:
        """Return the sequences that join the queue at the next step of all ranks."""
        return [] if self._lockstep is None else self._lockstep.incoming

    def _left(self, completion: Completion) -> bool:
        """Return True where all its sequences have ended; cancelled ones do so at the next step."""
        incoming = self._incoming()
        return not any(sequence in self._alive or sequence in incoming for sequence in completion.sequences)

    def _has_work(self) -> bool:
        return bool(self._alive or self._incoming())

    def _idle(self) -> bool:
        return not self._has_work() and not self._turns

    def _refuse(self, answers: int, turn: Turn | None = None) -> None:
        """Raise Fault when closed, Busy when so many more answers may not join; a turn that has begun is not refused."""
        if turn in self._turns and self._fatal is None:
            return
        self._refuse_when_closed()
        self._gate.check(answers, "" if turn is None else turn.group)

    def _refuse_when_closed(self) -> None:
        if self._stopping or self._fatal is not None:
            raise Fault("The server is shutting down.")

    def _advance(self) -> None:
        """Take one step, or wait a moment where a background thread steps."""
        if self._thread is None:
            self.step()
        else:
            with self._changed:
                self._refuse_when_closed()
                self._changed.wait(timeout=0.1)

    def _begin(self, thread: threading.Thread) -> None:
        if self._thread is not None:
            raise RuntimeError("The engine was started before.")
        self._count_anew()
        self._steps.budget = self._budget
        self._thread = thread

    def _await_work(self, busy: bool) -> None:
        with self._changed:
            self._changed.wait_for(lambda: busy or self._has_work() or (self._stopping and self._idle()))

    def _run(self, heed: Callable[[bool], object]) -> None:
        try:
            while (busy := self._has_work()) or not (self._stopping and self._idle()):
                heed(busy or self.compilation.prepare_next())
                if self._has_work():
                    self.step()
            self._release()
        except BaseException as error:
            log.critical("The engine thread died.", exc_info=error)
            self._fatal = error
            with self._changed:
                for sequence in [*self._alive, *self._incoming()]:
                    sequence.error = Fault(f"The engine died: {error}")
                    sequence.notify(sequence, "", [])
                self._changed.notify_all()
            if self._died is not None:
                self._died()
