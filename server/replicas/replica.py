"""A replica: the application with its model, in a process of Ray's."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from ray import serve

from server.replicas.call import AnswerHead, Call, Whole
from server.settings import Settings

if TYPE_CHECKING:
    from server.replicas.answering import Answering

POLL = 0.05


class Replica:
    """A deployment that exists once its model is loaded; `threads` is the number of CPU threads of its engine."""

    async def __init__(self, settings: Settings, threads: int):  # type: ignore[misc]  # as Ray Serve allows
        # Imported here, since describing a replica needs neither torch nor Flask.
        from server.serving import import_ahead, worker_app  # noqa: PLC0415

        import_ahead()  # before torch is imported
        from server.replicas.answering import Answering  # noqa: PLC0415

        self._settings = settings = settings.model_copy(update={"threads": threads})
        app = await asyncio.to_thread(worker_app, settings, time.monotonic(), lambda: None)
        self._state = app.extensions["helmsight"]
        while self._state.runtime.state == "loading":
            await asyncio.sleep(POLL)
        if self._state.runtime.state == "failed":
            raise RuntimeError(f"the model {settings.model} could not be loaded: {self._state.runtime.error}")
        self._answering: Answering = Answering(app, settings)

    async def answer(self, call: Call) -> AsyncIterator[AnswerHead | bytes]:
        """Yield the answer's head, then its bytes as they arrive."""
        async for piece in self._answering.answer(call):
            yield piece

    async def whole(self, call: Call) -> Whole:
        """Return the whole answer, for callers that ask every replica."""
        return Whole(self.name, *await self._answering.whole(call))

    @property
    def name(self) -> str:
        """The replica's name in Ray Serve."""
        return str(serve.get_replica_context().replica_tag)

    async def drain(self) -> None:
        """Refuse new requests, and return once running ones have ended or timed out."""
        await asyncio.to_thread(self._state.runtime.drain, float(self._settings.graceful_timeout))

    def check_health(self) -> None:
        """Raise if Ray Serve must replace this replica."""
        if self._state.runtime.state == "failed":
            raise RuntimeError("the engine has died")

    async def __del__(self) -> None:
        # Ray Serve calls this name before it ends the process, once running requests have ended.
        state = getattr(self, "_state", None)
        if state is not None:
            await asyncio.to_thread(state.runtime.drain, 0.0)
            await asyncio.to_thread(state.journal.close)
