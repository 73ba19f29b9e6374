"""The decoder's inputs that depend on a token alone, which generated tokens need as well as prompts."""

from __future__ import annotations

from typing import Any

import torch


class TokenInputs:
    """Computes the decoder's arguments for tokens of text.

    They are the tokens' embeddings (rows, n, d) and, where the decoder adds further ones to each layer (Gemma 4), these
    (rows, n, layers, width). `further` names the latter's argument. `vocab_size` is the number of tokens that they know.
    """

    def __init__(self, model: Any):
        self._embed = model.get_input_embeddings()
        decoder = model.get_decoder()
        per_layer = bool(getattr(decoder, "hidden_size_per_layer_input", 0))
        self._per_layer = decoder.get_per_layer_inputs if per_layer else None
        self.further = ("per_layer_inputs",) if per_layer else ()
        tables = [self._embed, *([decoder.embed_tokens_per_layer] if per_layer else [])]
        self.vocab_size = min(table.weight.shape[0] for table in tables)

    def __call__(self, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
        """Return the arguments for tokens (rows, n)."""
        inputs = {"inputs_embeds": self._embed(tokens)}
        if self._per_layer is not None:
            inputs["per_layer_inputs"] = self._per_layer(tokens, None)
        return inputs
