"""A row of the journal is opened in the playground, as far as it was kept; what was not is said."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any
from urllib.parse import parse_qs

import pytest
from flask import Flask

from server.app import create_app
from server.journal.bounded import bounded, clean
from server.settings import Settings
from tests.server.fakes import FakeEngine
from tests.server.web import known_journal
from tests.server.web.browser import Visit
from tests.server.web.known_journal import NOW, Journal, row

Links = Callable[..., list[tuple[dict[str, str], str]]]


@pytest.fixture
def links(visit: Callable[..., Visit], live: Callable[[Flask], str], monkeypatch: pytest.MonkeyPatch) -> Links:
    """Return a function that shows rows and returns their links' contents with the text beside each."""
    url = live(create_app(Settings(journal="off"), engine=FakeEngine())) + "/dashboard"  # type: ignore[arg-type]

    def found(*rows: dict[str, Any]) -> list[tuple[dict[str, str], str]]:
        monkeypatch.setattr(known_journal, "ROWS", list(rows))
        page = visit(now=NOW).page
        Journal(page)
        out = []
        for one in rows:
            page.goto("about:blank")
            page.goto(f"{url}#{one['id']}")
            link = page.get_by_role("link", name="Open in the playground")
            fragment = link.get_attribute("href").partition("#")[2]
            beside = link.locator("..").inner_text().removeprefix("Open in the playground").strip()
            out.append(({name: value for name, (value,) in parse_qs(fragment, True).items()}, beside))
        return out

    return found


def test_a_row_leads_to_the_playground(links: Links) -> None:
    prompt = "system: Be brief.\nuser: What?\nassistant: A star.\nuser: Text context: It is red.\n\nWhich colour?"
    asked = {
        "steering": {"toward": "text", "strength": 1.5},
        "sage": {"think": False},
        "contrast": {"kind": "icd", "instruction": "Be wrong."},
        "baseline": False,
        "diagnostics": {"include": ["attention", "focus"]},
    }
    sampling = {"temperature": 0.5, "max_tokens": 9, "seed": 3, "n": 1, "top_p": 1.0}
    full = row(1, asked=asked, sampling=sampling, texts={"prompt": prompt, "answer": "Red."})
    ((held, beside),) = links(full)
    turns, others = json.loads(held.pop("turns")), json.loads(held.pop("asked"))
    assert held == {
        "question": "Which colour?", "context": "It is red.", "system": "Be brief.", "pictures": "*,*", "strength": "-1.5",
        "max_tokens": "9", "temperature": "0.5", "seed": "3", "baseline": "0", "readouts": "attention,focus",
    }  # fmt: skip
    assert turns == [{"context": "", "question": "What?", "answer": "A star.", "pictures": ""}]
    assert others == {"sage": {"think": False}, "contrast": {"kind": "icd", "instruction": "Be wrong."}}
    assert beside == ""


def test_a_prompt_that_was_cut_is_not_guessed_at(links: Links) -> None:
    prompt = "system: Be brief.\nuser: A long story.\nassistant: A star.\nuser: Which colour?"
    limits = (len(prompt), len(prompt) - 1, 50, 30, 10, 1)
    kept = [clean(prompt, limit, end=True) for limit in limits]
    assert kept[0] == prompt
    whole, *cut = links(*(row(i, texts={"prompt": text, "answer": ""}) for i, text in enumerate(kept)))
    assert (whole[0]["question"], whole[0]["system"], whole[1]) == ("Which colour?", "Be brief.", "")
    for held, beside in cut:
        assert not held.keys() & {"question", "context", "system", "turns"}
        assert beside == "without its prompt, of which only the end was kept"


def test_other_texts_that_were_not_kept_whole_are_named(links: Links) -> None:
    texts = {"prompt": "user: What?", "answer": ""}
    contrasts = [bounded({"kind": "icd", "instruction": "x" * size}) for size in (255, 256, 257)]
    contrasts.append({"kind": "icd", "instruction": "(14 characters)"})
    found = links(
        *(row(i, asked={"contrast": one}, texts=texts) for i, one in enumerate(contrasts)),
        row(5, asked={"omitted": 20_000}, images=0),
        row(6, asked={"force": True}, images=0, texts=texts),
        row(7, asked={"chat_template_kwargs": {"a": 1}, "continue_final_message": True}, images=0, texts=texts),
    )
    said = ["", "", *2 * ["without a text of an intervention, which was not kept whole"]]
    assert [beside for _, beside in found[:4]] == said
    sizes = [len(json.loads(held["asked"])["contrast"].get("instruction", "")) for held, _ in found[:4]]
    assert sizes == [255, 256, 0, 0]
    assert found[4] == (
        {"max_tokens": "8", "readouts": ""},
        "without its prompt, which was not kept, and without the requested options, which were too long to keep",
    )
    assert found[5] == (
        {"question": "What?", "max_tokens": "8", "readouts": ""},
        "without its forced answer, which was not kept as such",
    )
    assert found[6] == (
        {"question": "What?", "max_tokens": "8", "readouts": ""},
        "without the arguments of its chat template, and without the fact that it continued an assistant message",
    )
