"""A prompt that one process has read for another, which runs it."""

from __future__ import annotations

from dataclasses import replace

from steering.model.images import TEXT_INPUTS, Picture, joined
from steering.prompt.layout import Prompt

KINDS = (Prompt, Picture)
"""What it is made of, as `relay` is to be told."""


def sendable(prompt: Prompt) -> Prompt:
    """The same with the tensors of its pictures once: they stand among its inputs, too."""
    return replace(prompt, inputs={name: one for name, one in prompt.inputs.items() if name in TEXT_INPUTS})


def received(prompt: Prompt) -> Prompt:
    """What it was before `sendable`."""
    return replace(prompt, inputs={**prompt.inputs, **joined(prompt.pictures)}) if prompt.pictures else prompt
