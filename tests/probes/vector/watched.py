"""An engine whose requests are counted and which may be stopped, and vectors that are the same."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest
import torch

import steering


def same(one: steering.SteeringVector, other: steering.SteeringVector) -> None:
    """To the last bit or two of float32, and in everything that is told; only rounding of numbers may differ."""
    assert (one.name, one.layers, one.fingerprint) == (other.name, other.layers, other.fingerprint)
    for name in ("direction", "weight", "mean_abs", "std"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-5, atol=1e-6)
    assert set(one.info) == set(other.info)
    for name, value in one.info.items():
        if name == "magnitudes":
            for one_of, other_of in zip(_numbers(value), _numbers(other.info[name]), strict=True):
                assert other_of == pytest.approx(one_of, rel=1e-4)
            continue
        measured = name in ("agreement", "score")
        assert other.info[name] == (pytest.approx(value, rel=1e-4) if measured else value), name


def _numbers(magnitudes: dict[str, dict[str, list[float]]]) -> list[list[float]]:
    return [magnitudes[of][kind] for of in sorted(magnitudes) for kind in sorted(magnitudes[of])]


class Stopped(Exception):
    """The exception that ends a run."""


class Watched:
    """An engine that counts the requests it takes and, after so many pairs, is stopped."""

    def __init__(self, engine: steering.Engine, stop_after: int | None = None) -> None:
        self.mllm = engine.mllm
        self.taken = 0
        self._engine, self._stop_after = engine, stop_after

    def stream(self, requests: Iterable[steering.Request]) -> Iterator[steering.Result]:
        def counted() -> Iterator[steering.Request]:
            for request in requests:
                self.taken += 1
                yield request

        for number, result in enumerate(self._engine.stream(counted())):
            if self._stop_after is not None and number >= 3 * self._stop_after:
                raise Stopped
            yield result
