"""Vision encoders as CUDA graphs, because launching the kernels of a small picture takes longer than computing them.

A graph is of pictures of fixed sizes. Sizes recur where pictures come from a camera, or where a family has only one.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from steering.devices import leaves_room
from steering.errors import UnsupportedModel
from steering.model.images import PIXELS, Features, Inputs, on_device
from steering.model.mllm import MLLM
from steering.triton.capture import CaptureFunction
from steering.vision.geometry import GRID

PATIENCE = 4
"""Encodings of pictures of the same sizes before they are captured, which takes as long as about six more."""
MOST = 8
"""Maximum number of graphs, each of which holds its pictures' pixels and features."""
STALE = 512
"""Encodings after which sizes that have not recurred are forgotten, and a graph that was not used gives way to another."""
MOST_PATCHES = 8192
"""Maximum patches of a graph: with more, a GPU takes longer than the host."""
MOST_PIXELS = 3 * 2**21
"""Maximum colour values of a graph for an encoder whose pictures have no grids."""
ROOM = 16
"""Bytes of intermediate results for each of pixels, which graphs hold together."""
WITHIN = 2e-2
"""Largest relative difference between features of a new graph and the eager ones, from other kernels in half precision."""

log = logging.getLogger(__name__)

Sizes = tuple[tuple[int, ...], ...]


class _Graph(NamedTuple):
    """A captured encoding.

    pixels: its input. made: its outputs, and `shape` their structure. kept: what else it reads beside weights, as caches may
    drop it.
    """

    pixels: torch.Tensor
    replay: Callable[[], object]
    made: list[torch.Tensor]
    shape: Any
    kept: list[torch.Tensor]


class PictureGraphs:
    """The graphs of one model's vision encoder; `taken` is how many encodings ran in one.

    Once a capture fails there are no more. Where its features differ from the eager ones, or memory ends, the same sizes are
    not tried again.
    """

    def __init__(self, mllm: MLLM, capture: CaptureFunction):
        self._mllm, self._capture = mllm, capture
        self._graphs: dict[Sizes, _Graph] = {}
        self._used: dict[Sizes, int] = {}  # the encoding in which a graph was last used
        self._wanted: Counter[Sizes] = Counter()
        self._refused: set[Sizes] = set()
        self._ended = False
        self._encodings = 0
        self.taken = 0

    def __len__(self) -> int:
        return len(self._graphs)

    @torch.inference_mode()
    def features(self, pictures: Mapping[str, torch.Tensor]) -> Features | None:
        """Encode pictures as `MLLM.image_features`; None where they must be encoded eagerly."""
        self._encodings += 1
        if self._encodings % STALE == 0:
            self._wanted.clear()
        sizes = _sizes(pictures)
        if sizes is None:
            return None
        graph = self._graphs.get(sizes) or self._new(sizes, pictures)
        if graph is None:
            return None
        self._used[sizes] = self._encodings
        graph.pixels.copy_(on_device(pictures, PIXELS, self._mllm.device))
        graph.replay()
        self.taken += 1
        return Features(*tree_unflatten([tensor.clone() for tensor in graph.made], graph.shape))

    def _new(self, sizes: Sizes, pictures: Mapping[str, torch.Tensor]) -> _Graph | None:
        """Capture pictures of these sizes once they have recurred, and while there is room; otherwise return None."""
        self._wanted[sizes] += 1
        waits = GRID in pictures and not self._mllm.encoder.splits_on_the_host  # for the device, which no graph can
        if waits or self._ended or sizes in self._refused or self._wanted[sizes] <= PATIENCE or not self._make_room():
            return None
        self._wanted[sizes] = 0
        try:
            fixed = _Fixed(pictures, self._mllm.device)
            if not leaves_room(self._mllm.device, ROOM * fixed.tensors[PIXELS].nbytes):
                return None
            graph = self._captured(fixed)
        except torch.OutOfMemoryError as error:
            log.warning("pictures of %s are encoded eagerly: %s", sizes, error)
            graph = None
        except Exception as error:
            log.warning("no more pictures are captured; the rest are encoded eagerly: %s", error)
            self._ended = True
            return None
        if graph is None:
            self._refused.add(sizes)
            return None
        self._graphs[sizes] = graph
        log.info("captured the encoding of pictures of %s: %d graphs", sizes, len(self))
        return graph

    def _make_room(self) -> bool:
        """Return True where there may be one more graph, after one that was not used for long has given way."""
        if len(self._graphs) < MOST:
            return True
        oldest = min(self._used, key=lambda sizes: self._used[sizes])
        if self._encodings - self._used[oldest] < STALE:
            return False
        del self._graphs[oldest], self._used[oldest]
        return True

    def _captured(self, fixed: _Fixed) -> _Graph | None:
        """Capture pictures; return None where the result is not the eager one."""

        def run() -> tuple[list[torch.Tensor], Any]:
            output = self._mllm.image_features(fixed)
            if not Features.are_all_of(output):
                raise UnsupportedModel("The vision encoder returns more than features.")
            deep = output.get("deepstack_features")
            return tree_flatten((output.pooler_output,) if deep is None else (output.pooler_output, deep))

        run()  # fills caches, whose tensors are then given
        with _Given() as given:
            expected, shape = run()
        replay, made = self._capture(lambda: run()[0], self._mllm.device)
        replay()
        for ours, eager in zip(made, expected, strict=True):
            if not float((ours - eager).double().norm()) <= WITHIN * float(eager.double().norm()):
                log.warning("the graph of an encoding has other features than the eager one, and is not used")
                return None
        model = self._mllm.model
        weights = {part.untyped_storage().data_ptr() for part in (*model.parameters(), *model.buffers())}
        kept = [tensor for place, tensor in given.tensors.items() if place not in weights]
        return _Graph(fixed.tensors[PIXELS], replay, made, shape, kept)


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
        self._made = set[int]()  # addresses of memory that was allocated within the block

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
    pixels = pictures[PIXELS]
    return (tuple(pixels.shape),) if pixels.numel() <= MOST_PIXELS else None
