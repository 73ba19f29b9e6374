"""Decoder layers whose outputs are steered and read. Their classes are replaced after loading; no model family is named."""

from __future__ import annotations

import inspect
from typing import Any, Protocol

import torch
from torch import nn
from vllm.model_executor.layers.attention import Attention


class Observer(Protocol):
    """Sees the residual stream of a step, layer by layer, as pairs whose sum it is: an update, and the stream before it."""

    def enter(self, layer: int, update: torch.Tensor, stream: torch.Tensor | None) -> None:
        """See a layer's input."""

    def leave(self, layer: int, update: torch.Tensor, stream: torch.Tensor | None) -> None:
        """See a layer's output before a vector is added, and change `update` in place where it is to be damped."""


_observer: Observer | None = None
"""The observer of this process."""


eager_calls = {"layers": 0}
"""The number of times that a layer ran as Python in this process, rather than as compiled code."""


def observe(observer: Observer) -> None:
    """Let an observer see every step from now on."""
    global _observer  # noqa: PLW0603  custom operators take no objects
    _observer = observer


def _enter(update: torch.Tensor, stream: torch.Tensor | None, layer: int) -> None:
    if _observer is not None:
        _observer.enter(layer, update, stream)


def _leave(update: torch.Tensor, stream: torch.Tensor | None, layer: int) -> None:
    if _observer is not None:
        _observer.leave(layer, update, stream)


def _define() -> torch.library.Library:
    """Define the two operators, opaque to compilers; that they change `update` keeps them in their place."""
    library = torch.library.Library("helmsight", "DEF")
    for name, function in (("enter", _enter), ("leave", _leave)):
        library.define(f"{name}(Tensor(a!) update, Tensor? stream, int layer) -> ()")
        for key in ("CPU", "CUDA"):
            library.impl(name, function, key)
        library.impl(name, lambda update, stream, layer: None, "Meta")
    return library


_LIBRARY = _define()


def decoder_layers(registry: dict[str, Any], model: nn.Module) -> dict[int, tuple[nn.Module, Attention]]:
    """Return the decoder layers of this rank by their number, with their attention, from vLLM's registry of layers."""
    layers = {}
    for prefix, module in registry.items():
        if isinstance(module, Attention) and str(getattr(module.attn_type, "value", module.attn_type)) == "decoder":
            parts = prefix.split(".")
            at = next(place for place, part in enumerate(parts) if part.isdigit())
            layers[int(parts[at])] = model.get_submodule(".".join(parts[: at + 1])), module
    return dict(sorted(layers.items()))


def extend(layer: nn.Module, number: int, table: torch.Tensor, rows: torch.Tensor) -> None:
    """Add a row of `table` (rows, d) to each token of a layer's output, `rows` (tokens,) says which, and let it be observed.

    Table and rows are buffers of fixed addresses, so that neither compiled code nor CUDA graphs hold a request's settings.
    A subclass is what compilers trace without knowing of it.
    """
    plain = type(layer)
    update, stream = _arguments(plain)

    class Extended(plain):  # type: ignore[misc, valid-type]
        def forward(self, *args: Any, **kwargs: Any) -> Any:
            if not torch.compiler.is_compiling():
                eager_calls["layers"] += 1
            torch.ops.helmsight.enter(_argument(args, kwargs, update), _argument(args, kwargs, stream), number)
            output = super().forward(*args, **kwargs)
            first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, ())
            torch.ops.helmsight.leave(first, rest[0] if rest else None, number)
            first = first + self.helmsight_table.index_select(0, self.helmsight_rows[: first.shape[0]])
            return (first, *rest) if isinstance(output, tuple) else first

    Extended.__name__, Extended.__qualname__ = plain.__name__, plain.__qualname__
    layer.__class__ = Extended
    layer.register_buffer("helmsight_table", table, persistent=False)
    layer.register_buffer("helmsight_rows", rows, persistent=False)


def _arguments(layer: type[nn.Module]) -> tuple[tuple[int, str], tuple[int, str]]:
    """Return places and names of a layer's two inputs; raise ValueError for a layer of another form."""
    names = list(inspect.signature(layer.forward).parameters)[1:]
    if "hidden_states" not in names or "residual" not in names:
        raise ValueError(
            f"{layer.__name__} is no decoder layer of vLLM's usual form: its inputs are {', '.join(names)}."
        )
    return tuple((names.index(name), name) for name in ("hidden_states", "residual"))  # type: ignore[return-value]


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], argument: tuple[int, str]) -> Any:
    place, name = argument
    return kwargs[name] if name in kwargs else args[place]
