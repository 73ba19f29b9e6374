"""The life cycle of the model inside the server: loading in the background, ready, draining, failed."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import torch

from server.engine import local, vllm
from server.engine.progress import LoadProgress, Tell
from server.engine.resources import prepared_at_once
from server.engine.served import Capabilities, ServedEngine
from server.errors import ApiError
from server.images.turns import PictureTurns
from server.settings import Settings
from server.wording import one_sentence
from steering import Steering, TextBounds, VectorStore
from steering.errors import SHUTTING_DOWN, EngineEnded

log = logging.getLogger("helmsight")

LOADING = "The model is still loading."
State = Literal["loading", "ready", "draining", "failed"]


@dataclass(frozen=True)
class Serving:
    """A loaded model with its engine and its vectors.

    `pictures` bounds how many requests decode images at once, since the engine's queue does not bound that memory and CPU
    time. `disabled` names the interventions of the engine that the settings forbid.
    """

    engine: ServedEngine
    store: VectorStore
    since: int = field(default_factory=lambda: int(time.time()))
    pictures: PictureTurns = field(default_factory=lambda: PictureTurns(prepared_at_once()))
    disabled: frozenset[str] = frozenset()

    @classmethod
    def of(cls, engine: ServedEngine, settings: Settings) -> Serving:
        """Return an engine with the vectors of the configured folders and those beside its model."""
        capabilities = engine.capabilities
        pictures = PictureTurns(prepared_at_once(), settings.slots + settings.max_waiting, settings.max_wait)
        store = vector_store(settings, capabilities.folder, capabilities)
        store.watch(_log_change)
        return cls(engine, store, pictures=pictures, disabled=frozenset(settings.disable_interventions))

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the engine, without the interventions that are disabled."""
        capabilities = self.engine.capabilities
        if not self.disabled:
            return capabilities
        return replace(capabilities, interventions=capabilities.interventions - self.disabled)

    @property
    def name(self) -> str:
        """The model's name on the wire."""
        return self.capabilities.name

    @cached_property
    def magnitudes(self) -> torch.Tensor:
        """(layers,) mean |h| of the model, the unit of steering limits; measured once."""
        return self.engine.magnitudes()

    def text_bounds(self, settings: Settings) -> TextBounds:
        """Return how much text a request may hold."""
        most = self.capabilities.text
        return TextBounds(
            most.tokens,
            min(most.characters, settings.max_characters or most.characters),
            min(most.parts, settings.max_parts or most.parts),
        )


def _log_change(name: str, before: str | None, after: str | None) -> None:
    """Log that a name stands for another vector than before; later requests use the new one."""
    level = logging.INFO if before is None else logging.WARNING
    log.log(level, "steering vector %s changed: digest %s before, %s now", name, before or "none", after or "none")


def vector_store(
    settings: Settings, model_folder: Path | None, capabilities: Capabilities | None = None
) -> VectorStore:
    """Return a store of the configured folders, then the model's own.

    `capabilities` selects the model's vectors, and makes vectors of dictionaries' features, if the model is known.
    """
    folders = [Path(folder).expanduser() for folder in settings.vectors]
    if model_folder is not None:
        folders.append(Path(model_folder) / "vectors")
    if capabilities is None:
        return VectorStore(*folders)
    return VectorStore(*folders, fingerprint=capabilities.fingerprint, layers=capabilities.layers)


def engine_of(settings: Settings, tell: Tell) -> ServedEngine:
    """Return the engine of the settings, loaded into this process or reached from it, before its start."""
    return local.load(settings, tell) if settings.engine == "own" else vllm.load(settings, tell)


def load(
    settings: Settings,
    tell: Tell = lambda stage, share: None,
    make: Callable[[Settings, Tell], ServedEngine] = engine_of,
) -> Serving:
    """Load the model, check it and start the engine that `make` returns; raises whatever `make` raises."""
    tell("importing", None)
    engine = make(settings, tell)
    serving = Serving.of(engine, settings)
    if Steering.name() in engine.capabilities.interventions:
        tell("measuring its magnitudes", None)
        _ = serving.magnitudes  # measured before requests can queue
    engine.start()
    return serving


class Runtime:
    """Holds the one model of this process.

    `on_failure` is called if the model cannot be loaded, but not if the engine's process has ended, which `make` handles.
    `begun` is the program's start on the monotonic clock.
    """

    def __init__(
        self,
        settings: Settings,
        serving: Serving | None = None,
        loader: Callable[[Settings], Serving] | None = None,
        on_failure: Callable[[], None] | None = None,
        begun: float | None = None,
        make: Callable[[Settings, Tell], ServedEngine] = engine_of,
    ):
        self.settings = settings
        self.error: str | None = None
        self._serving = serving
        self.checks: list[Callable[[Serving], None]] = []
        """Checks of the loaded model; if one raises, the model is not served."""
        self.progress = LoadProgress()
        self._loader = loader or partial(load, tell=self.progress.tell, make=make)
        self._on_failure = on_failure
        self._begun = time.monotonic() if begun is None else begun
        self._draining = False
        self._lock = threading.Lock()

    def start(self) -> None:
        """Load the model in the background, so that /health and /ready answer meanwhile."""
        threading.Thread(target=self._load, name="helmsight-load", daemon=True).start()

    def _load(self) -> None:
        try:
            serving = self._checked()
        except BaseException as error:  # a panic of a native library is no Exception
            if self._draining:  # the shutdown interrupted loading, which is no failure
                log.debug("the server ended while it loaded", exc_info=error)
                return
            if isinstance(error, EngineEnded):
                log.debug("the engine has ended; this process ends, too", exc_info=error)
                return
            log.error("the model %s could not be loaded: %s", self.settings.model, one_sentence(error))
            log.debug("where loading ended", exc_info=error)
            self.error = f"{type(error).__name__}: {error}"
            if self._on_failure:
                self._on_failure()
            return
        with self._lock:
            self._serving = serving
            draining = self._draining
        if draining:
            serving.engine.stop(drain=0)
        capabilities, slots = serving.capabilities, int(serving.engine.stats()["slots"])
        if (warning := local.cut_length(self.settings, capabilities)) is not None:
            log.warning(warning)
        log.info(
            "model %s is ready after %.1f s at %s: a context of %d tokens, %d slots, %s on %s",
            serving.name,
            time.monotonic() - self._begun,
            self.settings.address,
            capabilities.context_length,
            slots,
            " with ".join(filter(None, [capabilities.dtype, capabilities.quantization])),
            capabilities.device,
        )

    def _checked(self) -> Serving:
        serving = self._loader(self.settings)
        try:
            for check in self.checks:
                check(serving)
        except Exception:
            serving.engine.stop()
            raise
        return serving

    @property
    def state(self) -> State:
        """The current state of the model; "failed" also if its engine has died and does not come back by itself."""
        if self._draining:
            return "draining"
        if self._serving is None:
            return "loading" if self.error is None else "failed"
        engine = self._serving.engine
        return "ready" if engine.healthy else "loading" if engine.capabilities.recovers else "failed"

    def progress_json(self) -> dict[str, Any]:
        """Return the progress of loading, or of the wait for an engine that is gone and comes back by itself, for JSON."""
        if self._serving is None:
            return self.progress.as_json()
        engine = self._serving.engine
        gone = round(engine.stats().get("seconds_gone", 0.0), 1)
        return {"stage": f"waiting for {engine.capabilities.engine}", "share": None, "seconds": gone}

    @property
    def loaded(self) -> Serving | None:
        """The loaded model in any state; None before loading has finished."""
        return self._serving

    def serving(self) -> Serving:
        """Return the model that serves requests; raises a 503 with Retry-After while none does."""
        state = self.state
        if state == "ready" and self._serving is not None:
            return self._serving
        message, retry = {
            "loading": (LOADING if self._serving is None else "The engine is gone, and is expected back.", 2.0),
            "draining": (SHUTTING_DOWN, 5.0),
            "failed": ("The model is not available.", 30.0),
        }[state]
        headers = {"Connection": "close"} if state == "draining" else {}
        raise ApiError(503, message, code=f"model_{state}", retry_after=retry, headers=headers)

    def drain(self, seconds: float) -> None:
        """Refuse new requests, let running ones finish for up to `seconds`, then stop the engine; returns when done."""
        with self._lock:
            self._draining = True
            serving = self._serving
        if serving is not None:
            serving.engine.stop(drain=seconds)
