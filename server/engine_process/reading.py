"""Prompts with images, and long ones, are read in the worker's process.

In the engine's process that work would share the interpreter with the stepping thread.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from typing import Any

import torch

from server.engine.local import LocalReader, is_light
from server.engine.resources import keep_what_is_loaded
from server.engine.served import Capabilities
from server.settings import Settings
from steering import Request

log = logging.getLogger("helmsight")


class PromptReader:
    """A reader of prompts that loads in a thread of its own; any thread may call it meanwhile."""

    def __init__(self, settings: Settings, able: Capabilities):
        self._settings, self._able = settings, able
        self._reader: LocalReader | None = None
        torch.set_num_threads(1)  # each request has its own thread; computing is left to the engine's process
        threading.Thread(target=self._load, name="helmsight-reader", daemon=True).start()

    def __call__(self, request: Request) -> Any:
        """Return the prompt of a request that takes long to read, for `LocalTurn.submit_read`; None for the others.

        Raises whatever preparing it raises.
        """
        return self._reader(request) if self._reader is not None and not is_light(request) else None

    def stats(self) -> Mapping[str, float]:
        """Return the counters of the reader's image cache."""
        return {} if self._reader is None else self._reader.stats()

    def _load(self) -> None:
        try:
            self._reader = LocalReader(self._settings, self._able)
        except Exception as error:  # only speed is lost
            log.warning("the engine's process prepares all prompts, as this one cannot: %s", error)
            return
        keep_what_is_loaded()
