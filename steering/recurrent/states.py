"""The recurrent states of layers without keys and values, in every slot, and their place in a forward pass.

Keys and values of a token lie in a column of their own, so that a pass may run again and a column may be overwritten. A
recurrent state is of all tokens before it. A slot therefore holds two, with the number of tokens that each is behind: a pass
reads the one behind its first token and writes the other, and may be run again until a later pass overwrites what it read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch

from steering.devices import fill_slot, to_device, zeros

NEVER = -1
"""The length of a state that no pass reads."""

GRAIN = 64
"""Snapshots are of multiples of this many tokens, at which linear attention computes its states anyway."""

LayerStates = tuple[torch.Tensor, ...]
"""A layer's states: the last inputs (..., channels, width - 1) of its convolution.

In linear attention a matrix (..., heads, k, v) follows.
"""

Snapshot = Mapping[int, LayerStates]
"""The states behind one token, by layer."""


def inputs_before(inputs: torch.Tensor, at: torch.Tensor, width: int) -> torch.Tensor:
    """Return the last inputs (rows, channels, width) before token `at` (rows,) of each row.

    inputs: (rows, channels, width + n), of each row's tokens and the `width` before them.
    """
    index = at[:, None] + torch.arange(width, device=inputs.device)
    return inputs.gather(2, index[:, None].expand(-1, inputs.shape[1], -1))


def snapshot_bytes(snapshot: Snapshot) -> int:
    """Return the memory that a snapshot takes."""
    return sum(tensor.nbytes for tensors in snapshot.values() for tensor in tensors)


class RecurrentStates:
    """Two states of each slot and layer. `lengths` (2, slots) are the numbers of tokens that they are behind.

    A layer's tensors have 2 * slots + 2 rows: the first states of all slots, the second ones, a state of zeros, which is the
    one behind no token, and a row for what is not kept. They are made at first use, unless `allot` made them.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self._layers: dict[int, LayerStates] = {}
        self._lengths: torch.Tensor | None = None

    def __bool__(self) -> bool:
        return bool(self._layers)

    @property
    def tensors(self) -> list[torch.Tensor]:
        """The tensors of all layers, in their order, then `lengths`; none without a layer."""
        layers = [tensor for tensors in self._layers.values() for tensor in tensors]
        return layers if self._lengths is None else [*layers, self._lengths]

    @classmethod
    def of(cls, slots: int, layers: Sequence[int], tensors: Sequence[torch.Tensor]) -> RecurrentStates:
        """Return the states that consist of these `tensors`."""
        states = cls(slots)
        if layers:
            each = (len(tensors) - 1) // len(layers)
            states._layers = {layer: tuple(tensors[at * each :][:each]) for at, layer in enumerate(layers)}
            states._lengths = tensors[-1]
        return states

    @property
    def bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors)

    @property
    def slot_bytes(self) -> dict[torch.device, int]:
        """The bytes that one slot takes on each device."""
        sizes: dict[torch.device, int] = {}
        for tensors in self._layers.values():
            for tensor in tensors:
                sizes[tensor.device] = sizes.get(tensor.device, 0) + 2 * tensor[0].nbytes
        return sizes

    def allot(self, like: RecurrentStates) -> None:
        """Make the tensors of all layers now, shaped after others."""
        for index, tensors in like._layers.items():
            self._layers[index] = self._made(*tensors)
        if like._lengths is not None:
            self.lengths_on(like._lengths.device)

    def layer(self, index: int, make: Callable[[], LayerStates]) -> LayerStates:
        """Return the tensors of a layer, shaped after the rows that `make` returns."""
        if index not in self._layers:
            self._layers[index] = self._made(*make())
        return self._layers[index]

    def _made(self, *rows: torch.Tensor) -> LayerStates:
        return tuple(zeros((2 * self.slots + 2, *row.shape[1:]), row) for row in rows)

    def lengths_on(self, device: torch.device) -> torch.Tensor:
        """Return `lengths`, made on this device at first use."""
        if self._lengths is None:
            self._lengths = torch.full((2, self.slots), NEVER, device=device)
        return self._lengths

    def read_from(self, slots: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Return the rows with the states of slots (rows,) behind their first `lengths` tokens (rows,).

        It is the row of zeros where that is none, and where a slot has no such state.
        """
        first, second = self.lengths_on(slots.device)[:, slots]
        held = torch.where(second == lengths, slots + self.slots, 2 * self.slots)
        return torch.where(lengths == 0, 2 * self.slots, torch.where(first == lengths, slots, held))

    def write_to(
        self, read: torch.Tensor, slots: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Return the rows for the states behind tokens `ends`, of slots whose states behind `starts` are in rows `read`.

        The states in `read` stay. Where a slot had none, what is written is not kept. All are (rows,).
        """
        lengths, fresh = self.lengths_on(slots.device), starts == 0
        to_second = read < self.slots
        to_first = fresh | ((read >= self.slots) & (read < 2 * self.slots))
        first, second = lengths[:, slots]
        # The other state is the one that was read, or of an earlier sequence.
        lengths[0, slots] = torch.where(to_first, ends, torch.where(to_second, starts, first))
        lengths[1, slots] = torch.where(to_second, ends, torch.where(to_first, starts, second))
        return torch.where(to_first, slots, torch.where(to_second, slots + self.slots, 2 * self.slots + 1))

    def taken(self, slot: int, length: int) -> Snapshot:
        """Return a copy of a slot's states behind its first `length` tokens."""
        if self._lengths is None:
            return {}
        device = self._lengths.device
        row = self.read_from(*(to_device(torch.tensor([number]), device) for number in (slot, length)))
        return {
            index: tuple(tensor[row.to(tensor.device)][0] for tensor in tensors)
            for index, tensors in self._layers.items()
        }

    def put(self, slot: int, length: int, snapshot: Snapshot) -> None:
        """Write states behind the first `length` tokens into a slot."""
        for index, states in snapshot.items():
            for pooled, state in zip(self._layers[index], states, strict=True):
                pooled[slot] = state
        if self._lengths is not None:
            for lengths, held in zip(self._lengths, (length, NEVER), strict=True):
                fill_slot(lengths, slot, held)

    def leave(self, layer: int, states: LayerStates) -> None:
        """Write states (1, ...) of a layer into the row that nothing reads."""
        for pooled, state in zip(self._layers[layer], states, strict=True):
            pooled[-1:] = state

    def left(self) -> Snapshot:
        """Return a copy of the states that a pass has left in that row."""
        return {index: tuple(tensor[-1].clone() for tensor in tensors) for index, tensors in self._layers.items()}

    def move(self, source: int, target: int) -> None:
        """Copy the states of a slot to another."""
        if self._lengths is None:
            return
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[target :: self.slots][:2] = tensor[source :: self.slots][:2]
        self._lengths[:, target] = self._lengths[:, source]

    def clear(self, slot: int) -> None:
        """Zero the states of a slot."""
        if self._lengths is None:
            return
        for tensors in self._layers.values():
            for tensor in tensors:
                tensor[slot :: self.slots][:2] = 0
        self._lengths[:, slot] = NEVER


@dataclass
class RecurrentPass:
    """The states that one forward pass reads and writes.

    slots, starts: (rows,), the slots of the rows, and how many tokens are before theirs. real: the number of tokens of each
    row, where others behind them are padding. kept: False where states stay as they are. wanted: for each row, numbers of
    its tokens, ascending, behind which a snapshot is `taken`, by row and number.
    """

    states: RecurrentStates
    slots: torch.Tensor
    starts: torch.Tensor
    real: Sequence[int] | None = None
    kept: bool = True
    wanted: Sequence[Sequence[int]] = ()
    taken: dict[tuple[int, int], dict[int, LayerStates]] = field(default_factory=dict)
    _places: tuple[torch.Tensor, torch.Tensor | None] | None = None
    _copies: dict[tuple[str, torch.device], torch.Tensor] = field(default_factory=dict)
    _parts: dict[torch.device, list[tuple[torch.Tensor, torch.Tensor]]] = field(default_factory=dict)

    def places(
        self, layer: int, n: int, make: Callable[[], LayerStates]
    ) -> tuple[LayerStates, torch.Tensor, torch.Tensor | None]:
        """Return the states of a layer, their rows before a pass of `n` tokens, and those behind it, None for none.

        make: returns a row like them.
        """
        pooled = self.states.layer(layer, make)
        if self._places is None:
            device = self.states.lengths_on(pooled[0].device).device
            slots, starts = to_device(self.slots, device), to_device(self.starts, device)
            read, write = self.states.read_from(slots, starts), None
            if self.kept:
                ends = starts + (n if self.real is None else self.real_on(device))
                write = self.states.write_to(read, slots, starts, ends)
            self._places = read, write
        (read, write), device = self._places, pooled[0].device
        rows = self._on("read", device, lambda: read)
        return pooled, rows, None if write is None else self._on("write", device, lambda: write)

    def real_on(self, device: torch.device) -> torch.Tensor:
        """Return `real` (rows,) on a device."""
        return self._on("real", device, lambda: torch.tensor(self.real))

    def _on(self, name: str, device: torch.device, source: Callable[[], torch.Tensor]) -> torch.Tensor:
        if (name, device) not in self._copies:
            self._copies[name, device] = to_device(source(), device)
        return self._copies[name, device]

    def parts_on(self, device: torch.device) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Return the tokens of each part between wanted snapshots and behind the last one.

        They are (rows, tokens): their number in the pass, and 1 where a row has such a token.
        """
        if device not in self._parts:
            real = self.real or []
            ends = [[*wanted, length] for wanted, length in zip(self.wanted or [()] * len(real), real, strict=True)]
            count, parts, start = max(map(len, ends)), [], torch.zeros(len(ends), 1, dtype=torch.int64)
            for part in range(count):
                end = torch.tensor([[row[min(part, len(row) - 1)]] for row in ends])
                at = start + torch.arange(int((end - start).max()))
                parts.append((to_device(at, device), to_device(at < end, device)))
                start = end
            self._parts[device] = parts
        return self._parts[device]

    @property
    def undivided(self) -> bool:
        """True where rows have no padding, and no snapshot is wanted."""
        return self.real is None or (len(set(self.real)) == 1 and not any(self.wanted))

    @property
    def cuts(self) -> int:
        """The number of parts behind which snapshots are taken."""
        return max(map(len, self.wanted), default=0)

    def take(self, layer: int, part: int, inputs: torch.Tensor, width: int, *others: torch.Tensor) -> None:
        """Take the snapshots behind a part.

        inputs: (rows, channels, width + n), of each row's tokens and the `width` before them. others: behind the part.
        """
        for row, wanted in enumerate(self.wanted):
            if part < len(wanted):
                at = wanted[part]
                states = inputs[row, :, at : at + width].clone(), *(tensor[row].clone() for tensor in others)
                self.taken.setdefault((row, at), {})[layer] = states
