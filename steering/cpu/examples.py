"""Example inputs of steps: the hooks of a few rows, and the layout of a model's tensors."""

from __future__ import annotations

import hashlib

import torch

from steering.accel.step import Step
from steering.accel.tensors import Sizes, fixed_sizes, taken_apart
from steering.cpu.forms.registry import forms_of
from steering.cpu.packing import PackedWeights
from steering.cpu.step import STEPS, PackedStep, StepSizes, Variant, constants
from steering.decoder.hooks import Hook
from steering.model.mllm import MLLM
from steering.model.processing.pixels import picture
from steering.prompt.layout import build_prompt
from steering.protocol import intervention, recorder
from steering.protocol.sequence import Sequence, Spec, State
from steering.protocol.slots import DecodeBatch, Pool, PrefillChunk
from steering.recorders.spans import span_count

INLINED = 64
"""Numbers of the largest tensor whose contents are compared; torch inlines tensors of up to 8 into its code."""
EXAMPLES = (StepSizes(5, 37, 83, 11, 167, 19), StepSizes(7, 41, 89, 13, 173, 23))
"""Example sizes, all different within and between the examples, so that each size of a tensor is recognised."""


def small(step: Step) -> dict[str, list[float]]:
    """Return the contents of the model's tensors that compiled code may inline as numbers, by name."""
    return {
        name: tensor.flatten().tolist() for name, tensor in sorted(constants(step).items()) if tensor.numel() <= INLINED
    }


def manifest(step: Step) -> str:
    """Return a digest of everything that compiled code assumes about a model's tensors.

    It covers names, sizes, strides, dtypes, and the contents of small ones.
    """
    lines = [
        f"{name} {tuple(tensor.shape)} {tensor.stride()} {tensor.dtype}"
        for name, tensor in sorted(constants(step).items())
    ]
    lines += [f"{name} {values}" for name, values in small(step).items()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def example_step(
    mllm: MLLM, variant: Variant, axes: int | None, weights: PackedWeights, sizes: StepSizes = EXAMPLES[0]
) -> tuple[PackedStep, list[torch.Tensor]]:
    """Return the requested step, and the tensors of its hooks in an example of these sizes."""
    shape, tensors = taken_apart([] if variant.kind == "pictures" else _hooks(mllm, variant, sizes))
    return STEPS[variant.kind](mllm, shape, axes, weights), tensors


def example_sizes(mllm: MLLM, variant: Variant) -> tuple[Sizes, ...]:
    """Return the sizes of the tensors of a step's hooks, None for each that varies between passes or engines."""
    if variant.kind == "pictures":
        return ()
    return fixed_sizes(*(taken_apart(_hooks(mllm, variant, sizes))[1] for sizes in EXAMPLES))


def _hooks(mllm: MLLM, variant: Variant, sizes: StepSizes) -> list[Hook]:
    """Return the hooks of a pass, in their order."""
    pool = Pool(mllm, sizes.slots, sizes.length, sizes.spans - span_count(0))
    interventions = {name: make for name, (_, make) in intervention.REGISTRY.items() if make is not None}
    parts = [make(name, pool) for name, make in (interventions | recorder.REGISTRY).items()]
    words = [{"type": "image", "image": picture()}, {"type": "text", "text": "?"}]
    spec = Spec(build_prompt(mllm, [{"role": "user", "content": words}]))
    sequences = [Sequence(spec, slot=slot, state=State.RUNNING) for slot in range(sizes.rows)]
    forms = forms_of(parts, variant.kind, variant.scope)
    if variant.kind == "prefill":
        lengths = [sizes.width] * sizes.rows
        chunk = PrefillChunk(sequences, [0] * sizes.rows, lengths, complete=True)
        hooks = [form.prefill(chunk) for form in forms]
    else:
        positions = torch.zeros(sizes.rows, dtype=torch.int64, device=mllm.device)
        active = torch.ones(sizes.rows, 1, 1, device=mllm.device)
        batch = DecodeBatch(sequences, positions, sizes.columns, active)
        hooks = [form.decode(batch) for form in forms]
    return [hook for hook in hooks if hook is not None]
