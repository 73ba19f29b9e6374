"""Transfer of a prompt from the process that has read it to another one, which runs it."""

from __future__ import annotations

from dataclasses import replace

from steering.model.images import TEXT_INPUTS, Inputs, Picture
from steering.prompt.fitting import Shrunk
from steering.prompt.layout import Prompt
from steering.prompt.rendering import TemplateOptions

KINDS = (Prompt, Picture, Shrunk, TemplateOptions)
"""The kinds of objects in a prompt, for `relay`."""


def sendable(prompt: Prompt) -> Prompt:
    """Return the prompt without the pictures' tensors among its inputs, where they are a second time."""
    return replace(prompt, inputs={name: prompt.inputs[name] for name in prompt.inputs if name in TEXT_INPUTS})


def received(prompt: Prompt) -> Prompt:
    """Return the prompt as it was before `sendable`."""
    return replace(prompt, inputs=Inputs(prompt.inputs, prompt.pictures))
