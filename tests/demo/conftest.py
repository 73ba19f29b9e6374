"""A tokenizer trained once on a small corpus; the demo's tests need no checkpoint."""

from __future__ import annotations

import pytest
import torch

from demo.model.tokenizer import train_tokenizer
from demo.training.curriculum import corpus


@pytest.fixture(scope="session")
def tokenizer():
    torch.set_num_threads(1)
    return train_tokenizer(corpus(600))
