"""Decoder layers whose outputs are steered and read. Their classes are replaced after loading; no model family is named."""

from __future__ import annotations

import ast
import inspect
import textwrap
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


def decoder_layers(registry: dict[str, Any], model: nn.Module) -> tuple[list[nn.Module], dict[int, Attention]]:
    """Return a model's decoder layers, and by number the attention of those that attend, from vLLM's registry of layers.

    Layers with linear attention or a convolution stand in the same list of modules as those that attend.
    """
    paths = {module: path for path, module in model.named_modules()}  # the registry's own are others in some models
    attentions, lists = dict[int, Attention](), dict[str, nn.Module]()
    for module in registry.values():
        if isinstance(module, Attention) and str(getattr(module.attn_type, "value", module.attn_type)) == "decoder":
            parts = paths.get(module, "").split(".")
            at = next((place for place, part in enumerate(parts) if part.isdigit()), 0)
            if not at:
                raise ValueError(
                    f"helmsight-vllm cannot steer {type(model).__name__}: its attention is in no decoder layer."
                )
            attentions[int(parts[at])] = module
            path = ".".join(parts[:at])
            lists[path] = model.get_submodule(path)
    if len(lists) != 1:
        raise ValueError(
            f"helmsight-vllm finds no one list of decoder layers in this model, but {sorted(lists) or 'none'}."
        )
    (layers,) = lists.values()
    return [*layers.children()], dict(sorted(attentions.items()))


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
            before = None if stream is None else _argument(args, kwargs, stream)
            torch.ops.helmsight.enter(_tokens(_argument(args, kwargs, update)), before, number)
            output = super().forward(*args, **kwargs)
            first, rest = (output[0], output[1:]) if isinstance(output, tuple) else (output, ())
            torch.ops.helmsight.leave(_tokens(first), None if stream is None else rest[0], number)
            first = first + self.helmsight_table.index_select(0, self.helmsight_rows[: first.shape[-2]])
            return (first, *rest) if isinstance(output, tuple) else first

    Extended.__name__, Extended.__qualname__ = plain.__name__, plain.__qualname__
    layer.__class__ = Extended
    layer.register_buffer("helmsight_table", table, persistent=False)
    layer.register_buffer("helmsight_rows", rows, persistent=False)


def _tokens(states: torch.Tensor) -> torch.Tensor:
    """Return states as (tokens, d); layers of transformers, which vLLM runs for some models, have a batch of 1 around."""
    return states.flatten(0, 1) if states.dim() > 2 else states


def splits(layer: type[nn.Module]) -> bool:
    """Return True for a layer that gives its last update and the stream before it, and False for one that gives their sum.

    Layers of both kinds take a `residual`; those that give the sum replace it by their input before they read it.
    """
    forward = inspect.unwrap(layer.forward)
    if "residual" not in inspect.signature(forward).parameters:
        return False
    (function,) = ast.parse(textwrap.dedent(inspect.getsource(forward))).body
    first = next(statement for statement in function.body if _names(statement, "residual"))  # type: ignore[attr-defined]
    return not isinstance(first, ast.Assign) or not any(_names(target, "residual") for target in first.targets)


def _names(tree: ast.AST, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


def _arguments(layer: type[nn.Module]) -> tuple[tuple[int, str], tuple[int, str] | None]:
    """Return places and names of a layer's two inputs, the second of which is None where it takes the whole stream.

    Raises ValueError for a layer of another form.
    """
    names = list(inspect.signature(layer.forward).parameters)[1:]
    if "hidden_states" not in names:
        raise ValueError(
            f"{layer.__name__} is no decoder layer of vLLM's usual form: its inputs are {', '.join(names)}."
        )
    update = names.index("hidden_states"), "hidden_states"
    return update, (names.index("residual"), "residual") if splits(layer) else None


def _argument(args: tuple[Any, ...], kwargs: dict[str, Any], argument: tuple[int, str]) -> Any:
    place, name = argument
    return kwargs[name] if name in kwargs else args[place]
