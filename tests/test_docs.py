"""README and docs: links lead somewhere, the site builds, and the output of readouts is explained.

`tests/first_hour` runs their blocks.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import yaml
from markdown_it import MarkdownIt

import steering
from demo.world.scenes import random_scene, render
from steering.protocol import readout
from tests.first_hour.pages import PAGES, ROOT
from tests.steering.vectors.made import dictionary

READOUTS = ROOT / "docs" / "readouts.md"


def links(page: Path) -> Iterator[str]:
    for token in MarkdownIt("commonmark").enable("table").parse(page.read_text()):
        for child in token.children or ():
            for name in ("href", "src"):
                if (target := child.attrGet(name)) is not None:
                    yield str(target)


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub and mkdocs make them."""
    found = re.findall(r"(?m)^#+ (.*)$", page.read_text())
    return {re.sub(r"[^\w -]", "", title.lower()).strip().replace(" ", "-") for title in found}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for target in links(page):
        if re.match(r"[a-z]+:", target):
            assert target.startswith(("https://", "http://127.0.0.1")), target
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), f"{target} in {page.name}"
        assert not anchor or anchor in anchors(file), f"{target} in {page.name}"


def build(root: Path, folder: Path) -> subprocess.CompletedProcess[str]:
    """Have mkdocs build the site, without `--quiet`, which would keep it from counting its warnings."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(folder)]
    return subprocess.run(command, cwd=root, check=False, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the site, without warnings, and return its folder."""
    folder = tmp_path_factory.mktemp("site")
    done = build(ROOT, folder)
    assert done.returncode == 0, done.stderr
    return folder


class Built(HTMLParser):
    """The links of a built page, and the anchors in it."""

    def __init__(self, page: Path):
        super().__init__()
        self.targets: list[str] = []
        self.places = {""}
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if value is not None and name in ("href", "src"):
                self.targets.append(value)
            elif value is not None and name in ("id", "name"):
                self.places.add(value)


def dead(folder: Path) -> list[str]:
    """Return the links of a site's pages that lead to no file of it, or to no anchor of a page."""
    pages = {page: Built(page) for page in folder.rglob("*.html")}
    found = []
    for page, built in pages.items():
        for target in built.targets:
            path, _, place = target.partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            start = folder if path.startswith("/") else page.parent
            file = (start / unquote(path).lstrip("/")).resolve() if path else page
            file = file / "index.html" if file.is_dir() else file
            there = file.is_file() and file.is_relative_to(folder)
            if not there or (file in pages and place not in pages[file].places):
                found.append(f"{target} in {page.relative_to(folder)}")
    return found


def test_no_link_of_the_site_is_dead(site: Path) -> None:
    assert dead(site) == []
    assert (site / "demo" / "reports" / "stme" / "report" / "index.html").exists(), "what lies outside docs/ is there"


def test_dead_links_are_found(tmp_path: Path) -> None:
    (tmp_path / "page").mkdir()
    (tmp_path / "plot.svg").write_text("")
    (tmp_path / "index.html").write_text('<a href="page/#here"></a><a href="page/#there"></a><a href="#"></a>')
    (tmp_path / "page" / "index.html").write_text(
        '<p id="here"><a href=".."></a><img src="../plot.svg"><img src="plot.svg"><a href="https://arxiv.org"></a>'
        '<a href="/page/"></a><a href="../../docs/"></a>'
    )
    assert sorted(dead(tmp_path)) == [
        "../../docs/ in page/index.html",
        "page/#there in index.html",
        "plot.svg in page/index.html",
    ]


def test_a_page_with_a_dead_link_is_not_built(tmp_path: Path) -> None:
    config = yaml.safe_load((ROOT / "mkdocs.yml").read_text())
    for folder in ("docs", "deploy", "demo"):
        (tmp_path / folder).mkdir()
    (tmp_path / "mkdocs.yml").write_text(yaml.safe_dump({name: config[name] for name in config if name != "nav"}))
    shutil.copy(ROOT / "deploy" / "pages.py", tmp_path / "deploy")
    (tmp_path / "demo" / "report.md").write_text("# A report\n\n![a plot](plot.svg) [back](../docs/index.md#a-page)\n")
    (tmp_path / "demo" / "plot.svg").write_text("")
    page = tmp_path / "docs" / "index.md"

    page.write_text("# A page\n\n[A report](../demo/report.md#a-report)\n")
    assert build(tmp_path, tmp_path / "site").returncode == 0
    assert dead(tmp_path / "site") == []
    assert (tmp_path / "site" / "demo" / "plot.svg").exists()
    for link in ("../demo/other.md", "../demo/report.md#another", "other.md"):
        page.write_text(f"# A page\n\n[A report]({link})\n")
        done = build(tmp_path, tmp_path / "site")
        assert done.returncode != 0, link
        assert link.removeprefix("../") in done.stderr


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Return the `diagnostics` of an answer about two pictures, by request.

    "example" asks as docs/readouts.md does, "all" for every readout with every option, "plain" without the options that
    make values null, "bare" without a text context.
    """
    engine = steering.Engine(steering.load())
    features = {"dictionary": dictionary(tmp_path_factory.mktemp("docs") / "layer1", engine.mllm.hidden_size)}
    pictures = [render(random_scene(random.Random(f"scene {seed}"), held_out=True), (84, 84)) for seed in (5, 6)]
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    parts.append({"type": "text", "text": "There are 3 shapes.", "span": "context"})
    parts.append({"type": "text", "text": "How many shapes are in picture 1?"})
    chat = [{"role": "user", "content": parts}]
    included = ["focus", "modality", "decay", "flags", "confidence", "alarm"]
    options = {"heatmaps": True, "causal": True, "discount_sinks": True}
    asked = {
        "example": steering.Request(chat, diagnose=steering.Diagnose(included, target_image=1)),
        "bare": steering.Request([{"role": "user", "content": [*parts[:2], parts[3]]}], diagnose=["modality"]),
        "plain": steering.Request(chat, diagnose=steering.Diagnose(readout.REGISTRY, features=features)),
        "all": steering.Request(
            chat, interventions=steering.Think(), baseline=True, diagnose=steering.Diagnose(readout.REGISTRY, **options)
        ),
    }
    results = engine.generate(list(asked.values()))
    return {name: result.choices[0].diagnostics for name, result in zip(asked, results, strict=True)}


def keys(said: Any, before: str = "") -> Iterator[str]:
    """Yield the keys of a JSON value that have values, by their paths, `[]` for any item of a list."""
    if isinstance(said, dict):
        for name, value in said.items():
            yield from keys(value, f"{before}.{name}" if before else name)
    elif isinstance(said, list) and said and isinstance(said[0], dict):
        for value in said:
            yield from keys(value, f"{before}[]")
    elif said is not None:
        yield before


def test_every_key_of_the_diagnostics_is_explained(answered: dict[str, Any]) -> None:
    found = {key for said in answered.values() for key in keys(said)}
    first = re.findall(r"(?m)^\| (`.*?`) \|", READOUTS.read_text())
    explained = {key for cell in first for key in re.findall(r"`([^`]+)`", cell)}
    patterns = {key: re.compile(re.escape(key).replace(r"\*", r"\w+")) for key in explained}
    assert {key for key in found if not any(one.fullmatch(key) for one in patterns.values())} == set()
    tiled = {"images[].overview", "patches[].overview", "tam[].overview"}  # no picture of this model is
    large = {"states.file"}  # its states are not
    assert {key for key, one in patterns.items() if not any(map(one.fullmatch, found))} == tiled | large


def test_the_answer_that_is_shown_is_what_is_answered(answered: dict[str, Any]) -> None:
    (shown,) = (
        token.content for token in MarkdownIt("commonmark").parse(READOUTS.read_text()) if token.type == "code_block"
    )
    said = json.loads(json.dumps(answered["example"]), parse_float=lambda number: round(float(number), 4))
    assert nearly(json.loads(re.sub(r" // .*", "", shown)), said)


def nearly(shown: Any, said: Any) -> bool:
    """Return whether values are the same but for the last digit of numbers with four."""
    if isinstance(shown, dict):
        return shown.keys() == said.keys() and all(nearly(shown[name], said[name]) for name in shown)
    if isinstance(shown, list):
        return len(shown) == len(said) and all(map(nearly, shown, said))
    return abs(shown - said) < 1.5e-4 if isinstance(shown, float) else shown == said


def test_the_shares_of_a_context_as_a_line_and_as_a_part_are_the_pages() -> None:
    page = re.sub(r"\s+", " ", (ROOT / "docs" / "readouts.md").read_text())
    written = re.search(r"a `context_share` of (\.\d+) as a line and (\.\d+) as a part", page)
    assert written is not None
    claim, question = "The green object is a heart.", "What is the green object?"
    shown = {"type": "image", "image": render(random_scene(random.Random("scene 5"), held_out=True), (336, 336))}
    line = [{"type": "text", "text": f"Text context: {claim}\n{question}"}]
    part = [{"type": "text", "text": claim, "span": "context"}, {"type": "text", "text": f"\n{question}"}]
    requests = [
        steering.Request(
            [{"role": "user", "content": [shown, *parts]}],
            steering.Sampling(max_tokens=24),
            diagnose=steering.Diagnose(["modality"]),
        )
        for parts in (line, part)
    ]
    shares = []
    for result in steering.Engine(steering.load(), slots=2).generate(requests):
        diagnostics = result.choices[0].diagnostics
        assert diagnostics is not None
        shares.append(f"{diagnostics['modality']['context_share']:.3f}".removeprefix("0"))
    assert shares == list(written.groups())


def test_the_readme_counts_the_published_configurations_as_their_page_does() -> None:
    rows = re.findall(r"^\| `\S+/\S+` \|.*\| (served|refused)", (ROOT / "docs" / "models.md").read_text(), re.MULTILINE)
    served, refused = rows.count("served"), rows.count("refused")
    counts = f"{len(rows)} repositories of the hub: [{served} load, {refused} are refused](docs/models.md)"
    assert counts in (ROOT / "README.md").read_text()
