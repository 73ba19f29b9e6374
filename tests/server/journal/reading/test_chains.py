"""Stored responses and their chains, through the methods of the openai package against a live server."""

from __future__ import annotations

import base64
import json
import os
import stat
import time
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import openai
import pytest
from flask.testing import FlaskClient
from PIL import Image

import steering
from server.access.named import NamedKey, digest_of, write
from server.app import create_app
from server.cli import main
from server.journal.retention import DAY
from server.settings import Settings
from tests.families.calling import calling
from tests.server.conftest import data_uri
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import Sdk, Serve, database_of, journal_of

RED, GREEN, BLUE = (data_uri(Image.new("RGB", (28, 28), colour)) for colour in ("red", "green", "blue"))
LOOK: Any = {
    "type": "function", "name": "look", "strict": True,
    "parameters": {"type": "object", "properties": {"at": {"enum": ["star", "ring"]}}, "required": ["at"]},
}  # fmt: skip
IMAGES: Any = ["message.input_image.image_url"]


def image(url: str) -> dict[str, Any]:
    return {"type": "input_image", "image_url": url, "detail": "auto"}


def says(*parts: Any, role: str = "user") -> dict[str, Any]:
    texts = [{"type": "input_text", "text": part} if isinstance(part, str) else part for part in parts]
    return {"type": "message", "role": role, "content": texts}


def folder(client: FlaskClient) -> Path:
    path = Path(journal_of(client)._setting)
    return path.with_name(f"{path.name}.pictures")


def kept(client: FlaskClient) -> set[bytes]:
    """Return the contents of the kept images."""
    return {path.read_bytes() for path in folder(client).iterdir()} if folder(client).exists() else set()


def content(url: str) -> bytes:
    return base64.b64decode(url.partition(",")[2])


def test_a_chain_is_the_whole_chat_again_with_images_and_calls_and_survives_a_restart(
    root: Path, sdk: Sdk, tmp_path: Path
) -> None:
    engine = steering.Engine(
        steering.load(calling(root), device="cpu"), slots=4, max_length=1024, self_check=False, threads=1
    )
    engine.start()
    journal = str(tmp_path / "journal.db")

    def started() -> FlaskClient:
        return create_app(Settings(journal=journal), engine=engine).test_client()

    client = started()
    ask = partial(
        sdk(client).responses.create, model=engine.mllm.name, tools=[LOOK], temperature=0, max_output_tokens=80
    )
    call = 'I look.\n<tool_call>\n{"name": "look", "arguments": {"at": "star"}}\n</tool_call>'
    opening: Any = [says(image(RED), "Which colour has the star?")]
    first = ask(input=opening, instructions="Be brief.", store=True, extra_body={"force": call})
    said, called = first.output
    assert (said.type, called.type) == ("message", "function_call")
    assert json.loads(called.arguments) == {"at": "star"}  # type: ignore[union-attr]
    came: Any = [{
        "type": "function_call_output", "call_id": called.call_id,  # type: ignore[union-attr]
        "output": [{"type": "input_text", "text": "Closer:"}, image(GREEN)],
    }]  # fmt: skip
    second = ask(input=came, previous_response_id=first.id, store=True, extra_body={"force": "It is red."})
    journal_of(client).close()

    client = started()
    ask = partial(
        sdk(client).responses.create, model=engine.mllm.name, tools=[LOOK], temperature=0, max_output_tokens=80
    )
    third = ask(input="Sure?", previous_response_id=second.id, store=True, instructions="Be polite.")
    flat: Any = [
        *opening, *(item.to_dict() for item in first.output), *came, *(item.to_dict() for item in second.output),
        says("Sure?"),
    ]  # fmt: skip
    expected = ask(input=flat, instructions="Be polite.")
    assert third.usage
    assert expected.usage
    assert third.usage.input_tokens == expected.usage.input_tokens > 100
    assert third.output_text == expected.output_text
    assert (third.previous_response_id, third.instructions, third.store) == (second.id, "Be polite.", True)
    assert expected.store is False

    responses = sdk(client).responses
    assert responses.retrieve(third.id).to_dict() == third.to_dict()
    items = [item.to_dict() for item in responses.input_items.list(third.id, order="asc", include=IMAGES)]
    plain = [{name: value for name, value in item.items() if name not in ("id", "status")} for item in items]
    texts = [part["text"] for item in plain for part in item.get("content", ()) if "text" in part]
    assert texts == ["Which colour has the star?", "I look.", "It is red.", "Sure?"]
    assert plain[0] == opening[0]
    assert plain[2] == {
        "type": "function_call",
        "call_id": called.call_id,
        "name": "look",
        "arguments": called.arguments,
    }  # type: ignore[union-attr]
    assert plain[3] == came[0]
    assert len({item["id"] for item in items}) == 6
    newest = list(responses.input_items.list(third.id, limit=2))
    assert [item.id for item in newest] == [item["id"] for item in items[::-1]], "over three pages"
    assert RED not in json.dumps([item.to_dict() for item in newest])
    journal_of(client).close()
    engine.stop()


def test_images_are_kept_for_chains_alone_and_go_with_the_last_response_that_has_them(
    fake: FakeEngine, serve: Serve, sdk: Sdk
) -> None:
    client = serve(fake)
    responses = sdk(client).responses
    ask = partial(responses.create, model="fake")
    ask(input=[says(image(BLUE), "Unkept?")])  # type: ignore[list-item]
    sdk(client).chat.completions.create(
        model="fake", store=True,
        messages=[{"role": "user", "content": [{"type": "image_url", "image_url": {"url": BLUE}}]}],
    )  # fmt: skip
    assert kept(client) == set()
    first = ask(input=[says(image(RED), image(GREEN), "Which?")], store=True)  # type: ignore[list-item]
    other = RED.replace("image/png", "image/x-png")  # the same image under another name
    second = ask(input=[says(image(other), "And this?")], store=True)  # type: ignore[list-item]
    assert kept(client) == {content(RED), content(GREEN)}
    assert stat.S_IMODE(folder(client).stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder(client).iterdir()} == {0o600}
    third = ask(input="Sure?", previous_response_id=first.id, store=True)
    assert [message["role"] for message in fake.requests[-1].messages] == ["user", "assistant", "user"]

    responses.delete(first.id)
    assert kept(client) == {content(RED), content(GREEN)}, "the third one goes on with them"
    for gone in (lambda: responses.retrieve(first.id), lambda: responses.input_items.list(first.id)):
        with pytest.raises(openai.NotFoundError):
            gone()
    with pytest.raises(openai.NotFoundError, match="was deleted") as refused:
        ask(input="And?", previous_response_id=first.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "previous_response_not_found")
    responses.delete(third.id)
    assert kept(client) == {content(RED)}
    responses.delete(second.id)
    assert kept(client) == set()


@pytest.mark.parametrize("why", ["bound", "days"])
def test_images_beyond_the_bounds_are_gone_by_name(fake: FakeEngine, serve: Serve, sdk: Sdk, why: str) -> None:
    most = sum(len(content(url)) for url in (RED, GREEN, BLUE)) - 1 if why == "bound" else 2**20
    client = serve(fake, store_bytes=most, journal_days=2.0)
    ask = partial(sdk(client).responses.create, model="fake", store=True)
    first = ask(input=[says(image(RED), "Which?")])  # type: ignore[list-item]
    for path in folder(client).iterdir():
        moment = time.time() - (3 * DAY if why == "days" else 60)
        os.utime(path, (moment, moment))
    second = ask(input=[says(image(GREEN), "Which?")])  # type: ignore[list-item]
    if why == "bound":
        assert kept(client) == {content(RED), content(GREEN)}
        ask(input=[says(image(BLUE), "Which?")])  # type: ignore[list-item]
    assert content(RED) not in kept(client)
    with pytest.raises(openai.BadRequestError, match="no longer kept") as refused:
        ask(input="Sure?", previous_response_id=first.id)
    assert (refused.value.param, refused.value.code) == ("previous_response_id", "images_gone")
    assert ask(input="Sure?", previous_response_id=second.id).output_text
    (item,) = sdk(client).responses.input_items.list(first.id, include=IMAGES)
    assert item.to_dict()["content"][0]["image_url"] is None  # type: ignore[index]
    assert sdk(client).responses.retrieve(first.id).id == first.id


def test_an_image_that_exceeds_the_bound_is_not_kept_but_answered(fake: FakeEngine, serve: Serve, sdk: Sdk) -> None:
    client = serve(fake, store_bytes=10)
    ask = partial(sdk(client).responses.create, model="fake", store=True)
    first = ask(input=[says(image(RED), "Which?")])  # type: ignore[list-item]
    assert kept(client) == set()
    with pytest.raises(openai.BadRequestError, match="no longer kept"):
        ask(input="Sure?", previous_response_id=first.id)


@pytest.mark.parametrize("stream", [False, True])
def test_an_image_of_an_answer_that_does_not_end_is_not_kept(serve: Serve, stream: bool) -> None:
    engine = FakeEngine("It is", RuntimeError("broken"))
    client = serve(engine)
    body = {"input": [says(image(RED), "Which?")], "store": True, "stream": stream}
    client.post("/v1/responses", json=body, buffered=True)
    assert kept(client) == set()
    engine.script = ("It is", " red.")
    client.post("/v1/responses", json=body, buffered=True)
    assert kept(client) == {content(RED)}


def test_the_journal_sweeps_them_when_it_prunes(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    journal = journal_of(client)
    client.post("/v1/responses", json={"input": [says(image(RED), "hi")], "store": True})
    (path,) = folder(client).iterdir()
    os.utime(path, (0, 0))
    journal._prune(database_of(client))
    assert not path.exists()


def test_a_key_sees_continues_and_deletes_its_own_alone(
    fake: FakeEngine, serve: Serve, sdk: Sdk, tmp_path: Path
) -> None:
    keys = {name: f"{name}-0123456789" for name in ("ann", "ben")}
    write(
        tmp_path / "keys.json",
        [NamedKey(name=name, digest=digest_of(key), roles=("use",)) for name, key in keys.items()],
    )
    client = serve(fake, named_key_file=str(tmp_path / "keys.json"))
    ann, ben = (sdk(client, key).responses for key in keys.values())
    made = ann.create(model="fake", input=[says(image(RED), "mine")], store=True)  # type: ignore[list-item]
    for refused in (
        lambda: ben.retrieve(made.id), lambda: ben.input_items.list(made.id), lambda: ben.delete(made.id),
        lambda: ben.create(model="fake", input="hi", previous_response_id=made.id),
    ):  # fmt: skip
        with pytest.raises(openai.NotFoundError):
            refused()
    assert ann.retrieve(made.id).id == made.id
    assert kept(client) == {content(RED)}


@pytest.mark.parametrize(
    ("store", "journal", "asked", "stored"),
    [
        ("own", True, None, False), ("own", True, False, False), ("own", True, True, True),
        ("on", True, None, True), ("on", True, False, False), ("on", True, True, True),
        ("off", True, None, False), ("off", True, True, False),
        ("on", False, None, False), ("own", False, True, False),
    ],
)  # fmt: skip
@pytest.mark.parametrize("null", [False, True])
def test_the_operator_decides_what_is_stored(
    fake: FakeEngine, serve: Serve, store: str, journal: bool, asked: bool | None, stored: bool, null: bool
) -> None:
    client = serve(fake, store=store, **({} if journal else {"journal": "off"}))
    body: dict[str, Any] = {"input": "hi", **({} if asked is None and not null else {"store": asked})}
    answer = client.post("/v1/responses", json=body).json
    assert answer["store"] is stored
    assert answer.get("ignored", []) == (["store"] if asked and not stored else [])
    assert client.get(f"/v1/responses/{answer['id']}").status_code == (200 if stored else 404)
    more = client.post("/v1/responses", json={"input": "hi", "previous_response_id": answer["id"]})
    assert more.status_code == (200 if stored else 404)
    if not stored:
        assert "--store" in more.json["error"]["message"]


def test_completions_and_responses_are_told_apart(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    body = {"messages": [{"role": "user", "content": "hi"}], "store": True}
    completion = client.post("/v1/chat/completions", json=body).json["id"]
    response = client.post("/v1/responses", json={"input": "hi", "store": True}).json["id"]
    for here, there in ((f"/v1/chat/completions/{completion}", f"/v1/responses/{completion}"),
                        (f"/v1/responses/{response}", f"/v1/chat/completions/{response}")):  # fmt: skip
        assert client.get(there).status_code == client.delete(there).status_code == 404
        assert client.get(here).status_code == 200
    assert client.get(f"/v1/responses/{completion}/input_items").status_code == 404
    assert client.get(f"/v1/chat/completions/{response}/messages").status_code == 404
    refused = client.post("/v1/responses", json={"input": "a", "previous_response_id": completion})
    assert refused.status_code == 404
    assert "begins with 'resp_'" in refused.json["error"]["message"]
    assert [one["id"] for one in client.get("/v1/chat/completions").json["data"]] == [completion]


@pytest.mark.parametrize(
    "identity",
    [
        "resp_",
        "resp_%",
        "resp_' OR 1=1 --",
        "resp_\x00",
        "resp_" + "x" * 5000,
        "../resp_1",
        "resp_\u202e",
        "",
    ],
)
def test_hostile_ids_are_unknown(fake: FakeEngine, serve: Serve, identity: str) -> None:
    client = serve(fake)
    client.post("/v1/responses", json={"input": "hi", "store": True})
    body = {"input": "hi", "previous_response_id": identity}
    refused = client.post("/v1/responses", data=json.dumps(body), content_type="application/json")
    assert (refused.status_code, refused.json["error"]["param"]) == (404, "previous_response_id")
    if identity.isprintable() and identity and "/" not in identity:
        for method in ("GET", "DELETE"):
            assert client.open(f"/v1/responses/{identity}", method=method).status_code == 404


def test_a_kept_image_cannot_be_named_by_a_client(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    client.post("/v1/responses", json={"input": [says(image(RED), "hi")], "store": True})
    (path,) = folder(client).iterdir()
    stolen = client.post("/v1/responses", json={"input": [says(image(f"kept:image/png:{path.name}"), "hi")]})
    assert (stolen.status_code, stolen.json["error"]["param"]) == (400, "input[0].content[0].image_url")


def test_an_image_outlives_a_deletion_while_a_continuation_with_it_ends(
    serve: Serve, sdk: Sdk, monkeypatch: pytest.MonkeyPatch
) -> None:
    client = serve()
    ask = partial(sdk(client).responses.create, model="helmsight-demo", max_output_tokens=4, store=True)
    first = ask(input=[says(image(RED), "Which colour?")])  # type: ignore[list-item]
    record, deletions = journal_of(client).record, []
    delete = partial(client.application.test_client().delete, f"/v1/responses/{first.id}")

    def record_late(row: Any, *table: Any) -> int:
        if table and not deletions:
            deletions.append(Thread(target=delete))  # the second's images are kept, its row is not yet queued
            deletions[0].start()
            deletions[0].join(0.5)
        return record(row, *table)

    monkeypatch.setattr(journal_of(client), "record", record_late)
    second = ask(input="Sure?", previous_response_id=first.id)
    deletions[0].join()
    assert client.get(f"/v1/responses/{first.id}").status_code == 404
    assert kept(client) == {content(RED)}
    ask(input="And now?", previous_response_id=second.id)


def test_the_oldest_turns_go_where_the_chat_is_too_long(engine: steering.Engine, serve: Serve, sdk: Sdk) -> None:
    responses = sdk(serve()).responses
    ask = partial(responses.create, model="helmsight-demo", max_output_tokens=1)
    turns: Any = [
        says(f"{number} " + "star " * 30, role=role) for number in range(60) for role in ("user", "assistant")
    ]
    turns.append(says("Which?"))
    with pytest.raises(openai.BadRequestError) as refused:
        ask(input=turns)
    assert refused.value.code == "context_length_exceeded"
    answer = ask(input=turns, truncation="auto", store=True)
    assert answer.usage
    assert answer.usage.input_tokens <= engine.max_length
    left = [item.to_dict()["content"][0]["text"] for item in responses.input_items.list(answer.id, order="asc")]  # type: ignore[index]
    assert left == [turn["content"][0]["text"] for turn in turns[-len(left) :]]
    assert left[0].endswith("star ")
    with pytest.raises(openai.BadRequestError):
        ask(input=[says("star " * 5000)], truncation="auto")  # type: ignore[list-item]


def test_a_chain_goes_on_from_a_backup(serve: Serve, sdk: Sdk, tmp_path: Path) -> None:
    client, backup = serve(), tmp_path / "backup.db"
    first = sdk(client).responses.create(
        model="helmsight-demo", input=[says(image(RED), "Which colour?")], store=True, max_output_tokens=4
    )
    assert journal_of(client).settle_all(), "the first answer does not wait for a journal that is being opened"
    assert main(["journal", "backup", str(backup), "--journal", journal_of(client)._setting]) == 0
    again = sdk(serve(journal=str(backup)))
    second = again.responses.create(
        model="helmsight-demo", input="Sure?", previous_response_id=first.id, max_output_tokens=4
    )
    assert second.usage
    assert first.usage
    assert second.usage.input_tokens > first.usage.input_tokens, "the image is asked again"
