"""The page of the steering vectors, and that of the model, against what the server says."""

from __future__ import annotations

import shlex
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flask import Flask

import steering
from probes.pairs.file import load
from server.app import create_app
from server.cli import main
from server.settings import Settings
from tests.server.fakes import FakeEngine, checkpoint
from tests.server.web.browser import Visit

Open = Callable[..., Visit]


@pytest.fixture
def folder(tmp_path: Path, engine: steering.Engine) -> Path:
    """Return a folder of three vectors: one may be deleted, one is of another model, one is damaged."""
    vector = steering.VectorStore(checkpoint() / "vectors").get("modality-preference")
    (-0.5 * vector).named("half").save(tmp_path / "half.safetensors")
    (tmp_path / "broken.safetensors").write_bytes(b"no vector")
    return tmp_path


@pytest.fixture
def opened(engine: steering.Engine, folder: Path, live: Callable[[Flask], str], visit: Callable[..., Visit]) -> Open:
    def begin(path: str, **settings: Any) -> Visit:
        app = create_app(Settings(vectors=(str(folder),), slots=4, journal="off", **settings), engine=engine)  # type: ignore[arg-type]
        found = visit()
        found.page.goto(live(app) + path)
        found.page.locator("dl").first.wait_for()
        return found

    return begin


BROKEN = """(selector) => [...document.querySelectorAll(selector)].map((element) => {
    const range = document.createRange();
    range.selectNodeContents(element);
    const tops = new Set([...range.getClientRects()].map(({ top }) => Math.round(top)));
    return tops.size > 1 ? element.innerText : null;
}).filter((text) => text !== null)"""


def broken(page: Any, selector: str) -> list[str]:
    """Return the texts of elements that take more than one line."""
    return page.evaluate(BROKEN, selector)  # type: ignore[no-any-return]


def card(page: Any, name: str) -> Any:
    return page.locator("#vectors section", has=page.get_by_role("heading", name=name, exact=True))


def test_vectors_are_listed_with_what_they_say_of_themselves(
    opened: Open, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = opened("/vectors").page
    assert page.locator("#vectors h2").all_inner_texts() == ["broken", "half", "modality-preference"]
    rows = dict(
        row.split("\n") for row in card(page, "modality-preference").locator("dl.numbers div").all_inner_texts()
    )
    assert rows == {
        "kind": "modality-preference",
        "+ is toward": "the text",
        "layers": "3",
        "strength 1 in published units": "0.500",
        "calibrated": "from 0.3 to 1",
        "made from": "250 samples",
        "pairs agree": "yes",
    }
    assert broken(page, "dl.numbers dd") == []
    assert "+ is toward\nthe image" in card(page, "half").inner_text()  # negated
    assert "damaged" in card(page, "broken").inner_text()
    assert card(page, "half").locator(".chart").count() == 0  # what was measured of the whole is not the half's
    assert page.locator("#upload").is_hidden()
    assert "--allow-uploads" in page.locator("#upload-note").inner_text()
    command = page.get_by_label("Command that builds a vector from pairs").inner_text()
    row = page.get_by_label("A line of a file of pairs").inner_text()
    (folder / "pairs.jsonl").write_text(row)
    (pair,) = load(folder / "pairs.jsonl")
    assert pair.toward.chat() != pair.away.chat()
    words = shlex.split(command.replace("pairs.jsonl", str(folder / "pairs.jsonl")))
    monkeypatch.setenv("HOME", str(folder))
    assert words[0] == "helmsight"
    assert main(words[1:]) == 1  # one pair is too few, which is all that is wrong with it
    assert "There are too few different pairs: 1" in capsys.readouterr().err


def test_a_vector_from_pairs_tells_its_sides_and_what_strengths_do(opened: Open, folder: Path) -> None:
    vector = steering.VectorStore(checkpoint() / "vectors").get("modality-preference")
    point = {"n": 12, "toward": 0.75, "away": 0.25, "others": 0.0}
    curve = [
        {
            "strength": s,
            "toward": point | {"toward": s},
            "away": point | {"toward": 0.1, "away": 0.8, "others": 0.1},
            "repetition": 0.0,
        }
        for s in (0.5, 1.0)
    ]
    calibration = {"range": [0.5, 1.0], "baseline": {"plain": point, "repetition": 0.0}, "curve": curve}
    info = {"sides": ["polite", "rude"], "samples": 24, "calibration": calibration}
    replace(vector, name="manners", kind="pairs", info=info).save(folder / "manners.safetensors")
    said = card(opened("/vectors").page, "manners")
    said.locator(".chart .line").first.wait_for()
    for words in ("+ is toward\npolite", "− is toward\nrude", "made from\n24 pairs", "calibrated\nfrom 0.5 to 1"):
        assert words in said.inner_text()
    assert "toward rude, answers that are" in said.inner_text()
    assert said.locator(".chart").count() == 2


def test_the_curve_is_the_vectors_own(opened: Open) -> None:
    page = opened("/vectors").page
    info = steering.VectorStore(checkpoint() / "vectors").get("modality-preference").info["calibration"]
    points = sorted(info["curve"], key=lambda point: point["strength"])
    expected = [info["baseline"]["plain"]["s_vision"], *(point["vision"]["s_vision"] for point in points)]
    chart = card(page, "modality-preference").locator(".chart").first
    line = chart.locator(".line").first
    line.wait_for()
    path = line.locator("path").get_attribute("d")
    heights = [float(part.split(",")[-1].split()[-1]) for part in path.replace("M", "L").split("L") if part.strip()]
    assert len(heights) == len(expected)
    top, bottom = heights[expected.index(max(expected))], heights[expected.index(min(expected))]
    for y, value in zip(heights, expected, strict=True):
        share = (value - min(expected)) / (max(expected) - min(expected))
        assert (bottom - y) / (bottom - top) == pytest.approx(share, abs=0.02)


def test_a_vector_is_fetched_uploaded_and_deleted(opened: Open, folder: Path) -> None:
    found = opened("/vectors", allow_uploads=True)
    found.expected = ("403", "400")
    page = found.page
    page.on("dialog", lambda dialog: dialog.accept())
    with page.expect_download() as caught:
        card(page, "half").get_by_role("button", name="Download").click()
    assert Path(caught.value.path()).read_bytes() == (folder / "half.safetensors").read_bytes()
    page.locator("#file").set_input_files(folder / "half.safetensors")
    page.locator("#name").fill("third")
    page.locator("#upload button").click()
    page.get_by_text("third is there.").wait_for()
    card(page, "third").wait_for()
    assert steering.SteeringVector.load(folder / "third.safetensors").name == "third"
    card(page, "third").get_by_role("button", name="Delete").click()
    card(page, "third").wait_for(state="detached")
    assert not (folder / "third.safetensors").exists()
    card(page, "modality-preference").get_by_role("button", name="Delete").click()
    page.locator("#problem", has_text="belongs to the model").wait_for()
    page.locator("#file").set_input_files({"name": "x.safetensors", "mimeType": "", "buffer": b"nothing"})
    page.locator("#upload button").click()
    page.locator("#problem:not(:has-text('belongs'))").wait_for()


def test_the_model_is_told_as_the_server_says(opened: Open, engine: steering.Engine) -> None:
    page = opened("/model").page
    assert page.locator("h1").inner_text() == "helmsight-demo"
    text = page.locator("main").inner_text()
    for said in (
        "Qwen2VLForConditionalGeneration", "8 layers of 192", "4 decode steps", "equal within 0.001",
        "7,092 tokens of 128 prompts", "5.5 % of right and 9.1 % of wrong answers", "qwen2_5_vl",
    ):  # fmt: skip
        assert said in text, said
    limits = dict(
        row.split("\n")
        for row in page.locator("section", has_text="Limits of a request").locator("dl div").all_inner_texts()
    )
    slots = int(engine.stats()["slots"])
    assert (limits["slots"], limits["image bytes"], limits["strength"]) == (str(slots), "16 MiB", "4")
    rows = page.locator("tbody tr").all_inner_texts()
    assert "SAGE See\talpha\t0.1\tfrom 0 to 1" in rows
    assert "e+" not in "".join(rows)  # a bound that only a float has is none
    assert broken(page, "td .whole, td .range") == []
    assert page.locator("td .whole").first.inner_text() == "built-in"


def test_an_engine_that_tells_nothing_of_itself_has_a_page_all_the_same(
    visit: Callable[..., Visit], live: Callable[[Flask], str]
) -> None:
    page = visit().page
    page.goto(live(create_app(Settings(journal="off"), engine=FakeEngine())) + "/model")  # type: ignore[arg-type]
    page.get_by_text("This engine reports no self-check.").wait_for()
    assert page.get_by_text("not measured: helmsight probe --calibrate-flags").count() == 1
