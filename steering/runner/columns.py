"""The columns that a decode reads: a common number for most rows together, and their own for the few long rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from steering.decoder.kv import KVPool
from steering.runner.room import COLUMN_BUCKET

CALL_BYTES = {"cpu": 2**19}
"""Bytes read in the time of one more call of a layer's attention (about 20 us), by device type."""
GPU_CALL_BYTES = 2**26
BUCKET = {"cpu": 16}
"""The number of columns read is a multiple of this, the processor's vector width; on a GPU, of `COLUMN_BUCKET`."""


class Columns(NamedTuple):
    """The columns that a decode reads.

    longest: the number that the longest row needs, rounded up to a bucket. common: the number that all rows read together.
    apart: (row, number of columns) of each row that reads by itself. saved: bytes, over all layers, that need not be read.
    """

    longest: int
    common: int
    apart: tuple[tuple[int, int], ...] = ()
    saved: int = 0


def columns_of(lengths: Sequence[int], pool: KVPool, device: str) -> Columns:
    """Return the fastest way to read rows of these lengths."""
    bucket = BUCKET.get(device, COLUMN_BUCKET)
    longest = _bucket(max(lengths), pool, bucket)
    column_bytes = pool.column_bytes
    call = CALL_BYTES.get(device, GPU_CALL_BYTES) / column_bytes if column_bytes else float("inf")
    if len(lengths) * longest - sum(lengths) <= call:  # most steps: no split saves more
        return Columns(longest, longest)
    needed = [_bucket(length, pool, bucket) for length in lengths]
    order = sorted(range(len(needed)), key=needed.__getitem__, reverse=True)
    best, apart, apart_columns = float(len(needed) * longest), 0, 0
    for count, row in enumerate(order[:-1], 1):
        apart_columns += needed[row]
        cost = len(needed) * needed[order[count]] + apart_columns + count * call
        if cost < best:
            best, apart = cost, count
    rows = order[:apart]
    common = needed[order[apart]]
    saved = len(needed) * (longest - common) - sum(needed[row] for row in rows)
    return Columns(longest, common, tuple((row, needed[row]) for row in rows), saved * column_bytes * pool.layers)


def _bucket(length: int, pool: KVPool, bucket: int) -> int:
    return min(-(-length // bucket) * bucket, pool.length)
