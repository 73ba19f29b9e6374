"""The logit lens against plain transformers, and its margins by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForImageTextToText, AutoTokenizer

import steering
from probes.conflicts.asking import Condition
from probes.conflicts.samples import Side
from probes.mc2 import lens as module
from probes.mc2 import report_conditions
from probes.mc2.evaluate import Candidate
from probes.mc2.lens import Margin, lens
from probes.reporting.report import Report
from tests import families
from tests.probes.conftest import make_samples
from tests.probes.mc2.pages import tables
from tests.probes.vector.test_build import plainly


def test_the_lens_equals_that_of_plain_transformers(root: Path, tiny: steering.Engine) -> None:
    folder, samples = families.checkpoint("qwen2_vl", root), make_samples(3)
    margin_found = lens(tiny, samples, {("instruct", "text"): Condition("text")}, quiet=True)["instruct_text"]
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    a, b = (AutoTokenizer.from_pretrained(folder).encode(letter)[0] for letter in "AB")
    expected = []
    for swapped in (False, True):
        states = plainly(folder).states([swapped] * 3, "text", "paper", -1)
        with torch.inference_mode():
            logits = model.lm_head(model.get_decoder().norm(states))
        text, vision = (a, b) if swapped else (b, a)
        expected.append(torch.stack([logits[..., text], logits[..., vision]]))
    text, vision = torch.stack(expected).mean((0, 2))
    assert margin_found.n == 6
    assert margin_found.preferred == pytest.approx(text.tolist(), abs=1e-3)
    assert margin_found.other == pytest.approx(vision.tolist(), abs=1e-3)
    assert margin_found.margin == pytest.approx((text - vision).tolist(), abs=1e-3)


def test_steering_changes_the_lens_from_its_layer_on(tiny: steering.Engine, vector: steering.SteeringVector) -> None:
    samples, side = make_samples(2), Candidate(vector, 20.0)
    conditions: dict[tuple[str, Side | None], Condition] = {
        ("instruct", "text"): Condition("plain"),  # as a plain one that has a side
        ("steer", "text"): Condition("plain", side.toward("text")),
    }
    margins = lens(tiny, samples, conditions, quiet=True)
    plain, steered = margins["instruct_text"].margin, margins["text"].margin
    assert steered[0] == pytest.approx(plain[0], abs=1e-4)  # the vector's layer is 1
    assert min(abs(s - p) for s, p in zip(steered[1:], plain[1:], strict=True)) > 1e-3


def test_plain_questions_are_parted_by_what_the_last_layer_prefers() -> None:
    # Two samples in both orders; two layers.
    vision = np.array([[[0.0, 3], [0, 1]], [[0, 2], [0, -1]]])
    text = np.array([[[0.0, 1], [0, 2]], [[1, 1], [0, 4]]])
    margins = dict(module._margins({("plain", None): np.stack([vision, text])}))
    assert list(margins) == ["plain_vision", "plain_text"]
    assert (margins["plain_vision"].margin, margins["plain_vision"].n) == ([-0.5, 1.5], 2)
    assert (margins["plain_text"].preferred, margins["plain_text"].other) == ([0, 3], [0, 0])
    assert margins["plain_text"].margin == [0, 3]


def test_the_interval_is_of_the_mean_over_questions() -> None:
    # Twelve samples of which both orders count, and twelve of which one does.
    differences = np.zeros((24, 2, 1))
    differences[:12], differences[12:, 0], differences[12:, 1] = 4.0, 1.0, -1.0
    chosen = np.array([[True, True]] * 12 + [[True, False]] * 12)
    margin_found = module._margin(differences, np.zeros_like(differences), chosen)
    drawn = np.random.default_rng(5).binomial(24, 0.5, 20000)  # of each resample, how many samples count twice
    expected = np.quantile((drawn * 8 + (24 - drawn)) / (24 + drawn), (0.025, 0.975))
    assert margin_found.margin == pytest.approx([3.0])
    assert margin_found.intervals[0] == pytest.approx(expected, abs=0.12)


def margin(values: list[float], low: list[float]) -> Margin:
    return Margin(values, [0.0] * len(values), values, [(bound, bound + 1) for bound in low], 4)


@pytest.mark.parametrize(
    ("values", "low", "layer"),
    [
        ([0.0, 0.1, 0.4, 4.0], [-0.1, 0.05, 0.3, 3.5], 2),  # 0.1 is less than a twentieth
        ([0.0, 1.0, -0.2, 4.0], [-0.1, 0.9, -0.5, 3.5], 3),  # it went under again
        ([0.0, 1.0, 2.0, 4.0], [-0.1, -0.9, 1.5, -3.5], None),
    ],
)
def test_a_margin_surfaces_where_it_stays_above_zero(values: list[float], low: list[float], layer: int | None) -> None:
    assert margin(values, low).surfaces == layer


def test_the_page_of_the_lens(tmp_path: Path) -> None:
    margins: dict[str, Any] = {
        "plain_text": margin([0.0, 2.0], [-1.0, 1.5]).to_json(), "vision": margin([0.0, 3.0], [0.0, 2.5]).to_json(),
    }  # fmt: skip
    page = Report("Preference")
    report_conditions.lens(page, margins, [0])
    layers, ends = tables(page)
    assert layers["1"] == {
        "layer": "1", "plain, preferring text": "2.000 (1.500 to 2.500)",
        "steered toward vision": "3.000 (2.500 to 3.500)",
    }  # fmt: skip
    assert ends["steered toward vision"]["surfaces at layer"] == "1"
    page.write(tmp_path)
    assert "steered" in (tmp_path / "lens.svg").read_text()


def test_a_tokenizer_without_the_letter_is_refused(tiny: steering.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(tiny.mllm.tokenizer), "encode", lambda *_, **__: [1, 2])
    with pytest.raises(ValueError, match="no single token for the letter A"):
        lens(tiny, make_samples(1), {("plain", None): Condition()}, quiet=True)
