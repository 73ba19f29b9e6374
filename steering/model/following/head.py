"""The language model's head: the operations that the wrapper's forward pass applies to the decoder's states.

Configs state scales and soft caps that some wrappers apply and others leave out. Therefore one pass of the wrapper is traced
at load, with a state in place of the decoder's output, and its operations with numbers are repeated.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

log = logging.getLogger(__name__)

Operation = Callable[[torch.Tensor], torch.Tensor]

_aten: Any = torch.ops.aten


class OutputHead:
    """Computes logits (..., vocabulary) of normalised states (..., d), in the wrapper's dtype."""

    def __init__(self, model: Any):
        self._output: nn.Module = model.get_output_embeddings()
        self._before: list[Operation] = []
        self._after: list[Operation] = []
        weight: torch.Tensor = self._output.weight
        if weight.device.type == "meta":  # no logits are computed there
            return
        try:
            self._follow(
                model, torch.ones(1, 1, model.config.get_text_config().hidden_size).to(weight.device, weight.dtype)
            )
        except Exception as error:  # the self-check compares the logits
            log.debug("the output head of the model's wrapper could not be traced: %s: %s", type(error).__name__, error)

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        for operation in self._before:
            hidden = operation(hidden)
        logits: torch.Tensor = self._output(hidden)
        for operation in self._after:
            logits = operation(logits)
        return logits

    @torch.inference_mode()
    def _follow(self, model: Any, state: torch.Tensor) -> None:
        following = _Following(state)
        handle = self._output.register_forward_hook(following.multiplied)
        try:
            with _replace_forward(model.model, _Made((state,))), following:
                output = model(input_ids=torch.zeros(1, 1, dtype=torch.int64, device=state.device), use_cache=False)
        finally:
            handle.remove()
        if following.after is None or not following.follows(output.logits):
            raise ValueError("its logits do not follow from the output embedding's by scalar operations")
        self._before, self._after = following.before, following.after


class _Made(tuple[torch.Tensor]):
    """A stand-in for the inner model's output, with nothing but states."""

    def __getattr__(self, name: str) -> Any:
        return self[0] if name == "last_hidden_state" else None


@contextmanager
def _replace_forward(module: nn.Module, output: _Made) -> Iterator[None]:
    """Make calls of the module return `output` within the block."""
    forward = vars(module).get("forward")
    module.forward = lambda *args, **kwargs: output
    try:
        yield
    finally:
        del module.forward
        if forward is not None:
            module.forward = forward


class _Following(TorchDispatchMode):
    """Records the operations on a state, and on the output embedding's result for it."""

    def __init__(self, state: torch.Tensor):
        super().__init__()
        self.before: list[Operation] = []
        self.after: list[Operation] | None = None
        self._value = state

    def multiplied(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        self._value, self.after = output, []

    def follows(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is the traced value, or a view of all its elements."""
        return tensor.data_ptr() == self._value.data_ptr() and tensor.numel() == self._value.numel()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = func(*args, **(kwargs or {}))
        tensors = bool(args) and isinstance(args[0], torch.Tensor) and isinstance(output, torch.Tensor)
        if tensors and self.follows(args[0]) and (operation := _operation(func, args, output)):
            (self.before if self.after is None else self.after).append(operation)
            self._value = output
        return output


def _operation(func: Any, args: tuple[Any, ...], output: torch.Tensor) -> Operation | None:
    """Return an operation that takes nothing but numbers besides the value; None for others."""
    packet = func.overloadpacket
    if packet in (_aten.mul, _aten.mul_, _aten.div, _aten.div_):
        if not isinstance(number := args[1], int | float):
            return None
        return partial(torch.mul if packet in (_aten.mul, _aten.mul_) else torch.div, other=number)
    if packet in (_aten.tanh, _aten.tanh_):
        return torch.tanh
    if packet in (_aten._to_copy, _aten.to):  # inference mode does not decompose `to`
        return partial(torch.Tensor.to, dtype=output.dtype)
    return None
