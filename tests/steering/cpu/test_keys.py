"""Packages are found again after an edit that changes no graph, and by no edit that changes one."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import MLLM
from steering.cpu import start, steps
from steering.cpu.building import trace
from steering.cpu.keys import CODE, ROOT, code_digest
from steering.cpu.packing import PackedWeights
from steering.cpu.step import Variant
from steering.interventions.steer_rows import SteerTokens
from tests.steering.cpu.conftest import VARIANTS, engine

COMPARED = "    over = differs > above\n"
OPENING = '''    """Return the relative change of each token's FFN update'''


@pytest.mark.parametrize(
    ("before", "after", "same"),
    [
        (COMPARED, "    # Where they diverge.\n\n    over = (differs  >  above)  # more\n", True),
        (OPENING, OPENING.replace("relative change", "change"), True),
        (COMPARED, COMPARED.replace(">", ">="), False),
    ],
    ids=["comment", "docstring", "operation"],
)
def test_comments_and_docstrings_do_not_change_the_digest_of_code(
    before: str, after: str, same: bool, tmp_path: Path
) -> None:
    for room in CODE:
        copy = shutil.copytree if (ROOT / room).is_dir() else shutil.copy
        copy(ROOT / room, tmp_path / room)
    edited = tmp_path / "interventions" / "think.py"
    source = edited.read_text()
    assert source.count(before) == 1
    edited.write_text(source.replace(before, after))
    assert (code_digest(tmp_path) == code_digest()) is same


def test_code_that_traces_to_the_same_graph_has_the_same_key(mllm: MLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = PackedWeights(mllm)

    def key() -> str:
        return trace(mllm, Variant("decode"), None, weights, 1).key

    def written_otherwise(hook: SteerTokens, layer: int, *states: Any) -> torch.Tensor:
        *_, hidden, _ = states
        added = hook._delta.select(1, layer).unsqueeze(1) if layer < 0 else hook._delta[:, layer, None]
        return hidden + added.to(hidden.device)

    def other(hook: SteerTokens, layer: int, *states: Any) -> torch.Tensor:
        return 2 * written_otherwise(hook, layer, *states)

    own_key = key()
    monkeypatch.setattr(SteerTokens, "after", written_otherwise)
    assert key() == own_key
    monkeypatch.setattr(SteerTokens, "after", other)
    assert key() != own_key


@pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++")
@pytest.mark.usefixtures("compiled")
def test_packages_are_found_by_graph_after_code_changed(
    mllm: MLLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".*"))
    monkeypatch.setattr(start, "VARIANTS", VARIANTS[:1])
    monkeypatch.setattr(steps, "code_digest", lambda: "other code")
    monkeypatch.setenv("CXX", "nowhere-c++")
    restarted: steering.Engine = engine(mllm, copy)
    assert restarted.compilation.state == "compiling"
    assert restarted.compilation.wait(300)
    assert restarted.stats()["compiled_in_use"] == 1
