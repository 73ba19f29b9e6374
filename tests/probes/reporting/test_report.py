"""Reports: cells by hand, text that tries to break out, pages that stand alone, files that are whole or not there."""

from __future__ import annotations

import base64
import json
import os
from html.parser import HTMLParser
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure

from probes.reporting.report import Report

CSP = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"


class Page(HTMLParser):
    """A parser that records a page as a browser sees it: start tags with attributes, the cells' texts, the whole text."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.tables: list[list[list[str]]] = []
        self.words = ""
        self._open: list[str] = []
        self.around_tables: list[tuple[str, ...]] = []
        self.feed((folder / "report.html").read_text(encoding="utf-8"))

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
            self.around_tables.append(tuple(dict(attributes).get("class") or "" for _, attributes in self.tags[-2:-1]))
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if tag not in ("meta", "img", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words += data
        if self._open and self._open[-1] in ("td", "th"):
            self.tables[-1][-1][-1] += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]


def line(height: float = 1.0) -> Figure:
    """Return a figure whose SVG would hold ids and dates (clip paths, markers)."""
    figure = Figure(layout="constrained")
    axes = figure.add_subplot()
    axes.plot([0, 1], [0, height], marker="o", label="a line")
    axes.set(xlabel="dose", ylabel="share")
    figure.legend(loc="outside lower center")
    return figure


def svg(folder: Path, figure: Figure) -> bytes:
    report = Report("One plot")
    report.plot("plot", figure, "A plot")
    report.write(folder)
    return (folder / "plot.svg").read_bytes()


def test_markdown_word_for_word() -> None:
    report = Report("What the vector\ndoes")
    report.text("Two things:\n\n- one\n- two\n")
    report.heading("Results")
    report.table(
        ["condition", "share", "samples", "reliable", "mixed", "kept"],
        [
            ["plain", 0.48, 400, True, 1, True],
            ["toward vision", None, 12, False, "2", False],
            ["random", -0.00001, np.int64(3), np.bool_(True), None, None],
            ["single", np.float32(0.5), None, None, float("nan"), True],
        ],
    )
    report.heading("Below", level=3)
    report.plot("by-dose", line(), "Share by dose")
    assert report.markdown() == (
        "# What the vector does\n\n"
        "Two things:\n\n- one\n- two\n\n"
        "## Results\n\n"
        "| condition | share | samples | reliable | mixed | kept |\n"
        "| --- | ---: | ---: | --- | --- | --- |\n"
        "| plain | 0.480 | 400 | yes | 1 | yes |\n"
        "| toward vision | - | 12 | no | 2 | no |\n"
        "| random | 0.000 | 3 | yes | - | - |\n"
        "| single | 0.500 | - | - | nan | yes |\n\n"
        "### Below\n\n"
        "![Share by dose](by-dose.svg)\n"
    )


def test_the_files_are_the_markdown_the_plots_the_page_and_the_data(tmp_path: Path) -> None:
    report = Report("Größe")
    report.plot("a", line(1), "First")
    report.plot("b", line(2), "Second")
    report.write(tmp_path / "new" / "folder")
    assert {path.name for path in (tmp_path / "new" / "folder").iterdir()} == {
        "a.svg",
        "b.svg",
        "report.md",
        "report.html",
    }
    report.write(tmp_path, {"shares": [0.5, None], "name": "Größe"})
    assert (tmp_path / "report.md").read_text(encoding="utf-8") == report.markdown()
    text = (tmp_path / "report.json").read_text(encoding="utf-8")
    assert json.loads(text) == {"shares": [0.5, None], "name": "Größe"}
    assert text.startswith('{\n  "shares": [\n    0.5,')


def test_the_page_shows_what_the_markdown_says(tmp_path: Path) -> None:
    report = Report("Shares & doses")
    report.text("Some **strong** words.\n\n- an item")
    report.table(["name", "share"], [["plain", 0.5]])
    report.write(tmp_path)
    page = Page(tmp_path)
    tags = [tag for tag, _ in page.tags]
    assert {"h1", "strong", "li", "table"} <= set(tags)
    assert page.tables == [[["name", "share"], ["plain", "0.500"]]]
    assert [cell.get("style") for cell in page.all("th")] == [None, "text-align:right"]
    assert page.all("html") == [{"lang": "en"}]
    assert "<title>Shares &amp; doses</title>" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_a_wide_table_scrolls_within_the_page(tmp_path: Path) -> None:
    report = Report("Wide")
    report.table([f"column {index}" for index in range(40)], [])
    report.write(tmp_path)
    assert Page(tmp_path).around_tables == [("wide",)]
    assert ".wide { display: block; overflow-x: auto" in (tmp_path / "report.html").read_text(encoding="utf-8")


def test_the_page_stands_alone_whatever_the_text_refers_to(tmp_path: Path) -> None:
    report = Report("Title </title><script src=https://evil.example/t.js></script>")
    report.text("A [link](https://evil.example/a), <https://evil.example/b>, [c]\n\n[c]: https://evil.example/c")
    report.text(
        '![picture](https://evil.example/p.png "title") ![other](other.svg) ![inline](data:image/png;base64,AAAA)'
    )
    report.text(
        '<img src="https://evil.example/i.png" onerror="alert(1)">\n\n<style>@import "//evil.example/s";</style>'
    )
    report.text("[x](javascript:alert(1)) ![y](javascript:alert(1))")
    report.heading("<iframe src='//evil.example'>")
    report.plot("mine", line(), "Mine")
    report.write(tmp_path)
    page = Page(tmp_path)
    (csp,) = [meta["content"] for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    assert csp == CSP
    assert not {"script", "link", "iframe", "a", "object", "base"} & {tag for tag, _ in page.tags}
    assert len(page.all("style")) == 1
    (image,) = page.all("img")
    values = [value or "" for _, attributes in page.tags for value in attributes.values()]
    assert [value for value in values if "//" in value.replace(image["src"] or "", "")] == []
    assert not any(name.startswith("on") for _, attributes in page.tags for name in attributes)
    assert "url(" not in (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "<script src=https://evil.example/t.js>" in page.words, "what is not obeyed is shown"


def test_every_plot_is_in_the_page_as_it_is_in_its_file(tmp_path: Path) -> None:
    report = Report("Plots")
    captions = {"first": "One", "second-2": 'a ] b [ c *d* `e` <i>f</i> &amp; "g" \\] _h_ | i'}
    for height, (name, caption) in enumerate(captions.items(), start=1):
        report.plot(name, line(height), caption)
    report.write(tmp_path)
    page = Page(tmp_path)
    images = page.all("img")
    assert [image["alt"] for image in images] == list(captions.values())
    for name, image in zip(captions, images, strict=True):
        kind, data = (image["src"] or "").split(",")
        assert kind == "data:image/svg+xml;base64"
        assert base64.b64decode(data) == (tmp_path / f"{name}.svg").read_bytes()
        assert ElementTree.fromstring(base64.b64decode(data)).tag.endswith("svg")
        assert captions[name] in page.words, "a caption is to be seen, too"
    assert images[0]["src"] != images[1]["src"]


@pytest.mark.parametrize(
    "cell",
    [
        "<script>alert(1)</script>",
        "</td></tr></table><h1>out</h1>",
        "a | b || c",
        r"a \| b",
        r"a \\| b",
        "|",
        "\\",
        "ends in \\",
        "one\ntwo",
        "one\r\n\r\ntwo",
        "one\u2028two\x0bthree",
        "| --- |",
        "```",
        "` | `",
        "# no heading",
        '"><img src=x onerror=alert(1)>',
        "",
    ],
)
@pytest.mark.parametrize("place", ["head", "body"])
def test_no_cell_breaks_its_table_or_becomes_html(cell: str, place: str, tmp_path: Path) -> None:
    rows = [["before", "name", "after"], ["x", "y", "z"]]
    rows[place == "body"][1] = cell
    report = Report("Hostile")
    report.table(rows[0], [rows[1], ["last", "row", "here"]])
    report.text("the end")
    report.write(tmp_path)
    page = Page(tmp_path)
    (table,) = page.tables
    assert [len(row) for row in table] == [3, 3, 3]
    assert [table[0][0], table[0][2], table[1][0], table[1][2]] == ["before", "after", rows[1][0], rows[1][2]]
    assert table[2] == ["last", "row", "here"]
    assert not {"script", "img"} & {tag for tag, _ in page.tags}
    assert len(page.all("h1")) == 1
    if "\\" not in cell and "`" not in cell:  # which mean something in Markdown
        assert table[place == "body"][1] == " ".join(cell.splitlines())


def test_a_pipe_and_the_backslashes_before_it_are_shown(tmp_path: Path) -> None:
    report = Report("Backslashes")
    report.table(["a"], [[r"x \| y"]])
    report.write(tmp_path)
    assert Page(tmp_path).tables == [[["a"], [r"x \| y"]]]


def test_the_same_figure_is_the_same_bytes(tmp_path: Path) -> None:
    figure = line()
    first = svg(tmp_path, figure)
    assert svg(tmp_path, figure) == first, "written twice"
    assert svg(tmp_path, line()) == first, "made twice"
    assert svg(tmp_path, line(2)) != first
    assert b"dc:date" not in first
    assert b">dose</text>" in first, "text is to be found in the file"


def test_a_layout_that_moves_when_drawn_again_is_fixed(tmp_path: Path) -> None:
    figure = line()
    figure.axes[0].text(0.5, 1.5, "far above", transform=figure.axes[0].transAxes)
    assert svg(tmp_path, figure) == svg(tmp_path, figure)


def test_a_plot_is_what_it_was_when_it_was_added(tmp_path: Path) -> None:
    report, figure = Report("Moment"), line()
    report.plot("plot", figure, "Now")
    figure.axes[0].set_title("added later")
    report.write(tmp_path)
    assert b"added later" not in (tmp_path / "plot.svg").read_bytes()


@pytest.mark.parametrize("name", ["", "Upper", "a b", "../up", "a.svg", "ä", "a\n"])
def test_an_invalid_file_name_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="a-z, 0-9 and -"):
        Report("Names").plot(name, line(), "A plot")


def test_a_name_is_taken_once() -> None:
    report = Report("Names")
    report.plot("same", line(), "First")
    with pytest.raises(ValueError, match="'same' already"):
        report.plot("same", line(), "Second")
    assert report.markdown().count("same.svg") == 1


@pytest.mark.parametrize("level", [0, 7])
def test_an_invalid_heading_level_is_refused(level: int) -> None:
    with pytest.raises(ValueError, match=f"not {level}"):
        Report("Levels").heading("text", level)


def test_a_row_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ValueError, match="A row has 1 cells, the table 2 columns"):
        Report("Rows").table(["a", "b"], [["x", "y"], ["x"]])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), np.float64("-inf")])
def test_nan_and_infinity_are_refused_before_anything_is_written(value: float, tmp_path: Path) -> None:
    report = Report("Numbers")
    report.plot("plot", line(), "A plot")
    with pytest.raises(ValueError, match="JSON"):
        report.write(tmp_path, {"deep": [{"down": value}]})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("undrawn")
def test_a_failed_write_keeps_the_old_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def write(title: str) -> None:
        report = Report(title)
        report.plot("plot", line(), "A plot")
        report.write(tmp_path, {"title": title})

    def full(source: str, target: Path) -> None:
        if Path(target).name == failing:
            raise OSError("disk full")
        replace(source, target)

    write("old")
    names = sorted(os.listdir(tmp_path))
    replace = os.replace
    monkeypatch.setattr("steering.files.os.replace", full)
    for failing in names:
        before = (tmp_path / failing).read_bytes()
        with pytest.raises(OSError, match="disk full"):
            write("new")
        assert sorted(os.listdir(tmp_path)) == names
        assert (tmp_path / failing).read_bytes() == before


def test_mappings_are_written_as_words() -> None:
    page = Report("A run")
    page.facts({"model": "m", "versions": {"torch": "2.13", "transformers": "5.23"}, "note": None})
    assert page.markdown().rstrip().endswith("- model: m\n- versions: torch 2.13, transformers 5.23")
