"""Calls captured as CUDA graphs, which launch all their kernels at once."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

WARMUPS = 2
"""Runs before a capture, for allocations at first use."""

Captured = tuple[Callable[[], object], list[torch.Tensor]]
"""The replay of a captured call, and the tensors that it writes each time."""
CaptureFunction = Callable[[Callable[[], list[torch.Tensor]], torch.device], Captured]
"""The type of a `Capture`."""


class Capture:
    """Captures calls as CUDA graphs that share the memory of intermediate results.

    Only one runs at a time, and its outputs are read before another one runs. All are captured in one stream of their
    device, because torch keeps a workspace of up to 32 MiB for each stream in which a product ever ran. That workspace is
    part of the graphs' memory, too: torch drops it with any graph of its stream, while others go on writing to it.
    """

    def __init__(self) -> None:
        self._memory: Any = None
        self._graphs = WeakSet[Any]()  # those that have this memory
        self._stream: torch.cuda.Stream | None = None

    def __call__(self, run: Callable[[], list[torch.Tensor]], device: torch.device) -> Captured:
        """Capture a call as a graph; raise torch's error for a call that waits for the host."""
        with torch.cuda.device(device), torch.cuda.stream(torch.cuda.current_stream(device)):  # a failure leaves it
            if not self._graphs:  # torch refuses memory whose graphs are gone
                self._memory = torch.cuda.graph_pool_handle()
            if self._stream is None or self._stream.device != device:
                self._stream = torch.cuda.Stream(device)
            beforehand(run, device, self._stream)
            torch._C._cuda_clearCublasWorkspaces()  # so that the capture makes one in its own memory
            graph = torch.cuda.CUDAGraph()
            try:  # other threads may copy pictures meanwhile
                with torch.cuda.graph(graph, self._memory, self._stream, capture_error_mode="thread_local"):
                    output = run()
            except BaseException:
                _end_allocation(self._memory)
                self._graphs.clear()
                raise
            self._graphs.add(graph)
        return graph.replay, output


def _end_allocation(memory: Any) -> None:
    """Let the current device's allocator know that a failed capture is over.

    Where CUDA ends a capture with an error, torch does not, and from then on frees no cached memory for other sizes.
    """
    with suppress(RuntimeError, AttributeError):  # it has ended
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), memory)
        torch._C._cuda_releasePool(torch.cuda.current_device(), memory)


def beforehand(run: Callable[[], object], device: torch.device, aside: torch.cuda.Stream) -> None:
    """Run a call in a stream a few times before it is captured there, for allocations at first use."""
    aside.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(aside):
        for _ in range(WARMUPS):
            run()
    torch.cuda.current_stream(device).wait_stream(aside)
