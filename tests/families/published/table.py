"""`python -m tests.families.published.table` writes docs/models.md: what becomes of published configurations."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from transformers.models.smolvlm import processing_smolvlm

import steering
from tests.families.building import build_published
from tests.families.published.repositories import PUBLISHED

PAGE = Path(__file__).parents[3] / "docs" / "models.md"
HEAD = """\
# Published configurations

This page lists which published checkpoints load. **Their trained weights were not run.** Each row is a checkpoint with tiny
random weights in the form of the named repository's files. It has a `config.json` with the settings of the second column,
end tokens, a chat template in the same place, and the bounds of the processor. They were read from the repository or from
copies of it.

Each checkpoint is loaded as `helmsight serve` loads it. **served** means that the self-check found prefill and decoding
equal to the plain model's, and that each layer adds only the updates of attention and FFN. **refused** has the error.
The test suite compares each row with the result; `python -m tests.families.published.table` writes this page.

| repository | settings of its files | result |
|---|---|---|
"""


@contextmanager
def words_of_numbers() -> Iterator[None]:
    """Within, SmolVLM's processor has what it needs of the package that takes numbers into words."""
    own, processing_smolvlm.num2words = processing_smolvlm.num2words, str
    try:
        yield
    finally:
        processing_smolvlm.num2words = own


def row(name: str, folder: Path) -> tuple[str, steering.MLLM | None]:
    """Return a repository's line of the table, and the model where it is served.

    Its checkpoint is written into `folder`.
    """
    build_published(name, folder)
    mllm = None
    try:
        with words_of_numbers():
            mllm = steering.load(folder, device="cpu", name=name)
        steering.Engine(mllm, slots=2, max_length=512)
        becomes = "served" if mllm.updates_add_up else "served, without `residual`, `drift` and Think"
    except steering.UnsupportedModel as refusal:
        mllm, becomes = None, f"refused: {refusal}"
    return f"| `{name}` | {PUBLISHED[name].told} | {becomes} |", mllm


def main() -> None:
    """Write the page."""
    with tempfile.TemporaryDirectory() as root:
        lines = [row(name, Path(root) / str(number))[0] for number, name in enumerate(PUBLISHED)]
    PAGE.write_text(HEAD + "\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
