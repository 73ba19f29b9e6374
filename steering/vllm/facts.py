"""The facts that a vLLM server with the plugin states of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from steering.errors import UnsupportedModel
from steering.model.mllm import MLLM

PATH = "/v1/helmsight/facts"
CONTRACT = 1
"""The version of the contract between this client and the plugin."""


@dataclass(frozen=True)
class ServerFacts:
    """The model and the abilities of a server.

    `can` names what it does, as `supported` reads it. `slots` answers run at once, each with at most `context_length`
    tokens.
    """

    plugin: str
    vllm: str
    layers: int
    hidden_size: int
    vocabulary: int
    context_length: int
    slots: int
    dtype: str
    device: str
    can: frozenset[str]

    @classmethod
    def of(cls, url: str, content: Any) -> ServerFacts:
        """Return the facts in a server's answer; raise UnsupportedModel where it is no server with our plugin."""
        if not isinstance(content, Mapping) or "contract" not in content:
            raise UnsupportedModel(
                f"{url} has no plugin 'helmsight-vllm': install it where vLLM is, and start that again."
            )
        if content["contract"] != CONTRACT:
            raise UnsupportedModel(
                f"{url} runs helmsight-vllm {content.get('plugin')}, which speaks version {content['contract']} of the "
                f"contract; this server speaks {CONTRACT}: upgrade the older one."
            )
        try:
            model = content["model"]
            return cls(
                str(content["plugin"]), str(content["vllm"]), int(model["layers"]), int(model["hidden_size"]),
                int(model["vocabulary"]), int(content["max_model_len"]), int(content["max_num_seqs"]),
                str(model["dtype"]), str(content["device"]), frozenset(map(str, content["can"])),
            )  # fmt: skip
        except (KeyError, TypeError, ValueError) as error:
            raise UnsupportedModel(f"{url} states its facts in another form: {error!r}.") from error

    def difference(self, expected: ServerFacts) -> str | None:
        """Return what keeps this server from answering in place of one of the expected facts; None where nothing does."""
        names = ("layers", "hidden_size", "vocabulary", "dtype")
        different = [name for name in names if getattr(self, name) != getattr(expected, name)]
        if different:
            pairs = (f"{name} {getattr(self, name)}, not {getattr(expected, name)}" for name in different)
            return f"another model ({', '.join(pairs)})"
        if self.context_length < expected.context_length:
            return f"a context of {self.context_length} tokens, not {expected.context_length}"
        missing = sorted(expected.can - self.can)
        return f"less than others (no {', '.join(missing)}); it has helmsight-vllm {self.plugin}" if missing else None

    def complete(self, mllm: MLLM) -> None:
        """Complete a model without weights with what the servers' have; raise UnsupportedModel where it is another one."""
        ours = mllm.num_layers, mllm.hidden_size
        if (self.layers, self.hidden_size) != ours:
            raise UnsupportedModel(
                f"The vLLM servers serve another model: {self.layers} layers of {self.hidden_size}, where {mllm.name} has "
                f"{ours[0]} of {ours[1]}."
            )
        mllm.dtype = getattr(torch, self.dtype, torch.float32)
        mllm.devices = (torch.device(self.device),)
