"""Few tokens through small layers take one thread, whoever asked for more."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from steering.runner import threads
from steering.runner.threads import FEW, PassThreads
from tests.steering.conftest import LoadMLLM


@pytest.fixture
def three() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("three")
def test_a_pass_takes_one_thread_or_all(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = load_mllm("qwen2_vl")
    small = PassThreads(mllm)
    assert [small.of(tokens) for tokens in (1, FEW, FEW + 1)] == [1, 1, 3]
    for tokens in (1, FEW + 1):
        with small.taken(tokens):
            assert torch.get_num_threads() == small.of(tokens)
        assert torch.get_num_threads() == 3
    with pytest.raises(ValueError, match="it fails"), small.taken(1):
        raise ValueError("it fails")
    assert torch.get_num_threads() == 3
    largest = max(module.weight.numel() for module in mllm.layers.modules() if isinstance(module, nn.Linear))
    monkeypatch.setattr(threads, "SMALL", largest)
    assert PassThreads(mllm).of(1) == 3
