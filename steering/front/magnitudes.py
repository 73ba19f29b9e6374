"""The magnitude of a model's states: the unit in which a steering strength is published."""

from __future__ import annotations

import torch

from steering.front.client import Client
from steering.model.processing.pixels import picture
from steering.protocol.request import Request, Sampling


def magnitudes(engine: Client) -> torch.Tensor:
    """Return the mean |h| after each layer at the last token of a short prompt with a picture, (layers,).

    A vector at its published weight adds about as much to each element (modality-preference paper, equation 2). Between
    prompts the numbers differ by some tenths.
    """
    content = [{"type": "image", "image": picture()}, {"type": "text", "text": "What is this?"}]
    chat = [{"role": "user", "content": content}]
    (result,) = engine.generate([Request(chat, Sampling(max_tokens=1), states=True)])
    states = result.choices[0].states
    assert states is not None
    return states.abs().mean(dim=-1)
