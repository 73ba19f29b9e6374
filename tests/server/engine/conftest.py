"""The references of plain transformers that the front of vLLM keeps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from server.engine import vllm
from steering.messages import serialization
from steering.vllm.reference import REFERENCE_KINDS, Reference, ReferenceTask, compute


def computed_here(task: ReferenceTask, file: Path) -> Reference:
    """Return the references of a file, which this process computes: another one (`test_selfcheck`) imports torch anew."""
    if not file.is_file():
        file.write_bytes(serialization.written(compute(task), REFERENCE_KINDS))
    reference: Reference = serialization.read(file.read_bytes(), REFERENCE_KINDS)
    return reference


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Keep references for this module alone."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("references")
        patch.setattr(vllm, "KEPT", str(folder))
        patch.setattr(vllm, "computed_apart", computed_here)
        yield folder
