"""`helmsight vectors` on folders of its own."""

from __future__ import annotations

import json
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from server.cli import main
from steering import SteeringVector
from tests.server.fakes import checkpoint
from tests.steering.vectors.made import dictionary

LAYERS, WIDTH = 4, 6
FINGERPRINT = "0123456789abcdef" * 2

Run = Callable[..., tuple[int, str, str]]


def make(name: str, seed: int, **changes: Any) -> SteeringVector:
    direction = torch.randn(LAYERS, WIDTH, generator=torch.Generator().manual_seed(seed))
    fields: dict[str, Any] = {
        "weight": torch.full((LAYERS,), 0.7),
        **{key: torch.ones(LAYERS) for key in ("mean_abs", "std")},
        "layers": (1, 3),
        "fingerprint": FINGERPRINT,
        "info": {"calibration": {"range": [0.5, 2.0]}},
    }
    return SteeringVector(name, direction, **fields | changes)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return a folder with two vectors of one model and one of another."""
    folder = tmp_path / "vectors"
    for vector in (make("a", 1), make("b", 2, layers=(2, 3)), make("c", 3, fingerprint="f" * 32)):
        vector.save(folder / f"{vector.name}.safetensors")
    return folder


@pytest.fixture
def run(folder: Path, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run `helmsight vectors ...` on the folder: (status, output, errors)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["vectors", *arguments, "--folder", str(folder)])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def refused(answer: tuple[int, str, str]) -> str:
    """Return the one line that a refused command prints, after the output of loading a model."""
    status, out, err = answer
    *before, line = err.splitlines()
    assert (status, out, line.startswith("helmsight: ")) == (1, "", True)
    assert all(one.strip().startswith("Loading weights") or not one for one in before)
    return line


def test_vectors_are_listed_and_shown(run: Run, folder: Path) -> None:
    (folder / "damaged.safetensors").write_bytes(b"no")
    (folder / "directory.safetensors").mkdir()
    status, out, _ = run("list", "--model", str(folder))
    assert status == 0
    assert [line.split()[0] for line in out.splitlines()] == ["NAME", "a", "b", "c", "damaged", "directory"]
    assert "Not a steering vector file" in out
    shown = json.loads(run("show", "a")[1])
    assert (shown["name"], shown["layers"], shown["fingerprint"]) == ("a", [1, 3], FINGERPRINT)
    assert "no steering vector 'nobody'" in refused(run("show", "nobody"))


def test_dictionaries_are_listed_last(run: Run, folder: Path) -> None:
    dictionary(folder / "layer1", 8)
    dictionary(folder / "broken", 8)
    (folder / "broken" / "cfg.json").write_text("{}")
    status, out, _ = run("list")
    assert status == 0
    *_, broken, listed = out.splitlines()
    assert listed.split()[:8] == ["sae:layer1/0", "to", "39", "yes", "sae-dictionary", "1", "-", "-"]
    assert broken.split()[:3] == ["sae:broken/", "no", "sae-dictionary"]
    assert "its cfg.json has no 'd_in'" in broken or "cannot be used" in broken


def test_the_list_tells_what_is_used_and_what_its_strength_is(run: Run, folder: Path, tmp_path: Path) -> None:
    """In the order of a server's folders; the file of another model is not hidden, what a damaged file hides is."""
    later = tmp_path / "later"
    calibrated = make("a", 4, info={"calibration": {"range": [0.3, 1.0], "factor": 0.5}})
    calibrated.save(later / "a.safetensors")
    make("a-much-longer-name-than-others", 4, info={"published": 1.0}).save(
        later / "a-much-longer-name-than-others.safetensors"
    )
    make("c", 4, kind="control-vector", info={}).save(later / "c.safetensors")
    (-0.5 * calibrated).named("half").save(later / "half.safetensors")
    (folder / "b.safetensors").write_bytes(b"no")
    make("b", 4).save(later / "b.safetensors")
    folders = ("--folder", str(folder), "--folder", str(later))  # `run` names the first one again
    header, *lines = run("list", *folders, "--model", str(tmp_path))[1].splitlines()
    (broken,) = (line for line in lines if "Not a steering vector file" in line)
    assert broken.split()[:8] == ["b", "no", *"-----", f"{folder}:"]
    starts = [header.index(name) for name in header.split()]
    cut = [
        [line[a:b].strip() for a, b in zip(starts, [*starts[1:], None], strict=True)]
        for line in lines
        if line != broken
    ]
    rows = [[*row[:2], *row[4:6], row[7]] for row in cut]
    assert header.split() == ["NAME", "USED", "KIND", "LAYERS", "PUBLISHED", "CALIBRATED", "MODEL", "FOLDER"]
    assert rows == [
        ["a", "yes", "-", "0.5 to 2", str(folder)],
        ["a", "no", "0.5", "0.3 to 1", str(later)],
        ["a-much-longer-name-than-others", "yes", "1", "-", str(later)],
        ["b", "no", "-", "0.5 to 2", str(later)],
        ["c", "yes", "-", "0.5 to 2", str(folder)],
        ["c", "yes", "-", "-", str(later)],
        ["half", "yes", "0.25", "-", str(later)],
    ]
    assert cut[-1][2] == "modality-preference, negated"


def test_vectors_are_composed(run: Run, folder: Path) -> None:
    status, out, _ = run("compose", "mixture", "--add", "a", "b:-0.5")
    assert (status, out.startswith(f"{folder / 'mixture.safetensors'}: mixture, ")) == (0, True)
    a, b, mixture = (SteeringVector.load(folder / f"{name}.safetensors") for name in ("a", "b", "mixture"))
    assert torch.equal(mixture.delta(1.0), a.delta(1.0) + b.delta(-0.5))
    assert (mixture.name, mixture.layers) == ("mixture", (1, 2, 3))
    assert mixture.info == {"composed_of": [{"name": "a", "scale": 1.0}, {"name": "b", "scale": -0.5}]}
    assert "already exists; --replace overwrites it" in refused(run("compose", "mixture", "--add", "a"))
    for nothing in (("a:0",), ("a", "a:-1")):
        assert f"{' '.join(nothing)} adds up to zero" in refused(run("compose", "nothing", "--add", *nothing))
    assert run("compose", "mixture", "--add", "a", "--add", "a:2", "--replace")[0] == 0
    assert torch.equal(SteeringVector.load(folder / "mixture.safetensors").delta(1.0), a.delta(1.0) + a.delta(2.0))
    run("compose", "renamed", "--add", "a")
    assert SteeringVector.load(folder / "renamed.safetensors").calibrated_range == (0.5, 2.0)


def test_what_cannot_be_composed_is_refused(run: Run, folder: Path) -> None:
    before = sorted(folder.iterdir())
    assert "different models" in refused(run("compose", "mixture", "--add", "a", "c"))
    assert "no steering vector 'nobody'" in refused(run("compose", "mixture", "--add", "nobody"))
    assert "must match" in refused(run("compose", "../mixture", "--add", "a"))
    assert "finite" in refused(run("compose", "mixture", "--add", "a:nan"))
    status, out, err = run("compose", "mixture", "--add", "a:much")
    assert (status, out) == (2, "")
    assert "--add 'a:much': write NAME or NAME:SCALE" in err
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize("suffix", ["safetensors", "gguf"])
def test_a_vector_is_exported_and_imported(suffix: str, run: Run, folder: Path, tmp_path: Path) -> None:
    file = tmp_path / f"out.{suffix}"
    assert run("export", "a", str(file)) == (0, f"{file}: {file.stat().st_size} bytes\n", "")
    assert "--replace" in refused(run("export", "b", str(file)))
    for replacing in ((), ("--replace",)):
        assert refused(run("export", "b", str(tmp_path), *replacing)).endswith(f"{tmp_path} is a folder; name a file")
    given = ("--fingerprint", FINGERPRINT) if suffix == "gguf" else ()
    fresh = tmp_path / "fresh"
    assert run("import", str(file), "--name", "again", *given, "--folder", str(fresh))[0] == 0
    again = SteeringVector.load(fresh / "again.safetensors")
    assert torch.equal(again.delta(1.0), make("a", 1).delta(1.0))
    assert (again.name, again.layers, again.fingerprint) == ("again", (1, 3), FINGERPRINT)
    assert stat.S_IMODE(fresh.stat().st_mode) == 0o700
    assert "already exists; --replace overwrites it" in refused(run("import", str(file), "--name", "b", *given))
    assert run("import", str(file), "--name", "b", "--replace", *given)[0] == 0
    assert SteeringVector.load(folder / "b.safetensors").name == "b"


def test_a_damaged_file_is_not_imported(run: Run, folder: Path, tmp_path: Path) -> None:
    before = sorted(folder.iterdir())
    data = make("new", 1).to_bytes()
    for wrong in (b"", b"GG", data[:-1], data + b"\0"):
        (tmp_path / "new.safetensors").write_bytes(wrong)
        line = refused(run("import", str(tmp_path / "new.safetensors")))
        assert f"{tmp_path / 'new.safetensors'}: Not a steering vector file" in line
    (tmp_path / "new.gguf").write_bytes(data)
    assert "new.gguf: it is not a GGUF file" in refused(run("import", str(tmp_path / "new.gguf")))
    assert "No such file" in refused(run("import", str(tmp_path / "missing")))
    assert sorted(folder.iterdir()) == before


def test_a_name_of_another_folder_counts_for_the_same_model_alone(run: Run, folder: Path, tmp_path: Path) -> None:
    file, first = tmp_path / "b.safetensors", tmp_path / "first"
    make("b", 5).save(file)
    line = refused(run("import", str(file), "--folder", str(first), "--folder", str(folder)))
    place = first / "b.safetensors"
    assert f"'b' already stands for {folder / 'b.safetensors'}, of the same model" in line
    assert f"--replace writes {place}, which hides that one" in line
    assert run("import", str(file), "--folder", str(first), "--folder", str(folder), "--replace")[0] == 0
    assert torch.equal(SteeringVector.load(place).direction, make("b", 5).direction)
    assert torch.equal(SteeringVector.load(folder / "b.safetensors").direction, make("b", 2).direction)
    make("modality-preference", 6).save(file)  # the embedded model has one of this name
    assert run("import", str(file))[0] == 0


def test_a_model_of_the_demo_is_named_as_elsewhere(run: Run) -> None:
    status, out, _ = run("list", "--model", "demo:prior")
    assert status == 0
    assert str(Path("prior", "vectors")) in out or "modality-preference" in out
    assert "the model 'demo:nothing' is not shipped" in run("list", "--model", "demo:nothing")[2]


def test_a_gguf_file_needs_to_be_told_its_model(run: Run, tmp_path: Path) -> None:
    file = tmp_path / "out.gguf"
    run("export", "a", str(file))
    assert "give --fingerprint or --model" in refused(run("import", str(file)))
    assert "32 hexadecimal" in refused(run("import", str(file), "--fingerprint", FINGERPRINT[:16]))


def test_another_vector_of_the_model_tells_how_many_layers_it_has(run: Run, folder: Path, tmp_path: Path) -> None:
    from steering.vectors.gguf import to_gguf

    short = make("short", 1, layers=(1,))
    file = tmp_path / "short.gguf"
    file.write_bytes(
        to_gguf(SteeringVector("short", short.direction[:2], *(torch.ones(2) for _ in range(3)), (1,), FINGERPRINT))
    )
    assert run("import", str(file), "--fingerprint", FINGERPRINT)[0] == 0
    assert len(SteeringVector.load(folder / "short.safetensors").direction) == LAYERS


def test_the_model_tells_its_fingerprint(run: Run, folder: Path, tmp_path: Path, engine: steering.Engine) -> None:
    model = tmp_path / "model"
    shutil.copytree(checkpoint(), model, ignore=shutil.ignore_patterns("vectors"))
    shape = engine.mllm.num_layers, engine.mllm.hidden_size
    rows = [torch.ones(shape[0]) for _ in range(3)]
    fitting = SteeringVector("fitting", torch.ones(shape), *rows, (2,), "0" * 32)
    fitting.save(folder / "fitting.safetensors")
    for name in ("fitting", "a"):
        assert run("export", name, str(tmp_path / f"{name}.gguf"))[0] == 0
    assert run("import", str(tmp_path / "fitting.gguf"), "--name", "loaded", "--model", str(model))[0] == 0
    loaded = SteeringVector.load(folder / "loaded.safetensors")
    assert (loaded.fingerprint, loaded.layers) == (engine.mllm.fingerprint, (2,))
    assert "shape" in refused(run("import", str(tmp_path / "a.gguf"), "--name", "small", "--model", str(model)))


def test_without_gguf_a_line_says_what_to_install(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "gguf", missing)
    assert "pip install 'helmsight[gguf]'" in refused(run("export", "a", str(tmp_path / "a.gguf")))
    assert not (tmp_path / "a.gguf").exists()


def test_a_layer_that_gguf_does_not_have_is_refused(run: Run, folder: Path, tmp_path: Path) -> None:
    make("zero", 1, layers=(0, 1)).save(folder / "zero.safetensors")
    assert "layer 0" in refused(run("export", "zero", str(tmp_path / "zero.gguf")))
