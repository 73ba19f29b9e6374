"""Prompts with pictures are read in the worker's process: in the engine's, that would share the interpreter with the thread
that steps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch

from server.engine.local import LocalReader, has_pictures
from server.engine.resources import keep_what_is_loaded
from server.engine.served import Capabilities
from server.settings import Settings
from steering import Request

log = logging.getLogger("helmsight")


class PromptReader:
    """Loads what it needs in a thread of its own; any thread may ask it meanwhile."""

    def __init__(self, settings: Settings, able: Capabilities):
        self._settings, self._able = settings, able
        self._reader: LocalReader | None = None
        torch.set_num_threads(1)  # there is one for each request, and the engine's process has those for computing
        threading.Thread(target=self._load, name="helmsight-reader", daemon=True).start()

    def __call__(self, request: Request) -> Any:
        """The prompt of a request with pictures, for `LocalTurn.submit_read`; raises what preparing it raises. None where
        the engine is to read it."""
        return self._reader(request) if self._reader is not None and has_pictures(request) else None

    def stats(self) -> Mapping[str, float]:
        """What it keeps and counts."""
        return {} if self._reader is None else self._reader.stats()

    def _load(self) -> None:
        try:
            self._reader = LocalReader(self._settings, self._able)
        except Exception as error:  # nothing is lost but time
            log.warning("the engine's process prepares all prompts, as this one cannot: %s", error)
            return
        keep_what_is_loaded()
