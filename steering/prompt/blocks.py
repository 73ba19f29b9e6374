"""Hashes of a prompt's beginnings: equal hashes mean equal tokens and pictures."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch

from steering.prompt.spans import FIRST_IMAGE, SYSTEM

SIZE = 16
"""The number of tokens of a block."""


def block_names(ids: torch.Tensor, spans: torch.Tensor, pictures: Sequence[tuple[int, bytes]]) -> tuple[bytes, ...]:
    """Return for each whole block of a prompt a hash of everything before its end.

    It covers the ids (n,), whether a token is from a message, by its `spans` (n,), and each picture that has begun: its
    first column, and the hash of its content. A hash is of the one before it and of the block, as vLLM makes them
    (`vllm/v1/core/kv_cache_utils.py`).
    """
    in_message = (spans >= SYSTEM) & (spans < FIRST_IMAGE)
    words = torch.stack([ids, in_message.long()], 1).numpy()
    names, name = [], b""
    for start in range(0, len(ids) - SIZE + 1, SIZE):
        hasher = hashlib.sha256(name)
        hasher.update(words[start : start + SIZE].tobytes())
        for column, key in pictures:
            if start <= column < start + SIZE:
                hasher.update(key)
        name = hasher.digest()
        names.append(name)
    return tuple(names)
