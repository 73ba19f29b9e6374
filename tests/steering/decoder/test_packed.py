"""Weights in the order of the CPU's kernels: against plain linear layers, and a whole model against the plain one."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from torch import nn

from steering import Diagnose, Engine, Request, Sampling
from steering.bench.shapes import SHAPES, random_model
from steering.bench.speed import weights_read
from steering.decoder.packed import PackedLinear, pack, packed_bytes, prepare, supported
from steering.prompt.layout import build_prompt
from steering.runner.selfcheck import check_model, plain

SHAPE = replace(SHAPES["small"], text={**SHAPES["small"].text, "num_hidden_layers": 2})
DTYPES = [dtype for dtype in (torch.float32, torch.bfloat16) if supported(dtype)]
"""The dtypes with such kernels on this processor."""


class Model(nn.Module):
    """Two layers that gain by packing, one too small for it, and a head that shares the table of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(2048, 512)
        self.up, self.down = nn.Linear(512, 1408), nn.Linear(1408, 512, bias=False)
        self.small = nn.Linear(512, 64)
        self.head = nn.Linear(512, 2048, bias=False)
        self.head.weight = self.table.weight

    def get_output_embeddings(self) -> nn.Linear:
        return self.head


def model(dtype: torch.dtype) -> Model:
    torch.manual_seed(0)
    return Model().to(dtype).requires_grad_(False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_products_are_those_of_plain_layers(dtype: torch.dtype) -> None:
    plain = model(dtype)
    ours = copy.deepcopy(plain)
    prepare(ours, dtype)
    assert [type(layer) for layer in (ours.up, ours.small)] == [PackedLinear, nn.Linear]
    states = torch.randn(3, 7, 512).to(dtype)
    assert torch.equal(ours.up(states), plain.up(states))  # not packed yet
    pack(ours)
    for rows in (states, states[0], states[0, 0], states[:1, :1], torch.randn(200, 512).to(dtype)):
        exact = nn.functional.linear(rows.double(), plain.up.weight.double(), plain.up.bias.double())
        got, theirs = ours.up(rows), plain.up(rows)
        assert (got.dtype, got.shape) == (theirs.dtype, theirs.shape)
        # a sum may be ordered otherwise, and rounded only then
        error, plainly = ((output.double() - exact).square().mean().sqrt() for output in (got, theirs))
        assert error <= 1.2 * plainly + 4 * torch.finfo(torch.float32).eps
        down = ours.down(got).double() - plain.down(got).double()
        assert down.abs().max() <= 16 * torch.finfo(dtype).eps * plain.down(got).abs().max()
        assert torch.equal(ours.small(rows), plain.small(rows))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weights_are_held_once_and_can_be_read(dtype: torch.dtype) -> None:
    plain = model(dtype)
    ours = copy.deepcopy(plain)
    prepare(ours, dtype)
    pack(ours)
    names = {name for name, _ in ours.named_parameters()}
    assert names == {"table.weight", "up.bias", "small.weight", "small.bias"}
    assert packed_bytes(ours) == (2 * 512 * 1408) * dtype.itemsize
    assert torch.equal(ours.up.weight, plain.up.weight)
    assert ours.head.weight is ours.table.weight
    wide = torch.randn(5, 512).float()
    ours.up.bias.data = ours.up.bias.data.float()  # as a check has it that computes in float32
    assert torch.allclose(
        ours.up(wide), nn.functional.linear(wide, plain.up.weight.float(), plain.up.bias.float()), atol=1e-5
    )


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_model_answers_as_the_plain_one(dtype: torch.dtype) -> None:
    mllm = random_model(SHAPE, torch.device("cpu"), dtype)
    read = weights_read(mllm)
    chat = [{"role": "user", "content": "red star left of blue heart"}]
    prompt = build_prompt(mllm, chat)
    with torch.inference_mode(), plain(mllm) as model:
        lengths = {"max_new_tokens": 8, "min_new_tokens": 8}
        generated = model.generate(
            **prompt.inputs, **lengths, do_sample=False, output_logits=True, return_dict_in_generate=True
        )
    check_model(mllm)  # the plain model first, then what it is packed into
    layers = [layer for layer in mllm.model.modules() if isinstance(layer, PackedLinear)]
    assert layers
    assert all(layer.packed is not None for layer in layers)
    assert weights_read(mllm) == read
    engine = Engine(mllm, slots=2, max_length=128)  # which checks it again, as it is now
    requests = [
        Request(chat, Sampling(max_tokens=8, ignore_eos=True)),
        Request(chat, Sampling(max_tokens=8, ignore_eos=True), diagnose=Diagnose(frozenset({"residual"}))),
    ]
    answer, observed = engine.generate(requests)
    ours, plain_tokens = answer.choices[0].token_ids, generated.sequences[0, prompt.length :].tolist()
    first = next((step for step in range(8) if ours[step] != plain_tokens[step]), None)
    if first is not None:  # processors round a half-precision product in several ways: only a tie may fall differently
        assert dtype != torch.float32
        logprobs = generated.logits[first][0].float().log_softmax(-1)
        assert logprobs[plain_tokens[first]] - logprobs[ours[first]] < 0.05
    assert len(observed.choices[0].token_ids) == 8
