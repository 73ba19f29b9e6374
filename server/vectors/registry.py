"""The folder that vectors are uploaded to.

Processes that share it see each other's changes at the next lookup, because a `VectorStore` checks the file itself; changes
are serialised by a lock file.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from steering import NAME, SteeringVector, VectorError

LOCK = ".lock"
PATIENCE = 10.0
"""Seconds to wait for another process's change, which takes milliseconds."""
ABANDONED = 3600.0
"""Seconds after which a half-written file counts as abandoned by a killed process."""


@dataclass(frozen=True)
class Registry:
    """Adds vectors to a folder and removes them.

    Folders in `others` are only read, and their names cannot be changed. Errors are VectorErrors with the codes
    "vector_exists", "vector_read_only", "too_many_vectors", "unknown_vector" and "registry_busy", and OSErrors of the disk,
    after which the folder is unchanged.
    """

    folder: Path
    others: Sequence[Path] = field(default=())
    limit: int | None = None

    def add(self, vector: SteeringVector, replace: bool = False) -> Path:
        """Write a vector atomically; an existing one of the same name is only overwritten with `replace`."""
        with self._locked():
            self._sweep()
            path = self._path(vector.name)
            if path.exists():
                if not replace:
                    raise VectorError(f"There is a steering vector {vector.name!r} already.", code="vector_exists")
                return vector.save(path)
            self._refuse_foreign(vector.name, replace)
            if self.limit is not None and (count := self._count()) >= self.limit:
                raise VectorError(
                    f"There are {count} uploaded steering vectors already, at most {self.limit} are allowed; delete some.",
                    code="too_many_vectors",
                )
            return vector.save(path)

    def remove(self, name: str) -> None:
        """Delete an uploaded vector; requests that use it keep it."""
        unknown = VectorError(f"There is no steering vector {name[:128]!r}.", code="unknown_vector")
        if not NAME.fullmatch(name):
            raise unknown
        if not self._path(name).exists():  # checked first, so that an unused folder is not created
            self._refuse_foreign(name, changing=True)
            raise unknown
        with self._locked():
            try:
                self._path(name).unlink()
            except FileNotFoundError:
                raise unknown from None

    def _path(self, name: str) -> Path:
        return self.folder / f"{name}.safetensors"

    def _refuse_foreign(self, name: str, changing: bool) -> None:
        for folder in self.others:
            if (folder / f"{name}.safetensors").exists():
                if not changing:
                    raise VectorError(f"There is a steering vector {name!r} already.", code="vector_exists")
                raise VectorError(
                    f"Steering vector {name!r} was not uploaded: it belongs to the model or to a folder that is only read.",
                    code="vector_read_only",
                )

    def _count(self) -> int:
        with os.scandir(self.folder) as entries:
            return sum(entry.name.endswith(".safetensors") for entry in entries)

    def _sweep(self) -> None:
        """Remove the files of killed writers; no lookup sees them, but they take space."""
        for path in self.folder.glob(".*.safetensors.*"):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > ABANDONED:
                    path.unlink()

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock against all threads and processes; creates the folder."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # A new descriptor, because threads that shared one would share the lock.
        handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            deadline = time.monotonic() + PATIENCE
            while True:
                try:
                    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise VectorError(
                            "Another process is changing the steering vectors; try again.", code="registry_busy"
                        ) from None
                    time.sleep(0.01)
            yield
        finally:
            os.close(handle)
