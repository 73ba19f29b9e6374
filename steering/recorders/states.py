"""States after the last layer, normalised as the output embedding sees them, of image tokens and of text tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from steering.decoder.hooks import Hook
from steering.devices import to_device
from steering.measures import activation_maps
from steering.prompt.spans import FIRST_IMAGE
from steering.protocol.sequence import Sequence
from steering.protocol.signals import Signal
from steering.protocol.slots import Computed, DecodeBatch, PrefillChunk, Reuse, Slots
from steering.recorders.interference import EarlierTokens, without_interference

NAME = "states"


@dataclass
class CapturedStates:
    """The states captured of one sequence.

    image: (k, d) each, of image tokens; after the prompt's end a single tensor, image by image. text: of the user's text and
    of the rows that generate.
    """

    image: tuple[torch.Tensor, ...] = ()
    text: tuple[torch.Tensor, ...] = ()


@dataclass(frozen=True)
class TokenMaps:
    """Token activation maps of the answer's tokens, (steps, patches) on the CPU.

    `plain` are the maps themselves, `causal` those without the activation of earlier tokens, where they were requested.
    """

    plain: torch.Tensor
    causal: torch.Tensor | None = None


class StatesRecorder(Slots):
    """Keeps the states with their sequence, because they are as long as prompt and answer."""

    signals: ClassVar[frozenset[Signal]] = frozenset({Signal.IMAGE_STATES, Signal.TEXT_STATES})

    def keep(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> None:
        if chunk.replay:
            return
        for row, sequence in enumerate(chunk.sequences):
            if not sequence.wants(Signal.IMAGE_STATES, Signal.TEXT_STATES):
                continue
            hidden = computed.hidden[row, : chunk.lengths[row]]
            captured = self._capture_prompt(sequence, chunk.starts[row], hidden)
            if sequence.wants(Signal.IMAGE_STATES) and chunk.complete:  # captured in the order of columns
                order = to_device(sequence.prompt.layout.image_columns.argsort().argsort(), hidden.device)
                captured.image = (torch.cat(captured.image)[order],)
            if sequence.wants(Signal.TEXT_STATES) and chunk.complete:
                captured.text += (hidden[-1:],)

    def _capture_prompt(self, sequence: Sequence, start: int, hidden: torch.Tensor) -> CapturedStates:
        """Return a sequence's captured states after adding those of prompt tokens from `start` on: hidden (k, d)."""
        captured: CapturedStates = sequence.captured.setdefault(NAME, CapturedStates())
        layout, part = sequence.prompt.layout, slice(start, start + len(hidden))
        if sequence.wants(Signal.IMAGE_STATES):
            captured.image += (_select_rows(hidden, layout.spans[part] >= FIRST_IMAGE),)
        if sequence.wants(Signal.TEXT_STATES):
            captured.text += (_select_rows(hidden, layout.user_text[part]),)
        return captured

    def reuse(self, sequence: Sequence) -> Reuse:
        return Reuse(sequence.prompt.length, measured=sequence.wants(*self.signals))

    def by_row(self, chunk: PrefillChunk, hook: Hook | None, computed: Computed) -> torch.Tensor:
        return computed.hidden

    def regain(self, sequence: Sequence, measured: torch.Tensor) -> None:
        self._capture_prompt(sequence, 0, measured)

    def record(self, batch: DecodeBatch, hook: Hook | None, computed: Computed) -> None:
        for sequence in batch.sequences:
            if sequence.wants(Signal.TEXT_STATES) and not sequence.held:
                sequence.captured[NAME].text += (computed.hidden[sequence.slot].clone(),)

    def take(self, sequence: Sequence) -> TokenMaps | None:
        captured: CapturedStates | None = sequence.captured.get(NAME)
        if sequence.spec.diagnose is None or captured is None or not captured.image:
            return None
        mllm = self.pool.mllm
        stopped = sequence.finish_reason == "stop" and sequence.tokens[-1] in mllm.stop_ids
        ids = to_device(torch.tensor(sequence.tokens[: -1 if stopped else None], dtype=torch.int64), mllm.device)
        (states,), head = captured.image, mllm.head_rows(ids)
        maps = activation_maps(states, head)
        if not sequence.wants(Signal.TEXT_STATES):
            return TokenMaps(maps.cpu())
        prompt = to_device(sequence.prompt.ids[sequence.prompt.layout.user_text], mllm.device)
        earlier = EarlierTokens(
            torch.cat([prompt, ids]),
            torch.cat(captured.text)[: len(prompt) + len(ids)],
            torch.cat([activation_maps(states, mllm.head_rows(prompt)), maps]),
        )
        return TokenMaps(maps.cpu(), without_interference(maps, ids, head, len(prompt), earlier).cpu())


def _select_rows(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the wanted rows (k, d) of hidden (n, d).

    mask: (n,) bool on the CPU, so that counting them needs no wait for the device.
    """
    return hidden[to_device(mask.nonzero()[:, 0], hidden.device)]
