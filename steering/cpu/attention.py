"""Attention of a pass by our own kernels, under the hooks that they support."""

from __future__ import annotations

import torch

from steering.accel.forms import WeightsForm, decode_terms
from steering.cpu.forms.base import CPU_FORMS
from steering.cpu.kernels.attention import decode_attention, decode_sums
from steering.cpu.kernels.looks import enhanced_attention, read_attention
from steering.cpu.kernels.prompts import PromptLoops
from steering.decoder.attention import Decode
from steering.decoder.hooks import AttentionHook, Hooks
from steering.decoder.kernels import Heads
from steering.decoder.prompts import Grouped
from steering.triton.attended import Enhancement


class CpuDecode:
    """Attention of a decode under any hooks; torch's operations compute the weights of hooks that no kernel supports."""

    def adopted(self, hooks: Hooks) -> Hooks:
        """Return the hooks of a pass in the kernels' forms."""
        return CPU_FORMS.adopted(hooks)

    def __call__(
        self, step: Decode, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor:
        """Return the output (rows, heads, 1, head_dim), after writing the new keys and values."""
        keys, values = step.write(heads.layer, key, value)
        query, hooks = query.float().contiguous(), step.hooks
        tensors, options = (query, keys, values, step.positions), _kernel_options(heads)
        if not hooks.looks:
            return decode_attention(*tensors, *options).to(values.dtype)
        terms = decode_terms(hooks, heads.layer, step.columns)
        if terms is None:
            rows, count, _, width = query.shape
            grouped, near = query.view(rows, keys.shape[1], -1, width), keys[:rows, :, : step.columns]
            weights = step.weights(heads, grouped, near, step.mask(heads.window, query)).view(rows, count, 1, -1)
            out = decode_sums(weights.contiguous(), values, step.positions, heads.window or 0)
            means = weights[:, :, 0].mean(1)
        elif terms.enhancement is None:
            out, means = read_attention(*tensors, terms.gains, *options, step.columns)
        else:
            masks, settings, reading = terms.enhancement
            out, means, effect = enhanced_attention(
                *tensors, terms.gains, masks, settings, reading, heads.layer, *options, step.columns
            )
            (hook,) = hooks.weighing
            assert isinstance(hook, WeightsForm)
            hook.note(effect)
        for observer in hooks.observers:
            observer.decode(heads.layer, means)
        return out.to(values.dtype)


class CpuPrompts:
    """Attention of prompts directly from the pool, in float32."""

    def __init__(self, loops: PromptLoops):
        self._loops = loops

    def __call__(
        self,
        hooks: Hooks,
        heads: Heads,
        query: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        columns: int,
    ) -> tuple[torch.Tensor | None, Grouped | None]:
        """Attend as `PromptKernel` specifies."""
        enhancement, options, loops = _enhancement(hooks, heads.layer, columns), _kernel_options(heads), self._loops
        if enhancement is None:
            return None, None
        attended = (loops.enhanced if enhancement else loops.plain)(
            query, keys, values, slots, starts, *enhancement, *options
        )
        if not hooks.looks or any(hook.queries is not None for hook in hooks.attention):
            return attended, None

        def grouped(queries: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
            loop = loops.enhanced_grouped if enhancement else loops.grouped
            chosen = queries.contiguous(), groups.contiguous()
            return loop(query, keys, slots, starts, *chosen, columns, *enhancement, *options)

        return attended, grouped


def _enhancement(hooks: Hooks, layer: int, columns: int) -> tuple[torch.Tensor | int, ...] | None:
    """Return the kernels' arguments for the hook that changes a prefill layer's weights.

    They are empty where no hook changes them, and None where a hook is unknown to the kernels.
    """
    changing: list[Enhancement] = []
    for hook in hooks.attention:
        if isinstance(form := CPU_FORMS.of(hook), WeightsForm):
            if (tables := form.enhancement(layer, columns)) is not None:
                changing.append(tables)
        elif type(hook).product is not AttentionHook.product:
            return None
    if not changing:
        return ()
    return None if len(changing) > 1 else (*changing[0], layer)


def _kernel_options(heads: Heads) -> tuple[torch.Tensor | None, float, int, float]:
    """Return the last arguments of every kernel."""
    sinks = None if heads.sinks is None else heads.sinks.float()
    return sinks, heads.scaling, heads.window or 0, heads.softcap or 0.0
