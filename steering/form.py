"""The form of cached tensors, the same for all of a kind, whichever path made them.

A pass may run eagerly at first and compiled, or as a graph, from some step on. Tensors of both are used side by side, so
they must have one dtype, one device, one number of axes and one layout.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch


class MixedForms(RuntimeError):
    """A tensor has another form than those of its kind that were kept before."""


class TensorForm(NamedTuple):
    """The common form of tensors of one kind. trailing: sizes after the first axis, None where they vary."""

    dtype: torch.dtype
    device: torch.device
    axes: int
    contiguous: bool
    trailing: tuple[int, ...] | None

    @classmethod
    def of(cls, tensor: torch.Tensor, varies: bool = False) -> TensorForm:
        """Return the form of a tensor; where the sizes after its first axis `varies`, they are not part of it."""
        trailing = None if varies else tuple(tensor.shape[1:])
        return cls(tensor.dtype, tensor.device, tensor.ndim, tensor.is_contiguous(), trailing)


class OneForm:
    """Remembers the form of the first tensors of each kind, and checks that of all later ones."""

    def __init__(self) -> None:
        self._forms: dict[str, tuple[TensorForm, ...]] = {}

    def check(self, kind: str, tensors: Iterable[torch.Tensor], varies: bool = False) -> None:
        """Raise MixedForms for tensors that differ from the first of their kind in number or in form."""
        forms = tuple(TensorForm.of(tensor, varies) for tensor in tensors)
        first = self._forms.setdefault(kind, forms)
        if forms != first:
            raise MixedForms(f"What is kept of {kind} had the form {first}; now it has {forms}.")
