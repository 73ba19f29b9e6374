"""Which columns a decode reads: those that most rows need for all of them together, and of the few long rows their own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steering.decoder.kv import KVPool
from steering.runner.room import COLUMN_BUCKET

CALL_BYTES = {"cpu": 2**19}
"""By the kind of a device: how much is read in the time that one more call of a layer's attention takes (about 20 us)."""
GPU_CALL_BYTES = 2**26
BUCKET = {"cpu": 16}
"""A multiple of so many columns is read: as many numbers as a vector of the processor has; on a GPU `COLUMN_BUCKET`."""


class Columns(NamedTuple):
    """longest: how many the longest row needs, up to a bucket. common: how many all rows read together. apart: of each row
    that reads by itself its number and how many it needs. saved: bytes of all layers that need not be read."""

    longest: int
    common: int
    apart: tuple[tuple[int, int], ...] = ()
    saved: int = 0


def columns_of(lengths: Sequence[int], pool: KVPool, device: str) -> Columns:
    """How rows of so many columns are read in the least time."""
    bucket = BUCKET.get(device, COLUMN_BUCKET)
    longest = _bucket(max(lengths), pool, bucket)
    each = pool.column_bytes
    call = CALL_BYTES.get(device, GPU_CALL_BYTES) / each if each else float("inf")
    if len(lengths) * longest - sum(lengths) <= call:  # most steps: no way of reading saves more
        return Columns(longest, longest)
    needed = [_bucket(length, pool, bucket) for length in lengths]
    order = sorted(range(len(needed)), key=needed.__getitem__, reverse=True)
    best, apart, own = float(len(needed) * longest), 0, 0
    for count, row in enumerate(order[:-1], 1):
        own += needed[row]
        cost = len(needed) * needed[order[count]] + own + count * call
        if cost < best:
            best, apart = cost, count
    rows = order[:apart]
    common = needed[order[apart]]
    saved = len(needed) * (longest - common) - sum(needed[row] for row in rows)
    return Columns(longest, common, tuple((row, needed[row]) for row in rows), saved * each * pool.layers)


def _bucket(length: int, pool: KVPool, bucket: int) -> int:
    return min(-(-length // bucket) * bucket, pool.length)
