"""Hidden states that are too large to be sent within an answer, kept until they are fetched or forgotten."""

from __future__ import annotations

import threading
from base64 import b64decode
from collections import OrderedDict
from dataclasses import replace
from typing import Any

from steering import Choice
from steering.readouts.residual import StatesReadout

INLINE = 2**20
"""The length in characters up to which an answer holds the base64 of its states."""
KEPT_BYTES = 256 * 2**20
"""The size of the files that are kept: the latest ones."""


class AnswerFiles:
    """The latest files of answers in memory, by name, each for the key that asked."""

    def __init__(self) -> None:
        self._files: OrderedDict[str, tuple[str, bytes]] = OrderedDict()
        self._bytes = 0
        self._lock = threading.Lock()

    def keep(self, name: str, owner: str, data: bytes) -> None:
        """Keep a file and forget the oldest ones beyond `KEPT_BYTES`."""
        with self._lock:
            self._files[name] = owner, data
            self._bytes += len(data)
            while self._bytes > KEPT_BYTES:
                _, (_, oldest) = self._files.popitem(last=False)
                self._bytes -= len(oldest)

    def find(self, name: str, owner: str) -> bytes | None:
        """Return a file of this owner; None where there is none, or no longer."""
        with self._lock:
            entry = self._files.get(name)
        return entry[1] if entry is not None and entry[0] == owner else None

    def apart(self, choice: Choice, answer_id: str, owner: str, suffix: str = "") -> Choice:
        """Return a choice whose states, and its baseline's, are files of their own where they are large."""
        name = f"{answer_id}-{choice.index}{suffix}"
        baseline = None if choice.baseline is None else self.apart(choice.baseline, answer_id, owner, "-baseline")
        return replace(choice, diagnostics=self._smaller(choice.diagnostics, name, owner), baseline=baseline)

    def _smaller(self, diagnostics: dict[str, Any] | None, name: str, owner: str) -> dict[str, Any] | None:
        report = None if diagnostics is None else diagnostics.get(StatesReadout.name)
        if diagnostics is None or report is None or len(report["safetensors"]) <= INLINE:
            return diagnostics
        self.keep(name, owner, b64decode(report["safetensors"]))
        return {**diagnostics, StatesReadout.name: {**report, "safetensors": None, "file": name}}
