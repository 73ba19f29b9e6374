"""Decode attention by a GPU kernel, under the hooks that it supports."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from steering.accel.forms import FORMS, BiasForm, Forms, WeightsForm, changes_of, decode_terms
from steering.decoder.attention import Decode, DecodeKernel
from steering.decoder.hooks import Hook, Hooks
from steering.decoder.kernels import Heads
from steering.interventions.look_at import LookAtRows
from steering.model.mllm import MLLM
from steering.triton.attended import DecodeFunction

GPU_FORMS = Forms(FORMS)
"""The forms that the kernel supports."""


@GPU_FORMS.register(LookAtRows)
class FusedLookAt(LookAtRows, BiasForm):
    """The form of `look_at`, with the hook's bias."""


class FusedDecode:
    """A decode's attention by one function of tensors, which reads only each row's own columns."""

    def __init__(self, function: DecodeFunction):
        self._function = function

    def adopted(self, hooks: Hooks) -> Hooks:
        """Return the hooks of a pass in the kernel's forms."""
        return GPU_FORMS.adopted(hooks)

    def __call__(
        self, step: Decode, heads: Heads, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> torch.Tensor | None:
        """Return the output (rows, heads, 1, head_dim), after writing the new keys and values.

        None where a hook is unknown to the kernel, or reads the layer's weights.
        """
        hooks = step.hooks
        terms = decode_terms(hooks, heads.layer, step.columns)
        if terms is None or value.shape != key.shape:
            return None
        pooled = step.pool.layer(heads.layer, key, value)
        place = (step.positions, heads.scaling, step.columns, heads.layer, heads.window, heads.softcap)
        attended = self._function(query, key, value, *pooled, *place, *terms, bool(hooks.observers), heads.sinks)
        if attended.effect is not None:
            (hook,) = hooks.weighing
            assert isinstance(hook, WeightsForm)
            hook.note(attended.effect)
        for observer in hooks.observers:
            assert attended.means is not None
            observer.decode(heads.layer, attended.means)
        return attended.out[:, :, None]


def suits_kernel(hooks: Iterable[Hook | None]) -> bool:
    """Return True where the kernel can compute the attention of every layer under these hooks."""
    adopted = GPU_FORMS.adopted(Hooks.of(hooks))
    return not adopted.reading and changes_of(adopted) is not None


def decode_kernel_of(mllm: MLLM) -> DecodeKernel | None:
    """Return the kernel of a model's decodes; None where torch's operations compute attention."""
    return None if mllm.decode_attention is None else FusedDecode(mllm.decode_attention)
