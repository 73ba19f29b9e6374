"""Attention of prompts in our own loops against the same in double precision, a query at a time."""

from __future__ import annotations

import shutil
from functools import partial
from typing import Any

import pytest
import torch

from steering.cpu.kernels import prompts
from steering.interventions.see import ADD, LEAST, SCALE, TRANSFER
from tests.steering.cpu.kernels.conftest import COMPILER, Loops
from tests.steering.cpu.kernels.test_kernels import close, drawn_sinks, pooled
from tests.steering.triton.reference import beside

pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="there is no compiler")


shaped = pytest.mark.parametrize(
    ("rows", "heads", "group", "n", "known", "width", "window", "softcap"),
    [
        (1, 1, 1, 1, 0, 16, 0, 0.0),
        (2, 2, 3, 70, 0, 32, 0, 0.0),
        (3, 1, 7, 37, 100, 64, 0, 0.0),
        (2, 2, 2, 130, 90, 20, 33, 0.0),
        (2, 1, 2, 40, 9, 7, 5, 2.0),
        (1, 2, 1, 230, 3, 80, 0, 0.0),
        (2, 1, 250, 2, 70, 16, 64, 0.0),
        (2, 2, 2, 260, 90, 20, 33, 0.0),
    ],
)


def places(rows: int, n: int, known: int) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Slots in another order than rows, where each begins, and how many columns there are."""
    starts = torch.tensor([known * row // max(1, rows - 1) for row in range(rows)])
    return torch.arange(rows).flip(0) + 1, starts, known + n + 3


def hide(pool: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, n: int) -> torch.Tensor:
    """NaN wherever none of the prompts lies: whoever looks there sees it."""
    hidden = torch.full_like(pool, torch.nan)
    for slot, start in zip(slots, starts, strict=True):
        hidden[slot, :, : start + n] = pool[slot, :, : start + n]
    return hidden


def by_definition(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    start: int,
    window: int,
    softcap: float,
    see: Any = None,
    sinks: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the output (heads, n, width) of one prompt.

    query: (heads, n, width). see: changes weights (heads, columns).
    """
    group = query.shape[0] // key.shape[0]
    key, value = (tensor.double().repeat_interleave(group, 0) for tensor in (key, value))
    out = []
    for at in range(query.shape[1]):
        end = start + at + 1
        begin = max(0, end - window) if window else 0
        scores = (key[:, begin:end] @ query[:, at, :, None].double())[..., 0] * 0.3
        weights = torch.zeros(query.shape[0], key.shape[1]).double()
        weights[:, begin:end] = beside(sinks, torch.tanh(scores / softcap) * softcap if softcap else scores)
        weights = weights if see is None else see(weights)
        out.append((weights[:, None, begin:end] @ value[:, begin:end])[:, 0])
    return torch.stack(out, 1)


@shaped
def test_prefill_attention_equals_torch(
    loops: Loops, rows: int, heads: int, group: int, n: int, known: int, width: int, window: int, softcap: float
) -> None:
    slots, starts, columns = places(rows, n, known)
    query = torch.randn(rows, heads * group, n, width, generator=torch.Generator().manual_seed(1))
    key, value = (pooled(rows + 2, heads, columns, width, torch.float32, seed) for seed in (2, 3))
    hidden = [hide(tensor, slots, starts, n) for tensor in (key, value)]
    for sinks in (None, drawn_sinks(heads * group)):
        each = [(query[i], key[s], value[s], int(starts[i]), window, softcap, None, sinks) for i, s in enumerate(slots)]
        expected = torch.stack([by_definition(*arguments) for arguments in each])
        options = slots, starts, sinks, 0.3, window, softcap
        close(loops("prompt_attention", query, *hidden, *options), expected)
        close(prompts.prompt_attention(query, key, value, *options), expected)


@pytest.mark.parametrize(
    ("known", "window", "softcap", "sunk"),
    [(0, 0, 0.0, False), (50, 0, 0.0, False), (20, 40, 0.0, False), (0, 0, 3.0, False), (20, 40, 0.0, True)],
)
def test_prefill_attention_with_see_equals_torch(
    loops: Loops, known: int, window: int, softcap: float, sunk: bool
) -> None:
    """Each row has another reading and other settings.

    There are queries before the first image, columns that are neither an image's nor the text's, and a row without See.
    """
    random = torch.Generator().manual_seed(0)
    rows, heads, group, n, width, layer = 4, 2, 2, 90, 32, 1
    slots, starts, columns = places(rows, n, known)
    query = torch.randn(rows, heads * group, n, width, generator=random)
    key, value = (pooled(rows + 2, heads, columns, width, torch.float32, seed) for seed in (2, 3))
    masks, settings = torch.zeros(rows, columns + 8, 2), torch.rand(rows, 3, 4, generator=random)
    masks[:, 5:60, 0], masks[:, :3, 1], masks[:, 70:, 1] = 1.0, 1.0, 1.0
    masks[1, 8:11] = torch.tensor([0.0, 1.0])
    settings[2] = 0.0
    reading = torch.tensor([TRANSFER, SCALE, TRANSFER, ADD], dtype=torch.uint8)

    def see(row: int, weights: torch.Tensor) -> torch.Tensor:
        image, text = masks[row, :columns].double().unbind(-1)
        alpha = settings[row, layer, 0].double()
        attention, read = (weights @ image)[:, None], (weights @ text)[:, None]
        if reading[row] != TRANSFER:
            return weights * (1 + alpha * image) / (1 + alpha * attention if reading[row] == SCALE else 1)
        moved = torch.where(attention >= LEAST, alpha, 0.0)
        return weights * (1 + image * (moved * read / attention.clamp(min=LEAST)) - text * moved)

    def by_row(values: torch.Tensor) -> torch.Tensor:
        arguments = [(query[i], key[s], values[s], int(starts[i]), window, softcap) for i, s in enumerate(slots)]
        return torch.stack(
            [by_definition(*row_arguments, partial(see, row), sinks) for row, row_arguments in enumerate(arguments)]
        )

    sinks = drawn_sinks(heads * group) if sunk else None
    expected = by_row(value)
    options = slots, starts, masks, settings, reading, layer, sinks, 0.3, window, softcap
    hidden = [hide(tensor, slots, starts, n) for tensor in (key, value)]
    actual = loops("enhanced_prompt_attention", query, *hidden, *options)
    close(actual, expected)
    close(prompts.enhanced_prompt_attention(query, key, value, *options), expected)
    plain = loops("prompt_attention", query, *hidden, *options[:2], *options[6:])
    assert torch.equal(actual[2], plain[2])  # it did not ask
    assert not torch.isclose(actual[0], plain[0], atol=1e-2).all()
    weights = by_row(torch.eye(columns).expand(rows + 2, heads, -1, -1)).mean(1)
    queries, groups = torch.arange(n).flip(0).expand(rows, -1).contiguous(), torch.rand(rows, 3, n, generator=random)
    arguments, options = (slots, starts, queries, groups, columns), options[2:]
    expected = groups.double() @ weights.flip(1)
    close(loops("enhanced_grouped_prompt_weights", query, hidden[0], *arguments, *options), expected)
    close(prompts.enhanced_grouped_prompt_weights(query, key, *arguments, *options), expected)
    plain = loops("grouped_prompt_weights", query, hidden[0], *arguments, *options[4:])
    assert torch.equal(loops("enhanced_grouped_prompt_weights", query, hidden[0], *arguments, *options)[2], plain[2])


@pytest.mark.parametrize("span", [1.0, 30.0, 90.0, 1e4])
@pytest.mark.parametrize("rising", [True, False])
def test_widely_spread_scores_keep_their_weights(loops: Loops, span: float, rising: bool) -> None:
    """The largest comes last, or first: what was summed before counts for what it is."""
    key, value = torch.zeros(1, 1, 203, 16), torch.eye(203)[None, None]
    key[0, 0, :, 0] = torch.linspace(-span, 0, 203) if rising else torch.linspace(0, -span, 203)
    query = torch.zeros(1, 1, 203, 16)
    query[..., 0] = 1.0
    at = torch.tensor([0])
    actual = loops("prompt_attention", query, key, value, at, at, None, 1.0, 0, 0.0)[0, 0]
    scores = key[0, 0, :, 0].double().expand(203, -1).masked_fill(torch.ones(203, 203).triu(1).bool(), -torch.inf)
    torch.testing.assert_close(actual.double(), scores.softmax(-1), rtol=3e-6, atol=2e-38)


def test_scores_of_minus_infinity_have_no_weight(loops: Loops) -> None:
    """Whole blocks of them come first; who sees nothing else has no answer."""
    key, value, at = torch.ones(1, 1, 150, 16), torch.eye(150)[None, None], torch.tensor([0])
    key[0, 0, :70] = -torch.inf
    actual = loops("prompt_attention", torch.ones(1, 1, 150, 16), key, value, at, at, None, 1.0, 0, 0.0)[0, 0]
    assert actual[:70].isnan().all()
    close(actual[70:], torch.ones(80, 150).tril(70) * (torch.arange(150) >= 70) / torch.arange(1, 81)[:, None])


def test_nan_propagates_to_the_output(loops: Loops) -> None:
    """A fault of the model is not answered from; those before it and other heads are as they were."""
    query, pool, at = torch.ones(1, 4, 80, 16), torch.ones(1, 2, 90, 16), torch.tensor([0])
    query[0, 1, 70, 3] = torch.nan
    key = pool.clone()
    key[0, 1, 75] = torch.nan
    actual = loops("prompt_attention", query, key, pool, at, at, None, 1.0, 0, 0.0)
    assert actual[0, 1, 70].isnan().all()
    assert actual[0, 2:, 75:].isnan().all()
    actual[0, 1, 70], actual[0, 2:, 75:] = 1.0, 1.0
    close(actual, torch.ones_like(actual))


def test_kernels_refuse_unsupported_arguments(loops: Loops) -> None:
    query, pool = torch.ones(2, 6, 4, 32), pooled(3, 2, 20, 32, torch.float32)
    at, begun = torch.tensor([2, 0]), torch.tensor([16, 3])
    masks, settings, moved = torch.ones(2, 20, 2), torch.ones(2, 3, 4), torch.tensor([True, False])
    options = None, 1.0, 0, 0.0
    assert loops("prompt_attention", query, pool, pool, at, begun, *options).shape == query.shape
    refused: list[tuple[Any, ...]] = [
        (query.double(), pool, pool, at, begun),
        (query, pool.half(), pool.half(), at, begun),
        (query, pool, pool.double(), at, begun),
        (query[:, :5], pool, pool, at, begun),
        (query[..., :16].contiguous(), pool, pool, at, begun),
        (query.mT.contiguous().mT, pool, pool, at, begun),
        (query, pool.mT.contiguous().mT, pool, at, begun),
        (query, pool, pool[:, :1], at, begun),
        (query, pool, pool, at + 1, begun),
        (query, pool, pool, at - 1, begun),
        (query, pool, pool, at, begun + 1),
        (query, pool, pool, at, begun - 4),
        (query, pool, pool, at[:1], begun),
        (query, pool, pool, at, begun.int()),
    ]
    for arguments in refused:
        with pytest.raises(RuntimeError, match="rejected"):
            loops("prompt_attention", *arguments, *options)
    for sinks in (torch.ones(5), torch.ones(6).double()):
        with pytest.raises(RuntimeError, match="rejected"):
            loops("prompt_attention", query, pool, pool, at, begun, sinks, *options[1:])
    for see_arguments in (
        (masks[:1], settings, moved, 0),
        (masks[:, :19], settings, moved, 0),
        (masks, settings, moved, 3),
    ):
        with pytest.raises(RuntimeError, match="rejected"):
            loops("enhanced_prompt_attention", query, pool, pool, at, begun, *see_arguments, *options)
        chosen = torch.zeros(2, 1, dtype=torch.int64), torch.ones(2, 1, 1)
        with pytest.raises(RuntimeError, match="rejected"):
            loops("enhanced_grouped_prompt_weights", query, pool, at, begun, *chosen, 20, *see_arguments, *options)


@shaped
def test_weights_of_chosen_queries_are_summed_by_group(
    loops: Loops, rows: int, heads: int, group: int, n: int, known: int, width: int, window: int, softcap: float
) -> None:
    """Queries in any order, one that is in no group and lies behind all, groups that count them differently."""
    random = torch.Generator().manual_seed(4)
    slots, starts, columns = places(rows, n, known)
    query = torch.randn(rows, heads * group, n, width, generator=random)
    key = pooled(rows + 2, heads, columns, width, torch.float32, 2)
    identity = torch.eye(columns).expand(rows + 2, heads, -1, -1)  # what is summed of these are the weights
    sinks = drawn_sinks(heads * group) if known > 50 else None
    each = [(query[i], key[s], identity[s], int(starts[i]), window, softcap, None, sinks) for i, s in enumerate(slots)]
    weights = torch.stack([by_definition(*arguments) for arguments in each]).mean(1)
    queries = torch.stack([torch.randperm(n, generator=random)[: -(-3 * n // 4)] for _ in range(rows)])
    groups = torch.rand(rows, 3, queries.shape[1], generator=random) * (torch.arange(queries.shape[1]) % 3 > 0)
    groups[..., 1::2] *= torch.tensor([1.0, 0.0, 1.0])[:, None]
    expected = groups.double() @ torch.stack(
        [row_weights[at] for row_weights, at in zip(weights, queries, strict=True)]
    )
    options = sinks, 0.3, window, softcap
    close(prompts.grouped_prompt_weights(query, key, slots, starts, queries, groups, columns, *options), expected)
    queries[:, 0] = n + 5
    arguments = query, hide(key, slots, starts, n), slots, starts, queries, groups
    close(loops("grouped_prompt_weights", *arguments, columns, *options), expected)
    if n > 1:
        with pytest.raises(RuntimeError, match="rejected"):
            loops("grouped_prompt_weights", *arguments, int(starts.max()) + n // 4, *options)


def test_groups_without_queries_have_no_weights(loops: Loops) -> None:
    query, key = torch.randn(2, 2, 5, 16), pooled(2, 1, 8, 16, torch.float32, 0)
    places = torch.arange(2), torch.zeros(2, dtype=torch.int64)
    nobody = torch.zeros(2, 0, dtype=torch.int64), torch.zeros(2, 3, 0)
    assert torch.equal(
        loops("grouped_prompt_weights", query, key, *places, *nobody, 8, None, 0.3, 0, 0.0), torch.zeros(2, 3, 8)
    )
    with pytest.raises(RuntimeError, match="rejected"):
        loops("grouped_prompt_weights", query, key, *places, *nobody, 0, None, 0.3, 0, 0.0)
