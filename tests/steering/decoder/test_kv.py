"""Layers that share keys and values have the same tensors in a pool, which are counted, copied and kept once."""

from __future__ import annotations

import pytest
import torch

from steering.decoder.kv import ColumnPool, KVBlocks, KVPool


def shared() -> KVPool:
    """Return the pool of one column of four layers, of which the third attends to the first one's keys and values."""
    pool, first = ColumnPool(), (torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    pool.layer(0, *first)
    pool.layer(1, torch.ones(1, 1, 1, 8), torch.ones(1, 1, 1, 8))
    pool.layer(2, *first)
    pool.layer(3, torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))
    return pool


def test_a_layer_that_is_given_the_same_shares() -> None:
    like = shared()
    pool = KVPool(3, 10)
    pool.allot(like)
    for made, length in ((like, 1), (pool, 10)):
        layers = list(made.tensors)
        assert made.layers == 4
        assert len(layers) == 8
        assert layers[4] is layers[0]
        assert layers[5] is layers[1]
        assert [tensor.shape[1:] for tensor in made.distinct] == [(2, length, 4)] * 2 + [(1, length, 8)] * 2 + [
            (2, length, 4)
        ] * 2
        assert made.bytes == made.slots * length * 3 * 2 * 8 * 4
    key, value = torch.zeros(1, 2, 1, 4), torch.zeros(1, 2, 1, 4)
    assert pool.layer(2, key, value) == pool.layer(0, key, value)


def test_copies_and_blocks_hold_every_layer() -> None:
    pool = KVPool(2, 8)
    pool.allot(shared())
    for number, tensor in enumerate(pool.distinct):
        tensor[0] = number + 1
    pool.copy(0, 1, 8)
    blocks = KVBlocks(pool, 4, 2**20)
    assert blocks.bytes_each == pool.bytes // 4
    blocks.save(0, 0, [0, 1])
    pool.clear(0)
    assert all(not tensor[0].any() for tensor in pool.tensors)
    assert all(tensor[1].all() for tensor in pool.tensors)
    blocks.load(0, 0, [0, 1])
    assert all(torch.equal(tensor[0], tensor[1]) for tensor in pool.tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_new_pool_is_zero_and_typed(dtype: torch.dtype) -> None:
    like = torch.zeros(1, 2, 3, 8, dtype=dtype)
    for tensor in KVPool(5, 32).layer(0, like, like):
        assert tensor.shape == (5, 2, 32, 8)
        assert tensor.dtype == dtype
        assert not tensor.any()


def test_keys_and_values_may_differ_in_width() -> None:
    keys, values = KVPool(5, 32).layer(0, torch.zeros(1, 2, 3, 8), torch.zeros(1, 2, 3, 4))
    assert (keys.shape[-1], values.shape[-1]) == (8, 4)
