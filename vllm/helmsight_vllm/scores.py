"""Log-probabilities of vLLM's outputs as the contract writes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch


def token_scores(tokens: Sequence[int], logprobs: Any, most: int) -> dict[str, Any]:
    """Return the log-probability of each generated token, and the `most` likeliest in its place, best first."""
    by_token = logprobs or [{} for _ in tokens]
    own = [entries[token].logprob for token, entries in zip(tokens, by_token, strict=True)]
    return {"logprobs": own, "top": [_likeliest(entries, most) for entries in by_token]}


def prompt_scores(logprobs: Sequence[Any], ids: Sequence[int], most: int | None) -> dict[str, torch.Tensor]:
    """Return the scores of a prompt's tokens from the second one on: logprobs and ranks (n,), the likeliest (n, k)."""
    entries = list(zip(ids[1:], logprobs[1:], strict=True))
    top = [_likeliest(likely, most or 0) for _, likely in entries]
    return {
        "logprobs": torch.tensor([likely[token].logprob for token, likely in entries]),
        "ranks": torch.tensor([float(likely[token].rank) for token, likely in entries]),
        "top_ids": torch.tensor([[float(token) for token, _ in row] for row in top]).view(len(top), most or 0),
        "top_logprobs": torch.tensor([[value for _, value in row] for row in top]).view(len(top), most or 0),
    }


def _likeliest(entries: Mapping[int, Any], most: int) -> list[tuple[int, float]]:
    ranked = sorted(((token, entry) for token, entry in entries.items()), key=lambda pair: pair[1].rank)
    return [(token, entry.logprob) for token, entry in ranked[:most]]
