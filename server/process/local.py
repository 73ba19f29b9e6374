"""Helmsight's own engine, as the server knows engines. Nothing else that serves knows more of it than this file tells."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

import steering
from server.engine import Capabilities, ServedCompletion, ServedEngine
from server.settings import Settings
from steering import Auto, Request, Steer

Servable = ServedEngine | steering.Engine


class LocalTurn:
    """A `server.engine.ServedTurn`."""

    def __init__(self, turn: steering.Turn):
        self._turn = turn

    def submit(self, request: Request) -> ServedCompletion:
        return self._turn.submit(request)

    def decide(self, request: Request, auto: Auto, begun: Callable[[ServedCompletion], object]) -> Request:
        return steering.decide(self._turn, request, auto, begun)


class LocalEngine:
    """A `server.engine.ServedEngine` in this process."""

    def __init__(self, engine: steering.Engine):
        mllm = engine.mllm
        self._engine = engine
        self.capabilities = Capabilities(
            name=mllm.name,
            fingerprint=mllm.fingerprint,
            layers=mllm.num_layers,
            hidden_size=mllm.hidden_size,
            context_length=engine.max_length,
            text=steering.TextBounds.of(mllm, engine.max_length),
            device=str(mllm.device),
            dtype=str(mllm.dtype).removeprefix("torch."),
            image_size=mllm.image_size,
            folder=mllm.path,
            generation_defaults=mllm.generation_defaults,
            interventions=engine.interventions,
            readouts=engine.readouts,
        )

    @property
    def healthy(self) -> bool:
        return self._engine.healthy

    def start(self) -> None:
        self._engine.start()

    def stop(self, drain: float = 0.0) -> None:
        self._engine.stop(drain)

    @contextmanager
    def turn(self) -> Iterator[LocalTurn]:
        with self._engine.turn() as turn:
            yield LocalTurn(turn)

    def stats(self) -> Mapping[str, float]:
        return self._engine.stats()

    def magnitudes(self) -> torch.Tensor:
        return steering.magnitudes(self._engine)

    def check_steer(self, steer: Steer, images: int | None = None) -> None:
        steering.check_steer(self._engine.mllm, steer, images)

    def check_auto(self, auto: Auto) -> None:
        steering.check_auto(self._engine.mllm, auto)


def adapted(engine: Servable) -> ServedEngine:
    """The engine as the server knows engines."""
    return LocalEngine(engine) if isinstance(engine, steering.Engine) else engine


def load(settings: Settings) -> LocalEngine:
    """Load the model of the settings, check it, and make an engine, which is not started yet; raises
    steering.UnsupportedModel and what loading raises."""
    mllm = steering.load(
        settings.model,
        dtype=settings.dtype,
        device=settings.device,
        local_files_only=not settings.download,
        name=settings.name,
    )
    engine = steering.Engine(
        mllm,
        slots=settings.slots,
        max_length=settings.max_length,
        max_waiting=settings.max_waiting,
        max_images=max(1, settings.max_images),
        image_cache_bytes=settings.image_cache,
        threads=settings.threads,
        compiled=settings.compiled,
    )
    return LocalEngine(engine)
