"""Compare Triton's kernels with plain torch in double precision.

They run on a GPU, or interpreted on a CPU (`TRITON_INTERPRET=1`, which has to be set before triton is imported). Run as a
script; prints a line for each check and ends with "alike".
"""

from __future__ import annotations

import functools
import sys

import torch
from transformers.models.gemma3 import modeling_gemma3 as gemma
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl as qwen

from steering.cpu.kernels.looks import enhanced
from steering.recurrent import triton_delta
from steering.recurrent.kernel import is_right, stepped
from steering.runner.truncation import Truncation, _thresholds
from steering.triton import fusing, triton_attention, triton_ops, triton_truncation, truncation
from steering.triton.triton_attention import Bias, Enhancement, decode_attention
from tests.steering.recurrent.modules import SHAPES, a_module

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = (
    torch.float32,
    torch.float16,
    *([torch.bfloat16] if DEVICE == "cuda" else []),
)  # the interpreter cuts bfloat16
CASES = (
    (None, None, "", False, False),
    (None, None, "", True, False),
    (40, None, "bias and gains", False, False),
    (40, 5.0, "bias and gains", True, False),
    (None, None, "bias", True, True),
    (None, 5.0, "gains", False, False),
    (40, None, "", False, True),
)
"""Window, soft cap, what changes scores, whether weights are enhanced, whether heads have sinks."""
LIMITS = (
    (0, 1.0, 0.0),
    (5, 1.0, 0.0),
    (0, 0.9, 0.0),
    (0, 0.05, 0.0),
    (0, 1.0, 0.1),
    (20, 0.8, 0.0),
    (20, 0.8, 0.3),
    (10_000, 0.99, 0.001),
)
"""The top_k, top_p and min_p of rows."""
TOLERANCE = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 2e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def relative(ours: torch.Tensor, reference: torch.Tensor) -> float:
    return float((ours.double() - reference.double()).norm() / reference.double().norm().clamp(min=1e-12))


class Case:
    """A decode of some rows, the last of which pads the batch, over a cache that holds NaN where nothing may be read."""

    def __init__(self, heads: int, kv_heads: int, width: int, length: int, lasts: list[int], dtype: torch.dtype):
        rows = len(lasts) + 1
        self.positions = torch.tensor([*lasts, length - 1], device=DEVICE)
        self.query = draw(rows, heads, 1, width, dtype=dtype)
        fused = draw(rows, 1, 2 * kv_heads * width, dtype=dtype)  # as views of a fused projection
        self.key, self.value = (
            part.view(rows, 1, kv_heads, width).transpose(1, 2) for part in fused.split(kv_heads * width, -1)
        )
        self.keys, self.values = (draw(rows + 1, kv_heads, length, width, dtype=dtype) for _ in range(2))
        for row, last in enumerate([*lasts, -1]):
            for cache in (self.keys, self.values):
                cache[row, :, last + (last >= 0) :] = torch.nan
        self.scaling, self.group = width**-0.5, heads // kv_heads

    def reference(
        self,
        columns: int,
        window: int | None,
        softcap: float | None,
        bias: Bias | None,
        gains: torch.Tensor | None,
        enhancement: Enhancement | None,
        layer: int,
        sinks: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
        rows = len(self.positions) - 1
        keys, values = (cache[:rows, :, :columns].double().clone() for cache in (self.keys, self.values))
        for row, position in enumerate(self.positions[:-1].tolist()):
            keys[row, :, position], values[row, :, position] = self.key[row, :, 0], self.value[row, :, 0]
        keys, values = (cache.nan_to_num().repeat_interleave(self.group, 1) for cache in (keys, values))
        scores = torch.einsum("rhd,rhcd->rhc", self.query[:rows, :, 0].double(), keys) * self.scaling
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        if bias is not None:
            by_head, places = (part[:rows].double() for part in bias)
            scores = scores + by_head[..., None] * places[:, None, :columns]
        if gains is not None:
            scores = scores + gains[:rows, None].double() * scores.abs()
        column, last = torch.arange(columns, device=DEVICE), self.positions[:rows, None]
        visible = column <= last
        if window is not None:
            visible &= column > last - window
        scores, effect = scores.masked_fill(~visible[:, None], -torch.inf), None
        if sinks is not None:  # one more column, whose weights are left out
            scores = torch.cat([scores, sinks.double()[:, None].expand(rows, -1, 1)], -1)
        weights = scores.softmax(-1)[:, :, None, :columns]
        if enhancement is not None:
            masks, settings, reading = (tensor[:rows] for tensor in enhancement)
            weights, effect = enhanced(weights, masks.double(), settings.double(), reading, layer)
        return torch.einsum("rhc,rhcd->rhd", weights[:, :, 0], values), weights[:, :, 0].mean(1), effect


def check_attention(dtype: torch.dtype, *, thorough: bool) -> None:
    tolerance = TOLERANCE[dtype]
    shapes = [(14, 2, 32, 120, [0, 77, 118]), (4, 4, 80, 96, [33, 94]), (4, 1, 256, 64, [40])]
    if thorough:
        shapes += [(28, 4, 128, 4096, [1063] * 5 + [17, 4094]), (16, 1, 256, 1200, [700]), (32, 8, 64, 9000, [8990, 3])]
    for heads, kv_heads, width, length, lasts in shapes:
        for window, softcap, adjusted, see, sunk in CASES:
            case = Case(heads, kv_heads, width, length, lasts, dtype)
            columns, rows = min(max(lasts) + 3, length), len(lasts) + 1
            gains = torch.rand(rows, columns, device=DEVICE) if "gains" in adjusted else None
            bias = None
            if "bias" in adjusted:
                by_head = draw(rows, 3, heads)[:, 1] * torch.arange(rows, device=DEVICE)[:, None]  # 0 in the first row
                bias = by_head, (torch.rand(rows, length, device=DEVICE) > 0.5).float()
            sinks = 3 + 2 * draw(heads, dtype=dtype) if sunk else None
            enhancement = None
            if see:
                kind = torch.randint(3, (rows, length), device=DEVICE)
                masks = torch.stack([kind == 1, kind == 2], -1).float()
                masks[0] = 0  # a row that nobody asked for
                settings = torch.rand(rows, 3, 4, device=DEVICE) * torch.tensor([0.3, 0.3, -0.2, 0.5], device=DEVICE)
                enhancement = (masks, settings, torch.arange(rows, dtype=torch.uint8, device=DEVICE) % 3)
            reference, means, effect = case.reference(columns, window, softcap, bias, gains, enhancement, 1, sinks)
            before = case.keys.clone(), case.values.clone()
            arguments = (
                case.query,
                case.key,
                case.value,
                case.keys,
                case.values,
                case.positions,
                case.scaling,
                columns,
                1,
            )
            ours, plain = (
                decode_attention(*arguments, window, softcap, bias, gains, enhancement, looks, sinks)
                for looks in (True, False)
            )
            label = f"{dtype} {heads}/{kv_heads}x{width} window {window} cap {softcap} scores {adjusted!r} see {see}"
            label += f" sinks {sunk}"
            assert ours.means is not None
            assert plain.means is None
            assert not sunk or float(means.sum(-1).min()) < 0.9, "sinks have a good part of the attention"
            assert torch.equal(ours.out, plain.out), label
            assert relative(ours.out[:-1], reference) < tolerance, (label, relative(ours.out[:-1], reference))
            assert relative(ours.means[:-1], means) < 5e-6 if dtype == torch.float32 else 2e-3, label
            assert torch.allclose(ours.means[:-1].sum(-1), means.sum(-1).float(), atol=1e-4), label
            assert torch.isfinite(ours.out).all(), label
            if effect is not None:
                assert ours.effect is not None
                assert torch.allclose(
                    ours.effect[:-1].double(), effect.double(), atol=1e-5 if dtype == torch.float32 else 2e-3
                )
            index = torch.arange(rows, device=DEVICE)
            for cache, old, new in zip((case.keys, case.values), before, (case.key, case.value), strict=True):
                old[index, :, case.positions] = new[:, :, 0]
                assert torch.equal(cache.nan_to_num(), old.nan_to_num()), label
    print("attention", dtype, flush=True)


def check_alone(dtype: torch.dtype) -> None:
    """Check that a row's answer does not depend on its neighbours, for a given number of rows."""
    case = Case(8, 2, 64, 300, [250, 250, 30], dtype)
    arguments = [case.key, case.value, case.keys, case.values, case.positions, case.scaling, 256]
    together = decode_attention(case.query, *arguments, looks=True)
    case.query[1:] = draw(*case.query[1:].shape, dtype=dtype)
    again = decode_attention(case.query, *arguments, looks=True)
    assert together.means is not None
    assert again.means is not None
    assert torch.equal(together.out[0], again.out[0])
    assert torch.equal(together.means[0], again.means[0])
    print("alone", dtype, flush=True)


def check_fused(dtype: torch.dtype) -> None:
    """Check that the fused kernels give the results of transformers' own modules."""
    close = {"rtol": 1e-5, "atol": 1e-6} if dtype == torch.float32 else {"rtol": 0.0, "atol": 0.0}
    if DEVICE == "cuda" and dtype != torch.float32:
        close = {"rtol": 1e-2, "atol": 1e-2}  # a GPU may round once where transformers does twice
    for kind, shifted in ((qwen.Qwen2_5_VLRMSNorm, False), (gemma.Gemma3RMSNorm, True)):
        norm = kind(96).to(DEVICE, dtype).requires_grad_(False)
        norm.weight.normal_()
        states = draw(2, 5, 96, dtype=dtype) * 3
        eps = getattr(norm, "variance_epsilon", None) or norm.eps
        torch.testing.assert_close(triton_ops.rms_norm(states, norm.weight, eps, shifted), norm(states), **close)
        assert fusing._adds_one(triton_ops, norm) is shifted
    query, key = (draw(2, 5, heads, 16, dtype=dtype).transpose(1, 2) for heads in (28, 4))
    for rows in (1, 2):
        angles = [draw(rows, 5, 16, dtype=dtype) for _ in range(2)]
        ours, expected = (
            fusing._rotate_text(triton_ops, query, key, *angles),
            qwen.apply_rotary_pos_emb(query, key, *angles),
        )
        torch.testing.assert_close(ours, expected, **close)
    query, key, _ = draw(7, 3, 4, 20, dtype=dtype).unbind(1)
    angles = [draw(7, 20) for _ in range(2)]
    expected = qwen.apply_rotary_pos_emb_vision(query, key, *angles)
    wide = close if DEVICE == "cuda" else {"rtol": 1e-2, "atol": 1e-5}
    torch.testing.assert_close(fusing._rotate_vision(triton_ops, query, key, *angles), expected, **wide)
    print("fused", dtype, flush=True)


def check_ops(dtype: torch.dtype) -> None:
    """Check the elementwise kernels and the product with a single state."""
    within = {"rtol": 2 * TOLERANCE[dtype], "atol": 2 * TOLERANCE[dtype]}
    states, update, weight = draw(3, 5, 96, dtype=dtype), draw(3, 5, 96, dtype=dtype), draw(96, dtype=dtype)
    for shifted in (False, True):
        total, normed = triton_ops.add_rms_norm(states, update, weight, 1e-6, shifted)
        assert torch.equal(total, states + update)
        expected = torch.nn.functional.rms_norm(total.double(), (96,), weight.double() + shifted, 1e-6)
        torch.testing.assert_close(normed.double(), expected, **within)
    gate, up = draw(7, 200, dtype=dtype).split(100, -1)
    expected = torch.nn.functional.silu(gate.double()) * up.double()
    torch.testing.assert_close(triton_ops.silu_product(gate, up).double(), expected, **within)
    for outputs, inputs in ((70, 300), (33, 2500)):
        state, table = draw(1, 1, inputs, dtype=dtype), draw(outputs, inputs, dtype=dtype) * inputs**-0.5
        for bias in (None, draw(outputs, dtype=dtype)):
            expected = torch.nn.functional.linear(*(part.double() for part in (state, table)))
            expected = expected if bias is None else expected + bias.double()
            for product in triton_ops.matvecs:
                torch.testing.assert_close(product(state, table, bias).double(), expected, **within)
    print("ops", dtype, flush=True)


def check_truncation() -> None:
    """Check that rows keep the tokens that sorting keeps, ties, forbidden tokens and rows that keep everything included."""
    assert truncation.is_right(triton_truncation.thresholds, torch.device(DEVICE))
    for vocabulary in (37, 9000, 20_000):
        limits = Truncation(*torch.tensor(LIMITS, device=DEVICE).T[:, :, None])
        limits = limits._replace(top_k=limits.top_k.long())
        logits = 3 * draw(len(LIMITS), vocabulary)
        for scaled in (logits, logits.round(), logits.masked_fill(logits < 3, -torch.inf), logits - 500):
            least = triton_truncation.thresholds(scaled, *limits)
            ours = scaled.masked_fill(scaled < least, -torch.inf)
            expected = _thresholds(scaled, limits, [vocabulary])
            assert torch.equal(ours, scaled.masked_fill(scaled < expected, -torch.inf)), (vocabulary, least, expected)
    print("truncation", flush=True)


def check_delta(dtype: torch.dtype) -> None:
    """Check linear attention of single tokens."""
    for shape in SHAPES:
        module = a_module(shape, dtype).to(DEVICE)
        assert is_right(functools.partial(stepped, triton_delta.delta_step), module), (shape, dtype)
    print("delta", dtype, flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    if len(sys.argv) == 1:
        check_truncation()
    assert triton_attention.splits_of(4, 8192, 132) == (66, 32)
    for kind in DTYPES:
        if len(sys.argv) == 1 or str(kind) in sys.argv:
            check_fused(kind)
            check_ops(kind)
            check_alone(kind)
            check_delta(kind)
            check_attention(kind, thorough=kind == torch.bfloat16)
    print("alike", DEVICE)
