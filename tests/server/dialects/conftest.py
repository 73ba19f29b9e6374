"""A model whose template describes tools and has a place for reasoning, for all tests of dialects."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import steering
from tests.families.calling import calling

SPEAKER = "{{- '<|im_start|>' + message.role + '\\n' }}"
QWEN3 = """
{%- if message.reasoning_content -%}
{{- '<think>\\n' + message.reasoning_content.strip('\\n') + '\\n</think>\\n\\n' }}
{%- endif -%}
"""
"""The place of reasoning in Qwen3's chat template."""


@pytest.fixture(scope="session")
def reasoner(root: Path) -> Iterator[steering.Engine]:
    """Yield the engine of a model that calls tools and reasons."""
    model = steering.load(calling(root), device="cpu")
    assert model.template.count(SPEAKER) == 1
    model.processor.chat_template = model.template.replace(SPEAKER, SPEAKER + QWEN3)
    engine = steering.Engine(model, slots=4, max_length=1024, self_check=False, threads=1)
    engine.start()
    yield engine
    engine.stop()
