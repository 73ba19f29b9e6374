"""The steps that are compiled for a CPU, with our own kernels for attention, counts and measurements, and packed weights."""

from __future__ import annotations

from abc import abstractmethod
from contextlib import AbstractContextManager
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from steering.accel.step import DecoderStep, DecodeStep, Step
from steering.accel.tensors import Pattern, put_together
from steering.cpu.attention import CpuDecode, CpuPrompts
from steering.cpu.forms.base import CPU_FORMS, Scope
from steering.cpu.kernels.prompts import WITHIN
from steering.cpu.packing import PackedWeights, Packing
from steering.cpu.placed import Placed
from steering.decoder.attention import DecodeKernel
from steering.decoder.hooks import Hook, Hooks
from steering.decoder.kv import KVPool
from steering.model.images import PIXELS
from steering.model.mllm import MLLM
from steering.vision.geometry import GRID

Kind = Literal["decode", "prefill", "pictures"]


class StepSizes(NamedTuple):
    """The sizes that vary from one pass to the next, and from one engine to another.

    rows: pictures where these are encoded. width: tokens of each row. spans: of a prompt with the maximum number of images.
    """

    rows: int
    width: int
    columns: int
    slots: int
    length: int
    spans: int


class Variant(NamedTuple):
    """The kind of a step, and the scope of passes that it serves."""

    kind: Kind
    scope: Scope = "plain"


class PackedStep(Step):
    """A step over packed weights."""

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None, weights: PackedWeights):
        super().__init__(mllm, shape, axes)
        self._groups = weights.groups
        self.packed = _Tensors(weights.tensors)

    @abstractmethod
    def arguments(self, sizes: StepSizes, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        """Return all arguments of a call of these sizes. tensors: the hooks' tensors."""

    def around(self) -> AbstractContextManager[object]:
        return Packing(self._groups, self.packed.named)

    def adopted(self, hooks: list[Hook]) -> Hooks:
        """Return the hooks in their forms for compiled steps."""
        return CPU_FORMS.adopted(Hooks.of(hooks))


class PackedDecoderStep(PackedStep, DecoderStep):
    """A pass through the decoder over packed weights."""

    @abstractmethod
    def example(self, sizes: StepSizes) -> tuple[torch.Tensor, ...]:
        """Return the inputs and their positions: the first arguments of a call of these sizes."""

    def arguments(self, sizes: StepSizes, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        (mllm,) = self._mllm
        column = torch.zeros(sizes.columns, device=mllm.device)
        pooled = [
            torch.zeros(sizes.slots, tensor.shape[1], sizes.length, tensor.shape[3], dtype=tensor.dtype)
            for tensor in mllm.column().tensors
        ]
        return (*self.example(sizes), column, [tensor.contiguous() for tensor in tensors], pooled)


class PackedDecode(PackedDecoderStep, DecodeStep):
    """A decode step of one token for each of the first rows of the pool."""

    def example(self, sizes: StepSizes) -> tuple[torch.Tensor, ...]:
        (mllm,) = self._mllm
        return tuple(torch.zeros(sizes.rows, dtype=torch.int64, device=mllm.device) for _ in range(3))

    def kernel(self) -> DecodeKernel:
        return CpuDecode()


class PackedPrefill(PackedDecoderStep):
    """A prefill step of some tokens of some prompts, a prompt a row."""

    def example(self, sizes: StepSizes) -> tuple[torch.Tensor, ...]:
        (mllm,) = self._mllm
        embeds = torch.zeros(sizes.rows, sizes.width, mllm.hidden_size, dtype=mllm.dtype, device=mllm.device)
        angles = torch.arange(sizes.width, device=mllm.device).expand(sizes.rows, -1)
        if self._axes is not None:
            angles = angles.expand(self._axes, -1, -1)
        places = torch.zeros(3, sizes.rows, dtype=torch.int64, device=mllm.device)
        return (embeds, angles.contiguous(), *(tensor.clone() for tensor in places))

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        last: torch.Tensor,
        column: torch.Tensor,
        tensors: list[torch.Tensor],
        pooled: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """Run a chunk of prompts.

        embeds: (rows, n, d). positions: (rows, n), or (axes, rows, n), rotary. slots, starts, last: (rows,), each row's
        slot, its first column, and the index of its last token. The others: as in `DecodeStep`.
        """
        hooks: list[Hook] = put_together(self.shape.tree, tensors)
        pool, kernel = KVPool.of(pooled, self._mllm[0].attention_layers), CpuPrompts(WITHIN)
        step = Placed(pool, slots, starts, column.shape[0], self.adopted(hooks), kernel)
        return self.run(embeds, positions, step, last, hooks, tensors)


class PackedPictures(PackedStep):
    """A step of pictures of one size through the packing vision encoder, which has no hooks."""

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None, weights: PackedWeights):
        super().__init__(mllm, shape, axes, weights)
        self.tower = mllm.whole_tower

    def arguments(self, sizes: StepSizes, tensors: list[torch.Tensor]) -> tuple[Any, ...]:
        (mllm,) = self._mllm
        merged = self.tower.spatial_merge_size
        grid = torch.tensor([[1, merged, merged * sizes.width]] * sizes.rows)
        patches = sizes.rows * sizes.width * merged**2
        weight = self.tower.patch_embed.proj.weight
        pixels = torch.zeros(patches, weight[0].numel(), dtype=weight.dtype)
        fed = mllm.alike({GRID: grid, PIXELS: pixels})
        assert fed is not None
        return tuple(fed)

    def forward(self, pixels: torch.Tensor, positions: torch.Tensor) -> list[torch.Tensor]:
        """Encode the tensors of `MLLM.alike`; return (pictures, tokens, d)."""
        pictures, width = pixels.shape[:2]
        with self.around():
            output = self.tower(
                pixels.flatten(0, 2),
                grid_thw=None,
                position_ids=positions.flatten(0, 2),
                cu_seqlens=positions.new_zeros(2),  # unused where pictures are `alike`
                max_seqlen=0,
                alike=pictures,
            )
        self._note.left = self.shape.tree
        return [output.pooler_output.unflatten(0, (pictures, width))]


STEPS: dict[Kind, type[PackedStep]] = {"prefill": PackedPrefill, "decode": PackedDecode, "pictures": PackedPictures}


class _Tensors(nn.Module):
    """Tensors by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_buffer(name, tensor)

    def named(self, name: str) -> torch.Tensor | None:
        return self._buffers.get(name)


def constants(step: Step) -> dict[str, torch.Tensor]:
    """Return all tensors that a step may need, by name."""
    return {
        **dict(step.named_parameters(remove_duplicate=False)),
        **dict(step.named_buffers(remove_duplicate=False)),
    }
