"""Attention beside sinks where it is not computed as elsewhere, and hooks that change it."""

from __future__ import annotations

import pytest
import torch

from steering.decoder import kernels
from steering.decoder.attention import Decode
from steering.decoder.candidates import Candidates
from steering.decoder.hooks import Hooks
from steering.decoder.kernels import Heads
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill
from steering.interventions.look_at import LookAtRows
from steering.interventions.see import ADD, SCALE, TRANSFER, SeeRows
from tests.steering.decoder.test_attention import (
    HEADS,
    KV_HEADS,
    LENGTH,
    SCALING,
    SINKS,
    WIDTH,
    by_definition,
    filled_pool,
    nothing,
    random,
)


@pytest.mark.parametrize("window", [None, 4])
def test_candidates_behind_a_row_are_as_its_next_token(window: int | None) -> None:
    """Beside sinks, whose heads lie in another order there."""
    heads, each, columns = Heads(0, SCALING, window, None, SINKS), 3, 20
    slots, positions = torch.tensor([2, 0]), torch.tensor([11, 5])
    query, key, value = (random(2 * each, count, 1, WIDTH, seed=count) for count in (HEADS, KV_HEADS, KV_HEADS))
    output = Candidates(filled_pool(), slots, positions, each, columns).attend(heads, query, key, value, None)
    for row in range(2 * each):
        slot, position = int(slots[row // each]), int(positions[row // each])
        keys, values = (tensor[slot].clone() for tensor in filled_pool().layer(0, nothing(), nothing()))
        keys[:, position], values[:, position] = key[row, :, 0], value[row, :, 0]
        expected, _ = by_definition(query[row, :, 0], keys, values, position, window, sinks=SINKS)
        torch.testing.assert_close(output[row, :, 0], expected, rtol=1e-5, atol=1e-6)


def test_values_of_another_width_are_attended_to_beside_sinks() -> None:
    """No kernel of torch tells what sinks need for them."""
    heads, positions = Heads(0, SCALING, 4, None, SINKS), torch.tensor([3, 9])
    query, key, value = (random(2, count, 10, WIDTH, seed=count) for count in (HEADS, KV_HEADS, KV_HEADS))
    wide, narrow = torch.cat([value, value + 1], -1), query[:, :, -1:]
    visible = (torch.arange(10) <= torch.arange(10)[:, None]) & (torch.arange(10) > torch.arange(10)[:, None] - 4)
    output = Prefill(KVPool(2, LENGTH), slice(0, 2)).attend(heads, query, key, wide, visible[None, None])
    pool = KVPool(2, LENGTH)
    for pooled, new in zip(pool.layer(0, key, wide), (key, wide), strict=True):
        pooled[:, :, :10] = new
    last = key[:, :, 9:], wide[:, :, 9:]
    decoded = Decode(pool, torch.tensor([9, 9]), 10).attend(heads, narrow, *last, None)
    for row, position in enumerate(positions.tolist()):
        expected, _ = by_definition(query[row, :, position], key[row], wide[row], position, 4, sinks=SINKS)
        torch.testing.assert_close(output[row, :, position], expected, rtol=1e-5, atol=1e-6)
        expected, _ = by_definition(query[row, :, 9], key[row], wide[row], 9, 4, sinks=SINKS)
        torch.testing.assert_close(decoded[row, :, 0], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("softcap", [None, 2.0])
@pytest.mark.parametrize("window", [None, 4])
def test_the_share_of_a_sink_is_exact_however_small(window: int | None, softcap: float | None) -> None:
    n = 9
    query, key = (random(2, count, n, WIDTH, seed=count).double() for count in (HEADS, KV_HEADS))
    near = key.repeat_interleave(HEADS // KV_HEADS, 1)
    scores = query @ near.mT * SCALING
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    row = torch.arange(n)
    seen = (row <= row[:, None]) & (row > row[:, None] - (n if window is None else window))
    powers, sinks = scores.exp() * seen, SINKS.double().exp()[:, None]
    heads = Heads(0, SCALING, window, softcap, SINKS)
    share = kernels.shares_of_sinks(heads, query.float(), key.float(), None)
    assert share is not None
    torch.testing.assert_close(share[..., 0].double(), sinks / (powers.sum(-1) + sinks), rtol=1e-5, atol=0)
    assert 0 < float(share[:, 5].max()) < 1e-12
    assert kernels.shares_of_sinks(heads._replace(sinks=None), query.float(), key.float(), None) is None


ROWS, PROMPT = 3, 12
IMAGE = torch.zeros(ROWS, LENGTH).index_fill_(1, torch.arange(2, 7), 1.0)
"""The columns of an image; the rest of the prompt is text."""


def look(bias: float) -> LookAtRows:
    """Return a hook with a bias for the queries behind the image, in all rows but the last."""
    by_layer = torch.full((ROWS, 1, HEADS), bias)
    places, asked = torch.arange(PROMPT).expand(ROWS, -1), torch.tensor([True, True, False])
    by_layer[2] = 0.0
    return LookAtRows(asked, by_layer, IMAGE, (0,), places, torch.full((ROWS, 1), 7))


ALPHA = torch.tensor([0.5, 0.9, 0.0])


def see(reading: int, apart: bool) -> SeeRows:
    """Return a hook with another alpha in each row. apart: the first two columns are of no kind."""
    masks = torch.stack([IMAGE, 1 - IMAGE], -1)
    masks[:, :2] *= 1 - apart
    none = torch.zeros(ROWS, 1)
    by_row = None if reading == SCALE else torch.full((ROWS,), reading, dtype=torch.uint8)
    return SeeRows(ALPHA > 0, masks, ALPHA[:, None], none, none, none[:, 0], by_row, (1, 1), False, apart=apart)


def seen(weights: torch.Tensor, reading: int, apart: bool) -> torch.Tensor:
    """Return weights (rows, heads, n, columns) under See; what goes to sinks is a part of the row that is normalised."""
    image, alpha = IMAGE[:, None, None, :PROMPT].double(), ALPHA.double()[:, None, None, None]
    text = (1 - image) * (torch.arange(PROMPT) >= 2 * apart)
    to_images, to_text, to_sinks = (weights * image).sum(-1), (weights * text).sum(-1), 1 - weights.sum(-1)
    if reading == TRANSFER:
        alpha = alpha * (to_images > 0)[..., None]
        share = weights * image / to_images.clamp(min=1e-300)[..., None]
        return weights * (1 - alpha * text) + alpha * to_text[..., None] * share
    raised = weights * (1 + alpha * image)
    return raised / (raised.sum(-1) + to_sinks)[..., None] if reading == SCALE else raised


@pytest.mark.parametrize("sinks", [None, SINKS])
@pytest.mark.parametrize(
    ("bias", "readings"),
    [
        (2.0, []), (-20.0, []), (20.0, []), (0.0, [(SCALE, False)]), (0.0, [(TRANSFER, False)]), (0.0, [(TRANSFER, True)]),
        (0.0, [(ADD, False)]), (-1.0, [(TRANSFER, False)]), (1.0, [(SCALE, False)]),
    ],
)  # fmt: skip
def test_products_under_hooks_are_those_of_their_weights(
    bias: float, readings: list[tuple[int, bool]], sinks: torch.Tensor | None
) -> None:
    """A prompt's output from products of plain weights is that of changed weights, in double precision."""
    query, key, value = (random(ROWS, count, PROMPT, WIDTH, seed=count + 1) for count in (HEADS, KV_HEADS, KV_HEADS))
    hooks = [look(bias) if bias else None, *(see(*reading) for reading in readings)]
    step = Prefill(KVPool(ROWS, LENGTH), slice(0, ROWS), hooks=Hooks.of(hooks))
    output = step.attend(Heads(0, SCALING, None, None, sinks), query, key, value, None)
    near, far = (part.double().repeat_interleave(HEADS // KV_HEADS, 1) for part in (key, value))
    scores, row = query.double() @ near.mT * SCALING, torch.arange(PROMPT)
    scores[:2] += bias * IMAGE[:2, None, None, :PROMPT] * (row >= 7)[:, None]
    powers = scores.exp() * (row <= row[:, None])
    total = powers.sum(-1, keepdim=True) + (0 if sinks is None else sinks.double().exp()[:, None, None])
    weights = powers / total
    for reading in readings:
        weights = seen(weights, *reading)
    torch.testing.assert_close(output.double(), weights @ far, rtol=1e-5, atol=1e-6)
