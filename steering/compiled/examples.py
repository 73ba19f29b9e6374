"""What a step is made for: hooks as a decode of a few rows has them, and how a model's tensors lie."""

from __future__ import annotations

import hashlib

import torch

from steering.compiled.step import STEPS, Kind, Step, StepSizes, constants
from steering.compiled.tensors import taken_apart
from steering.decoder.hooks import Hook
from steering.model.mllm import MLLM
from steering.model.pixels import picture
from steering.prompt.layout import build_prompt
from steering.protocol import intervention, recorder
from steering.protocol.sequence import Sequence, Spec, State
from steering.protocol.signals import Signal
from steering.protocol.slots import DecodeBatch, Pool
from steering.protocol.text import TextStream

INLINED = 64
"""torch writes tensors of up to 8 numbers into its code, and more than these nowhere."""
EXAMPLES = (StepSizes(5, 37, 83, 11, 167), StepSizes(7, 41, 89, 13, 173))
"""All sizes differ, within one example and from the other, so that each size of a tensor is known for what it is."""


def small(step: Step) -> dict[str, list[float]]:
    """What is in those of a model's tensors that compiled code may hold as numbers, by name."""
    return {name: one.flatten().tolist() for name, one in sorted(constants(step).items()) if one.numel() <= INLINED}


def manifest(step: Step) -> str:
    """A digest of all that compiled code takes for granted of a model's tensors: names, sizes, strides, dtypes, and what is
    in small ones."""
    lines = [f"{name} {tuple(one.shape)} {one.stride()} {one.dtype}" for name, one in sorted(constants(step).items())]
    lines += [f"{name} {values}" for name, values in small(step).items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def example_step(
    mllm: MLLM, kind: Kind, signals: frozenset[Signal], axes: int | None, sizes: StepSizes = EXAMPLES[0]
) -> tuple[Step, list[torch.Tensor]]:
    """The step of rows that want these signals, and the tensors of its hooks in an example of these sizes."""
    shape, given = taken_apart([] if kind == "prefill" else _decode_hooks(mllm, signals, sizes))
    return STEPS[kind](mllm, shape, axes), given


def _decode_hooks(mllm: MLLM, signals: frozenset[Signal], sizes: StepSizes) -> list[Hook]:
    """The hooks of a decode of rows that want these signals, in their order."""
    pool = Pool(mllm, sizes.slots, sizes.length, 1)
    interventions = {name: made for name, (_, made) in intervention.REGISTRY.items() if made is not None}
    parts = [made(name, pool) for name, made in (interventions | recorder.REGISTRY).items()]
    words = [{"type": "image", "image": picture()}, {"type": "text", "text": "?"}]
    spec = Spec(build_prompt(mllm, [{"role": "user", "content": words}]), signals=signals)
    sequences = [
        Sequence(spec, TextStream(mllm.tokenizer, ()), notify=lambda *_: None, slot=slot, state=State.RUNNING)
        for slot in range(sizes.rows)
    ]
    batch = DecodeBatch(
        sequences,
        torch.zeros(sizes.rows, dtype=torch.int64, device=mllm.device),
        sizes.columns,
        torch.ones(sizes.rows, 1, 1, device=mllm.device),
    )
    hooks = [part.decode(batch) for part in parts if part.concerns((), signals)]
    return [hook for hook in hooks if hook is not None]
