"""`helmsight vectors build --gate`: from examples of when and when not to a condition that a server opens and closes by."""

from __future__ import annotations

import itertools
import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

import steering
from probes.gate.build import Split, choose, states_of, threshold, worth
from probes.gate.file import different, load
from server.app import create_app
from server.settings import Settings
from steering.auto.gate import measured
from tests.first_hour.pages import ROOT, blocks
from tests.probes.pairs.writing import Run, building, write
from tests.server.conftest import ask
from tests.server.fakes import checkpoint

SHAPES = ("square", "circle", "star", "triangle", "heart", "diamond")
WHEN = ("What colour is the {}?", "Tell me the colour of the {}.", "Which colour does the {} have?", "Is the {} red?")
NOT = ("How many {}s are there?", "Where is the {}?", "Count the {}s.", "Is there a {}?")


def examples() -> list[dict[str, Any]]:
    """Return 24 prompts about colours and 24 about anything else."""
    return [
        {key: wording.format(shape)}
        for key, wordings in (("when", WHEN), ("not", NOT))
        for wording, shape in itertools.product(wordings, SHAPES)
    ]


@pytest.fixture(scope="module")
def model() -> steering.MLLM:
    return steering.load(checkpoint(), device="cpu")


@pytest.fixture
def run(
    model: steering.MLLM, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run the command on these examples, in a home of its own, on a model that is loaded once."""
    run = building("--gate", model, tmp_path, capsys, monkeypatch)

    def of_rows(rows: list[dict[str, Any]], *words: str) -> tuple[int, str, str]:
        return run(write(tmp_path, rows).rename(tmp_path / "colours.jsonl"), *words)

    return of_rows


def test_layer_measure_and_threshold_by_hand() -> None:
    holds = np.array([True, True, True, False, False, False])
    blind = np.array([1.0, 5, 3, 4, 2, 6])
    apart = np.array([9.0, 5, 7, 1, 3, 2])
    wider = np.array([90.0, 89, 91, 1, 3, 2])
    values = {"cosine": np.stack([blind, apart], 1), "projection": np.stack([wider, blind], 1)}
    assert choose(values, holds, None) == {"layer": 0, "measure": "projection", "threshold": 46.0}
    assert choose(values, holds, [1]) == {"layer": 1, "measure": "cosine", "threshold": 4.0}
    # A bound between 1 and 3 and one between 3.2 and 4 each cost one example of one side; the first gap is the wider.
    assert threshold(np.array([3.0, 4.0, 3.2, 1.0]), np.array([True, True, False, False])) == 2.0
    found = worth(np.array([1.0, 3.0, 2.0, 0.0]), np.array([True, True, False, False]), {"threshold": 2.5})
    assert found["auroc"][0] == 0.75  # 1 > 0, 3 > 2, 3 > 0, but not 1 > 2
    assert (found["open_when"][0], found["open_not"][0], found["examples"]) == (0.5, 0.0, [2, 2])


def test_no_example_is_used_twice(tmp_path: Path) -> None:
    path = tmp_path / "examples.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in [*examples(), examples()[0]]))
    read = different(load(path), path)
    assert len(read) == 48
    split = Split.of(read, 3)
    assert sorted([*split.direction, *split.choice, *split.report]) == list(range(48))
    for part, size in ((split.direction, 12), (split.choice, 6), (split.report, 6)):
        assert [sum(read[i].holds is side for i in part) for side in (True, False)] == [size, size]


def test_examples_become_a_condition_that_opens_and_closes_a_gate(
    run: Run, model: steering.MLLM, tmp_path: Path
) -> None:
    (block,) = [block for block in blocks(ROOT / "docs" / "conditions.md") if block.language == "sh"]
    name, *words = shlex.split(block.text)
    assert (name, words[:4]) == ("helmsight", ["vectors", "build", "--gate", "colours.jsonl"])
    status, said, problem = run(examples(), "--seed", "3", *words[4:])
    assert status == 0, problem
    path = tmp_path / ".helmsight" / "vectors" / "about-colours.safetensors"
    made = steering.SteeringVector.load(path)
    gate = made.info["gate"]
    assert (made.kind, made.positive, made.layers) == ("condition", None, (gate["layer"],))
    assert f"layer {gate['layer']}, {gate['measure']} above" in said
    assert "AUROC" in said
    page = (tmp_path / "report" / "report.md").read_text()
    assert "AUROC" in page
    assert f"| {gate['layer']} | {gate['measure']} |" in page

    engine = steering.Engine(model, slots=4, threads=1, self_check=False)
    read = load(tmp_path / "colours.jsonl")
    split, states = Split.of(read, 3), states_of(engine, read, quiet=True)
    sides = [
        np.mean([states[i].numpy() for i in split.direction if read[i].holds is side], axis=0) for side in (True, False)
    ]
    torch.testing.assert_close(made.direction, torch.from_numpy(sides[0] - sides[1]).float())
    # The reported examples, measured by the gate itself as a request measures them.
    term = steering.GateTerm(made, gate["layer"], gate["threshold"], gate["measure"])
    opened: dict[bool, list[bool]] = {True: [], False: []}
    for number in split.report:
        request = steering.Request(read[number].prompt.chat(), steering.Sampling(max_tokens=1))
        (result,) = engine.generate([measured(request)])
        opened[read[number].holds].append(term.holds(term.value(result.choices[0].states)))
    assert gate["open_when"][0] == np.mean(opened[True])
    assert gate["open_not"][0] == np.mean(opened[False])
    assert gate["examples"] == [6, 6]
    assert gate["open_when"][0] > gate["open_not"][0]

    engine.start()
    client = create_app(Settings(vectors=(str(path.parent),), journal="off"), engine=engine).test_client()

    def opens(question: str) -> bool:
        steered = {"toward": "vision", "when": {"vector": "about-colours"}}
        answer = ask(client, question, steering=steered)
        assert answer.status_code == 200, answer.text
        (report,) = answer.json["choices"][0]["applied"]["steering"]
        (held,) = report["gate"]["terms"]
        assert (held["layer"], held["measure"], held["above"]) == (gate["layer"], gate["measure"], gate["threshold"])
        return bool(report["gate"]["open"])

    fresh = ("cross", "hexagon", "ring", "square")
    shares = [
        np.mean([opens(wording.format(shape)) for wording in side[:2] for shape in fresh]) for side in (WHEN, NOT)
    ]
    assert shares[0] > shares[1] + 0.5
    refused = ask(
        client,
        "hm",
        steering={"when": {"vector": "about-colours", "layer": (gate["layer"] + 1) % made.direction.shape[0]}},
    )
    assert refused.json["error"]["param"] == "steering.when.above"
    engine.stop()


def test_the_examples_of_the_page_build_a_condition(run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four examples of a kind are reported on, which even where all are told apart shows little more than chance."""
    monkeypatch.chdir(tmp_path)
    page = blocks(ROOT / "docs" / "conditions.md")
    (writes,) = (block.text for block in page if block.language == "python")
    (builds,) = (shlex.split(block.text) for block in page if block.language == "sh")
    exec(writes, {})
    rows = [json.loads(line) for line in Path("colours.jsonl").read_text().splitlines()]
    assert len(rows) == 32
    status, printed, problem = run(rows, *builds[5:])
    assert status == 0, problem
    gate = steering.SteeringVector.load(tmp_path / ".helmsight" / "vectors" / "about-colours.safetensors").info["gate"]
    assert gate["examples"] == [4, 4]
    for share, kind in ((gate["open_when"], "when"), (gate["open_not"], "not")):
        assert "{:.0%} ({:.0%} to {:.0%}) of".format(*share) + f' "{kind}"' in printed
    if gate["auroc"][0] == 1:
        assert gate["auroc"][1:] == pytest.approx([4 / (4 + 1.959964**2), 1.0])


def test_a_logistic_probe_becomes_a_condition(run: Run, model: steering.MLLM, tmp_path: Path) -> None:
    status, printed, problem = run(examples(), "--seed", "3", "--learner", "probe")
    assert status == 0, problem
    made = steering.SteeringVector.load(tmp_path / ".helmsight" / "vectors" / "colours.safetensors")
    gate = made.info["gate"]
    layer = gate["layer"]
    assert gate["measure"] == "probe"
    assert f"layer {layer}, probe above" in printed
    assert "logistic regression" in (tmp_path / "report" / "report.md").read_text()
    engine = steering.Engine(model, slots=4, threads=1, self_check=False)
    read = load(tmp_path / "colours.jsonl")
    split, states = Split.of(read, 3), states_of(engine, read, quiet=True)[:, layer].numpy()
    holds = np.array([example.holds for example in read])
    rows = states[split.direction]
    middle, size = rows.mean(0), np.sqrt(np.mean((rows - rows.mean(0)) ** 2))
    scaled, signs = (rows - middle) / size, np.where(holds[split.direction], 1, -1)

    def loss(free: np.ndarray) -> tuple[float, np.ndarray]:
        margins = signs * (scaled @ free[:-1] + free[-1])
        pull = -signs / (1 + np.exp(margins))
        value = np.logaddexp(0, -margins).sum() + free[:-1] @ free[:-1] / 2
        return float(value), np.append(scaled.T @ pull + free[:-1], pull.sum())

    best = minimize(
        loss, np.zeros(rows.shape[1] + 1), jac=True, method="L-BFGS-B", options={"ftol": 1e-15, "gtol": 1e-8}
    )
    chances = 1 / (1 + np.exp(-((states - middle) / size @ best.x[:-1] + best.x[-1])))
    term = steering.GateTerm(made, layer, gate["threshold"], "probe")
    opened: dict[bool, list[bool]] = {True: [], False: []}
    for number in split.report:
        request = steering.Request(read[number].prompt.chat(), steering.Sampling(max_tokens=1))
        (result,) = engine.generate([measured(request)])
        value = term.value(result.choices[0].states)
        assert value == pytest.approx(chances[number], abs=1e-3)
        opened[holds[number]].append(term.holds(value))
    assert gate["open_when"][0] == np.mean(opened[True])
    assert gate["open_not"][0] == np.mean(opened[False])
    other = steering.SteeringVector.from_bytes(made.to_bytes())
    assert other.identity == made.identity
    other.info["gate"]["bias"][layer] += 1
    assert steering.SteeringVector.from_bytes(other.to_bytes()).identity != made.identity


def test_examples_that_nothing_tells_apart_are_refused(run: Run, tmp_path: Path) -> None:
    rows = [{"when" if number % 2 else "not": f"Say {number * 7919 % 1000}."} for number in range(48)]
    status, said, problem = run(rows)
    path = tmp_path / ".helmsight" / "vectors" / "colours.safetensors"
    assert status == 1
    assert "does not tell other examples apart: AUROC" in problem
    assert not path.exists()
    assert "does not tell other examples apart" in (tmp_path / "report" / "report.md").read_text()
    status, said, _ = run(rows, "--force")
    assert status == 0
    assert "NOT RELIABLE" in said
    assert steering.SteeringVector.load(path).info["reliable"] is False


@pytest.mark.parametrize(
    ("rows", "words", "why"),
    [
        (examples()[:12] + examples()[24:], (), 'There are too few different examples under "when": 12'),
        ([{"when": "a"}, {"not": "a"}] * 8, (), 'a prompt stands under "when" and under "not"'),
        ([{"when": "a", "not": "b"}], (), "line 1: it must be an object with one of the keys"),
        ([{"toward": "a"}], (), "line 1: it must be an object with one of the keys"),
        ([{"when": []}], (), "line 1: 'when' must be a list of messages"),
        (examples()[:2] + examples()[24:], ("--force",), "at least 4 different examples"),
        (examples(), ("--score", "holds"), "--gate chooses its threshold by itself"),
        (examples(), ("--learner", "lat"), "needs pairs; a condition of --gate has mean or probe"),
        (examples(), ("--pairs", "x.jsonl"), "--pairs and --gate exclude one another"),
    ],
)
def test_what_is_wrong_is_said_before_a_model_is_loaded(
    run: Run, monkeypatch: pytest.MonkeyPatch, rows: list[dict[str, Any]], words: tuple[str, ...], why: str
) -> None:
    monkeypatch.setattr(steering, "load", None)
    status, _, problem = run(rows, *words)
    assert status == 1
    assert why in problem
