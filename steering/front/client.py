"""The client of an engine core, wherever the core runs: requests in, answers out."""

from __future__ import annotations

import itertools
import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, closing, contextmanager, nullcontext
from dataclasses import replace

from steering.errors import SHUTTING_DOWN, Fault, RequestError
from steering.front.completion import Completion
from steering.front.input_processor import Admitted, InputProcessor, Limits, admit, check_request, check_slots
from steering.front.turn import Turn
from steering.histogram import Histogram
from steering.messages.messages import Add, Output
from steering.model.calibration import Calibration
from steering.model.calibration_files import under
from steering.model.mllm import MLLM
from steering.protocol import intervention, readout
from steering.protocol.intervention import in_place_of, next_prelude
from steering.protocol.request import Request, Result


class Client(ABC):
    """Prepares requests, adds them to a core, and turns its outputs into answers; any thread may submit.

    A subclass implements the transport: the abstract methods, which send messages to a core. It calls `receive` with the
    core's outputs. Only methods registered before its construction can be requested: `interventions` and `readouts` are
    their names; `grammars` is True where answers can be constrained. `preparing` returns a context that is held while a
    request is prepared, to bound how many are at once.
    """

    def __init__(self, mllm: MLLM, limits: Limits):
        self.mllm = mllm
        self.limits = limits
        self.interventions = frozenset(intervention.REGISTRY)
        self.readouts = frozenset(readout.REGISTRY)
        self.grammars = True
        self.processor = InputProcessor(mllm, limits)
        self.preparing: Callable[[Request], AbstractContextManager[object]] = lambda request: nullcontext()
        self._numbers = itertools.count(1)
        self._running: dict[int, Completion] = {}
        self._turns: set[Turn] = set()  # from a turn's first accepted request to its end
        self._changed = threading.Condition()
        self._stopping = False

    # -- the transport -------------------------------------------------------------------------------------------------

    @abstractmethod
    def _add(self, request: Add) -> object:
        """Queue a request in the core; raise Busy, RequestError or Fault where it refuses."""

    @abstractmethod
    def _abort(self, number: int) -> None:
        """End the answers of a request."""

    @abstractmethod
    def _put_out_whole(self, number: int) -> None:
        """Let the core put out a request's answers only when each ends."""

    @abstractmethod
    def start(self) -> None:
        """Begin to work on requests; until then, an engine in this process steps in the threads that wait for answers."""

    @abstractmethod
    def _check(self, answers: int, group: str) -> None:
        """Raise Busy where the core would refuse `answers` more answers of a group."""

    @abstractmethod
    def _close(self) -> None:
        """End the core and everything that still runs."""

    @property
    @abstractmethod
    def stepped(self) -> bool:
        """True where another thread, or process, steps the core."""

    @property
    @abstractmethod
    def healthy(self) -> bool:
        """True while requests are being worked on."""

    @abstractmethod
    def stats(self) -> Mapping[str, float]:
        """Return counters since the start and current gauges."""

    @property
    @abstractmethod
    def bins(self) -> Mapping[str, Histogram]:
        """The distributions of times and batches since the start, in seconds and answers."""

    def _advance(self) -> None:
        """Step in the calling thread, or wait a moment where another one steps."""
        raise NotImplementedError

    @property
    def _is_full(self) -> bool:
        """True where a list of requests should not be prepared further yet, to bound memory."""
        return False

    # -- requests ------------------------------------------------------------------------------------------------------

    def submit(self, request: Request, turn: Turn | None = None) -> Completion:
        """Queue a request; it is prepared (tokenised, validated) in the calling thread.

        `turn` is the place that it takes. Raises RequestError, ContextOverflow or VectorError where it is wrong, Busy when
        the queue is full, Fault when the engine is closed.
        """
        check_request(request)
        check_slots(request, self.limits.slots)
        self.check(turn, request.n * (1 + request.baseline))  # before the work of preparing
        return self._enqueue(request, turn)

    def inspect(self, request: Request) -> Admitted:
        """Prepare a request as `submit` does, without queueing it; raises as `submit`, but never Busy.

        Preludes are checked and left out, because what they decide on is not known before they run.
        """
        check_request(request)
        check_slots(request, self.limits.slots)
        with self.preparing(request):
            while (prelude := next_prelude(request)) is not None:
                with closing(prelude.rounds(self.mllm, request)) as rounds:
                    next(rounds, None)  # the first round is prepared only once its requests are taken
                request = in_place_of(request, prelude)
            return admit(self.mllm, request, self.limits)

    def check(self, turn: Turn | None, answers: int = 1) -> None:
        """Raise Busy where `answers` more answers, in a turn or without one, may not join the queue now."""
        if turn is None or turn not in self._turns:
            self._refuse_when_closed()
            self._check(answers, "" if turn is None else turn.group)

    def calibrate(self, calibration: Calibration | None) -> None:
        """Answer later turns, and requests without a turn, under another calibration of the model."""
        self.mllm = self.processor.mllm = under(self.mllm, calibration)

    @contextmanager
    def turn(self, group: str = "") -> Iterator[Turn]:
        """Hold a place in the queue for dependent requests; a turn that has begun is completed while the engine drains."""
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

        They are prepared as the queue drains, to bound memory. `begun` receives each completion once it is queued; where one
        is cancelled, this raises Fault.
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
                while self._is_full:
                    self._advance()
                pending.append(self._enqueue(request, whole=True))
                if begun is not None:
                    begun(pending[-1])
                while pending and pending[0].done:
                    yield pending.popleft().result()
            while pending:
                yield self.result_of(pending.popleft())
        finally:
            for completion in pending:
                completion.cancel()

    def result_of(self, completion: Completion) -> Result:
        """Return the result as `Completion.result`, stepping in the calling thread unless the engine was started."""
        while not completion.done and not self.stepped:
            self._advance()
        return completion.result()

    def receive(self, outputs: Iterable[Output]) -> None:
        """Hand outputs of the core to the completions that they belong to."""
        ended = []
        for output in outputs:
            completion = self._running.get(output.request)
            if completion is not None:
                completion.receive(output)
                if completion.done:
                    ended.append(output.request)
        if ended:
            with self._changed:
                for number in ended:
                    self._running.pop(number, None)
                self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """End every request with an error, where no more outputs come."""
        with self._changed:
            running, self._running = list(self._running.values()), {}
            self._changed.notify_all()
        for completion in running:
            completion.fail(error)

    def stop(self, drain: float = 0.0) -> None:
        """Refuse new requests, let running ones finish for `drain` seconds, cancel the rest, end the core."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: not (self._running or self._turns) or self._is_dead, timeout=drain)
            self._turns.clear()
        self._close()

    # -- helpers -------------------------------------------------------------------------------------------------------

    @property
    def _is_dead(self) -> bool:
        """True where the core will never answer."""
        return False

    def _enqueue(self, request: Request, turn: Turn | None = None, whole: bool = False) -> Completion:
        number, group = next(self._numbers), "" if turn is None else turn.group
        with self.preparing(request):
            add, outputs = self.processor.prepare(request, number, None if turn is None else turn.mllm)
        completion = Completion(
            outputs,
            abort=lambda: self._abort(number),
            whole=lambda: self._put_out_whole(number),
            stepped=lambda: self.stepped,
            answers=add.answers,
            group=group,
        )
        begun = turn is not None and turn in self._turns
        with self._changed:
            if not begun:
                self._refuse_when_closed()
            if turn is not None:
                self._turns.add(turn)
            self._running[number] = completion
        waited, admitted = turn is not None and turn.served, begun or (turn is None and whole)
        try:
            self._add(replace(add, group=group, waited=waited, admitted=admitted, in_pieces=not whole))
        except BaseException:
            with self._changed:
                self._running.pop(number, None)
                if turn is not None and not begun:
                    self._turns.discard(turn)
                self._changed.notify_all()
            raise
        return completion

    def _refuse_when_closed(self) -> None:
        if self._stopping or self._is_dead:
            raise Fault(SHUTTING_DOWN)
