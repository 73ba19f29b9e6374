"""A forward pass as a function of tensors alone, which can be recorded once and run for many batches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
from torch import nn

from steering.accel.kernel import decode_kernel_of
from steering.accel.tensors import Leaf, Node, Pattern, put_together, taken_apart
from steering.decoder.attention import AttentionStep, Decode, DecodeKernel
from steering.decoder.hooks import Hook, Hooks
from steering.decoder.kv import KVPool
from steering.model.mllm import MLLM

SCORES = 4 * 8
"""Bytes that torch's attention takes for each head and column of a query: eight tensors in float32. Graphs keep them."""


class CapturedPass(NamedTuple):
    """A pass through the decoder as a CUDA graph.

    fed: its inputs, as the step takes them. given: the hooks' tensors. made: states, logits if there are any, and what hooks
    left behind. changes: of the hooks.
    """

    fed: list[torch.Tensor]
    given: list[torch.Tensor]
    replay: Callable[[], object]
    made: list[torch.Tensor]
    changes: list[tuple[int, str, Any]]


class Step(nn.Module):
    """A pass of one kind under hooks of one shape.

    axes: the number of rotary axes, None for positions without an axis. After a first call it knows `left`: the hooks' state
    afterwards, as a tree whose tensors are the given ones, then the made ones.
    """

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None):
        super().__init__()
        self.shape = shape
        self._mllm, self._axes = [mllm], axes  # in a list, so that it is not recorded as a submodule
        self._note = _Note()  # torch.export resets attributes and lists that tracing changes

    @property
    def left(self) -> Any:
        return self._note.left

    def around(self) -> AbstractContextManager[object]:
        """Return the context in which the model's modules are called."""
        return nullcontext()


class DecoderStep(Step):
    """A pass through the decoder."""

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None):
        super().__init__(mllm, shape, axes)
        self.decoder = mllm.decoder
        self.output = mllm.model.get_output_embeddings()

    def adopted(self, hooks: list[Hook]) -> Hooks:
        """Return the hooks at their points, in the form in which they are called."""
        return Hooks.of(hooks)

    def run(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        step: AttentionStep,
        last: torch.Tensor | int | None,
        hooks: list[Hook],
        tensors: list[torch.Tensor],
        **more: Any,
    ) -> list[torch.Tensor]:
        """Run the decoder: states (rows, n, d), logits (rows, vocabulary), and the hooks' new tensors.

        The states are normalised, and the logits are those of each row's last token; there are none where `last` is None.
        more: further arguments of the decoder.
        """
        (mllm,) = self._mllm
        rows = embeds.shape[0]
        at = torch.arange(rows, device=embeds.device) if isinstance(last, torch.Tensor) else slice(None)
        with self.around():
            hidden = self.decoder(
                inputs_embeds=embeds,
                position_ids=positions,
                attention_mask=torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=embeds.device),
                use_cache=False,
                step=step,
                **more,
            ).last_hidden_state
            logits = [] if last is None else [mllm.head(hidden[at, last])]
        step.hooks.settle(step.positions if isinstance(step, Decode) else None)
        pattern, hook_tensors = taken_apart(hooks)
        numbers = {id(tensor): number for number, tensor in enumerate(tensors)}
        new_tensors = [tensor for tensor in hook_tensors if id(tensor) not in numbers]
        fresh = {id(tensor): len(tensors) + number for number, tensor in enumerate(new_tensors)}
        self._note.left = renumbered(pattern.tree, [(numbers | fresh)[id(tensor)] for tensor in hook_tensors])
        return [hidden, *logits, *new_tensors]


class DecodeStep(DecoderStep):
    """A decode step of one token for each of the first rows of the pool."""

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None):
        super().__init__(mllm, shape, axes)
        self.embeddings = mllm.model.get_input_embeddings()

    def kernel(self) -> DecodeKernel | None:
        """Return the kernel that computes attention."""
        return decode_kernel_of(self._mllm[0])

    def adopted(self, hooks: list[Hook]) -> Hooks:
        kernel, plain = self.kernel(), Hooks.of(hooks)
        return plain if kernel is None else kernel.adopted(plain)

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        column: torch.Tensor,
        tensors: list[torch.Tensor],
        pooled: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Decode one token a row.

        tokens, positions, rope: (rows,), the inputs, the columns that they fill, and their rotary positions. column:
        (columns,) of any values, whose length is the number of columns read. tensors: the hooks' tensors. pooled: keys and
        values of each layer.
        """
        hooks: list[Hook] = put_together(self.shape.tree, tensors)
        angles = rope[:, None]
        if self._axes is not None:
            angles = angles.expand(self._axes, -1, -1)
        (mllm,) = self._mllm
        pool = KVPool.of(pooled, mllm.attention_layers, mllm.recurrent_layers)
        step = Decode(pool, positions, column.shape[0], self.adopted(hooks), kernel=self.kernel())
        inputs = mllm.token_inputs(tokens[:, None])
        return self.run(inputs.pop("inputs_embeds"), angles, step, -1, hooks, tensors, **inputs)


class _Note:
    left: Any = None


def renumbered(tree: Any, numbers: list[int]) -> Any:
    """Return the same tree with its tensors renumbered."""
    if type(tree) is Leaf:
        return Leaf(numbers[tree.number])
    if type(tree) is Node:
        return tree._replace(parts=tuple(renumbered(part, numbers) for part in tree.parts))
    return tree
