"""The allocation of slots.

On a GPU the KV cache is allocated at the start, so that lack of memory shows then and not at some request; on a CPU memory
is committed where it is first written to, unless it is little.
"""

from __future__ import annotations

import logging
from collections import Counter

import torch

from steering.decoder.kv import KVPool
from steering.devices import free_bytes
from steering.errors import UnsupportedModel
from steering.model.mllm import MLLM

log = logging.getLogger(__name__)

COLUMN_BUCKET = 64
"""A decode on a GPU reads a multiple of this many columns, so that shapes repeat."""
SHARE = 0.9
"""Maximum share of a GPU's free memory, once the model is loaded, for keys and values."""


COMMITTED = 2**29
"""Bytes of keys and values on a CPU up to which memory is committed at the start.

The system clears large pages, for which the first answers of many slots would wait.
"""


def allotted(
    mllm: MLLM, slots: int, length: int, graphs: bool = False, share: float = SHARE, reserved: int = 0
) -> KVPool:
    """Return the KV cache of `slots` slots with at least `length` columns each; on GPUs see `at_once`."""
    if graphs:  # graphs need a last column that nothing reads
        length = (-(-length // COLUMN_BUCKET) + 1) * COLUMN_BUCKET
    if mllm.device.type != "cpu":
        return at_once(mllm, slots, length, share, reserved)
    pool = KVPool(slots, length)
    with torch.inference_mode():
        pool.allot(mllm.column())
        if pool.bytes <= COMMITTED:
            for tensor in pool.distinct:
                tensor.zero_()
    return pool


def pass_bytes(mllm: MLLM, tokens: int) -> int:
    """Return the memory that a prefill of so many tokens takes beside keys and values: twice that of a layer's tensors.

    These are three as wide as an FFN and six as wide as the residual stream.
    """
    ffn = max(mllm.ffn_widths) or 4 * mllm.hidden_size
    return 2 * tokens * (3 * ffn + 6 * mllm.hidden_size) * mllm.dtype.itemsize


@torch.inference_mode()
def at_once(mllm: MLLM, slots: int, length: int, share: float, reserved: int) -> KVPool:
    """Allocate the KV cache now, of as many slots as fit in that share of the free memory of every device.

    On the model's own device, `reserved` bytes stay free for other uses. Raises UnsupportedModel where not one slot fits.
    """
    length = -(-length // COLUMN_BUCKET) * COLUMN_BUCKET  # otherwise masks of all columns are copied into aligned ones
    column = mllm.column()
    bytes_by_device: Counter[torch.device] = Counter()
    for tensor in column.distinct:
        bytes_by_device[tensor.device] += tensor.nbytes * length
    bytes_by_device.update(column.states.slot_bytes)
    room = [slots]
    for device, size in bytes_by_device.items():
        if (free := free_bytes(device)) is not None:
            room.append(int(share * free - reserved * (device == mllm.device)) // size)
    fitting = int(mllm.ranks.joined(torch.tensor([min(room)], device=mllm.device)).min())
    needed_text = f"{sum(bytes_by_device.values()) / 2**30:.3g} GiB for a slot of {length:,} columns"
    if fitting < 1:
        raise UnsupportedModel(
            f"{mllm.name} leaves no room for an answer: keys and values need {needed_text}; take a smaller 'max_length'."
        )
    if fitting < slots:
        log.warning("there is room for %d slots, not for %d: keys and values need %s", fitting, slots, needed_text)
    pool = KVPool(fitting, length)
    pool.allot(column)
    log.info("keys and values: %d slots of %d columns, %.3g GiB", fitting, length, pool.bytes / 2**30)
    return pool
