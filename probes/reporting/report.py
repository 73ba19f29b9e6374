"""A report of headings, text, tables and plots, written as Markdown; its HTML page is derived from that."""

from __future__ import annotations

import base64
import html
import io
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from markdown_it import MarkdownIt
from markdown_it.renderer import RendererHTML
from markdown_it.token import Token
from markdown_it.utils import EnvType, OptionsDict
from matplotlib.figure import Figure

from probes.reporting import tables
from probes.reporting.tables import line
from steering.files import write_atomically


class Report:
    """A report that is collected in reading order; nothing is written before `write`."""

    def __init__(self, title: str) -> None:
        self.title = line(title)
        self._blocks = [f"# {self.title}"]
        self._plots: dict[str, bytes] = {}

    def heading(self, text: str, level: int = 2) -> None:
        """Start a section at `level` 1 to 6; the title is level 1. Raise ValueError for another level."""
        if level not in range(1, 7):
            raise ValueError(f"level must be 1 to 6, not {level}.")
        self._blocks.append(f"{'#' * level} {line(text)}")

    def text(self, markdown: str) -> None:
        """Add a paragraph, a list or several of them; HTML in it is shown as text."""
        self._blocks.append(markdown.strip())

    def facts(self, facts: Mapping[str, object]) -> None:
        """Add a list of named facts with values in plain text; None values are left out."""
        self.text(
            "\n".join(f"- {name}: {_plain(_describe(value))}" for name, value in facts.items() if value is not None)
        )

    def table(self, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
        """Add a table (see `tables.markdown`)."""
        self._blocks.append(tables.markdown(columns, rows))

    def plot(self, name: str, figure: Figure, caption: str) -> None:
        """Add a figure in its present state, with a plain-text `caption`; its layout is fixed from then on.

        Raises ValueError for a name that is taken or has characters other than a-z, 0-9 and "-".
        """
        if not re.fullmatch("[a-z0-9-]+", name):
            raise ValueError(f"A plot's name is made of a-z, 0-9 and -, which {name!r} is not.")
        file = f"{name}.svg"
        if file in self._plots:
            raise ValueError(f"There is a plot {name!r} already.")
        self._plots[file] = _svg(figure)
        self._blocks.append(f"![{_plain(caption)}]({file})")

    def markdown(self) -> str:
        """Return the whole report; its plots are named by their files."""
        return "\n\n".join(self._blocks) + "\n"

    def write(self, folder: str | Path, data: Mapping[str, Any] | None = None) -> None:
        """Write report.md, report.html, an SVG file per plot and, from `data`, report.json into `folder`.

        The page is self-contained: it holds its plots and refers to nothing, so a link in a text stays text. Each file is
        written whole or not at all. Raises ValueError for NaN or infinity in `data`, before anything is written.
        """
        files = {**self._plots, "report.md": self.markdown().encode(), "report.html": self._page().encode()}
        if data is not None:
            files["report.json"] = (json.dumps(data, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode()
        for name, content in files.items():
            write_atomically(Path(folder) / name, content)

    def _page(self) -> str:
        def image(
            renderer: RendererHTML, tokens: Sequence[Token], index: int, options: OptionsDict, env: EnvType
        ) -> str:
            caption = html.escape(renderer.renderInlineAsText(tokens[index].children, options, env))
            svg = self._plots.get(str(tokens[index].attrs["src"]))
            if svg is None:  # a foreign picture would be fetched from outside
                return caption
            source = f"data:image/svg+xml;base64,{base64.b64encode(svg).decode()}"
            plot = f'<span class="wide"><img src="{source}" alt="{caption}"></span>'
            return f'{plot}<span class="caption" aria-hidden="true">{caption}</span>'

        parser = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["link", "autolink", "reference"])
        parser.add_render_rule("image", image)
        parser.add_render_rule("table_open", lambda *_: '<div class="wide"><table>\n')
        parser.add_render_rule("table_close", lambda *_: "</table></div>\n")
        return _PAGE.format(title=html.escape(self.title), style=_STYLE, body=parser.render(self.markdown()))


def _describe(value: object) -> str:
    return ", ".join(f"{name} {entry}" for name, entry in value.items()) if isinstance(value, Mapping) else str(value)


def _plain(text: str) -> str:
    """Escape text so that nothing in it is Markdown."""
    return re.sub(r"([\\`*_~\[\]<&])", r"\\\1", line(text))


def _svg(figure: Figure) -> bytes:
    """Render a figure as SVG, with the same bytes for the same figure on every run.

    Text stays text, which is searchable and half the size of outlines. It is laid out for DejaVu Sans, which is wider than
    the fallback of a viewer without it, so that nothing is cut.
    """
    figure.draw_without_rendering()
    figure.set_layout_engine("none")  # the layout engine moves things a little at every drawing
    file = io.BytesIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "helmsight"}):
        figure.savefig(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


_STYLE = """
:root { color-scheme: light dark; font: 1rem/1.5 system-ui, sans-serif }
body { max-width: 66rem; margin: 0 auto; padding: 1rem }
h1, h2, h3, p, li { overflow-wrap: anywhere; max-width: 52rem }
.wide { display: block; overflow-x: auto; margin: 1rem 0 .25rem }
pre { overflow-x: auto }
table { border-collapse: collapse; font-size: .9rem }
th, td { padding: .25rem .5rem; border-bottom: 1px solid #8888; text-align: left; vertical-align: top }
th { vertical-align: bottom }
td { font-variant-numeric: tabular-nums }
img { display: block; width: 100%; min-width: 30rem; max-width: 42rem; background: white }
.caption { font-size: .9rem; opacity: .8 }
"""

_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
{body}</body>
</html>
"""
