"""The files of a model's calibrations, which may change while it is served."""

from __future__ import annotations

import copy
import logging
import threading
from pathlib import Path

from steering.errors import UnsupportedModel
from steering.model.calibration import Calibration, places
from steering.model.mllm import MLLM

log = logging.getLogger(__name__)

Stamps = tuple[tuple[int, int, int] | None, ...]
"""Inode number, time of change and size of each file; None for one that does not exist."""


class CalibrationFiles:
    """Reads a model's calibration again whenever one of its files changed; any thread may ask.

    `held` is the calibration that was loaded before. `calibrations` is the user's folder, `folder` the model's own; the
    others are as of `Calibration.load`.
    """

    def __init__(
        self,
        calibration: Calibration | None,
        fingerprint: str,
        layers: int,
        folder: Path | None,
        calibrations: Path | None,
        attending: int | None = None,
    ):
        self._calibration = calibration
        self._of = folder, fingerprint, layers, calibrations, attending
        self._paths = places(folder, fingerprint, calibrations)
        self._stamps: Stamps | None = None
        self._lock = threading.Lock()

    def current(self) -> Calibration | None:
        """Return the calibration as of now, the same object while its numbers are the same.

        A damaged file leaves the last one in use, and is logged once.
        """
        stamps = tuple(_stamp(path) for path in self._paths)
        if stamps == self._stamps:
            return self._calibration
        with self._lock:
            if stamps != self._stamps:
                try:
                    read = Calibration.load(*self._of)
                    if read != self._calibration:
                        self._calibration = read
                except (UnsupportedModel, OSError) as error:
                    log.warning("the calibration in use is kept: %s", error)
                self._stamps = stamps
        return self._calibration


def under(mllm: MLLM, calibration: Calibration | None) -> MLLM:
    """Return the same model, weights and caches included, under another calibration; whoever holds the old one keeps it."""
    view = copy.copy(mllm)
    view.calibration = calibration
    return view


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        stat = path.stat()
    except OSError:
        return None
    return stat.st_ino, stat.st_mtime_ns, stat.st_size  # a replaced file has a new inode number
