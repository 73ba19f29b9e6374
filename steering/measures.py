"""Formulas that interventions and readouts share."""

from __future__ import annotations

import torch


def divergence(mha: torch.Tensor, ffn: torch.Tensor) -> torch.Tensor:
    """D in nats, (...), of the updates of a layer, (..., d): KL(softmax(mha) || softmax(ffn)) (SAGE paper, section 5.1)."""
    p, q = mha.float().log_softmax(-1), ffn.float().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)


def activation_maps(states: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """(tokens, patches): ReLU of the logit of each token at each image token (Token Activation Maps, see `readouts.tam`).

    states: (patches, d), normalised states after the last layer. head: (tokens, d), rows of the output embedding.
    """
    return (head.float() @ states.float().T).relu()
