"""A forward pass as a function of tensors alone, which is what can be compiled before it is used."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import nn

from steering.accel.cpu.packing import PackedWeights, Packing
from steering.accel.tensors import Hole, Made, Pattern, put_together, taken_apart
from steering.decoder.attention import Decode
from steering.decoder.hooks import Hook, Hooks
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Placed
from steering.model.images import PIXELS
from steering.model.mllm import MLLM
from steering.protocol.slots import Scope
from steering.tower.geometry import GRID

Kind = Literal["decode", "prefill", "pictures"]


class Variant(NamedTuple):
    """Which step: its kind, and what it is for."""

    kind: Kind
    scope: Scope = "plain"


class StepSizes(NamedTuple):
    """What varies from one pass to the next, and from one engine to another; rows: pictures where these are encoded; width:
    tokens of each row; spans: of a prompt with as many images as there may be."""

    rows: int
    width: int
    columns: int
    slots: int
    length: int
    spans: int


class Step(nn.Module):
    """A pass of one kind, through the decoder under hooks of one shape.

    axes: how many axes rotary positions have, None for one that is not told apart. weights: those that its linear layers
    read, where it calls our own loops; None where it is made of the model's operations alone. Called once, it knows
    `left`: what the hooks are afterwards, as a tree whose tensors are those that were given, then those made.
    """

    kind: ClassVar[Kind]

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None, weights: PackedWeights | None):
        super().__init__()
        self._fused = weights is not None
        self.shape = shape
        self._mllm, self._axes = [mllm], axes  # in a list, as it is no part of what is compiled
        self._groups = [] if weights is None else weights.groups
        self.packed = _Tensors({} if weights is None else weights.tensors)
        self._note = _Note()  # torch.export sets back what tracing sets, and what lists held

    @property
    def left(self) -> Any:
        return self._note.left

    @abstractmethod
    def arguments(self, sizes: StepSizes, given: list[torch.Tensor]) -> tuple[Any, ...]:
        """All arguments of a call of these sizes. given: the hooks' tensors."""


class DecoderStep(Step):
    """A pass through the decoder."""

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None, weights: PackedWeights | None):
        super().__init__(mllm, shape, axes, weights)
        self.decoder = mllm.decoder
        self.output = mllm.model.get_output_embeddings()

    @abstractmethod
    def example(self, sizes: StepSizes) -> tuple[torch.Tensor, ...]:
        """What is fed, and where that lies: the first arguments of a call of these sizes."""

    def arguments(self, sizes: StepSizes, given: list[torch.Tensor]) -> tuple[Any, ...]:
        (mllm,) = self._mllm
        column = torch.zeros(sizes.columns, device=mllm.device)
        pooled = [
            torch.zeros(sizes.slots, one.shape[1], sizes.length, one.shape[3], dtype=one.dtype)
            for one in mllm.column().tensors
        ]
        return (*self.example(sizes), column, [one.contiguous() for one in given], pooled)

    def _run(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        step: Placed | Decode,
        last: torch.Tensor | int,
        hooks: list[Hook],
        given: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """The normalised states (rows, n, d) of embeds, logits (rows, vocabulary) of each row's last token, and what the
        hooks made of the tensors that they were given."""
        (mllm,) = self._mllm
        rows = embeds.shape[0]
        at = torch.arange(rows, device=embeds.device) if isinstance(last, torch.Tensor) else slice(None)
        with Packing(self._groups, self.packed.named):
            hidden = self.decoder(
                inputs_embeds=embeds,
                position_ids=positions,
                attention_mask=torch.ones(rows, 1, 1, 1, dtype=torch.bool, device=embeds.device),
                use_cache=False,
                step=step,
            ).last_hidden_state
            logits = mllm.head(hidden[at, last])
        step.hooks.settle(step.positions if isinstance(step, Decode) else None)
        left, found = taken_apart(hooks)
        known = {id(one): number for number, one in enumerate(given)}
        made = [one for one in found if id(one) not in known]
        fresh = {id(one): len(given) + number for number, one in enumerate(made)}
        self._note.left = renumbered(left.tree, [(known | fresh)[id(one)] for one in found])
        return [hidden, logits, *made]


class DecodeStep(DecoderStep):
    """One token for each of the first rows of the pool."""

    kind: ClassVar[Kind] = "decode"

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None, weights: PackedWeights | None):
        super().__init__(mllm, shape, axes, weights)
        self.embeddings = mllm.model.get_input_embeddings()

    def example(self, sizes: StepSizes) -> tuple[torch.Tensor, ...]:
        (mllm,) = self._mllm
        return tuple(torch.zeros(sizes.rows, dtype=torch.int64, device=mllm.device) for _ in range(3))

    def forward(
        self,
        tokens: torch.Tensor,
        positions: torch.Tensor,
        rope: torch.Tensor,
        column: torch.Tensor,
        given: list[torch.Tensor],
        pooled: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """tokens, positions, rope: (rows,), what is fed, where it is written, and its rotary position. column: (columns,) of
        anything: how many columns are read. given: the hooks' tensors. pooled: keys and values of each layer."""
        hooks: list[Hook] = put_together(self.shape.tree, given)
        angles = rope[:, None]
        if self._axes is not None:
            angles = angles.expand(self._axes, -1, -1)
        kernel = self._mllm[0].decode_attention
        step = Decode(KVPool.of(pooled), positions, column.shape[0], Hooks.of(hooks), fused=self._fused, kernel=kernel)
        return self._run(self.embeddings(tokens[:, None]), angles, step, -1, hooks, given)


class PrefillStep(DecoderStep):
    """Some tokens of some prompts, a prompt a row."""

    kind = "prefill"

    def example(self, sizes: StepSizes) -> tuple[torch.Tensor, ...]:
        (mllm,) = self._mllm
        embeds = torch.zeros(sizes.rows, sizes.width, mllm.hidden_size, dtype=mllm.dtype, device=mllm.device)
        angles = torch.arange(sizes.width, device=mllm.device).expand(sizes.rows, -1)
        if self._axes is not None:
            angles = angles.expand(self._axes, -1, -1)
        places = torch.zeros(3, sizes.rows, dtype=torch.int64, device=mllm.device)
        return (embeds, angles.contiguous(), *(one.clone() for one in places))

    def forward(
        self,
        embeds: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        starts: torch.Tensor,
        last: torch.Tensor,
        column: torch.Tensor,
        given: list[torch.Tensor],
        pooled: list[torch.Tensor],
    ) -> list[torch.Tensor]:
        """embeds: (rows, n, d). positions: (rows, n), or (axes, rows, n), rotary. slots, starts, last: (rows,), where each
        row lies, its first column, and which of its tokens is the last. The others: as those of a decode."""
        hooks: list[Hook] = put_together(self.shape.tree, given)
        step = Placed(KVPool.of(pooled), slots, starts, column.shape[0], Hooks.of(hooks), fused=self._fused)
        return self._run(embeds, positions, step, last, hooks, given)


class PicturesStep(Step):
    """Pictures of one size through the tower that packs them, which has no hooks."""

    kind = "pictures"

    def __init__(self, mllm: MLLM, shape: Pattern, axes: int | None, weights: PackedWeights | None):
        super().__init__(mllm, shape, axes, weights)
        self.tower = mllm.whole_tower

    def arguments(self, sizes: StepSizes, given: list[torch.Tensor]) -> tuple[Any, ...]:
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
        """What `MLLM.alike` gives of pictures -> (pictures, tokens, d)."""
        pictures, width = pixels.shape[:2]
        with Packing(self._groups, self.packed.named):
            made = self.tower(
                pixels.flatten(0, 2),
                grid_thw=None,
                position_ids=positions.flatten(0, 2),
                cu_seqlens=positions.new_zeros(2),  # which nobody reads who knows that they are `alike`
                max_seqlen=0,
                alike=pictures,
            )
        self._note.left = self.shape.tree
        return [made.pooler_output.unflatten(0, (pictures, width))]


STEPS: dict[Kind, type[Step]] = {one.kind: one for one in (PrefillStep, DecodeStep, PicturesStep)}


class _Tensors(nn.Module):
    """Tensors by name."""

    def __init__(self, tensors: dict[str, torch.Tensor]):
        super().__init__()
        for name, one in tensors.items():
            self.register_buffer(name, one)

    def named(self, name: str) -> torch.Tensor | None:
        return self._buffers.get(name)


class _Note:
    left: Any = None


def renumbered(tree: Any, numbers: list[int]) -> Any:
    """The same, tensors counted otherwise."""
    if type(tree) is Hole:
        return Hole(numbers[tree.number])
    if type(tree) is Made:
        return tree._replace(parts=tuple(renumbered(part, numbers) for part in tree.parts))
    return tree


def constants(step: Step) -> dict[str, torch.Tensor]:
    """All tensors that a step may need, by name."""
    return {
        **dict(step.named_parameters(remove_duplicate=False)),
        **dict(step.named_buffers(remove_duplicate=False)),
    }
