"""Attention of chosen rows by span of the prompt, and maps over pictures' patches, in every layer of this rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from helmsight_vllm import kernel, paged
from helmsight_vllm.faults import Faults
from helmsight_vllm.looks import Look, MapLook, Method, Pass, Span, looks_of

log = logging.getLogger(__name__)


def method_of(layers: Mapping[int, Any], config: Any, device: torch.device) -> Method | None:
    """Return the way to read these layers' attention; None where there is none.

    `HELMSIGHT_ATTENTION` chooses: `torch` reads paged keys, which works with backends of GPUs but was never run on one; by
    default the kernel of CPUs is called a second time, and on GPUs nothing is read.
    """
    if config.model_config.is_mm_prefix_lm:  # a picture's tokens see each other
        return None
    asked = os.environ.get("HELMSIGHT_ATTENTION", "")
    if asked not in ("", "kernel", "torch"):
        raise ValueError(f"HELMSIGHT_ATTENTION is 'kernel' or 'torch', not {asked!r}.")
    if asked == "torch":
        reads = paged.whole_batches(config) and all(map(paged.readable, layers.values()))
        return paged.PagedMethod(layers.values(), device) if reads else None
    return kernel.KernelMethod() if all(map(kernel.readable, layers.values())) else None


class AttentionReader:
    """Reads attention behind the own work of each layer's backend. `maps`: the rows whose maps are read in a pass."""

    def __init__(self, layers: Mapping[int, Any], method: Method, faults: Faults):
        self.maps: Sequence[MapLook] = []
        self.method = method
        self._faults = faults
        self._spans: Sequence[Span] = []
        self._looks: list[Look] = []
        self._width = 0
        self._sums: torch.Tensor | None = None  # (attending layers, looked rows, labels), of the pass
        self._apart = False
        self._layers = len(layers)
        for place, (number, attention) in enumerate(layers.items()):
            self._extend(attention.impl, number, place)

    def begin(self, spans: Sequence[Span], width: int) -> None:
        """Read what `spans` look at in the next pass, with labels below `width`."""
        self._spans, self._looks, self._width = spans, looks_of(spans), width
        rows = sum(look.stop - look.start for look in self._looks)
        self._sums = torch.zeros(self._layers, rows, width, device=self.method.device)
        self._apart = False
        with self._together():
            self.method.begin(spans, self._looks, width)

    def end(self) -> None:
        """Give each answer what was read of it."""
        sums, self._sums, self.maps = self._sums, None, []
        if sums is not None and self._looks:
            parts = sums.cpu().split([look.stop - look.start for look in self._looks], 1)
            for look, part in zip(self._looks, parts, strict=True):
                with self._faults.of(look.answer):
                    look.answer.add_attention(look.start, look.stop, part)

    def _extend(self, impl: Any, number: int, place: int) -> None:
        """Replace an implementation's class by one that reads behind its own work."""
        plain, reader = type(impl), self

        class Read(plain):  # type: ignore[misc, valid-type]
            def forward(
                self, layer: Any, query: Any, key: Any, value: Any, kv_cache: Any, attn_metadata: Any, output: Any,
                *args: Any, **kwargs: Any,
            ) -> Any:  # fmt: skip
                out = super().forward(layer, query, key, value, kv_cache, attn_metadata, output, *args, **kwargs)
                if attn_metadata is not None:
                    reader._read(number, place, Pass(self, layer, query, kv_cache, attn_metadata))
                return out

        Read.__name__ = plain.__name__
        impl.__class__ = Read

    def _read(self, number: int, place: int, of: Pass) -> None:
        """Read a layer, which is the one at `place` among those that attend."""
        if self._sums is not None:
            if not self._apart:
                with self._together():
                    self.method.sum_into(self._sums[place], of)
            if self._apart:
                self._read_apart(self._sums[place], of)
        for look in self.maps:
            if number in look.layers and not look.answer.failed:
                with self._faults.of(look.answer):
                    look.sums += self.method.map(look, of)

    @contextmanager
    def _together(self) -> Iterator[None]:
        """Contain what is raised of all answers: in this layer and the pass's next ones, each is read alone."""
        try:
            yield
        except Exception:
            log.warning("the attention of several answers is read for each alone", exc_info=True)
            self._apart = True

    def _read_apart(self, sums: torch.Tensor, of: Pass) -> None:
        """Read the attention of each answer alone: those fail whose reading raises."""
        row = 0
        for span in self._spans:
            looks = looks_of([span])
            first, row = row, row + sum(look.stop - look.start for look in looks)
            if not span.answer.failed:
                with self._faults.of(span.answer):
                    self.method.begin([span], looks, self._width)
                    self.method.sum_into(sums[first:row], of)
