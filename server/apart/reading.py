"""Prompts with pictures are read in the worker's process: in the engine's, that would share the interpreter with the thread
that steps. It needs the model's processor, and none of its weights."""

from __future__ import annotations

import logging
import threading

import torch

import steering
from server.engine import Capabilities
from server.process.local import has_pictures
from server.process.resources import keep_what_is_loaded
from server.settings import Settings
from steering import Request
from steering.engine.admission import read_prompt
from steering.prompt.layout import Prompt

log = logging.getLogger("helmsight")


class PromptReader:
    """Loads what it needs in a thread of its own; any thread may ask it meanwhile."""

    def __init__(self, settings: Settings, able: Capabilities):
        self._settings, self._able = settings, able
        self._mllm: steering.MLLM | None = None
        torch.set_num_threads(1)  # there is one for each request, and the engine's process has those for computing
        threading.Thread(target=self._load, name="helmsight-reader", daemon=True).start()

    def __call__(self, request: Request) -> Prompt | None:
        """The prompt of a request with pictures; raises what preparing it raises. None where the engine is to read it."""
        if self._mllm is None or not has_pictures(request):
            return None
        return read_prompt(self._mllm, request, self._able.context_length)

    def _load(self) -> None:
        try:
            mllm = steering.load(
                self._settings.model,
                dtype="float32",
                device="meta",
                local_files_only=not self._settings.download,
                unread=self._able.fingerprint,
            )
        except Exception as error:  # nothing is lost but time
            log.warning("the engine's process prepares all prompts, as this one cannot: %s", error)
            return
        self._mllm = mllm
        keep_what_is_loaded()
