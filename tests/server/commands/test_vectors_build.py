"""`helmsight vectors build` from a file to a vector that steers the embedded model, like the one of `helmsight probe`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from demo.world.conflicts import conflict_samples
from probes.conflicts.samples import ConflictSample, Setting, messages
from probes.vector.build import build, drawn
from server.cli import main
from tests.probes.pairs.writing import Run, building
from tests.server.fakes import checkpoint

BUILT = 16


@pytest.fixture(scope="module")
def samples() -> list[ConflictSample]:
    return conflict_samples(24, 77)


@pytest.fixture(scope="module")
def pairs(samples: list[ConflictSample], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write pairs from the demo world's conflicts, with the letters of their answers.

    Each is instructed toward the text and toward the picture.
    """
    folder = tmp_path_factory.mktemp("pairs")
    rows = []
    for number, (sample, swapped) in enumerate(drawn(samples, 0)):
        sample.picture().save(folder / f"{number}.png")

        def said(setting: Setting, sample: ConflictSample = sample, swapped: bool = swapped, n: int = number) -> Any:
            (message,) = messages(sample, setting, swapped)
            return [{"role": "user", "content": [{"type": "image", "image": f"{n}.png"}, message["content"][1]]}]

        letters = ("B", "A") if not swapped else ("A", "B")
        row = {"toward": said("text"), "away": said("vision")}
        if number >= BUILT:
            row |= {"question": said("plain"), "expect": dict(zip(("toward", "away"), letters, strict=True))}
        rows.append(row)
    path = folder / "text-or-picture.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.fixture(scope="module")
def model() -> steering.MLLM:
    return steering.load(checkpoint(), device="cpu")


@pytest.fixture
def run(
    pairs: Path,
    model: steering.MLLM,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Run:
    """Run `helmsight vectors build` in a home of its own, on a model that is loaded once: (status, output, errors)."""
    run = building("--pairs", model, tmp_path, capsys, monkeypatch)
    return lambda *words, pairs=pairs: run(pairs, *words)


def letters(engine: steering.Engine, samples: list[ConflictSample], steer: steering.Steer) -> list[str]:
    sampling = steering.Sampling(max_tokens=2)
    asked = [steering.Request(messages(sample, "plain", False), sampling, (steer,)) for sample in samples]
    return [result.choices[0].text.strip()[:1] for result in engine.generate(asked)]


def test_pairs_become_the_vector_that_the_probe_builds_and_it_steers(
    run: Run, tmp_path: Path, samples: list[ConflictSample], model: steering.MLLM
) -> None:
    scored = ("--score", "begins", "--layers", "3", "--strengths", "0.2", "0.4")
    status, said, _ = run("--sides", "text", "picture", *scored)
    assert status == 0, said
    path = tmp_path / ".helmsight" / "vectors" / "text-or-picture.safetensors"
    assert f"{path}: text-or-picture, + is toward text, - toward picture; {BUILT} pairs" in said
    made = steering.SteeringVector.load(path)
    assert (made.kind, made.positive, made.info["sides"]) == ("pairs", None, ["text", "picture"])
    assert made.info["reliable"] is True
    assert made.info["calibration"]["samples"] == 8
    assert made.layers == (3,)

    engine = steering.Engine(model, slots=4, threads=1, self_check=False)
    # Both sides of a pair are the two instructions of a probe of the same samples.
    probed = build(engine, samples[:BUILT], layers=[3], quiet=True)
    torch.testing.assert_close(made.direction, probed.direction, rtol=1e-3, atol=1e-4)
    shipped = steering.VectorStore(checkpoint() / "vectors").get("modality-preference")
    cosine = torch.cosine_similarity(made.direction[3], shipped.direction[3], dim=0)
    assert cosine > 0.95
    fresh = conflict_samples(8, 78)
    for scale, letter in ((1.0, "B"), (-1.0, "A")):  # unswapped, A is the picture's
        answers = letters(engine, fresh, steering.Steer(made, scale))
        assert answers == [letter] * len(fresh), scale

    report = (tmp_path / "report" / "report.md").read_text()
    assert "A positive scale is toward: text" in report
    assert "Yes: the pairs agree, and the direction moves answers that it was not built from both ways." in report
    assert "An answer counts for a side if it begins with the text of that side" in report
    status, _, problem = run("--sides", "text", "picture", *scored)
    assert status == 1
    assert problem.splitlines()[-1] == (
        f"helmsight: {path} already exists; --replace overwrites it, --name or --out names another file"
    )
    assert main(["vectors", "list"]) == 0


def test_without_a_score_it_says_that_nothing_is_calibrated(
    run: Run, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    out = tmp_path / "v.safetensors"
    status, said, _ = run("--out", str(out))
    assert status == 0
    assert "strength 1.0 = the published weight, NOT calibrated" in said
    assert "--score calibrates the strength with them" in caplog.text
    made = steering.SteeringVector.load(out)
    assert (made.published, made.calibrated_range, made.info["samples"]) == (1.0, None, 24)
    assert "reliable" not in made.info, "the pairs agree, and that is all that is known"
    page = (tmp_path / "report" / "report.md").read_text()
    assert "NOT calibrated" in page
    assert "The effect of the direction on answers was not measured" in page


def test_four_pairs_on_one_picture_are_too_few_and_no_model_is_loaded_for_them(
    run: Run, pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few = pairs.parent / "few.jsonl"
    few.write_text("".join(pairs.read_text().splitlines(keepends=True)[:1] * 3 + SAME_PICTURE))
    with monkeypatch.context() as patch:
        patch.setattr(steering, "load", None)
        status, _, problem = run(pairs=few)
    out = tmp_path / ".helmsight" / "vectors" / "few.safetensors"
    assert status == 1
    assert problem.splitlines()[-1] == (
        f"helmsight: No reliable direction, so {out} is not written (--force writes it anyway). There are too few different "
        "pairs: 4; at least 16 are needed. All pairs show one image; at least 4 different images are needed."
    )
    assert not out.exists()
    status, said, _ = run("--force", pairs=few)
    assert status == 0
    assert "NOT RELIABLE: There are too few different pairs" in said
    assert steering.SteeringVector.load(out).info["reliable"] is False


SAME_PICTURE = [
    json.dumps({
        side: [{"role": "user", "content": [{"type": "image", "image": "0.png"}, {"type": "text", "text": f"{way} {n}?"}]}]
        for side, way in (("toward", "Say yes"), ("away", "Say no"))
    }) + "\n"
    for n in range(3)
]  # fmt: skip


def test_pairs_that_disagree_are_refused(run: Run, pairs: Path, tmp_path: Path) -> None:
    mixed = pairs.parent / "mixed.jsonl"
    rows = [json.loads(line) for line in pairs.read_text().splitlines()]
    for row in rows[::2]:
        row["toward"], row["away"] = row["away"], row["toward"]
    mixed.write_text("".join(json.dumps(row) + "\n" for row in rows))
    status, _, problem = run(pairs=mixed)
    assert status == 1
    assert "the pairs' differences agree by 0." in problem.splitlines()[-1]
    assert not (tmp_path / ".helmsight" / "vectors" / "mixed.safetensors").exists()


@pytest.mark.parametrize(
    ("words", "status", "why"),
    [
        (("--sides", "one", "one"), 1, "--sides: both are called 'one'"),
        (("--sides", "one"), 2, "--sides"),
        (("--name", "No Name"), 1, "--name 'No Name' must match"),
        (("--model", "/nowhere"), 1, "/nowhere"),
        (("--pairs", "/nowhere.jsonl"), 1, "/nowhere.jsonl: No such file or directory"),
        (("--report", "/dev/null/x"), 1, "cannot be written to"),
        (("--out", "/proc/x.safetensors"), 1, "/proc cannot be written to"),
        (("--strengths", "1", "2"), 1, "--strengths needs --score"),
        (("--calibration-samples", "64"), 1, "--calibration-samples needs --score"),
        (("--score", "holds", "--strengths", "nan"), 1, "--strengths nan: a strength must be positive and finite"),
        (("--gate", "x.jsonl"), 1, "--pairs and --gate exclude one another"),
    ],
)
def test_what_is_wrong_is_one_sentence(
    run: Run, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], status: int, why: str
) -> None:
    monkeypatch.setattr(steering, "load", None)
    ended, _, problem = run(*words)
    assert ended == status
    assert why in problem
    assert "Traceback" not in problem


def test_ctrl_c_says_that_the_same_command_goes_on(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(steering, "load", interrupted)
    status, _, problem = run()
    assert status == 130
    assert problem.strip().splitlines()[-1] == "Stopped. Finished work is kept: run the same command again to continue."
