"""A graph of recorded operations: what stands for a CUDA graph where there is no GPU, as strict as one.

A CUDA graph repeats the operations of its capture on the same memory: numbers that Python knew then are in it, and no line
of Python runs again. So does a `Recording`. What it made is garbage after the next graph's replay, which on a GPU has the
same memory, and what it made on the way is garbage at once. An operation that waits for the host raises in a capture.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from steering.triton.capture import WARMUPS, Captured

WAITING = {"_local_scalar_dense", "equal", "masked_select", "nonzero", "_unique2", "bincount", "lift_fresh"}
"""Operations that a capture refuses: their result decides what comes next, or their input is Python's."""
EMPTY = {"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"}


class _Call(NamedTuple):
    run: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    made: list[torch.Tensor]


class _Recorder(TorchDispatchMode):
    """Keeps each operation with its arguments, which are the tensors themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.own: dict[int, torch.Tensor] = {}
        """A tensor of each memory that was allocated, by its address."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        by_mask = name in ("index", "index_put", "index_put_", "_index_put_impl_") and any(
            part is not None and part.dtype in (torch.bool, torch.uint8) for part in args[1]
        )
        if name in WAITING or by_mask:
            raise RuntimeError(f"{name} is not permitted when stream is capturing")
        result = func(*args, **kwargs)
        writes = any(alias.alias_info is not None and alias.alias_info.is_write for alias in func._schema.arguments)
        if writes:
            self.calls.append(_Call(func, args, kwargs, []))
        else:  # some operations, such as a reshape, make a view or a copy
            given = {_memory(tensor) for tensor in _tensors([args, kwargs])}
            made = [tensor for tensor in _tensors(result) if _memory(tensor) not in given]
            self.own |= {_memory(tensor): tensor for tensor in made}
            if made and name not in EMPTY:
                self.calls.append(_Call(func, args, kwargs, made))
        return result


class Recording:
    """A captured call."""

    def __init__(self, calls: list[_Call], own: list[torch.Tensor], outputs: list[torch.Tensor]):
        self._calls, self._outputs = calls, outputs
        kept = {_memory(tensor) for tensor in outputs}
        self._own = own
        self._passing = [tensor for tensor in own if _memory(tensor) not in kept]

    def replay(self) -> None:
        """Run the recorded operations again, each into the memory of its first result."""
        for run, args, kwargs, made in self._calls:
            for kept, new in zip(made, _tensors(run(*args, **kwargs)), strict=bool(made)):
                kept.copy_(new)
        _spoil(self._passing)

    def spoil(self) -> None:
        """Overwrite all that was made."""
        _spoil(self._own)


class Recorded:
    """Captures calls as recordings of one memory."""

    def __init__(self) -> None:
        self._last: Callable[[], Recording | None] = lambda: None
        """A reference to the recording that was replayed last: all others are spoilt already."""
        self.replays = 0

    def __call__(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> Captured:
        for _ in range(WARMUPS):
            run()
        with _Recorder() as recorder:
            outputs = run()
        recording = Recording(recorder.calls, list(recorder.own.values()), outputs)
        recording.spoil()  # a capture computes nothing

        def replay() -> None:
            last = self._last()
            if last is not None and last is not recording:
                last.spoil()
            recording.replay()
            self._last = ref(recording)
            self.replays += 1

        return replay, outputs


def _tensors(value: Any) -> list[torch.Tensor]:
    return [part for part in tree_leaves(value) if isinstance(part, torch.Tensor)]


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoil(tensors: list[torch.Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(torch.nan if tensor.is_floating_point() else True if tensor.dtype == torch.bool else 77)
