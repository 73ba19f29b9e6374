"""The references of plain transformers that the front of vLLM keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.engine import vllm


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep references for this module alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("references")
        patch.setattr(vllm, "KEPT", str(folder))
        yield folder
