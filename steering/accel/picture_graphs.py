"""Vision encoders as CUDA graphs, because launching the kernels of a small picture takes longer than computing them.

A graph is of pictures of fixed sizes. Sizes recur where pictures come from a camera, or where a family has only one.
"""

from __future__ import annotations

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from steering.devices import free_bytes
from steering.model.images import PIXELS, Features, Inputs, on_device
from steering.model.mllm import MLLM
from steering.triton.capture import Captured
from steering.vision.geometry import GRID

PATIENCE = 4
"""Encodings of pictures of the same sizes before they are captured, which takes about as long as four more."""
MOST = 8
"""Maximum number of graphs, each of which holds its pictures' pixels and features; the latest are kept."""
MOST_PATCHES = 8192
"""Maximum patches of a graph: with more, a GPU takes longer than the host."""
MOST_PICTURES = 8
"""Maximum pictures of a graph for an encoder without patches of its own size."""
LEAST_FREE = 2**30
"""Bytes of a GPU's free memory below which no more pictures are captured."""
WITHIN = 2e-2
"""Largest relative difference between features of a new graph and the eager ones, from other kernels in half precision."""

log = logging.getLogger(__name__)

Sizes = tuple[tuple[int, ...], ...]
Capture = Callable[[Callable[[], list[torch.Tensor]], torch.device], Captured]


class _Graph(NamedTuple):
    """A captured encoding.

    pixels: its input. made: its outputs, and `shape` their structure. kept: what else it reads, which caches may drop.
    """

    pixels: torch.Tensor
    replay: Callable[[], object]
    made: list[torch.Tensor]
    shape: Any
    kept: list[torch.Tensor]


class PictureGraphs:
    """The graphs of one model's vision encoder; `taken` is how many encodings ran in one."""

    def __init__(self, mllm: MLLM, capture: Capture):
        self._mllm, self._capture = mllm, capture
        self._graphs: OrderedDict[Sizes, _Graph] = OrderedDict()
        self._wanted: Counter[Sizes] = Counter()
        self._ended = False
        self.taken = 0

    def __len__(self) -> int:
        return len(self._graphs)

    def features(self, pictures: Mapping[str, torch.Tensor]) -> Features | None:
        """Encode pictures as `MLLM.image_features`; None where they must be encoded eagerly."""
        sizes = None if self._ended else _sizes(pictures)
        if sizes is None:
            return None
        graph = self._graphs.get(sizes) or self._capture_recurring(sizes, pictures)
        if graph is None:
            return None
        self._graphs.move_to_end(sizes)
        graph.pixels.copy_(on_device(pictures, PIXELS, self._mllm.device))
        graph.replay()
        self.taken += 1
        return Features(*tree_unflatten([tensor.clone() for tensor in graph.made], graph.shape))

    def _capture_recurring(self, sizes: Sizes, pictures: Mapping[str, torch.Tensor]) -> _Graph | None:
        """Capture pictures of these sizes once they have recurred, and while memory is free; otherwise return None."""
        self._wanted[sizes] += 1
        if len(self._wanted) > 64 * MOST:
            self._wanted = Counter(dict(self._wanted.most_common(MOST)))
        free = free_bytes(self._mllm.device)
        if self._wanted[sizes] <= PATIENCE or (free is not None and free < LEAST_FREE):
            return None
        try:
            graph = self._captured(pictures)
        except Exception as error:
            log.warning("pictures are encoded eagerly: %s: %s", type(error).__name__, error)
            self._ended = True
            return None
        while len(self._graphs) >= MOST:
            self._graphs.popitem(last=False)
        del self._wanted[sizes]
        self._graphs[sizes] = graph
        log.info("captured the encoding of pictures of %s: %d graphs", sizes, len(self))
        return graph

    def _captured(self, pictures: Mapping[str, torch.Tensor]) -> _Graph:
        """Capture pictures, and compare the result with the eager one; raise RuntimeError where they differ."""
        device = self._mllm.device
        fixed = _Fixed(pictures, device)

        def run() -> tuple[list[torch.Tensor], Any]:
            output = self._mllm.image_features(fixed)
            deep = output.get("deepstack_features")
            return tree_flatten((output.pooler_output,) if deep is None else (output.pooler_output, deep))

        run()  # fills caches, whose tensors are then given
        with _Given() as given:
            expected, shape = run()
        replay, made = self._capture(lambda: run()[0], device)
        replay()
        for ours, eager in zip(made, expected, strict=True):
            if not float((ours - eager).double().norm()) <= WITHIN * float(eager.double().norm()):
                raise RuntimeError("a captured encoding has other features")
        return _Graph(fixed.tensors[PIXELS], replay, made, shape, list(given.tensors.values()))


class _Fixed(Inputs):
    """Pictures whose tensors on the device stay where they are; `tensors` are these."""

    def __init__(self, pictures: Mapping[str, torch.Tensor], device: torch.device):
        grid = {GRID: pictures[GRID]} if GRID in pictures else {}
        super().__init__(grid, ())
        self._names = dict.fromkeys(pictures)
        self.tensors = {name: on_device(pictures, name, device).clone() for name in pictures}

    def on(self, name: str, device: torch.device) -> torch.Tensor:
        return self.tensors[name]


class _Given(TorchDispatchMode):
    """Collects the tensors that operations read and that none of them made."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: dict[int, torch.Tensor] = {}
        self._made = set[int]()  # addresses, of which none was that of a tensor from before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for tensor in _tensors([args, kwargs or {}]):
            if (place := tensor.untyped_storage().data_ptr()) not in self._made:
                self.tensors[place] = tensor
        result = func(*args, **(kwargs or {}))
        for tensor in _tensors(result):
            if (place := tensor.untyped_storage().data_ptr()) not in self.tensors:
                self._made.add(place)
        return result


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (part for part in tree_leaves(value) if isinstance(part, torch.Tensor))


def _sizes(pictures: Mapping[str, torch.Tensor]) -> Sizes | None:
    """Return the sizes of pictures; None for more than a graph should have, or with other tensors than pixels and grids."""
    if not pictures.keys() <= {PIXELS, GRID}:
        return None
    if GRID in pictures:
        grids = tuple(map(tuple, pictures[GRID].tolist()))
        return grids if sum(map(math.prod, grids)) <= MOST_PATCHES else None
    shape = tuple(pictures[PIXELS].shape)
    return (shape,) if shape[0] <= MOST_PICTURES else None
