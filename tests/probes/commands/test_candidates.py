"""A probe's vector is a candidate, which changes nothing before somebody uses it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from server import cli
from server.engine.runtime import vector_store
from server.process.sources import load_settings
from steering.vectors.candidates import side_by_side
from tests.probes.command_line import last_error
from tests.probes.commands.test_probe import at_home, serving
from tests.steering.vectors.made import make

pytestmark = pytest.mark.usefixtures("loaded_once", "short_answers")


def test_a_probes_vector_is_a_candidate_until_somebody_uses_it(
    model: str, home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The name stands for the earlier vector until then, and both are shown side by side, before and after."""
    folder, name = home / ".helmsight" / "vectors", "modality-preference"
    assert at_home(model, "--use") == 0
    old = steering.SteeringVector.load(folder / f"{name}.safetensors")
    served = vector_store(load_settings(environ={}), Path(model), serving(old))
    capsys.readouterr()
    assert at_home(model, "--seed", "1", "--report", "other") == 0
    new = steering.SteeringVector.load(folder / "candidates" / f"{name}.safetensors")
    assert old.identity != new.identity
    assert served.get(name).identity == old.identity
    after_the_probe = capsys.readouterr().out
    assert f"until 'helmsight vectors use {name}'" in after_the_probe
    assert cli.main(["vectors", "use", name, "--model", model, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "WARNING: " in shown, "a probe of so few samples of random weights"
    for warning in (*new.info["doubts"], *new.info["warnings"]):
        assert f"WARNING: {warning}" in shown
    cosine = float(torch.cosine_similarity(old.direction[1], new.direction[1], dim=0))
    for said in (after_the_probe, shown):
        lines = {line.split("  ")[0]: line.split() for line in said.splitlines()}
        assert lines["digest"][-2:] == [old.identity[:16], new.identity[:16]]
        assert lines["layers"][-2:] == ["1", "1"]
        assert lines["cosine at layer 1"][-2:] == ["1", f"{cosine:.3f}"]
    assert served.get(name).identity == old.identity
    assert cli.main(["vectors", "list", "--model", model]) == 0
    assert [line.split()[1] for line in capsys.readouterr().out.splitlines()[1:]] == ["yes", "candidate"]
    assert cli.main(["vectors", "use", name, "--model", model]) == 0
    said = capsys.readouterr().out
    assert f"digest {old.identity} before, {new.identity} now" in said
    assert served.get(name).identity == new.identity
    assert not (folder / "candidates" / f"{name}.safetensors").exists()
    kept = folder / "previous" / f"{name}-{old.identity[:16]}.safetensors"
    assert f"helmsight vectors import {kept} --name {name} --replace" in said
    assert cli.main(["vectors", "import", str(kept), "--name", name, "--replace"]) == 0
    assert served.get(name).identity == old.identity
    assert cli.main(["vectors", "use", name, "--model", model]) == 1
    assert f"There is no candidate {name!r}" in last_error(capsys)


@pytest.mark.parametrize(
    ("info", "said"),
    [
        ({}, "-"),
        ({"reliable": True}, "yes"),
        ({"reliable": False, "warnings": []}, "no"),
        ({"reliable": True, "warnings": ["Few samples."]}, "yes, with 1 warning"),
        ({"reliable": True, "warnings": ["Few samples.", "No instructions."]}, "yes, with 2 warnings"),
    ],
)
def test_a_reliable_vector_is_shown_with_the_number_of_its_warnings(info: dict[str, Any], said: str) -> None:
    assert {name: new for name, _, new in side_by_side(None, make(info=info))}["reliable"] == said
