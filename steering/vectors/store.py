"""A store of steering vectors: the files of several folders by name."""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from steering.errors import RequestError, VectorError
from steering.vectors.info import NAME
from steering.vectors.sparse import SparseDictionary, feature_of, is_dictionary
from steering.vectors.vector import SteeringVector

PIN = "@"
"""Separator between a vector's name and the beginning of the digest that it must have."""
_DIGEST = re.compile(r"[0-9a-f]{8,64}")

Changed = Callable[[str, str | None, str | None], object]
"""A callback with a vector's name and its digests before and after; None stands for no vector."""


class PinError(RequestError):
    """A vector is not the one whose digest was named."""


class VectorStore:
    """The named vectors in several folders; a name in an earlier folder hides the same name in a later one.

    A vector of another model hides none: where `fingerprint` is given, the first vector of that model is returned, and the
    first of any model only where there is none. A name is looked up anew each time and its file read again when it changed,
    so that several processes may share a folder. No lookup of a known name reads a directory.

    A folder may also hold sparse dictionaries, each in a folder of its own, whose features are vectors by the name
    `sae:DICTIONARY/FEATURE`; `layers` is the model's number of layers, which these need, as they need its fingerprint.
    """

    def __init__(self, *folders: str | Path, fingerprint: str | None = None, layers: int | None = None):
        self.folders = tuple(Path(folder) for folder in folders)
        self.fingerprint = fingerprint
        self.layers = layers
        self._cache: dict[Path, tuple[tuple[int, int, int], SteeringVector]] = {}
        self._changed: Changed | None = None
        self._seen: dict[str, str] = {}
        self._noting = threading.Lock()

    def watch(self, changed: Changed) -> None:
        """Call `changed` whenever a lookup finds that a name has come to stand for another vector than before."""
        self._changed = None
        for name in self.names():
            try:
                self._seen[name] = self.get(name).identity
            except (VectorError, OSError):
                continue
        self._changed = changed

    def _note(self, name: str, vector: SteeringVector | None) -> None:
        if self._changed is None:
            return
        now = None if vector is None else vector.identity
        if self._seen.get(name) == now:
            return
        with self._noting:
            before = self._seen.pop(name, None)
            if now is not None:
                self._seen[name] = now
            if before != now:
                self._changed(name, before, now)

    def names(self) -> list[str]:
        """Return every available name, sorted."""
        files = [path for folder in self.folders if folder.is_dir() for path in folder.glob("*.safetensors")]
        return sorted({path.stem for path in files if NAME.fullmatch(path.stem)})

    def get(self, name: str) -> SteeringVector:
        """Return the vector of that name; raise VectorError (code "unknown_vector") if there is none, PinError as above."""
        name, pinned, digest = name.partition(PIN)
        feature = feature_of(name)
        vector = self._find(name)[1] if feature is None else self._feature(*feature)
        if pinned:
            _check_pin(vector, digest)
        return vector

    def all(self, name: str) -> list[SteeringVector]:
        """Return the vectors of that name in all folders, also those of other models; raise VectorError as `get` does."""
        vectors = [vector for _, vector in self._candidates(name)]
        if not vectors:
            raise self._unknown(name)
        return vectors

    def files(self, name: str) -> list[Path]:
        """Return the files of that name in all folders, damaged ones too."""
        return [path for path in self._places(name) if path.exists()]

    def read(self, name: str) -> bytes:
        """Return the artifact of that name as stored in its file, verified; raise VectorError as `get` does."""
        path, _ = self._find(name)
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            raise self._unknown(name) from None
        SteeringVector.from_bytes(data)
        return data

    def dictionaries(self) -> list[str]:
        """Return the names of the sparse dictionaries, sorted."""
        folders = [path for folder in self.folders if folder.is_dir() for path in folder.iterdir()]
        return sorted({path.name for path in folders if is_dictionary(path)})

    def dictionary(self, name: str) -> SparseDictionary:
        """Return the sparse dictionary of that name; raise VectorError (code "unknown_dictionary") if there is none."""
        for folder in self.folders:
            if is_dictionary(folder / name):
                return SparseDictionary.load(folder / name)
        available = ", ".join(self.dictionaries()) or "none"
        raise VectorError(f"There is no dictionary {name[:128]!r}; available: {available}.", code="unknown_dictionary")

    def _feature(self, name: str, feature: int) -> SteeringVector:
        dictionary = self.dictionary(name)
        if self.fingerprint is None or self.layers is None:
            raise VectorError(
                f"'sae:{name[:64]}/{feature}' is a vector of no model: the store knows neither fingerprint nor layers.",
                code="wrong_model",
            )
        return dictionary.vector(feature, self.layers, self.fingerprint)

    def _find(self, name: str) -> tuple[Path, SteeringVector]:
        first = None
        for path, vector in self._candidates(name):
            if self.fingerprint in (None, vector.fingerprint):
                first = path, vector
                break
            first = first or (path, vector)
        self._note(name, None if first is None else first[1])
        if first is None:
            raise self._unknown(name)
        return first

    def _candidates(self, name: str) -> Iterator[tuple[Path, SteeringVector]]:
        for path in self._places(name):
            try:
                stat = path.stat()
                # A replaced file has a new inode number, even within one tick of the clock.
                stamp = (stat.st_ino, stat.st_mtime_ns, stat.st_size)
                cached = self._cache.get(path)
                if cached is None or cached[0] != stamp:
                    cached = self._cache[path] = (stamp, SteeringVector.load(path))
            except FileNotFoundError:
                self._cache.pop(path, None)
            else:
                yield path, cached[1]

    def _places(self, name: str) -> list[Path]:
        return [folder / f"{name}.safetensors" for folder in self.folders] if NAME.fullmatch(name) else []

    def _unknown(self, name: str) -> VectorError:
        available = ", ".join(self.names()) or "none"
        return VectorError(
            f"There is no steering vector {name[:128]!r}; available: {available}.", code="unknown_vector"
        )


def _check_pin(vector: SteeringVector, digest: str) -> None:
    if not _DIGEST.fullmatch(digest):
        raise PinError(
            f"Steering vector {vector.name!r} must be followed by {PIN!r} and 8 to 64 hexadecimal digits of its digest; got "
            f"{digest[:64]!r}.",
            code="bad_vector_digest",
        )
    if not vector.identity.startswith(digest):
        raise PinError(
            f"Steering vector {vector.name!r} has digest {vector.identity[:16]}, not {digest[:64]}, which was pinned.",
            code="vector_digest_mismatch",
        )
