"""The engine: a client and its core in one process, and the loop that steps the core."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch

from steering.core.budget import MERGED, StepBudget
from steering.core.compilation import Compilation, check_compilable
from steering.core.core import EngineCore
from steering.devices import gpu_memory
from steering.front.client import Client
from steering.front.input_processor import Limits
from steering.histogram import Histogram
from steering.messages.messages import Add, Output
from steering.model.mllm import MLLM
from steering.protocol.request import Request, Sampling
from steering.protocol.wording import shown
from steering.runner.room import SHARE
from steering.runner.runner import Runner
from steering.runner.selfcheck import check_model

log = logging.getLogger(__name__)


class Engine(Client):
    """An engine that serves one patched model with continuous batching.

    Any thread may submit; one thread steps. Engines that share a model take turns. `slots` sequences run at once, each with
    at most `max_length` tokens of prompt and answer; `prefill_budget` bounds the prompt tokens of one step. Once started, a
    step beside running answers takes at most about `max_gap` seconds, and `max_stall` times as long as one without prompts
    (`StepBudget`). `max_waiting` answers may wait for a slot; an answer expected to wait longer than `max_wait` seconds is
    refused. On a GPU the KV cache is allocated at once, in at most `kv_share` of the memory that the model leaves: where
    `slots` need more, there are fewer. `prefix_cache_bytes` bounds the prefix cache (0: none, so that no answer depends, by
    rounding, on earlier ones). `focus_layers` is N of the focus metrics (default: the model's own). Only methods registered
    before construction can be requested: `interventions` and `readouts` are their names. `compiled` compiles the decode step
    (`compilation`), kept in `compiled_folder` (None: the user's cache, "off": nowhere). `overlap` launches each pass before
    the tokens of the last one are read (`Steps`); None does on a GPU where a few answers are the same both ways. `died` is
    called where the stepping thread ends by a fault; an engine is not `healthy` while a step exceeds `max_step` seconds.
    Raises UnsupportedModel where the self-check fails.
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
        overlap: bool | None = None,
        max_step: float = math.inf,
        died: Callable[[], None] | None = None,
    ):
        if not isinstance(mllm, MLLM):
            raise TypeError(f"An Engine is made of the model that steering.load returns; got {shown(mllm)}.")
        if compiled:
            check_compilable(mllm)
        if overlap and compiled and mllm.device.type == "cpu":
            raise ValueError(
                "overlap is for GPUs: the compiled steps of a CPU count what they measure within the pass."
            )
        if threads is not None:
            torch.set_num_threads(threads)
        self.max_length = min(mllm.context_length, max_length or 4096)
        self.focus_layers = focus_layers or mllm.focus_layers
        if self_check:
            check_model(mllm, compiled)
        mllm.settle(compiled)
        self.compilation = Compilation(mllm, compiled, compiled_folder)
        sizes = (slots, self.max_length, max_images, image_cache_bytes, prefix_cache_bytes)
        runner = Runner(mllm, *sizes, kv_share, self.compilation.steps, MERGED * prefill_budget)
        self.core = EngineCore(mllm, runner, prefill_budget, max_waiting, max_wait)
        super().__init__(mllm, Limits(self.max_length, max_images, self.focus_layers, self.core.slots))
        self._budget = StepBudget(prefill_budget, max_gap, max_stall)
        self._thread: threading.Thread | None = None
        self._stepping_since = math.inf
        self._fatal: BaseException | None = None
        self._died, self._max_step = died, max_step
        self._hosted = False  # the core's requests and outputs are those of the client of `run`
        tried = self.compilation.try_now(self.generate, self.core.slots, mllm.name)
        if overlap is None and mllm.device.type == "cuda" and mllm.ranks.size == 1:
            tried, overlap = True, _overlap_is_exact(self)
        self.core.steps.overlap = bool(overlap)
        if tried:
            self.core.count_anew()

    # -- for callers ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """Take one step of the core, and hand out its tokens."""
        self._step()
        self.receive(self.core.take_outputs())

    def follow(self) -> None:
        """Take the same steps as the first rank's engine until that stops; for the engines of the other ranks."""
        self.core.follow()

    def start(self) -> None:
        """Step in a background thread from now on; raise RuntimeError when the engine was started before."""
        self.core.steps.meanwhile = partial(self._deliver_first, self.receive)
        loop = (self._await_work, self.receive)
        thread = threading.Thread(target=self._run, args=loop, name="helmsight-engine", daemon=True)
        self._begin(thread)
        thread.start()

    def run(
        self, heed: Callable[[bool], object], deliver: Callable[[list[Output]], object], meanwhile: Callable[[], bool]
    ) -> None:
        """Step in the calling thread until the engine is stopped; raise RuntimeError as `start`.

        `heed(busy)` is called before each step, to add and abort requests of the core; unless `busy` it may wait. `deliver`
        gets the outputs of each step. `meanwhile` is called within a step that has first tokens; it returns True where more
        requests came in, which the step may take in, too.
        """
        # all ranks must take in the same requests at the same step
        self.core.steps.meanwhile = meanwhile if self.mllm.ranks.size == 1 else partial(self._deliver_first, deliver)
        self._hosted = True
        self._begin(threading.current_thread())
        self._run(heed, deliver)

    def stop(self, drain: float = 0.0) -> None:
        self.compilation.stop()
        super().stop(drain)

    @property
    def healthy(self) -> bool:
        works = self._thread is not None and self._thread.is_alive() and not self._stopping and self._fatal is None
        return works and time.monotonic() - self._stepping_since <= self._max_step

    def stats(self) -> dict[str, float]:
        return {**self.core.stats(), **self.compilation.stats(), **gpu_memory(self.mllm.devices)}

    @property
    def bins(self) -> Mapping[str, Histogram]:
        return self.core.bins

    @property
    def stepped(self) -> bool:
        return self._thread is not None

    # -- the core ------------------------------------------------------------------------------------------------------

    def _add(self, request: Add) -> Any:
        if self._hosted:
            raise RuntimeError("This engine's outputs go to the client of `run`, by which requests are added, too.")
        return self.core.add(request)

    def _abort(self, number: int) -> None:
        self.core.abort(number)

    def _put_out_whole(self, number: int) -> None:
        self.core.put_out_whole(number)

    def _check(self, answers: int, group: str) -> None:
        self.core.check(answers, group)

    def _close(self) -> None:
        self.core.close()
        if self._thread is None:
            self._release()
        elif self._thread is not threading.current_thread():
            self._thread.join()

    # -- helpers -------------------------------------------------------------------------------------------------------

    def _deliver_first(self, deliver: Callable[[list[Output]], object]) -> bool:
        """Deliver first tokens within a step, which takes in no further requests."""
        deliver(self.core.take_outputs())
        return False

    def _step(self) -> None:
        self._stepping_since = time.monotonic()
        self.core.step()
        self._stepping_since = math.inf

    def _advance(self) -> None:
        if self._thread is None:
            self.step()
        else:
            with self.core.changed:
                self._refuse_when_closed()
                self.core.changed.wait(timeout=0.1)

    @property
    def _is_full(self) -> bool:
        return self.core.waiting >= self.core.slots

    @property
    def _is_dead(self) -> bool:
        return self._fatal is not None

    def _release(self) -> None:
        if self._fatal is None:
            self.core.end_following()

    def _begin(self, thread: threading.Thread) -> None:
        if self._thread is not None:
            raise RuntimeError("The engine was started before.")
        self.core.count_anew(self._budget)
        self._thread = thread

    def _await_work(self, busy: bool) -> None:
        with self.core.changed:
            self.core.changed.wait_for(lambda: busy or self.core.has_work or self.core.closed)

    def _run(self, heed: Callable[[bool], object], deliver: Callable[[list[Output]], object]) -> None:
        if self.mllm.device.type == "cuda":  # pinned memory belongs to the thread's device, which is else the first one
            torch.cuda.set_device(self.mllm.device)
        try:
            while (busy := self.core.has_work) or not self.core.closed:
                heed(busy or self.compilation.prepare_next())
                if self.core.has_work:
                    self._step()
                    deliver(self.core.take_outputs())
            self._release()
        except BaseException as error:
            log.critical("The engine thread died.", exc_info=error)
            self._fatal = error
            deliver(self.core.fail(error))
            with self._changed:
                self._changed.notify_all()
            if self._died is not None:
                self._died()


def _overlap_is_exact(engine: Engine) -> bool:
    """Return True where small answers of an idle engine have the same tokens with `overlap`; log a warning where not."""
    request = Request(
        [{"role": "user", "content": "?"}], Sampling(max_tokens=8, ignore_eos=True, temperature=1.0, seed=1)
    )
    answers = []
    for engine.core.steps.overlap in (False, True):
        results = engine.generate([request] * min(engine.core.slots, 4))
        answers.append([choice.token_ids for result in results for choice in result.choices])
    if answers[0] != answers[1]:
        log.warning(
            "the host reads the tokens of each step before the next one: other answers came of it when it did not"
        )
    return answers[0] == answers[1]
