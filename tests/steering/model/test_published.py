"""Checkpoints as they are published are served, or refused with the reason that the table of the docs gives."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from steering.model.processing.pixels import PixelBounds
from tests.families.published.repositories import PUBLISHED
from tests.families.published.table import PAGE, row


@pytest.mark.parametrize("name", PUBLISHED)
def test_each_published_config_has_its_outcome_in_the_table(name: str, tmp_path: Path) -> None:
    published = PUBLISHED[name]
    line, mllm = row(name, tmp_path / "model")
    assert line in PAGE.read_text().splitlines(), "python -m tests.families.published.table"
    if published.refused is not None:
        assert mllm is None
        assert published.refused in line
        return
    assert mllm is not None
    stops = json.loads((tmp_path / "model" / "generation_config.json").read_text())["eos_token_id"]
    assert mllm.stop_ids == frozenset([stops] if isinstance(stops, int) else stops)
    if "max_pixels" in published.image_processor:
        assert mllm.pixels == PixelBounds(14, 3136, 12845056)
    if published.shards:
        assert (tmp_path / "model" / "model.safetensors.index.json").is_file()
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert ("text_config" in config) is not published.flat


def test_the_table_has_no_other_rows() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    assert [line.split("`")[1] for line in rows] == list(PUBLISHED)
