"""A long answer among short ones reads its own columns, and they read theirs; nobody's tokens change."""

from __future__ import annotations

from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from steering import Engine, Request, Sampling
from steering.decoder.attention import Decode
from steering.decoder.kv import KVPool
from steering.runner import columns, passes
from steering.runner.columns import Columns, columns_of
from tests import families
from tests.steering.conftest import MakeEngine


def a_pool(length: int = 8192, column_bytes: int = 2048, layers: int = 8) -> Any:
    return SimpleNamespace(length=length, column_bytes=column_bytes, layers=layers)


def test_few_long_rows_are_read_separately_if_that_reads_less() -> None:
    columns = columns_of([1000] * 31 + [8000], a_pool(), "cpu")
    assert columns == Columns(8000, 1008, ((31, 8000),), (32 * (8000 - 1008) - 8000) * 2048 * 8)
    assert columns_of([1000] * 31 + [8000], a_pool(column_bytes=0), "cpu") == Columns(8000, 8000)
    assert columns_of([1000] * 32, a_pool(), "cpu") == Columns(1008, 1008)
    assert columns_of([8191], a_pool(8191), "cpu") == Columns(8191, 8191)


def test_rows_on_a_gpu_are_split_if_reading_takes_longer_than_launching() -> None:
    assert columns_of([1000] * 31 + [2000], a_pool(), "cuda").apart == ()
    assert columns_of([1000] * 31 + [8000], a_pool(), "cuda").apart == ((31, 8000),)


def test_no_other_choice_reads_less() -> None:
    """Beside all subsets of rows that could read apart."""
    generator = torch.Generator().manual_seed(0)
    for call in (64, 300, 5000):
        pool = a_pool(column_bytes=columns.CALL_BYTES["cpu"] // call)
        for _ in range(20):
            lengths = torch.randint(1, 3000, (6,), generator=generator).tolist()
            needed = [-(-length // 16) * 16 for length in lengths]

            def cost(apart: tuple[bool, ...], needed: list[int] = needed, call: int = call) -> int:
                costs = [need + call for need, alone in zip(needed, apart, strict=True) if alone]
                return sum(costs) + 6 * max(
                    (n for n, alone in zip(needed, apart, strict=True) if not alone), default=10**9
                )

            chosen_columns = columns_of(lengths, pool, "cpu")
            chosen = tuple(row in dict(chosen_columns.apart) for row in range(6))
            least = min(map(cost, product([False, True], repeat=6)))
            assert cost(chosen) <= least + call, "what could be saved at most is not looked for below a call"
            assert all(chosen_columns.common >= need for need, alone in zip(needed, chosen, strict=True) if not alone)


def said(engine: Engine) -> list[Any]:
    sampling = Sampling(max_tokens=6, ignore_eos=True, logprobs=3)
    chats = [
        families.example_messages("qwen2_vl", 1, seed=i, text="so " * count) for i, count in enumerate((2, 150, 9))
    ]
    results = engine.generate([Request(chat, sampling) for chat in chats])
    return [(result.choices[0].token_ids, result.choices[0].logprobs) for result in results]


def test_answers_are_the_same_to_the_bit(make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine("qwen2_vl", slots=3)
    expected = said(engine)
    parted: list[tuple[tuple[int, int], ...]] = []

    def step(*args: Any, **kwargs: Any) -> Decode:
        step_made = Decode(*args, **kwargs)
        parted.append(step_made.apart)
        return step_made

    monkeypatch.setattr(passes, "Decode", step)
    assert said(engine) == expected
    assert not any(parted)
    monkeypatch.setitem(columns.CALL_BYTES, "cpu", 1)
    assert said(engine) == expected
    assert any(parted)


def test_the_pool_knows_what_a_column_takes() -> None:
    pool = KVPool(3, 100)
    assert (pool.column_bytes, pool.layers) == (0, 0)
    pool.layer(0, torch.zeros(1, 2, 1, 16), torch.zeros(1, 2, 1, 8))
    assert (pool.column_bytes, pool.layers) == (2 * (16 + 8) * 4, 1)
