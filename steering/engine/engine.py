"""The engine: requests in, answers out. One step is: admit and prefill, decode, hand out tokens."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

import torch

from steering.bins import Bins
from steering.engine.admission import Limits, prepare
from steering.engine.completion import Completion
from steering.engine.steps import Steps
from steering.engine.turn import Turn
from steering.errors import Busy, Fault, RequestError, UnsupportedModel
from steering.grammar.compiled import Grammars
from steering.model.images import ImageCache
from steering.model.mllm import MLLM
from steering.protocol import intervention, readout
from steering.protocol.readout import Diagnose
from steering.protocol.request import Request, Result, Sampling
from steering.protocol.wording import must, shown
from steering.runner.runner import Runner
from steering.runner.selfcheck import check_model, picture

log = logging.getLogger(__name__)

KEPT = 8
"""Of the places in the queue one in so many is kept for groups that have none waiting."""


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
        if not isinstance(mllm, MLLM):
            raise TypeError(f"An Engine is made of the model that steering.load returns; got {shown(mllm)}.")
        if compiled and len(mllm.devices) > 1:
            raise UnsupportedModel(
                f"{mllm.name} lies on {len(mllm.devices)} devices: its decode step cannot be compiled."
            )
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
        self._grammars = Grammars(mllm)
        self._runner = Runner(mllm, slots, self.max_length, max_images, ImageCache(image_cache_bytes), compiled)
        self._changed = threading.Condition()
        self._steps = Steps(mllm, self._runner, slots, prefill_budget, self._changed)
        self._scheduler, self._alive = self._steps.scheduler, self._steps.alive
        self._turns: set[Turn] = set()  # from the first request that was taken to the end
        self._thread: threading.Thread | None = None
        self._stopping = False
        self._fatal: BaseException | None = None
        if compiled:
            self._compile()

    # -- for callers ---------------------------------------------------------------------------------------------------

    def submit(self, request: Request, turn: Turn | None = None) -> Completion:
        """Queue a request; it is prepared (tokenised, validated) in the calling thread. `turn` is whose place it takes.

        Raises RequestError, ContextOverflow or VectorError when it is wrong, Busy when the queue is full.
        """
        _check_request(request)
        contrasts = any(one.twin for one in request.asked.values())
        answers = request.n * (1 + request.baseline + contrasts)
        if request.n < 1:
            raise RequestError(f"'n' must be at least 1; got {request.n}.", param="n")
        if answers > self._scheduler.slots:
            raise _too_many(request, answers, self._scheduler.slots)
        with self._changed:
            self._refuse(answers, turn)  # before the work of preparing
        return self._enqueue(request, lambda answers: self._refuse(answers, turn), turn)

    @contextmanager
    def turn(self, group: str = "") -> Iterator[Turn]:
        """A place in the queue for several requests that depend on one another, among those of a group, who get their turn
        however many others of another group wait. The engine counts them as one that runs,
        from the first that it takes to the end of the block: they are answered while it drains, too."""
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
        if isinstance(requests, Request):
            raise RequestError("'requests' must be a list of them; got a single Request.", param="requests")
        try:
            for request in requests:
                _check_request(request)
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

    def step(self) -> None:
        """Admit and prefill, decode, hand out tokens; sequences leave as they finish."""
        self._steps.step()

    def start(self) -> None:
        """Step in a background thread from now on; raises RuntimeError when one does already."""
        if self._thread is not None:
            raise RuntimeError("The engine was started before.")
        self._count_anew()
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
            **self._runner.sizes(),
            "kv_tokens": sum(sequence.length for sequence in list(self._scheduler.running)),
            **self._steps.counts,
        }

    @property
    def bins(self) -> Mapping[str, Bins]:
        """How times and batches spread since the start, in seconds and answers."""
        return self._steps.bins

    # -- helpers -------------------------------------------------------------------------------------------------------

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
        self._count_anew()

    def _count_anew(self) -> None:
        self._steps.counts.update(dict.fromkeys(self._steps.counts, 0))
        for bins in self.bins.values():
            bins.clear()

    def _enqueue(self, request: Request, refuse: Callable[[int], None], turn: Turn | None = None) -> Completion:
        waited = turn is not None and turn.served
        group = "" if turn is None else turn.group
        completion = prepare(
            self.mllm, request, self.limits, self._steps.token_text, self._wake, self._grammars, waited, group
        )
        with self._changed:
            refuse(len(completion.sequences))
            if turn is not None:
                self._turns.add(turn)
            self._scheduler.enqueue(completion.sequences)
            self._alive.update(dict.fromkeys(completion.sequences))
            self._changed.notify_all()
        return completion

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
        kept = self.max_waiting // KEPT if turn is not None and self._scheduler.has_waiting(turn.group) else 0
        if waiting + answers > self.max_waiting - kept + self._free_slots():
            raise Busy(waiting, self._steps.rate.seconds_for(waiting))

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


def _too_many(request: Request, answers: int, slots: int) -> RequestError:
    """The error of a request that needs more slots than there are, in words of what it needs them for."""
    if request.n > 1:
        said = f"'n' is too large: this server runs {slots} answers at once (baselines and twins count)."
        return RequestError(said, param="n")
    names = [".".join(one.path) for one in request.asked.values() if one.twin] + ["baseline"] * request.baseline
    said = " and ".join(f"'{name}'" for name in names)
    return RequestError(
        f"{said} {'needs' if len(names) == 1 else 'need'} {answers} slots, one for each answer and twin; this server has "
        f"{slots}.",
        param=names[0],
    )


def _check_request(request: object) -> None:
    if not isinstance(request, Request):
        raise must("requests", "be steering.Request objects", request)
