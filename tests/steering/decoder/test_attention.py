"""The attention function against its definition, written out row by row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import nn

from steering.accel.forms import GainsForm
from steering.cpu.attention import CpuDecode
from steering.decoder.attention import Decode, attend
from steering.decoder.hooks import AttentionHook, Hooks, Product
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVBlocks, KVPool
from steering.decoder.prompts import Prefill, Ragged
from steering.recorders import attention
from steering.recorders.attention import QUESTIONS, DecodeCapture, PrefillCapture

HEADS, KV_HEADS, WIDTH, SLOTS, LENGTH = 6, 2, 8, 5, 32
SCALING = 0.3
SINKS = torch.tensor([1.0, -0.5, 2.5, 30.0, 0.0, -30.0])
"""Scores that join the denominators of heads, of which one leaves columns nothing, and another one everything."""
VARIANTS = [
    (None, None, None),
    (4, None, None),
    (None, 2.0, None),
    (4, 2.0, None),
    (None, None, SINKS),
    (4, 2.0, SINKS),
]
"""Window, soft cap and sinks."""


def by_definition(
    query: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    position: int,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attend from one query row (heads, width) to keys (kv_heads, columns, width); return outputs and weights by head."""
    outputs, weights = [], []
    for head in range(len(query)):
        group = head // (len(query) // len(keys))
        scores = keys[group].double() @ query[head].double() * SCALING
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        for column in range(len(scores)):
            if column > position or (window is not None and column <= position - window):
                scores[column] = -torch.inf
        powers = scores.exp()
        weights.append(powers / (powers.sum() + (0 if sinks is None else sinks[head].double().exp())))
        outputs.append(weights[-1] @ values[group].double())
    return torch.stack(outputs).float(), torch.stack(weights).float()


def random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def filled_pool(seed: int = 0) -> KVPool:
    """Return a pool with finite values in every column, as in slots that are used again."""
    pool = KVPool(SLOTS, LENGTH)
    for number, tensor in enumerate(
        pool.layer(0, random(1, KV_HEADS, 1, WIDTH, seed=0), random(1, KV_HEADS, 1, WIDTH, seed=0))
    ):
        tensor.copy_(random(*tensor.shape, seed=seed + number))
    return pool


def nothing() -> Any:
    return cast(Any, None)


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("columns", [20, LENGTH])
@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
def test_decode_of_rows_of_different_lengths_is_exact(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None, columns: int, captured: bool, fused: bool
) -> None:
    pool = filled_pool()
    keys, values = (tensor.clone() for tensor in pool.layer(0, nothing(), nothing()))
    positions = torch.tensor([3, 19, 0, 11])
    query, key, value = (random(4, heads, 1, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    spans = (random(SLOTS, LENGTH, 7, seed=3) > 0).float()
    capture = DecodeCapture(spans[:4])
    kernel = CpuDecode() if fused else None
    step = Decode(pool, positions, columns, Hooks.of([capture if captured else None]), kernel=kernel)
    output = step.attend(Heads(0, SCALING, window, softcap, sinks), query, key, value, None)
    step.hooks.settle(positions)
    assert output.shape == query.shape
    for row, position in enumerate(positions.tolist()):
        keys[row, :, position], values[row, :, position] = key[row, :, 0], value[row, :, 0]
        expected, weights = by_definition(query[row, :, 0], keys[row], values[row], position, window, softcap, sinks)
        torch.testing.assert_close(output[row, :, 0], expected, rtol=1e-5, atol=1e-6)
        if captured:
            torch.testing.assert_close(capture.means[row, 0], weights.mean(0)[:columns], rtol=1e-5, atol=1e-6)
    # One column a row was written, and nothing else.
    for ours, theirs in zip(pool.layer(0, nothing(), nothing()), (keys, values), strict=True):
        assert torch.equal(ours, theirs)


class Louder(AttentionHook):
    """Scores s of some columns become s + gain * |s|."""

    def __init__(self) -> None:
        self.gain = random(4, LENGTH, seed=9).abs()
        self.asked = torch.ones(4, 1, 1, 1, dtype=torch.bool)

    def scores(self, layer: int, scores: torch.Tensor, queries: torch.Tensor | None) -> torch.Tensor:
        return scores + self.gain[:, None, None, : scores.shape[-1]] * scores.abs()


class Fused(Louder, GainsForm):
    """The same, of which kernels know."""

    def gains(self, layer: int, columns: int) -> torch.Tensor:
        return self.gain[:, :columns]


@pytest.mark.parametrize("hooks", [[True], [False], [True, True], [True, False]], ids=str)
@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
def test_cpu_kernels_apply_hooks_on_scores_as_eager_attention_does(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None, hooks: list[bool]
) -> None:
    heads, positions = Heads(0, SCALING, window, softcap, sinks), torch.tensor([3, 19, 0, 11])
    query, key, value = (random(4, count, 1, WIDTH, seed=count) for count in (HEADS, KV_HEADS, KV_HEADS))
    bound_hooks = [Fused() if fuses else Louder() for fuses in hooks]
    outputs = [
        Decode(filled_pool(), positions, 20, Hooks.of(bound_hooks), kernel=kernel).attend(
            heads, query, key, value, None
        )
        for kernel in (None, CpuDecode())
    ]
    torch.testing.assert_close(outputs[1], outputs[0])


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("sinks", [None, SINKS])
def test_rows_that_read_their_own_columns_equal_rows_that_read_all(
    window: int | None, sinks: torch.Tensor | None
) -> None:
    query, key, value = (random(4, heads, 1, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    positions, heads = torch.tensor([3, 19, 0, 11]), Heads(0, SCALING, window, None, sinks)
    all_columns = Decode(filled_pool(), positions, 20).attend(heads, query, key, value, None)
    pool = filled_pool()
    keys, values = pool.layer(0, nothing(), nothing())
    keys[0, :, 4:], values[3, :, 12:] = torch.nan, torch.nan  # read by nobody, or masked
    values[2, :, 4:] = torch.nan
    got = Decode(pool, positions, 20, common=4, apart=((1, 20), (3, 12))).attend(heads, query, key, value, None)
    torch.testing.assert_close(got, all_columns, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("captured", [False, True])
def test_an_output_may_lie_in_memory_in_any_order(captured: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Outputs of some CUDA kernels have tokens as the outer and heads as the inner dimension."""
    tensors = [random(4, heads, 1, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS)]
    positions, heads = torch.tensor([3, 19, 0, 11]), Heads(0, SCALING, None, None)

    def out() -> torch.Tensor:
        hook = DecodeCapture(torch.ones(4, LENGTH, 1)) if captured else None
        return Decode(filled_pool(), positions, 20, Hooks.of([hook])).attend(heads, *tensors, None)

    expected, product = out(), torch.nn.functional.scaled_dot_product_attention

    def otherwise(*args: Any, **options: Any) -> torch.Tensor:
        return product(*args, **options).transpose(1, 2).contiguous().transpose(1, 2)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", otherwise)
    torch.testing.assert_close(out(), expected)


def test_decode_uses_the_same_step_for_layers_of_different_shapes() -> None:
    """Gemma-like models mix windows, and some mix numbers of key-value heads."""
    pool = KVPool(SLOTS, LENGTH)
    step = Decode(pool, torch.tensor([2, 5]), 8)
    for layer, (kv_heads, window) in enumerate([(2, None), (3, 4), (2, 4), (6, None)]):
        query, key, value = (random(2, heads, 1, WIDTH, seed=layer + heads) for heads in (HEADS, kv_heads, kv_heads))
        output = step.attend(Heads(layer, SCALING, window, None), query, key, value, None)
        keys, values = pool.layer(layer, nothing(), nothing())
        for row, position in enumerate((2, 5)):
            expected, _ = by_definition(query[row, :, 0], keys[row], values[row], position, window)
            torch.testing.assert_close(output[row, :, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("slots", [slice(2, 3), slice(1, 4)])
@pytest.mark.parametrize(("softcap", "sinks"), [(None, None), (2.0, None), (None, SINKS)])
def test_prefill_of_padded_prompts_is_exact(slots: slice, softcap: float | None, sinks: torch.Tensor | None) -> None:
    pool = filled_pool()
    n, rows = 12, slots.stop - slots.start
    query, key, value = (random(rows, heads, n, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    before = [tensor.clone() for tensor in pool.layer(0, nothing(), nothing())]
    step = Prefill(pool, slots)
    output = step.attend(Heads(0, SCALING, None, softcap, sinks), query, key, value, None)
    for row in range(rows):
        for position in range(n):
            expected, _ = by_definition(query[row, :, position], key[row], value[row], position, None, softcap, sinks)
            torch.testing.assert_close(output[row, :, position], expected, rtol=1e-5, atol=1e-6)
    for old, pooled, new in zip(before, pool.layer(0, nothing(), nothing()), (key, value), strict=True):
        old[slots, :, :n] = new
        assert torch.equal(pooled, old)


@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
@pytest.mark.parametrize("chunks", [[5, 5, 2], [1, 11], [11, 1]])
def test_prefill_in_chunks_is_exact(
    chunks: list[int], window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    pool = filled_pool()
    n, slot = 12, 3
    query, key, value = (random(1, heads, n, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    start = 0
    for count in chunks:
        part = slice(start, start + count)
        # Only the first chunk gets a mask of the model; the others make their own.
        mask = None
        if start == 0 and window is not None:
            row = torch.arange(count)
            mask = ((row <= row[:, None]) & (row > row[:, None] - window))[None, None]
        step = Prefill(pool, slice(slot, slot + 1), start)
        output = step.attend(
            Heads(0, SCALING, window, softcap, sinks), query[:, :, part], key[:, :, part], value[:, :, part], mask
        )
        for position in range(start, start + count):
            expected, _ = by_definition(query[0, :, position], key[0], value[0], position, window, softcap, sinks)
            torch.testing.assert_close(output[0, :, position - start], expected, rtol=1e-5, atol=1e-6)
        start += count


@pytest.mark.parametrize(("window", "softcap", "sinks"), VARIANTS)
def test_prefill_of_prompts_that_begin_at_different_columns_is_exact(
    window: int | None, softcap: float | None, sinks: torch.Tensor | None
) -> None:
    pool = filled_pool()
    starts, lengths, slots = [0, 5, 9], [4, 2, 3], slice(1, 4)
    rows, n = len(starts), max(lengths)
    query, key, value = (random(rows, heads, n, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    before = [tensor.clone() for tensor in pool.layer(0, nothing(), nothing())]
    step = Prefill(pool, slots, starts[0], ragged=Ragged(starts, lengths))
    output = step.attend(Heads(0, SCALING, window, softcap, sinks), query, key, value, None)
    after = list(pool.layer(0, nothing(), nothing()))
    for row, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        for old, new in zip(before, (key, value), strict=True):
            old[slots.start + row, :, start : start + length] = new[row, :, :length]
        keys, values = (tensor[slots.start + row] for tensor in after)
        for at in range(length):
            expected, _ = by_definition(query[row, :, at], keys, values, start + at, window, softcap, sinks)
            torch.testing.assert_close(output[row, :, at], expected, rtol=1e-5, atol=1e-6)
    for old, pooled in zip(before, after, strict=True):  # what is padding was written nowhere
        assert torch.equal(old, pooled)


def test_blocks_are_copied_out_of_slots_and_into_others() -> None:
    pool = filled_pool()
    keys, values = pool.layer(0, nothing(), nothing())
    blocks = KVBlocks(pool, 4, capacity=3 * 2 * KV_HEADS * 4 * WIDTH * 4 + 1)
    assert blocks.count == 3
    expected = [tensor[2, :, :12].clone() for tensor in (keys, values)]
    blocks.save(2, 0, [1])
    blocks.save(2, 1, [0, 2])
    saved = [tensor[0, :, 12:].clone() for tensor in (keys, values)]
    for tensor in (keys, values):
        tensor[2] = 0.0
    blocks.load(0, 0, [1])
    blocks.load(0, 1, [0, 2])
    for tensor, first, last in zip((keys, values), expected, saved, strict=True):
        assert torch.equal(tensor[0, :, :12], first)
        assert torch.equal(tensor[0, :, 12:], last)


@pytest.mark.parametrize("piece", [1, 3, 128])
@pytest.mark.parametrize("mask_kind", ["none", "bool", "float"])
def test_prefill_captures_the_chosen_rows_by_group(mask_kind: str, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "CAPTURE_ROWS", piece)
    sinks = SINKS if piece == 3 else None
    n, window = 10, 6
    query, key, value = (random(2, heads, n, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    rows = torch.tensor([[1, 4, 9, 0], [2, 3, 5, 8]])
    weights = torch.tensor(
        [[[1.0, 0.0], [1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[1.0, 0.0], [1.0, 0.0], [1.0, 0.0], [0.0, 1.0]]]
    )
    spans = (random(2, LENGTH, 5, seed=3) > 0).float()
    row = torch.arange(n)
    visible = ((row <= row[:, None]) & (row > row[:, None] - window))[None, None]
    mask = {"none": None, "bool": visible, "float": torch.zeros(visible.shape).masked_fill(~visible, -1e30)}[mask_kind]
    groups = weights.transpose(1, 2)
    capture = PrefillCapture(spans, rows, groups, None, by_patch=True, maps_from=None, at_once=piece == 128)
    step = Prefill(KVPool(2, LENGTH), slice(0, 2), hooks=Hooks.of([capture]))
    step.attend(Heads(0, SCALING, window if mask_kind != "none" else None, None, sinks), query, key, value, mask)
    step.hooks.settle(None)
    assert capture.patches is not None
    for prompt, groups in enumerate(([[1, 4], [9]], [[2, 3, 5], [8]])):
        for group, members in enumerate(groups):
            expected = torch.zeros(n)
            for member in members:
                own = query[prompt, :, member], key[prompt], value[prompt], member
                _, attended = by_definition(*own, None if mask is None else window, sinks=sinks)
                expected += attended.mean(0)
            by_span = expected @ spans[prompt, :n]
            torch.testing.assert_close(capture.sums[0, prompt, group], by_span, rtol=1e-5, atol=1e-6)
            if group == QUESTIONS:
                torch.testing.assert_close(capture.patches[0, prompt], expected, rtol=1e-5, atol=1e-6)


def test_bidirectional_masks_are_kept() -> None:
    """Gemma 3 and PaliGemma let image tokens see each other."""
    n = 6
    query, key, value = (random(1, heads, n, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    mask = torch.ones(1, 1, n, n, dtype=torch.bool)
    step = Prefill(KVPool(1, LENGTH), slice(0, 1))
    output = step.attend(Heads(0, SCALING, None, None), query, key, value, mask)
    for position in range(n):
        expected, _ = by_definition(query[0, :, position], key[0], value[0], n)
        torch.testing.assert_close(output[0, :, position], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("sinks", [None, SINKS])
def test_outside_a_step_attention_is_the_librarys(sinks: torch.Tensor | None) -> None:
    query, key, value = (random(2, heads, 7, WIDTH, seed=9 + heads) for heads in (HEADS, KV_HEADS, KV_HEADS))
    facts = {"num_key_value_groups": HEADS // KV_HEADS, "is_causal": True, "training": False, "layer_idx": 0}
    module = cast(nn.Module, SimpleNamespace(**facts))
    output, weights = attend(module, query, key, value, None, scaling=SCALING, s_aux=sinks)
    assert weights is None
    for row in range(2):
        for position in range(7):
            expected, _ = by_definition(query[row, :, position], key[row], value[row], position, sinks=sinks)
            torch.testing.assert_close(output[row, position], expected, rtol=1e-5, atol=1e-6)


# --- the pool --------------------------------------------------------------------------------------------------------


def test_copying_moves_the_used_columns_and_clearing_forgets_even_nan() -> None:
    pool = filled_pool()
    keys, values = pool.layer(0, nothing(), nothing())
    before = keys.clone()
    pool.copy(1, 4, 10)
    assert torch.equal(keys[4, :, :10], before[1, :, :10])
    assert torch.equal(keys[4, :, 10:], before[4, :, 10:])
    assert torch.equal(keys[:4], before[:4])
    keys[2], values[2] = torch.nan, torch.inf
    pool.clear(2)
    assert not keys[2].any()
    assert not values[2].any()
    assert torch.equal(keys[3], before[3])


class Scaled(AttentionHook):
    """Weights of even, or of odd, columns are scaled in some rows, told as weights and as what they make of values."""

    def __init__(self, factor: float, first: int, flags: list[bool], by_product: bool):
        self.asked = torch.tensor(flags)[:, None, None, None]
        self.factor, self.first, self.by_product = factor, first, by_product
        self.queries = None if by_product else torch.where(self.asked[:, 0, 0], torch.arange(7), -1)

    def _gain(self, columns: int) -> torch.Tensor:
        gain = torch.ones(columns)
        gain[self.first :: 2] = self.factor
        return gain

    def weights(self, layer: int, weights: torch.Tensor) -> torch.Tensor:
        return torch.where(self.asked, weights * self._gain(weights.shape[-1]), weights)

    def product(self, layer: int, value: torch.Tensor, exact: Product) -> torch.Tensor | None:
        return exact(value * self._gain(value.shape[2])[:, None]) if self.by_product else None


def test_hooks_without_weights_act_in_order() -> None:
    """And as the same hooks with weights do; a row that asks for one of them has that alone."""
    query, key, value = (random(3, count, 7, WIDTH, seed=i) for i, count in enumerate((HEADS, KV_HEADS, KV_HEADS)))
    outputs = []
    for by_product in (True, False):
        hooks = [
            Scaled(0.5, 0, [True, True, False], by_product), Scaled(3.0, 1, [True, False, False], by_product),
            Scaled(1.5, 0, [True, False, False], by_product),
        ]  # fmt: skip
        step = Prefill(filled_pool(), slice(0, 3), hooks=Hooks.of(hooks))
        outputs.append(step.attend(Heads(0, SCALING, None, None), query, key, value, None))
    torch.testing.assert_close(outputs[0], outputs[1], rtol=1e-5, atol=1e-5)
    for row, gains in enumerate(([0.75, 3.0], [0.5, 1.0], [1.0, 1.0])):
        _, weights = by_definition(query[row, :, 6], key[row], value[row], 6)
        changed = weights * torch.tensor([gains[column % 2] for column in range(7)])
        expected = torch.stack([changed[head] @ value[row, head // (HEADS // KV_HEADS)] for head in range(HEADS)])
        torch.testing.assert_close(outputs[0][row, :, 6], expected, rtol=1e-4, atol=1e-5)
