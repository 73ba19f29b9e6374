"""A stream's reports: the chunk that has them, and how to fetch what an SDK's stream helper drops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest
import requests
from flask import Flask

from tests.server.conftest import data_uri, user
from tests.server.journal.rows import Serve, rows_of

OURS = ("applied", "diagnostics", "baseline")
ASKED: dict[str, Any] = {
    "model": "helmsight-demo",
    "messages": [user(data_uri(), "Text context: red.\nWhat colour is it?")],
    "max_tokens": 6,
    "temperature": 0,
}
EXTRA = {"steering": {"toward": "text"}, "diagnostics": True, "baseline": True, "banana": 1}


@pytest.fixture
def sdk(serve: Serve, live: Callable[[Flask], str]) -> openai.OpenAI:
    client = serve()
    made = openai.OpenAI(base_url=f"{live(client.application)}/v1", api_key="none", max_retries=0)
    made.flask = client  # type: ignore[attr-defined]
    return made


def test_the_last_chunk_of_each_choice_has_the_reports(sdk: openai.OpenAI) -> None:
    stream = sdk.chat.completions.create(
        **ASKED, n=2, stream=True, stream_options={"include_usage": True}, extra_body=EXTRA
    )
    chunks = list(stream)
    whole = sdk.chat.completions.create(**ASKED, n=2, extra_body=EXTRA)
    *answers, usage = chunks
    ends = {}
    for chunk in answers:
        (choice,) = chunk.choices
        reports = {name: choice.model_extra[name] for name in OURS if name in choice.model_extra}
        assert bool(reports) == (choice.finish_reason is not None)
        if reports:
            ends[choice.index] = reports
        assert "ignored" not in chunk.model_extra
    assert usage.choices == []
    assert usage.model_extra["ignored"] == ["banana"]
    assert ends.keys() == {0, 1}
    for choice in whole.choices:
        assert ends[choice.index].keys() == {*OURS}
        assert ends[choice.index]["applied"] == choice.model_extra["applied"]
        assert ends[choice.index]["baseline"]["message"] == choice.model_extra["baseline"]["message"]


@pytest.mark.parametrize("store", [True, False])
def test_what_the_helper_drops_is_fetched_by_the_completions_id(sdk: openai.OpenAI, store: bool) -> None:
    asked = {**ASKED, "max_tokens": 40}  # the helper raises where an answer ends by its length
    extra = {**EXTRA, "structured_outputs": {"choice": ["red", "blue"]}}
    with sdk.chat.completions.stream(**asked, store=store, extra_body=extra) as stream:
        kept = [event.chunk.choices[0].model_extra for event in stream if event.type == "chunk" and event.chunk.choices]
        final = stream.get_final_completion()
    assert not {*OURS} & final.choices[0].model_extra.keys(), "the helper keeps them now; say so in the page"
    (reports,) = [extra for extra in kept if "applied" in extra]
    assert {*OURS} <= reports.keys()

    numbers = requests.get(f"{str(sdk.base_url).rstrip('/')}/diagnostics/{final.id}", timeout=30).json()["data"]
    assert [row["choice"] for row in numbers] == [0]
    assert numbers[0]["applied"] == reports["applied"]
    modality = reports["diagnostics"]["modality"]
    assert numbers[0]["diagnostics"]["attention_ratio"] == modality["attention_ratio"]
    for share in ("image_share", "context_share"):
        assert numbers[0]["diagnostics"][share] == modality[share]
    if store:
        whole = sdk.chat.completions.retrieve(final.id)
        assert {name: whole.choices[0].model_extra[name] for name in OURS} == {name: reports[name] for name in OURS}
    else:
        with pytest.raises(openai.NotFoundError):
            sdk.chat.completions.retrieve(final.id)
    assert rows_of(sdk.flask, 1)[0]["id"] == final.id  # type: ignore[attr-defined]
