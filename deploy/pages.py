"""The site that mkdocs builds has what its pages link to outside `docs/`, too, where it lies in the repository."""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
LINK = re.compile(r"\]\((?![a-z]+:|#)([^)#\s]+)")
"""A link to a file, with its path."""
OUT = "](../"
"""Beginning of a link that leads out of `docs/`, whose pages lie in one folder."""
BACK = re.compile(r"(\]\((?:\.\./)+)docs/")
"""Beginning of a link from another folder to `docs/`, which is the top of the site."""


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add files that are linked to, and those that these link to."""
    docs = Path(config.docs_dir)
    pages = [docs / file.src_uri for file in files.documentation_pages()]
    while pages:
        page = pages.pop()
        for link in LINK.findall(page.read_text()):
            target = (page.parent / link).resolve()
            if not target.is_file() or target.is_relative_to(docs) or not target.is_relative_to(ROOT):
                continue  # what is in docs/ is known, and what is nowhere mkdocs warns of
            name = target.relative_to(ROOT).as_posix()
            if files.get_file_from_path(name) is None:
                files.append(File.generated(config, name, abs_src_path=str(target)))
                pages += [target] if target.suffix == ".md" else []
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead the links of a page of `docs/` to them, and theirs to `docs/`."""
    return BACK.sub(r"\1", markdown) if page.file.generated_by else markdown.replace(OUT, "](")
