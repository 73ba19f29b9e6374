"""The forms of interventions for vLLM servers: what is written of each into a body, and what is read of it at the end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from steering.errors import Inapplicable
from steering.interventions.contrast import Icd, Vcd, noise_seed
from steering.interventions.generate import Generate, Mask, can_mask_pixels
from steering.interventions.steer import NAME as STEERING
from steering.interventions.steer import Steering
from steering.interventions.think import Think, Thought
from steering.model.mllm import MLLM
from steering.prompt.layout import Prompt
from steering.prompt.tokens import class_count, prompt_classes
from steering.protocol.sequence import Spec
from steering.runner.contrastive import TwinReport
from steering.vllm.arrays import tensor_of
from steering.vllm.attention import runs_of

Taken = Mapping[str, Any]
"""What a server says of an answer at its end."""


@dataclass(frozen=True)
class RemoteForm:
    """The translation of an intervention to a server's fields, and of its measurements back.

    write: returns the fields of a body, from the answer's settings and the model. read: returns what
    `InterventionSpec.report` takes, from the settings, what the server says, and how many generated tokens went through the
    model.
    """

    write: Callable[[Spec, MLLM], dict[str, Any]]
    read: Callable[[Spec, Taken, int], Any]


# -- steering ----------------------------------------------------------------------------------------------------------


def _class_count(steering: Steering, prompt: Prompt) -> int:
    return class_count([steer.chosen for steer in steering.steers], len(prompt.layout.images))


def steered_classes(spec: Spec, prompt: Prompt) -> list[list[int]]:
    """Return the class of each token of a prompt, as runs; nothing where it is not steered."""
    steering = spec.asked.get(STEERING)
    if not isinstance(steering, Steering):
        return []
    one_hot = prompt_classes(prompt.layout.spans, _class_count(steering, spec.prompt))
    return [list(run) for run in runs_of(one_hot.argmax(-1).numpy())]


def _write_steering(spec: Spec, mllm: MLLM) -> dict[str, Any]:
    steering: Any = spec.asked[STEERING]
    count = _class_count(steering, spec.prompt)
    vectors = [
        {
            "name": steer.vector.name,
            "digest": steer.vector.digest,
            "scale": steer.scale,
            "layers": list(steer.touched_layers),
            "classes": steer.chosen.classes(count).nonzero()[:, 0].tolist(),
            "generated": steer.chosen.generated,
        }
        for steer in steering.steers
    ]
    return {"steering": {"classes": count, "vectors": vectors}}


def _read_steering(spec: Spec, measurements: Taken, fed: int) -> tuple[dict[int, torch.Tensor], int, None]:
    steering: Any = spec.asked[STEERING]
    classes = prompt_classes(spec.prompt.layout.spans, _class_count(steering, spec.prompt))
    counts = classes.sum(0)
    inverses = tensor_of(measurements["steering"]["inverse"])  # (layers, classes)
    touched = {layer for steer in steering.steers for layer in steer.touched_layers}
    return {layer: torch.stack([counts, inverses[layer]]) for layer in sorted(touched)}, fed, None


# -- Think -------------------------------------------------------------------------------------------------------------


def _write_think(spec: Spec, mllm: MLLM) -> dict[str, Any]:
    think: Any = spec.asked[Think.name()]
    return {"think": {"gamma": think.gamma, "thresholds": list(spec.settled[Think.name()].values)}}


def _read_think(spec: Spec, measurements: Taken, fed: int) -> Thought:
    measured = tensor_of(measurements["think"]["measured"])
    return Thought(measured, spec.prompt.length + fed, None, spec.settled[Think.name()])


# -- contrasts ---------------------------------------------------------------------------------------------------------


def _rule(spec: Spec) -> dict[str, Any]:
    """Return the contrast's formula; `supported` refuses what has other fields."""
    assert spec.contrast is not None
    rule = spec.contrast.rule
    return {"weight": rule.weight, "relu": rule.relu, "plausible": rule.plausible}


def _write_vcd(spec: Spec, mllm: MLLM) -> dict[str, Any]:
    """Name the step of diffusion, and by the picture's own hash the seed of its noise."""
    vcd: Any = spec.asked[Vcd.name()]
    seeds = [noise_seed(picture) for picture in spec.prompt.pictures]
    return {"twin": {"rule": _rule(spec), "noise": {"step": vcd.step, "seeds": seeds}}}


def _write_icd(spec: Spec, mllm: MLLM) -> dict[str, Any]:
    return {"twin": {"rule": _rule(spec)}}


def _write_generate(spec: Spec, mllm: MLLM) -> dict[str, Any]:
    generate: Any = spec.asked[Generate.name()]
    if not can_mask_pixels(spec.prompt.inputs, spec.prompt.layout.images):  # the plugin masks no features
        raise Inapplicable(
            "'sage.generate' is not supported by this server's engine, vLLM, where a picture's tokens are no patches.",
            param="sage.generate",
            code="unsupported_value",
        )
    images = [image.columns.tolist() for image in spec.prompt.layout.images]
    layers = list(range(mllm.num_layers - mllm.focus_layers, mllm.num_layers))
    mask = {"top": generate.top, "refresh": generate.refresh, "images": images, "layers": layers}
    return {"twin": {"rule": _rule(spec), "mask": mask}}


def _read_twin(spec: Spec, measurements: Taken, fed: int) -> TwinReport:
    twin, images = measurements["twin"], spec.prompt.layout.images
    masks = []
    for mask in twin.get("masks", ()):
        chosen = tuple(torch.zeros(image.tokens, dtype=torch.bool) for image in images)
        for patches, numbers in zip(chosen, mask["patches"], strict=True):
            patches[numbers] = True
        masks.append(Mask(chosen, mask.get("pixels", can_mask_pixels(spec.prompt.inputs, images)), mask["token"]))
    return TwinReport(tuple(masks), int(twin["changed"]))


FORMS: Mapping[str, RemoteForm] = {
    STEERING: RemoteForm(_write_steering, _read_steering),
    Think.name(): RemoteForm(_write_think, _read_think),
    Vcd.name(): RemoteForm(_write_vcd, _read_twin),
    Icd.name(): RemoteForm(_write_icd, _read_twin),
    Generate.name(): RemoteForm(_write_generate, _read_twin),
}
"""The form of each intervention that a server can be asked for; those that only change the chat need none."""
