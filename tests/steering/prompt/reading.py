"""Chats put together from parts, and what the tokens of a prompt say."""

from __future__ import annotations

from typing import Any

import torch

from steering import MLLM
from steering.prompt.layout import Prompt
from tests import families
from tests.steering.plain import Messages

EVERY = families.FAMILIES


def user(*parts: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": list(parts)}]


def said(mllm: MLLM, prompt: Prompt, *spans: int) -> str:
    """Return the text of some spans' tokens, in order, without white space at the ends."""
    columns = torch.isin(prompt.layout.spans, torch.tensor(spans)).nonzero()[:, 0]
    return str(mllm.tokenizer.decode(prompt.ids[columns])).strip()


def squeezed(content: str) -> str:
    return "".join(content.split())
