"""Decoder layers of all forms: which modules they are, and what is seen of the residual stream behind each."""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helmsight_vllm.kernel import _like
from helmsight_vllm.layers import decoder_layers, extend, observe, splits
from helmsight_vllm.worker import Worker
from torch import nn
from vllm.model_executor.layers.attention import Attention

FORMS = {
    "llama.LlamaDecoderLayer": True,
    "qwen2.Qwen2DecoderLayer": True,
    "qwen3_next.Qwen3NextDecoderLayer": True,
    "lfm2.Lfm2AttentionDecoderLayer": True,
    "lfm2.Lfm2ShortConvDecoderLayer": True,
    "gemma3.Gemma3DecoderLayer": True,
    "gemma4.Gemma4DecoderLayer": False,
    "exaone4.Exaone4DecoderLayer": False,
    "commandr.CohereDecoderLayer": False,
    "granite.GraniteDecoderLayer": False,
}
"""By layers of vLLM, whether they give their last update and the stream before it, as their code says."""


@pytest.mark.parametrize("name", FORMS)
def test_forms_of_layers_are_told_apart(name: str) -> None:
    file, _, layer = name.partition(".")
    module = importlib.import_module(f"vllm.model_executor.models.{file}")
    assert splits(getattr(module, layer)) == FORMS[name]


def attention() -> Attention:
    """Return attention that only has its type."""
    own = Attention.__new__(Attention)
    nn.Module.__init__(own)
    own.attn_type = "decoder"
    return own


class Layer(nn.Module):
    """A layer that attends, or not."""

    def __init__(self, attends: bool):
        super().__init__()
        self.attn = attention() if attends else nn.Identity()


def model_of(*attending: bool) -> nn.Module:
    return nn.ModuleDict({"language_model": nn.ModuleDict({"layers": nn.ModuleList(map(Layer, attending))})})


def registry_of(model: nn.Module) -> dict[str, Any]:
    """Return vLLM's registry, whose names need not be those of the modules."""
    return {f"other.{number}": module for number, module in enumerate(model.modules()) if isinstance(module, Attention)}


def test_layers_that_do_not_attend_are_layers_too() -> None:
    model = model_of(False, True, False, False, True)
    layers, attentions = decoder_layers(registry_of(model), model)
    assert layers == list(model["language_model"]["layers"])  # type: ignore[index]
    assert list(attentions) == [1, 4]
    assert attentions[4] is layers[4].attn


def test_models_without_one_list_of_layers_are_refused() -> None:
    model = model_of(True)
    with pytest.raises(ValueError, match="in no decoder layer"):
        decoder_layers({"0.attn": attention()}, model)
    with pytest.raises(ValueError, match="none"):
        decoder_layers({}, model)
    two = nn.ModuleDict({"first": model_of(True), "second": model_of(True)})
    with pytest.raises(ValueError, match=r"first.*second"):
        decoder_layers(registry_of(two), two)


class Splitting(nn.Module):
    """A layer that gives its update, and the stream before that."""

    def forward(self, positions: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        stream = hidden_states if residual is None else hidden_states + residual
        return 2 * stream, stream


class Whole(nn.Module):
    """A layer that gives the stream, and beside it one that is not that before."""

    def forward(self, positions: Any, hidden_states: torch.Tensor, residual: torch.Tensor | None) -> Any:
        residual = hidden_states
        return 3 * hidden_states, residual


class Alone(nn.Module):
    """A layer that gives the stream alone."""

    def forward(self, positions: Any, hidden_states: torch.Tensor) -> torch.Tensor:
        return 3 * hidden_states


class Observer:
    """Keeps the stream before and behind layers."""

    def __init__(self) -> None:
        self.before, self.after = list[torch.Tensor](), list[torch.Tensor]()

    def enter(self, layer: int, update: torch.Tensor, stream: torch.Tensor | None) -> None:
        self.before.append(update.clone() if stream is None else update + stream)

    def leave(self, layer: int, update: torch.Tensor, stream: torch.Tensor | None) -> None:
        self.after.append(update.clone() if stream is None else update + stream)


@pytest.mark.parametrize(("kind", "batched"), [(Splitting, False), (Whole, False), (Alone, False), (Alone, True)])
def test_the_stream_is_seen_and_steered_in_each_form(kind: type[nn.Module], batched: bool) -> None:
    """Each of these layers triples the stream, to which the table's row of a token is added behind it."""
    hidden, table = torch.arange(6.0).view(2, 3), torch.stack([torch.zeros(3), torch.ones(3)])
    layers = [kind(), kind()]
    for number, layer in enumerate(layers):
        extend(layer, number, table, torch.tensor([0, 1, 0, 0]))
    observe(observer := Observer())
    stream: torch.Tensor | None = None
    hidden = hidden[None] if batched else hidden
    for layer in layers:
        output = layer(None, hidden, stream) if kind is not Alone else layer(None, hidden)
        hidden, stream = output if isinstance(output, tuple) else (output, None)
    observe(Observer())
    first = 3 * torch.arange(6.0).view(2, 3)
    steered = first + torch.tensor([[0.0], [1.0]])
    assert torch.equal(observer.after[0], first)
    assert torch.equal(observer.before[1], steered)
    assert torch.equal(observer.after[1], 3 * steered)


@pytest.mark.parametrize(
    ("recurrent", "splitting", "missing"),
    [(True, True, {"pairs", "vcd", "generate"}), (False, False, {"think"}), (False, True, set())],
)
def test_what_a_model_cannot_is_not_offered(recurrent: bool, splitting: bool, missing: set[str]) -> None:
    """A held token would change a recurrent state twice, and Think damps an update of its own."""
    runtime = SimpleNamespace(reads_attention=True, recurrent=recurrent, splits=splitting)
    runner = SimpleNamespace(kv_cache_config=SimpleNamespace(kv_cache_groups=[1]))
    worker: Any = SimpleNamespace(helmsight=runtime, pairs=True, model_runner=runner)
    every = {"steer", "states", "stream", "attention", "pairs", "vcd", "generate", "think"}
    assert set(Worker.helmsight_facts(worker)["can"]) == every - missing


def test_layers_with_wider_heads_keep_values_of_their_own() -> None:
    """One-hot values are written once for each token, so those of other layers must stay."""
    kept: Any = {}
    narrow, wide = torch.zeros(2, 1, 4, 8), torch.zeros(2, 1, 4, 16)
    _like(narrow, kept).fill_(1.0)
    _like(wide, kept).fill_(2.0)
    assert float(_like(narrow, kept).sum()) == narrow.numel()
    assert float(_like(wide, kept).sum()) == 2 * wide.numel()
