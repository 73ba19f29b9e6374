"""Checks of a body before anything of it is computed."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from helmsight_vllm.body import AnswerBody, PromptBody
from helmsight_vllm.inputs import Refused
from helmsight_vllm.plan import additions_of, expanded
from helmsight_vllm.table import ROWS_PER_ANSWER
from helmsight_vllm.vectors import UnknownVector, load_vector


def check(body: AnswerBody, can: Collection[str], model: Any) -> None:
    """Raise Refused where the server cannot do what a body asks for, or the body contradicts itself."""
    layers = model.get_total_num_hidden_layers()
    needed: dict[str, object] = {
        "attention": body.attention, "steer": body.steering, "states": body.state_position, "stream": body.residual,
        "think": body.think, "pairs": body.twin, "grammar": body.sampling.grammar,
    }  # fmt: skip
    for name, asked in needed.items():
        if asked is not None and name not in can:
            raise Refused(f"This server cannot do {name!r}.", name, "unsupported")
    if (twin := body.twin) is not None:
        for name, asked in (("vcd", twin.noise), ("generate", twin.mask)):
            if asked is not None and name not in can:
                raise Refused(f"This server cannot do {name!r}.", "twin", "unsupported")
        if sum(asked is not None for asked in (twin.prompt, twin.noise, twin.mask)) != 1:
            raise Refused("There must be one of 'prompt', 'noise' and 'mask'.", "twin")
    length = body.prompt.length
    if body.attention is not None:
        labels = expanded(body.attention.labels)
        if len(labels) != length:
            raise Refused(f"There are {len(labels)} labels for {length} tokens.", "attention.labels")
        if labels.max(initial=-1) >= model.get_head_size():
            raise Refused(f"There may be at most {model.get_head_size()} labels.", "attention.labels")
    if body.steering is not None:
        _check_classes(body.prompt, body.steering.classes, "prompt")
        if twin is not None and twin.prompt is not None:
            _check_classes(twin.prompt, body.steering.classes, "twin.prompt")
        if len({*additions_of(body.steering.model_dump())}) > ROWS_PER_ANSWER:
            raise Refused(f"There may be {ROWS_PER_ANSWER} different sums of vectors.", "steering")
        for place, vector in enumerate(body.steering.vectors):
            if max(vector.layers, default=0) >= layers:
                raise Refused(f"The model has {layers} layers.", f"steering.vectors[{place}].layers")
            try:
                load_vector(vector.name, vector.digest)
            except UnknownVector as error:
                raise Refused(str(error), f"steering.vectors[{place}]", error.code) from None
    if body.think is not None and len(body.think.thresholds) != layers:
        raise Refused(f"The model has {layers} layers.", "think.thresholds")


def _check_classes(prompt: PromptBody, count: int, param: str) -> None:
    """Raise Refused unless a prompt has one of `count` classes for each token; a step with others would end the engine."""
    classes = expanded(prompt.classes)
    if len(classes) != prompt.length or not 0 <= classes.min(initial=0) <= classes.max(initial=0) < count:
        raise Refused(f"There must be a class below {count} for each token.", f"{param}.classes")
