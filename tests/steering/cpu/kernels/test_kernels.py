"""Our own loops, as a compiler makes them, against the same in double precision."""

from __future__ import annotations

import itertools
import shutil
from typing import Any

import pytest
import torch

from steering.cpu.kernels import attention, linear, looks, stream
from steering.interventions.see import ADD, LEAST, SCALE, TRANSFER
from tests.steering.cpu.kernels.conftest import COMPILER, Loops
from tests.steering.triton.reference import beside

pytestmark = pytest.mark.skipif(shutil.which(COMPILER[0]) is None, reason="there is no compiler")
TOLERANCE = 2e-6
"""The tolerance per summed number; for any dtype, inputs are exact and sums are float32."""
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def close(actual: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    torch.testing.assert_close(actual.double(), expected.double(), rtol=tolerance, atol=tolerance)


def pooled(slots: int, heads: int, length: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return torch.randn(slots, heads, length, width, generator=torch.Generator().manual_seed(seed)).to(dtype)


def unseen(positions: torch.Tensor, columns: int, window: int) -> torch.Tensor:
    """(rows, 1, 1, columns)."""
    column, last = torch.arange(columns), positions[:, None, None, None]
    return (column > last) | ((column <= last - window) if window else False)


def drawn_sinks(heads: int) -> torch.Tensor:
    """Return sinks, of which one has almost no attention and another one almost all."""
    sinks = 2 * torch.randn(heads, generator=torch.Generator().manual_seed(5)) + 1
    sinks[0], sinks[-1] = -60.0, 40.0
    return sinks


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("rows", "heads", "group", "columns", "width", "window", "softcap"),
    [
        (1, 1, 1, 1, 16, 0, 0.0),
        (3, 2, 3, 37, 32, 0, 0.0),
        (2, 4, 7, 64, 80, 5, 0.0),
        (5, 1, 9, 50, 20, 0, 2.0),
        (2, 2, 16, 33, 256, 0, 0.0),
        (1, 3, 2, 5, 7, 3, 4.0),
    ],
)
def test_decode_attention_equals_torch(
    loops: Loops,
    dtype: torch.dtype,
    rows: int,
    heads: int,
    group: int,
    columns: int,
    width: int,
    window: int,
    softcap: float,
) -> None:
    random = torch.Generator().manual_seed(1)
    query = torch.randn(rows, heads * group, 1, width, generator=random)
    positions = torch.randint(0, columns, (rows,), generator=random)
    hidden = unseen(positions, columns, window)
    pools = [pooled(rows + 2, heads, columns + 9, width, dtype, seed) for seed in (2, 3)]
    for pool in pools:  # whoever looks there sees it
        pool[:rows, :, :columns].masked_fill_(hidden[:, :, 0, :, None], torch.nan)
        pool[:, :, columns:], pool[rows:] = torch.nan, torch.nan
    key, value = pools
    exact_key, exact_value = (pool[:rows, :, :columns].double().nan_to_num(0) for pool in pools)
    amplified = torch.rand(rows, columns + 9, generator=random)[:, :columns]
    for gains, sinks in itertools.product((None, amplified), (None, drawn_sinks(heads * group))):
        scores = query.double().view(rows, heads, group, width) @ exact_key.transpose(-1, -2) * 0.3
        if softcap:
            scores = (scores / softcap).tanh() * softcap
        if gains is not None:
            scores += gains[:, None, None] * scores.abs()
        expected = beside(sinks if sinks is None else sinks.view(heads, -1), scores.masked_fill(hidden, -torch.inf))
        arguments = query, key, positions, gains, sinks, 0.3, window, softcap, columns
        weights = attention.decode_weights(query, key.nan_to_num(0), *arguments[2:])
        close(weights, expected.view(weights.shape))
        assert not weights[hidden.expand_as(weights)].any()
        summed = (expected @ exact_value).view(query.shape)
        close(loops("decode_sums", weights, value, positions, window), summed)
        clean = query, key.nan_to_num(0), value.nan_to_num(0)
        close(attention.decode_sums(weights, clean[2], positions, window), summed)
        for out, means in (
            loops("read_attention", query, key, value, *arguments[2:]),
            looks.read_attention(*clean, *arguments[2:]),
        ):
            close(out, summed)
            close(means, expected.flatten(1, 2).mean(1))
            assert not means[hidden[:, 0, 0]].any()
        if gains is None:
            close(loops("decode_attention", query, key, value, positions, sinks, 0.3, window, softcap), summed)
            close(attention.decode_attention(*clean, positions, sinks, 0.3, window, softcap), summed)


@pytest.mark.parametrize("span", [1.0, 30.0, 90.0, 1e4])
def test_attention_weights_of_widely_spread_scores(loops: Loops, span: float) -> None:
    """Scores far below the largest have weight 0, as in torch, and none vanishes earlier."""
    scores = torch.linspace(-span, 0, 203)
    key = torch.zeros(1, 1, 203, 16)
    key[0, 0, :, 0] = scores
    query = torch.zeros(1, 1, 1, 16)
    query[..., 0] = 1.0
    _, weights = loops("read_attention", query, key, key, torch.tensor([202]), None, None, 1.0, 0, 0.0, 203)
    torch.testing.assert_close(weights.double()[0], scores.double().softmax(0), rtol=3e-6, atol=2e-38)


def test_nan_propagates_to_the_output(loops: Loops) -> None:
    """A fault of the model is not answered from."""
    key, query = torch.ones(1, 1, 40, 16), torch.ones(1, 2, 1, 16)
    query[0, 1, 0, 3] = torch.nan
    out = loops("decode_attention", query, key, key, torch.tensor([20]), None, 1.0, 0, 0.0)
    assert out[0, 0].isfinite().all()
    assert out[0, 1].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_numbers_are_read_exactly(loops: Loops, dtype: torch.dtype) -> None:
    """All of them that are: subnormal, infinite, not a number."""
    numbers = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    actual = loops("decode_sums", torch.ones(1, 1, 1, 1), numbers.view(1, 1, 1, -1), torch.tensor([0]), 0).flatten()
    torch.testing.assert_close(actual, numbers.float(), rtol=0, atol=0, equal_nan=True)


ROWS = (*range(1, 15), 24, 25, 37, 120)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("width", "outputs"), [(192, 512), (20, 16), (128, 1040), (7, 3), (64, 48), (33, 129)])
def test_a_linear_layer_equals_torch_for_any_number_of_rows(
    loops: Loops, width: int, outputs: int, dtype: torch.dtype, bias: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    states, weight = torch.randn(max(ROWS), 1, width, generator=random), torch.randn(outputs, width, generator=random)
    added = torch.randn(outputs, generator=random) if bias else None
    rounded = weight.to(dtype).float()
    packed = linear.packed_in_blocks(linear.narrowest(rounded))
    assert packed.dtype == dtype
    expected = torch.nn.functional.linear(states.double(), rounded.double(), None if added is None else added.double())
    close(linear.packed_linear(states, packed, added, outputs), expected, TOLERANCE * width)
    for rows in (0, *ROWS):
        actual = loops("packed_linear", states[:rows].clone(), packed, added, outputs)
        assert actual.shape == (rows, 1, outputs)
        torch.testing.assert_close(actual.double(), expected[:rows], rtol=0, atol=TOLERANCE * width)


def test_weights_are_read_in_their_published_dtype() -> None:
    numbers = torch.tensor([1.0, -3.5, 2.0**-24, 65504.0])
    assert linear.narrowest(numbers).dtype == torch.float16
    assert linear.narrowest(torch.cat([numbers, torch.tensor([2.0**100])])).dtype == torch.float32
    assert linear.narrowest(torch.tensor([1.0, 2.0**100, -0.0])).dtype == torch.bfloat16
    for inexact in (1 / 3, torch.nan):
        assert linear.narrowest(torch.tensor([1.0, inexact])).dtype == torch.float32


def test_values_may_be_wider_or_narrower_than_keys(loops: Loops) -> None:
    query, positions = torch.randn(2, 6, 1, 32), torch.tensor([3, 19])
    key, value = pooled(2, 3, 20, 32, torch.float32), pooled(2, 3, 20, 48, torch.float32, 1)
    weights = attention.decode_weights(query, key, positions, None, None, 0.2, 0, 0.0, 20)
    expected = (weights.double().view(2, 3, 2, 20) @ value.double()).view(2, 6, 1, 48)
    close(loops("decode_attention", query, key, value, positions, None, 0.2, 0, 0.0), expected)
    close(loops("read_attention", query, key, value, positions, None, None, 0.2, 0, 0.0, 20)[0], expected)


def test_see_equals_its_torch_version(loops: Loops) -> None:
    """Each row another reading and other settings, one without an image in sight, one that did not ask."""
    random = torch.Generator().manual_seed(0)
    rows, heads, columns, layers, layer = 6, 6, 37, 3, 1
    weights = (torch.randn(rows, heads, 1, columns, generator=random) * 3).softmax(-1)
    masks = torch.zeros(rows, columns + 5, 2)
    masks[:, 5:20, 0], masks[:, :5, 1], masks[:, 20:33, 1] = 1.0, 1.0, 1.0
    weights[3, :, :, 5:20] = 0.0
    settings = torch.rand(rows, layers, 4, generator=random)
    settings[..., 2] *= -1
    settings[4] = 0.0
    reading = torch.tensor([TRANSFER, SCALE, TRANSFER, TRANSFER, SCALE, ADD], dtype=torch.uint8)
    exact = weights.double()
    expected, effects = exact.clone(), torch.zeros(rows, 3).double()
    for row in range(rows):
        attention, read = ((exact[row, :, 0] * masks[row, :columns, kind]).sum(-1) for kind in (0, 1))
        fixed, start, fall, most = settings[row, layer].double()
        alpha = fixed + min(max(start + fall * attention.mean(), torch.zeros(())), most)
        after = attention.clone()
        for head in range(heads):
            image, text = masks[row, :columns].bool().unbind(-1)
            line = expected[row, head, 0]
            if reading[row] != TRANSFER:
                line[image] *= 1 + alpha
                line /= 1 + alpha * attention[head] if reading[row] == SCALE else 1
            elif attention[head] >= LEAST:
                line[image] *= 1 + alpha * read[head] / attention[head]
                line[text] *= 1 - alpha
            after[head] = line[image].sum()
        effects[row] = torch.stack([alpha, attention.mean(), after.mean()])
    actual, measured = looks.enhanced(weights, masks, settings, reading, layer)
    close(actual, expected)
    close(measured, effects)
    assert torch.equal(actual[4], weights[4])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    ("window", "softcap", "amplified", "sunk"),
    [(0, 0.0, False, False), (9, 0.0, True, False), (0, 3.0, True, False), (9, 0.0, False, True)],
)
def test_decode_attention_with_see_equals_torch(
    loops: Loops, dtype: torch.dtype, window: int, softcap: float, amplified: bool, sunk: bool
) -> None:
    """The parts, each of which is checked by itself, in double precision."""
    random = torch.Generator().manual_seed(0)
    rows, heads, group, columns, width = 4, 2, 3, 37, 32
    query = torch.randn(rows, heads * group, 1, width, generator=random)
    key, value = (pooled(rows + 1, heads, columns + 8, width, dtype, seed) for seed in (2, 3))
    positions = torch.tensor([36, 20, 3, 30])  # the third sees no image
    masks, settings = torch.zeros(rows, columns + 8, 2), torch.rand(rows, 3, 4, generator=random)
    masks[:, 5:20, 0], masks[:, :5, 1], masks[:, 20:33, 1] = 1.0, 1.0, 1.0
    settings[..., 2] *= -1
    settings[3] = 0.0
    reading = torch.tensor([TRANSFER, SCALE, ADD, TRANSFER], dtype=torch.uint8)
    gains = torch.rand(rows, columns, generator=random)
    sinks = drawn_sinks(heads * group) if sunk else None
    options = positions, gains if amplified else None, sinks, 0.3, window, softcap, columns
    weights = attention.decode_weights(query, key, *options).double()
    weights, effects = looks.enhanced(weights, masks.double(), settings.double(), reading, 1)
    arguments = query, key, value, positions, options[1], masks, settings, reading, 1, *options[2:]
    for out, means, measured in (loops("enhanced_attention", *arguments), looks.enhanced_attention(*arguments)):
        close(out, attention.decode_sums(weights.float(), value, positions, window))
        close(means, weights[:, :, 0].mean(1))
        close(measured, effects)
    enhanced, plain = loops("enhanced_attention", *arguments), loops("read_attention", *arguments[:5], *options[2:])
    assert all(
        torch.equal(first[3], second[3]) for first, second in zip(enhanced[:2], plain, strict=True)
    )  # it did not ask


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("activated", [True, False])
@pytest.mark.parametrize(("rows", "width", "gates"), [(1, 192, 512), (3, 37, 0), (5, 16, 7), (2, 1030, 33)])
def test_residual_stream_measures_equal_torch(
    loops: Loops, dtype: torch.dtype, rows: int, width: int, gates: int, activated: bool
) -> None:
    random = torch.Generator().manual_seed(0)
    layers = 3
    streams = [(torch.randn(rows, 1, width, generator=random) * 2).to(dtype) for _ in range(4 * layers)]
    states = [torch.randn(rows, 1, width, generator=random).to(dtype) for _ in range(layers)]
    widths = [gates, 0, gates - 2 if gates else 0]
    opened = [torch.randn(rows, 1, width, generator=random).to(dtype) for width in widths]
    fired = [gate[..., : gate.shape[2] if activated else 0].exp() for gate in opened]
    arguments = streams, states, opened, fired
    for measures, stacked, neurons in (loops("stream_looks", *arguments), stream.stream_looks(*arguments)):
        assert neurons.shape == (rows, layers, gates if activated else 0)
        for layer in range(layers):
            before, out, mha, ffn = (tensor[:, 0].double() for tensor in streams[4 * layer : 4 * layer + 4])
            middle, gate, fired_here = before + mha, opened[layer][:, 0], neurons[:, layer]
            log_p, log_q = mha.log_softmax(-1), ffn.log_softmax(-1)
            exact = [
                (before * middle).sum(-1) / before.norm(dim=-1) / middle.norm(dim=-1),
                (middle * out).sum(-1) / middle.norm(dim=-1) / out.norm(dim=-1),
                mha.norm(dim=-1) / before.norm(dim=-1),
                ffn.norm(dim=-1) / middle.norm(dim=-1),
                mha.norm(dim=-1),
                ffn.norm(dim=-1),
                (mha + ffn).norm(dim=-1),
                (log_p.exp() * (log_p - log_q)).sum(-1),
                (gate > 0).double().mean(-1) if widths[layer] else torch.full((rows,), torch.nan).double(),
            ]
            for row in range(rows):
                expected = torch.stack([tensor[row] for tensor in exact])
                torch.testing.assert_close(
                    measures[row, layer].double(), expected, rtol=1e-5, atol=1e-5, equal_nan=True
                )
                assert torch.equal(stacked[row, layer], states[layer][row, 0].float())
                assert torch.equal(fired_here[row, : fired[layer].shape[2]], fired[layer][row, 0].float())
                assert not fired_here[row, widths[layer] :].any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_think_damping_equals_torch(loops: Loops, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    mha, ffn = ((torch.randn(3, 4, 37, generator=random) * 2).to(dtype) for _ in range(2))
    log_p, log_q = (update.double().log_softmax(-1) for update in (mha, ffn))
    differs = (log_p.exp() * (log_p - log_q)).sum(-1)
    gamma, threshold = torch.tensor([0.9, 0.0, 0.5]), torch.full((3, 2), torch.inf)
    threshold[0], threshold[1, 1] = differs[0].median().float() + 1e-3, 0.0
    for every in (0, 1):
        arguments = mha, ffn, gamma, threshold, 1, every
        for effects in (loops("damping", *arguments), stream.damping(*arguments)):
            over = differs > threshold[:, 1, None]
            assert 0 < over[0].sum() < 4
            assert over[1].all()
            close(effects[..., 0], (gamma[:, None] - 1) * over)
            assert torch.equal(effects[..., 1], over.float())
            expected = differs.clone()
            if not every:
                expected[2] = 0.0
            close(effects[..., 2], expected)


def test_divergence_of_widely_spread_updates_is_finite_and_exact(loops: Loops) -> None:
    """A single entry dominates its own softmax, and has little of the other's."""
    mha, ffn = torch.zeros(2, 1, 40), torch.zeros(2, 1, 40)
    mha[0, 0, 3], ffn[0, 0, 3] = 60.0, -80.0
    mha[1], ffn[1] = 1e-3 * torch.arange(40), 0.0
    exact = torch.nn.functional.kl_div(
        ffn.double().log_softmax(-1), mha.double().log_softmax(-1), reduction="none", log_target=True
    ).sum(-1)
    actual = loops("damping", mha, ffn, torch.ones(2), torch.zeros(2, 1), 0, 1)[..., 2]
    torch.testing.assert_close(actual.double(), exact, rtol=1e-5, atol=2e-7)


def test_a_kernel_refuses_unsupported_arguments(loops: Loops) -> None:
    states, packed = torch.randn(2, 32), linear.packed_in_blocks(torch.randn(40, 32))
    at = torch.zeros(2, dtype=torch.int64)
    query, pool = torch.ones(2, 6, 1, 32), pooled(2, 2, 20, 32, torch.float32)
    masks, settings, moved = torch.ones(2, 20, 2), torch.ones(2, 3, 4), torch.tensor([True, False])
    update, gamma = states[:, None], torch.ones(2)
    refused: list[tuple[Any, ...]] = [
        ("packed_linear", states.double(), packed, None, 40),
        ("packed_linear", states, packed.double(), None, 40),
        ("packed_linear", states, packed, None, 50),
        ("packed_linear", states[:, :16], packed, None, 40),
        ("packed_linear", torch.randn(32, 2).t(), packed, None, 40),
        ("decode_attention", query, pool.double(), pool.double(), at, None, 1.0, 0, 0.0),
        ("decode_attention", query, pool, pool.half(), at, None, 1.0, 0, 0.0),
        ("decode_attention", query.double(), pool, pool, at, None, 1.0, 0, 0.0),
        ("decode_attention", query[:, :5], pool, pool, at, None, 1.0, 0, 0.0),
        ("decode_attention", query, pool[:1], pool[:1], at, None, 1.0, 0, 0.0),
        ("decode_attention", query[..., :16].contiguous(), pool, pool, at, None, 1.0, 0, 0.0),
        ("read_attention", query, pool.mT.contiguous().mT, pool, at, None, None, 1.0, 0, 0.0, 20),
        ("read_attention", query, pool, pool.mT.contiguous().mT, at, None, None, 1.0, 0, 0.0, 20),
        ("read_attention", query, pool, pool, at, torch.ones(2, 20).double(), None, 1.0, 0, 0.0, 20),
        ("read_attention", query, pool, pool, at, None, None, 1.0, 0, 0.0, 21),
        ("decode_attention", query, pool, pool, at, torch.ones(5), 1.0, 0, 0.0),
        ("read_attention", query, pool, pool, at, None, torch.ones(6).double(), 1.0, 0, 0.0, 20),
        ("enhanced_attention", query, pool, pool, at, None, masks[:, :10], settings, moved, 0, None, 1.0, 0, 0.0, 20),
        ("enhanced_attention", query, pool, pool, at, None, masks, settings[:1], moved, 0, None, 1.0, 0, 0.0, 20),
        ("enhanced_attention", query, pool, pool, at, None, masks, settings, moved, 3, None, 1.0, 0, 0.0, 20),
        ("damping", update.double(), update.double(), gamma, torch.ones(2, 3), 0, 1),
        ("damping", update, update, gamma, torch.ones(2, 3), 3, 1),
        ("stream_looks", [update] * 3, [update], [update], [update]),
        ("stream_looks", [update] * 8, [update] * 2, [update], [update]),
    ]
    for name, *arguments in refused:
        with pytest.raises(RuntimeError, match="rejected"):
            loops(name, *arguments)
