"""How far two answers are apart inside the model: semantic drift (SAGE paper, section 4.3)."""

from __future__ import annotations

import torch


def drift(one: torch.Tensor, other: torch.Tensor) -> list[float]:
    """Cosine similarity by layer of the residual streams (layers, d) at the row that generated each answer's last token."""
    return torch.nn.functional.cosine_similarity(one.float(), other.float(), dim=-1).tolist()
