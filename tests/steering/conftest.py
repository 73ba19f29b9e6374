"""Loaded tiny models, once a session: patched for the engine, and plain."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import steering
from steering.decoder.ranks import ALONE
from steering.prompt.layout import Layout, Prompt
from steering.prompt.spans import CONTEXT, FIRST_IMAGE, SYSTEM
from steering.protocol.sequence import Sequence, Spec
from steering.protocol.slots import Pool
from tests import families
from tests.steering.inside import noting_sequences
from tests.steering.plain import Plain

MakeEngine = Callable[..., steering.Engine]
LoadMLLM = Callable[[str], steering.MLLM]
LoadPlain = Callable[[str], Plain]
OF_EACH_KIND = ("qwen2_vl", "qwen3_5", "lfm2_vl", "qwen3_vl_moe", "llava", "gemma3", "paligemma2", "idefics3")
"""Families where not all are tested: M-RoPE, recurrent states, experts, windows, a bidirectional prompt, tiles."""


@pytest.fixture(scope="session", autouse=True)
def _noted_sequences() -> Iterator[None]:
    with noting_sequences():
        yield


@pytest.fixture(scope="session")
def load_mllm(root: Path) -> LoadMLLM:
    """Return a function from a family to its patched model, which is shared: undo any change to it."""
    return functools.cache(lambda family: steering.load(families.checkpoint(family, root), device="cpu"))


@pytest.fixture(scope="session")
def load_plain(root: Path) -> LoadPlain:
    """Return a function from a family to its plain model."""
    return functools.cache(lambda family: Plain(families.checkpoint(family, root)))


@pytest.fixture(scope="session")
def make_engine(load_mllm: LoadMLLM) -> MakeEngine:
    """(family, **options) -> an engine of a few slots; the self-check has tests of its own."""

    def make(family: str, **options: Any) -> steering.Engine:
        settings: dict[str, Any] = {"slots": 4, "max_length": 512, "self_check": False} | options
        return steering.Engine(load_mllm(family), **settings)

    return make


def a_pool(slots: int, length: int, layers: int) -> Pool:
    """Return a pool of a model that only has layers."""
    facts = {"dtype": torch.float32, "calibration": None, "ranks": ALONE, "attention_layers": tuple(range(layers))}
    mllm: Any = SimpleNamespace(num_layers=layers, device=torch.device("cpu"), **facts)
    return Pool(mllm, slots, length, 2)


def a_sequence(spans: Iterable[int], *asked: steering.InterventionSpec, slot: int = 0) -> Sequence:
    """Return a sequence with prompt tokens of these spans, and these interventions."""
    numbers = torch.tensor(list(spans))
    layout = Layout(numbers, (), torch.stack([numbers == SYSTEM, (numbers >= CONTEXT) & (numbers < FIRST_IMAGE)], -1))
    prompt = Prompt(torch.zeros(len(layout.spans), dtype=torch.int64), {}, (), layout)
    spec = Spec(prompt, asked={one.name(): one for one in asked})
    return Sequence(spec, slot=slot)
