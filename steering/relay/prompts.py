"""A prompt that one process has read for another, which runs it."""

from __future__ import annotations

from dataclasses import replace

from steering.model.images import TEXT_INPUTS, Inputs, Picture
from steering.prompt.fitting import Shrunk
from steering.prompt.layout import Prompt
from steering.prompt.rendering import TemplateOptions

KINDS = (Prompt, Picture, Shrunk, TemplateOptions)
"""What it is made of, as `relay` is to be told."""


def sendable(prompt: Prompt) -> Prompt:
    """The same with the tensors of its pictures once: they stand among its inputs, too."""
    return replace(prompt, inputs={name: prompt.inputs[name] for name in prompt.inputs if name in TEXT_INPUTS})


def received(prompt: Prompt) -> Prompt:
    """What it was before `sendable`."""
    return replace(prompt, inputs=Inputs(prompt.inputs, prompt.pictures))
