"""Token Activation Maps show which image tokens would themselves predict a generated token.

Li et al. 2025, "Token Activation Map to Visually Explain Multimodal LLMs", in the SAGE paper appendix D.1, equation 18.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class EarlierTokens:
    """Text tokens that come before, or are among, the explained ones.

    `ids` (j,), `states` (j, d) normalised after the last layer, and their own maps (j, patches).
    """

    ids: torch.Tensor
    states: torch.Tensor
    maps: torch.Tensor


def without_interference(
    maps: torch.Tensor, ids: torch.Tensor, head: torch.Tensor, first: int, earlier: EarlierTokens
) -> torch.Tensor:
    """Return maps (tokens, patches) without the activation of earlier tokens.

    This is the estimated causal inference of the TAM paper's section 3.2. The interference of a token is the mean of the
    maps of all other tokens before it, weighted by its own activation ReLU(logit) at each of them. Its least-squares
    multiple is subtracted, and ReLU is applied again. Token i has place `first` + i among the earlier ones; only those
    before it count, and not its own repetitions. ids: (tokens,). head: (tokens, d).

    In the authors' code (xmed-lab/TAM, tam.py) the map of the question's first token is that of the likeliest token behind
    it, and that of the answer's first token is the map of the prompt's last one.
    """
    places = torch.arange(len(earlier.ids), device=maps.device)
    before = places < first + torch.arange(len(ids), device=maps.device)[:, None]
    relevance = (head.float() @ earlier.states.float().T).relu() * (before & (earlier.ids != ids[:, None]))
    interference = (relevance / relevance.sum(-1, keepdim=True).clamp(min=1e-8)) @ earlier.maps
    scale = (maps * interference).sum(-1) / (interference * interference).sum(-1).clamp(min=1e-12)
    return (maps - scale[:, None] * interference).relu()
