"""Stored completions, through the methods of the openai package against a live server."""

from __future__ import annotations

import json
import threading
import time
from functools import partial

import openai
import pytest
from sqlalchemy import text

from server.access.named import NamedKey, digest_of, write
from server.dialects.answer import Answer
from server.journal import writer
from server.journal.database import Database
from server.journal.reading.stored import Chosen, page
from server.journal.retention import prune
from server.journal.schema import STORED
from steering import CallPiece, Choice, Chunk, Result, ToolCall
from tests.server.conftest import data_uri, user
from tests.server.fakes import FakeEngine
from tests.server.journal.rows import Sdk, Serve, database_of, journal_of
from tests.waiting import PATIENCE


def test_the_sdks_methods(serve: Serve, sdk: Sdk) -> None:
    chats = sdk(serve()).chat.completions
    picture = user(data_uri(), "What colour is it?")
    asked = {"model": "helmsight-demo", "max_tokens": 6, "temperature": 0, "store": True, "n": 2}
    extra = {"steering": {"toward": "vision"}, "diagnostics": True}
    messages = [{"role": "system", "content": "Be brief."}, picture]
    first = chats.create(messages=messages, metadata={"shop": "a"}, extra_body=extra, **asked)  # type: ignore[call-overload]
    second = chats.create(messages=[user("Why?")], metadata={"shop": "b", "n": "2"}, **asked)  # type: ignore[call-overload]
    unkept = chats.create(messages=[user("Why?")], **{**asked, "store": False})  # type: ignore[call-overload]

    kept = chats.retrieve(first.id)
    assert kept.to_dict() == first.to_dict() | {"metadata": {"shop": "a"}}
    assert kept.choices[0].model_extra["applied"]["steering"][0]["toward"] == "vision"  # type: ignore[index]
    assert [one.id for one in chats.list()] == [first.id, second.id]
    assert [one.id for one in chats.list(order="desc", limit=1)] == [second.id, first.id], "over two pages"
    assert [one.id for one in chats.list(metadata={"shop": "a"})] == [first.id]
    assert [one.id for one in chats.list(metadata={"shop": "b", "n": "2"})] == [second.id]
    assert not list(chats.list(metadata={"shop": "a", "n": "2"}))
    assert not list(chats.list(model="other"))

    system, question = chats.messages.list(first.id)
    assert (system.role, system.content, system.content_parts) == ("system", "Be brief.", None)
    assert question.content == "What colour is it?"
    assert [part.to_dict() for part in question.content_parts or ()] == [
        {"type": "image_url", "image_url": {"url": "omitted"}},
        {"type": "text", "text": "What colour is it?"},
    ]
    assert [one.id for one in chats.messages.list(first.id, order="desc", limit=1)] == [question.id, system.id]

    changed = chats.update(first.id, metadata={"answer_correct": "false", "who": "ann"})
    assert changed.to_dict() == first.to_dict() | {"metadata": {"answer_correct": "false", "who": "ann"}}
    assert [one.id for one in chats.list(metadata={"who": "ann"})] == [first.id]
    for wrong in ("False", "yes", "1", ""):
        with pytest.raises(openai.BadRequestError, match=r"'true' or 'false' as the value of 'answer_correct'"):
            chats.update(first.id, metadata={"answer_correct": wrong})
        with pytest.raises(openai.BadRequestError, match=r"'true' or 'false' as the value of 'answer_correct'"):
            chats.create(messages=[user("Why?")], metadata={"answer_correct": wrong}, **asked)  # type: ignore[call-overload]
    with pytest.raises(openai.BadRequestError, match="at most 16 keys"):
        chats.update(first.id, metadata={str(number): "x" for number in range(17)})
    assert chats.retrieve(first.id).to_dict() == changed.to_dict()

    for unknown in (unkept.id, "chatcmpl-0", "x" * 5000):
        with pytest.raises(openai.NotFoundError):
            chats.retrieve(unknown)
        with pytest.raises(openai.NotFoundError):
            chats.update(unknown, metadata={})
        with pytest.raises(openai.NotFoundError):
            chats.delete(unknown)
        with pytest.raises(openai.NotFoundError):
            chats.messages.list(unknown)

    for one in chats.list(limit=1):  # pages go on behind one that has been deleted
        assert chats.delete(one.id).deleted
    assert not list(chats.list())
    with pytest.raises(openai.NotFoundError):
        chats.retrieve(first.id)


def test_a_truth_reaches_the_rows_and_a_deletion_their_texts(serve: Serve, sdk: Sdk) -> None:
    client = serve(journal_texts=True)
    chats = sdk(client).chat.completions
    made = chats.create(model="helmsight-demo", messages=[user("A secret?")], max_tokens=4, store=True)  # type: ignore[list-item]
    chats.update(made.id, metadata={"answer_correct": "true"})
    (row,) = client.get(f"/v1/diagnostics/{made.id}").json["data"]
    assert (row["metadata"], row["texts"]["prompt"]) == ({"answer_correct": "true"}, "user: A secret?")
    correct = "SELECT answer_correct FROM helmsight_journal"
    with database_of(client).engine.connect() as connection:
        assert connection.execute(text(correct)).scalar_one() == 1
    chats.delete(made.id)
    (row,) = client.get(f"/v1/diagnostics/{made.id}").json["data"]
    assert (row["metadata"], row["texts"]) == (None, None)
    with database_of(client).engine.connect() as connection:
        left = connection.execute(text("SELECT * FROM helmsight_journal_stored")).mappings().one()
        assert "secret" not in json.dumps(dict(left))
        assert connection.execute(text(correct)).scalar_one() == 1, "the truth is a number"


def test_a_stream_is_stored_as_it_was_sent(serve: Serve, sdk: Sdk) -> None:
    chats = sdk(serve()).chat.completions
    body = {"model": "helmsight-demo", "messages": [user("Look!")], "max_tokens": 24, "temperature": 0}
    events = list(chats.create(**body, store=True, stream=True, extra_body={"diagnostics": True}))  # type: ignore[call-overload]
    kept = chats.retrieve(events[0].id).choices[0]
    assert kept.message.content == "".join(one.choices[0].delta.content or "" for one in events)
    assert kept.finish_reason == events[-1].choices[0].finish_reason
    assert kept.model_extra == events[-1].choices[0].model_extra, "what a stream's helper drops"


def test_a_tool_call_has_one_id_however_often_it_is_sent() -> None:
    answer, calls = Answer("m", "f"), (ToolCall("look", "{}"), ToolCall("see", "{}"))
    choices = tuple(Choice(index, "", (1,), "tool_calls", tool_calls=calls) for index in (0, 1))
    kept = [answer.completion(Result(choices, 1, 2))["choices"] for _ in range(2)]
    assert kept[0] == kept[1]
    named = [call["id"] for choice in kept[0] for call in choice["message"]["tool_calls"]]
    assert len(set(named)) == 4
    pieces = tuple(CallPiece(number, "look", "") for number in (0, 1))
    text = answer.events(Chunk(1, "", (), calls=pieces), usage_asked=False)
    streamed = json.loads(text.removeprefix("data: "))["choices"][0]["delta"]["tool_calls"]
    assert [call["id"] for call in streamed] == named[2:]


def test_a_key_sees_changes_and_deletes_its_own_alone(
    fake: FakeEngine, serve: Serve, sdk: Sdk, tmp_path: object
) -> None:
    file = tmp_path / "keys.json"  # type: ignore[operator]
    keys = {name: f"{name}-0123456789" for name in ("ann", "ben", "eve")}
    roles = {"ann": ["use"], "ben": ["use"], "eve": ["journal"]}
    write(file, [NamedKey(name=name, digest=digest_of(key), roles=roles[name]) for name, key in keys.items()])  # type: ignore[arg-type]
    plain = ("plain-0123456789", "other-0123456789")
    client = serve(fake, named_key_file=str(file), api_keys=plain)
    holders = {key: sdk(client, key).chat.completions for key in (keys["ann"], keys["ben"], *plain)}
    made = {
        key: chats.create(model="fake", messages=[user(key)], store=True).id  # type: ignore[list-item]
        for key, chats in holders.items()
    }
    for key, chats in holders.items():
        assert [one.id for one in chats.list()] == [made[key]]
        for other in set(made.values()) - {made[key]}:
            change = partial(chats.update, metadata={"a": "b"})
            for ask in (chats.retrieve, chats.delete, chats.messages.list, change):
                with pytest.raises(openai.NotFoundError):
                    ask(other)
            with pytest.raises(openai.BadRequestError, match="after"):
                chats.list(after=other)
    for key, chats in holders.items():
        assert chats.retrieve(made[key]).to_dict()["metadata"] == {}
    with pytest.raises(openai.PermissionDeniedError):
        sdk(client, keys["eve"]).chat.completions.list()
    again = serve(fake, journal=journal_of(client)._setting, api_keys=plain[:1])  # the same key, now the only one
    assert [one.id for one in sdk(again, plain[0]).chat.completions.list()] == [made[plain[0]]]
    with database_of(client).engine.connect() as connection:
        owners = connection.execute(text("SELECT owner FROM helmsight_journal_stored")).scalars().all()
    assert not any(digest_of(key) in owners or key in owners for key in plain)


def test_an_operator_can_forbid_it(fake: FakeEngine, serve: Serve) -> None:
    for settings in ({"store": "off"}, {"journal": "off"}):
        client = serve(fake, **settings)
        body = {"messages": [user("hi")], "store": True}
        answer = client.post("/v1/chat/completions", json=body).json
        assert answer["ignored"] == ["store"]
        refused = client.post("/v1/chat/completions", json=body | {"strict": True})
        assert (refused.status_code, refused.json["error"]["param"]) == (400, "store")
        assert client.get(f"/v1/chat/completions/{answer['id']}").status_code == 404
    assert "ignored" not in serve(fake).post("/v1/chat/completions", json=body).json


def test_an_answer_that_does_not_end_is_not_stored(fake: FakeEngine, serve: Serve) -> None:
    client = serve(fake)
    fake.script = ("Hel", RuntimeError("broken"))
    client.post("/v1/chat/completions", json={"messages": [user("hi")], "store": True})
    assert client.get("/v1/chat/completions").json["data"] == []


def test_the_limits_of_a_key_count_chats_alone(fake: FakeEngine, serve: Serve, tmp_path: object) -> None:
    file = tmp_path / "keys.json"  # type: ignore[operator]
    write(file, [NamedKey(name="ann", digest=digest_of("ann-0123456789"), roles=["use"], rate="1/hour")])  # type: ignore[arg-type]
    client = serve(fake, named_key_file=str(file))
    key = {"Authorization": "Bearer ann-0123456789"}
    body = {"messages": [user("hi")], "store": True}
    assert client.post("/v1/chat/completions", json=body, headers=key).status_code == 200
    assert client.post("/v1/chat/completions", json=body, headers=key).status_code == 429
    assert {client.get("/v1/chat/completions", headers=key).status_code for _ in range(3)} == {200}


@pytest.mark.parametrize(
    ("query", "param"),
    [
        ("limit=0", "limit"), ("limit=101", "limit"), ("order=up", "order"), ("after=x", "after"), ("colour=red", "colour"),
        ("metadata=a", "metadata"), ("metadata[a]=1&metadata[a]=2", "metadata[a]"), ("metadata[]=1", "metadata[]"),
        (f"metadata[{'k' * 65}]=1", "metadata"), ("&".join(f"metadata[{n}]=1" for n in range(17)), "metadata"),
    ],
)  # fmt: skip
def test_wrong_parameters_are_named(fake: FakeEngine, serve: Serve, query: str, param: str) -> None:
    refused = serve(fake).get(f"/v1/chat/completions?{query}")
    assert (refused.status_code, refused.json["error"]["param"]) == (400, param)


def stored(number: int, **columns: object) -> dict[str, object]:
    return {
        "id": f"chatcmpl-{number}", "created": time.time(), "owner": "", "model": "m", "metadata": None, "messages": "[]",
        "completion": "{}", **columns,
    }  # fmt: skip


HARD = [
    ("a", "b"), ('a"', "b"), ("a", 'b"'), ('x"a', "b"), ("a", "b\\"), (',"a', "b"), ("{", "}"), ("a", 'b","c":"d'),
    ("é", "ü"), ("a", ""), ("aa", "b"), ("a", "bb"), ("%", "_"), ("A", "B"), ("k", ',"a":"b"'), ('k"', '{"a":"b"'),
]  # fmt: skip


def test_metadata_are_found_whatever_they_hold(database: Database) -> None:
    from server.journal.bounded import encoded_metadata

    kept = [dict([pair]) for pair in HARD] + [dict([pair, ("a0", "z")]) for pair in HARD] + [{"z": "z", "a": "b"}]
    with database.writer.begin() as connection:
        connection.execute(
            STORED.insert(),
            [stored(n, metadata=encoded_metadata(pairs)) for n, pairs in enumerate(kept)] + [stored(99)],
        )
    with database.engine.connect() as connection:
        for pair in HARD:
            rows, more = page(connection, Chosen("", metadata=(pair,)), 100, None, newest_first=False)
            wanted = [f"chatcmpl-{n}" for n, pairs in enumerate(kept) if pair in pairs.items()]
            assert ([row["id"] for row in rows], more) == (wanted, False), pair


def test_stored_completions_go_with_the_days_and_the_number_of_rows(database: Database) -> None:
    with database.writer.begin() as connection:
        connection.execute(STORED.insert(), [stored(n, created=100.0 + n) for n in range(10)])
        assert prune(connection, max_rows=5, before=103.0) == 3
        left = connection.execute(text("SELECT id FROM helmsight_journal_stored ORDER BY key")).scalars().all()
    assert left == [f"chatcmpl-{n}" for n in range(5, 10)]


def test_an_answer_is_found_at_once_while_the_journal_is_being_written(
    fake: FakeEngine, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "PATIENCE", 0.1)
    client = serve(fake)
    database = database_of(client)
    held, free = threading.Event(), threading.Event()

    def hold() -> None:
        with database.writer.begin():
            held.set()
            free.wait(PATIENCE)

    holder = threading.Thread(target=hold)
    holder.start()
    held.wait(PATIENCE)
    made = client.post("/v1/chat/completions", json={"messages": [user("hi")], "store": True}).json["id"]
    threading.Timer(0.1, free.set).start()
    holder.join()
    assert client.get(f"/v1/chat/completions/{made}").status_code == 200
