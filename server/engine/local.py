"""Helmsight's own engine behind the server's engine protocol.

The rest of the server imports nothing else of the engine.
"""

from __future__ import annotations

import gc
import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import steering
from server.engine.progress import Tell, weights_told
from server.engine.resources import prepared_at_once, processors
from server.engine.served import Capabilities, Inspected, ServedEngine
from server.settings import Settings
from steering import Auto, Request, Steer
from steering.core import compilation
from steering.errors import UnsupportedModel
from steering.front.client import Client
from steering.model.calibration import CALIBRATIONS, FOLDER, PARTS, Calibration
from steering.model.calibration_files import CalibrationFiles
from steering.prompt.bounds import texts_of
from steering.prompt.chat import pictures_of
from steering.runner import selfcheck
from steering.tools.formats import format_of

log = logging.getLogger("helmsight")

LEAST_STEP = 60.0
"""Lower bound in seconds of the duration after which a step counts as hung, however short answers may be."""

LIGHT = 8192
"""Largest number of text characters of a request that any number of threads may prepare at once."""

Servable = ServedEngine | steering.Engine


class LocalEngine:
    """A `ServedEngine` over a client of Helmsight's own engine core, which runs in this process or in another one.

    It bounds how many requests with images or long texts are prepared at once, since the engine's queue bounds neither the
    memory nor the CPU time of that. `magnitudes` are those of the model, None if they have to be measured. `files` are
    those of its calibration, None where that never changes.
    """

    def __init__(self, client: Client, magnitudes: torch.Tensor | None = None, files: CalibrationFiles | None = None):
        self._client = client
        self._magnitudes = magnitudes
        self._files, self._refreshing = files, threading.Lock()
        self._pictures, self._texts = (threading.BoundedSemaphore(prepared_at_once()) for _ in range(2))
        client.preparing = self._preparing
        self.capabilities = capabilities_of(client)

    @property
    def healthy(self) -> bool:
        return self._client.healthy

    def start(self) -> None:
        self._client.start()

    def stop(self, drain: float = 0.0) -> None:
        self._client.stop(drain)

    def turn(self, group: str = "") -> AbstractContextManager[steering.Turn]:
        self.calibration()  # the turn keeps what is calibrated now
        return self._client.turn(group)

    def inspect(self, request: Request) -> Inspected:
        admitted = self._client.inspect(request)
        return Inspected(admitted.prompt.length, admitted.max_tokens)

    def calibration(self) -> Calibration | None:
        calibration = self._client.mllm.calibration
        if self._files is None or self._files.current() is calibration:
            return calibration
        with self._refreshing:
            calibration, now = self._client.mllm.calibration, self._files.current()
            if now is not calibration:
                self._client.calibrate(now)
                self.capabilities = replace(self.capabilities, about=about(self._client.mllm))
                log.warning("the calibration of %s changed: %s", self.capabilities.name, _difference(calibration, now))
        return now

    def stats(self) -> Mapping[str, float]:
        return self._client.stats()

    @property
    def bins(self) -> Mapping[str, steering.Histogram]:
        return self._client.bins

    def magnitudes(self) -> torch.Tensor:
        return steering.magnitudes(self._client) if self._magnitudes is None else self._magnitudes

    def check_steer(self, steer: Steer, images: int | None = None) -> None:
        steering.check_steer(self._client.mllm, steer, images)

    def check_auto(self, auto: Auto) -> None:
        steering.check_auto(self._client.mllm, auto)

    def _preparing(self, request: Request) -> AbstractContextManager[object]:
        """Return the lock to hold while a request is prepared: one for images, one for long texts, none for short texts."""
        if pictures_of(request.messages):
            return self._pictures
        return self._texts if sum(map(len, texts_of(request.messages))) > LIGHT else nullcontext()


def _difference(before: Calibration | None, after: Calibration | None) -> str:
    """Return the parts that differ and both digests, in words."""
    parts = [part for part in PARTS if getattr(before, part, None) != getattr(after, part, None)]
    digests = [getattr(calibration, "digest", None) or "none" for calibration in (before, after)]
    return f"{', '.join(parts)}; digest {digests[0]} before, {digests[1]} now"


def capabilities_of(client: Client) -> Capabilities:
    """Return the capabilities of a client's engine."""
    mllm, length = client.mllm, client.limits.length
    return Capabilities(
        name=mllm.name,
        fingerprint=mllm.fingerprint,
        layers=mllm.num_layers,
        hidden_size=mllm.hidden_size,
        context_length=length,
        text=steering.TextBounds.of(mllm, length),
        device=", ".join(map(str, mllm.devices)),
        dtype=str(mllm.dtype).removeprefix("torch."),
        quantization=mllm.quantization,
        image_size=mllm.image_size,
        pixels=None if mllm.pixels is None else (mllm.pixels.least, mllm.pixels.most),
        folder=mllm.path,
        generation_defaults=mllm.generation_defaults,
        interventions=client.interventions,
        readouts=client.readouts,
        grammars=client.grammars,
        tools=format_of(mllm) is not None,
        template_variables=mllm.chat.variables,
        reasoning=mllm.chat.reasoning,
        takes_reasoning=mllm.chat.takes_reasoning,
        about=about(mllm),
    )


def about(mllm: steering.MLLM) -> dict[str, Any]:
    """Return the details of a model that its page shows: its family, its self-check and its calibration."""
    calibration = mllm.calibration
    return {
        "architecture": type(mllm.model).__name__,
        "family": mllm.model.config.model_type,
        "vocabulary": mllm.vocab_size,
        "focus_layers": mllm.focus_layers,
        "attention_layers": list(mllm.attention_layers),
        "generation_defaults": dict(mllm.generation_defaults),
        "self_check": {
            "steps": selfcheck.STEPS,
            "tolerance": None if mllm.rounds else selfcheck.TOLERANCE,
            "margin": selfcheck.MARGIN if mllm.rounds else None,
        },
        "calibration": {
            "digest": calibration and calibration.digest,
            "think": calibration
            and calibration.divergence
            and {"samples": calibration.samples, "tokens": calibration.tokens},
            "sinks": calibration and calibration.sinks and {"images": calibration.images},
            "surprise": calibration
            and calibration.surprise
            and {"bound": calibration.surprise, "contexts": calibration.contexts},
            "flags": calibration and calibration.flags and asdict(calibration.flags),
            "alarm": calibration and calibration.alarm and asdict(calibration.alarm),
        },
    }


def engine_threads(settings: Settings) -> int:
    """Return the number of CPU threads of the engine.

    The default is torch's own choice, which knows the machine, capped at the processors that this process may use.
    """
    return settings.threads or max(1, min(torch.get_num_threads(), processors() // settings.tensor_parallel))


def cut_length(settings: Settings, capabilities: Capabilities) -> str | None:
    """Return a warning if `max_length` exceeds the model's context, else None."""
    context = capabilities.context_length
    if settings.max_length is None or settings.max_length <= context:
        return None
    return f"--max-length {settings.max_length} exceeds the model's context of {context} tokens"


def adapted(engine: Servable) -> ServedEngine:
    """Return the engine as a `ServedEngine`."""
    return LocalEngine(engine) if isinstance(engine, steering.Engine) else engine


def load(settings: Settings, tell: Tell = lambda stage, share: None) -> LocalEngine:
    """Load and check the model of the settings and return an engine that is not started yet.

    `tell` receives the progress. Raises steering.UnsupportedModel and whatever loading raises.
    """
    engine = make_engine(settings, tell)
    return LocalEngine(engine, files=calibration_files(engine.mllm, settings))


def load_without_weights(settings: Settings) -> steering.MLLM:
    """Return the model of the settings without its weights, which is enough to prepare requests; raises as `load`."""
    mllm = steering.load(
        settings.model,
        dtype="float32",
        device="meta",
        local_files_only=not settings.download,
        name=settings.name,
        unread="",
        chat_template=settings.chat_template,
    )
    mllm.seen.capacity = settings.image_cache
    return mllm


compiler = compilation.compiler
"""The compiler that would compile the engine's steps."""


def make_engine(
    settings: Settings, tell: Tell = lambda stage, share: None, died: Callable[[], None] | None = None
) -> steering.Engine:
    """Return the engine of `load` as a `steering.Engine`."""
    with weights_told(tell, "reading the weights"):
        mllm = steering.load(
            settings.model,
            dtype=settings.dtype,
            device=settings.device,
            device_map=settings.device_map,
            tensor_parallel=settings.tensor_parallel,
            quantization=settings.quantization,
            local_files_only=not settings.download,
            name=settings.name,
            chat_template=settings.chat_template,
            calibrations=calibrations_of(settings),
        )
    tell("comparing it with the plain model", None)
    threads = engine_threads(settings)
    log.info("%d CPU threads", threads)
    build = partial(
        steering.Engine,
        mllm,
        slots=settings.slots,
        max_length=settings.max_length,
        max_waiting=settings.max_waiting,
        max_wait=settings.max_wait,
        max_gap=settings.max_gap / 1e3,
        max_stall=settings.max_stall,
        max_images=max(1, settings.max_images),
        image_cache_bytes=settings.image_cache,
        prefix_cache_bytes=settings.prefix_cache,
        threads=threads,
        compiled_folder=settings.compiled_folder,
        overlap=settings.overlap if mllm.device.type == "cuda" else False,
        kv_share=settings.kv_share,
        max_step=longest_step(settings),
        died=died or end_process,
    )
    if settings.compiled is not None:
        return build(compiled=settings.compiled)
    pays = compilation.pays(mllm)
    try:
        return build(compiled=pays)
    except UnsupportedModel as reason:
        if not pays or mllm.device.type == "cpu":  # a CPU runs steps eagerly that cannot be compiled
            raise
        log.warning("decode steps are not captured as CUDA graphs and are slower: %s", reason)
    gc.collect()  # frees the first engine's KV cache, since memory does not hold two
    return build(compiled=False)


def calibrations_of(settings: Settings) -> Path | None:
    """Return the folder of calibrated thresholds: beside the vectors, or None for the library's default."""
    return Path(settings.vectors[0]) / CALIBRATIONS if settings.vectors else None


def calibration_files(mllm: steering.MLLM, settings: Settings) -> CalibrationFiles:
    """Return the files of a model's calibration under these settings."""
    calibrations = Path(calibrations_of(settings) or FOLDER).expanduser()
    attending = len(mllm.attention_layers)
    return CalibrationFiles(mllm.calibration, mllm.fingerprint, mllm.num_layers, mllm.path, calibrations, attending)


def longest_step(settings: Settings) -> float:
    """Return the seconds after which a step counts as hung."""
    return max(LEAST_STEP, settings.request_timeout)


def end_process() -> None:
    """End this process, since a failed device stays failed until its process ends.

    gunicorn or Ray starts another one. Where several processes share a model none can continue, and torchrun restarts all.
    """
    time.sleep(1)  # lets the last answers reach their clients
    logging.shutdown()
    os._exit(1)
