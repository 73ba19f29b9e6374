"""Linear attention and short convolutions in slots are transformers' own, whatever rows, padding, parts and kernels."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5GatedDeltaNet, Qwen3_5TextConfig

from steering.decoder.attention import Decode
from steering.decoder.candidates import Candidates
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill, Ragged
from steering.recurrent import kernel
from steering.recurrent.convolution import ShortConvolution
from steering.recurrent.delta import GatedDelta
from steering.recurrent.kernel import is_right, step_kernel, stepped
from tests.steering.recurrent.modules import HIDDEN, SHAPES, a_convolution, a_module, by_torch

LENGTHS = 150, 7, 64
WITHIN = {"rtol": 2e-4, "atol": 2e-5}


def plainly(module: Any, states: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Return transformers' output (n, d) of one prompt's states, fed one by one, with its cache's states behind them."""
    linear = isinstance(module, Qwen3_5GatedDeltaNet)
    config = Qwen3_5TextConfig(num_hidden_layers=1, layer_types=["linear_attention"]) if linear else module.config
    cache = DynamicCache(config=config)
    outputs = [type(module).forward(module, states[None, at : at + 1], cache=cache) for at in range(len(states))]
    width = (module.conv1d if linear else module.conv).kernel_size[0] - 1
    matrices = [cache.get_recurrent_state(0)[0]] if linear else []
    return torch.cat(outputs, 1)[0], cache.get_conv_state(0)[0][:, -width:], *matrices


def in_slots(module: Any, kernel: Any = None) -> Callable[..., torch.Tensor]:
    linear = isinstance(module, Qwen3_5GatedDeltaNet)
    forward = GatedDelta(module, 0, kernel) if linear else ShortConvolution(module, 0)
    return lambda states, step: forward(hidden_states=states, step=step)


def drawn(*lengths: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(length, HIDDEN, generator=generator) for length in lengths]


def padded(parts: list[torch.Tensor]) -> torch.Tensor:
    return nn.utils.rnn.pad_sequence(parts, batch_first=True, padding_value=9.0)


@pytest.mark.parametrize(
    "module",
    [*map(a_module, (SHAPES[0], *SHAPES[2:])), a_convolution(3, bias=True), a_convolution(4, bias=False)],
    ids=lambda module: type(module).__name__,
)
def test_prompts_in_parts_and_answers_are_as_token_by_token(module: nn.Module) -> None:
    forward, pool = in_slots(module), KVPool(5, 256)
    prompts = drawn(*LENGTHS)
    expected = [plainly(module, prompt) for prompt in prompts]
    cuts, rows = [40, 0, 63], slice(1, 4)
    first = [prompt[:cut] for prompt, cut in zip(prompts, cuts, strict=True)]
    for row in (0, 2):
        step = Prefill(pool, slice(1 + row, 2 + row), lengths=[cuts[row]])
        torch.testing.assert_close(forward(first[row][None], step)[0], expected[row][0][: cuts[row]], **WITHIN)
    rest = [prompt[cut:-1] for prompt, cut in zip(prompts, cuts, strict=True)]
    lengths = [len(part) for part in rest]
    for _ in range(2):  # a pass that is run again gives the same
        wanted = [[24, 88], [], []]
        step = Prefill(pool, rows, ragged=Ragged(cuts, lengths), lengths=lengths, wanted=wanted)
        output = forward(padded(rest), step)
        for row, (whole, *_) in enumerate(expected):
            torch.testing.assert_close(output[row, : lengths[row]], whole[cuts[row] : -1], **WITHIN)
    assert step.recurrent.taken.keys() == {(0, 24), (0, 88)}
    for (_, at), taken in step.recurrent.taken.items():
        torch.testing.assert_close(taken[0], plainly(module, prompts[0][: 40 + at])[1:], **WITHIN)
    last = torch.stack([prompt[-1:] for prompt in prompts])
    positions = torch.tensor(LENGTHS) - 1
    tried = Candidates(pool, torch.tensor([1, 2, 3]), positions, 2, 256)
    outputs = forward(last.repeat_interleave(2, 0), tried)
    pool.states.move(3, 0)
    decoded = forward(last[[2, 0, 1]], Decode(pool, positions[[2, 0, 1]], 256))
    for row, (whole, *states) in enumerate(expected):
        for ours in (outputs[2 * row], outputs[2 * row + 1], decoded[(row + 1) % 3]):
            torch.testing.assert_close(ours[0], whole[-1], **WITHIN)
        torch.testing.assert_close(pool.states.taken((row + 1) % 3, LENGTHS[row])[0], (*states,), **WITHIN)


def test_a_kernel_takes_the_place_of_a_token_in_torch() -> None:
    module = a_module(SHAPES[0])
    calls = []

    def counted(module: Any, *args: Any) -> torch.Tensor:
        calls.append(args)
        return stepped(functools.partial(by_torch, module=module), module, *args)

    plain, ours, pool, other = in_slots(module), in_slots(module, counted), KVPool(2, 64), KVPool(2, 64)
    (prompt,) = drawn(9)
    for forward, slots in ((plain, pool), (ours, other)):
        forward(prompt[None, :5], Prefill(slots, slice(0, 1), lengths=[5]))
    for at in range(5, 9):
        expected, got = (
            forward(prompt[None, at : at + 1], Decode(slots, torch.tensor([at]), 64))
            for forward, slots in ((plain, pool), (ours, other))
        )
        torch.testing.assert_close(got, expected)
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_right_kernel_is_right(dtype: torch.dtype) -> None:
    module = a_module(SHAPES[2], dtype)
    assert is_right(functools.partial(stepped, functools.partial(by_torch, module=module)), module)


@pytest.mark.parametrize("wrong", ["output", "inputs", "matrix", "another slot", "written where it only tries"])
def test_a_wrong_kernel_is_found(wrong: str) -> None:
    module = a_module(SHAPES[2])

    def kernel(*args: Any) -> torch.Tensor:
        *_, states, (read, write), _ = args
        output = by_torch(*args, module=module)
        if wrong == "output":
            output[0, 3] += 0.01
        elif wrong == "another slot":
            states[1][2, 0, 0, 0] += 1
        elif write is None and wrong.startswith("written"):
            states[0][read[0]] += 1
        elif write is not None and wrong == "inputs":
            states[0][write[1], 2, 1] += 0.01
        elif write is not None and wrong == "matrix":
            states[1][write[1], 2, 1, 3] += 0.01
        return output

    assert not is_right(functools.partial(stepped, kernel), module)


def test_a_cpu_has_no_kernel() -> None:
    assert step_kernel(a_module(SHAPES[0])) is None
    assert not kernel._known
