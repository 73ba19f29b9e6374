"""A batch: all requests under all conditions, resumed, bounded, and against a real server and a real model."""

from __future__ import annotations

import base64
import json
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from flask import Flask
from flask.testing import FlaskClient

from server.batches.conditions import read_conditions
from server.batches.measured import Digests
from server.batches.pool import Pace, in_order
from server.batches.run import BatchOptions, run_batch
from server.batches.transport import LocalTransport, remote
from tests.server.batches.files import Scripted, completion, failure, read, request, write
from tests.server.conftest import ask, data_uri, user

CONDITIONS = """
baseline = {}
vision = "@vision"
asked = "request"
[own]
sage = { see = { alpha = 0.3 } }
"""


def options(folder: Path, **more: Any) -> BatchOptions:
    return BatchOptions(folder / "in.jsonl", folder / "out.jsonl", quiet=True, **more)


def named(path: Path) -> dict[tuple[str, str | None], dict[str, Any]]:
    """Return the rows of a file by id and condition."""
    return {(one["custom_id"], one.get("condition")): one for one in read(path)}


def test_every_request_is_asked_under_every_condition(tmp_path: Path) -> None:
    write(
        tmp_path / "in.jsonl", [request("a", steering=True, model="scripted@sage", stream=True), request("b", seed=1)]
    )
    (tmp_path / "conditions.toml").write_text(CONDITIONS)
    transport = Scripted()
    summary = run_batch(options(tmp_path, conditions=tmp_path / "conditions.toml"), transport)
    assert (summary.answered, summary.failed) == (8, 0)
    assert set(named(tmp_path / "out.jsonl")) == {
        (name, condition) for name in ("a", "b") for condition in ("baseline", "vision", "asked", "own")
    }
    plain = {"messages": [{"role": "user", "content": "What colour is it?"}], "max_tokens": 6, "temperature": 0}
    own = {"sage": {"see": {"alpha": 0.3}}}
    expected = [
        *({"model": "scripted"}, {"model": "scripted@vision"}, {"steering": True, "model": "scripted@sage"}, own),
        *({"seed": 1}, {"seed": 1, "model": "scripted@vision"}, {"seed": 1}, {"seed": 1, **own}),
    ]
    bodies = [{"model": "scripted", **plain, **fields} for fields in expected]
    assert sorted(json.dumps(one, sort_keys=True) for one in transport.bodies) == sorted(
        json.dumps(one, sort_keys=True) for one in bodies
    )


def test_a_request_for_another_model_stays_one_unless_told(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request("a", model="gpt-4o"), request("b")])
    for any_model, models in ((False, ["gpt-4o", "scripted"]), (True, ["scripted", "scripted"])):
        transport = Scripted()
        (tmp_path / "out.jsonl").unlink(missing_ok=True)
        run_batch(options(tmp_path, any_model=any_model), transport)
        assert [body["model"] for body in transport.bodies] == models


def test_a_batch_that_was_stopped_goes_on_where_it_was(tmp_path: Path) -> None:
    names = [f"q{number}" for number in range(12)]
    write(tmp_path / "in.jsonl", [request(name, text=name) for name in names])
    texts: list[str] = []

    def stops(body: Any) -> Any:
        text = body["messages"][0]["content"]
        texts.append(text)
        if text == "q7":
            raise KeyboardInterrupt
        return failure(503) if text == "q2" else failure(400) if text == "q3" else completion(text)

    with pytest.raises(KeyboardInterrupt):
        run_batch(options(tmp_path), Scripted(stops))
    before = {one["custom_id"] for one in read(tmp_path / "out.jsonl")}
    assert {"q0", "q1", "q2", "q3"} <= before < set(names)
    again = Scripted()
    summary = run_batch(options(tmp_path), again)
    asked = {body["messages"][0]["content"] for body in again.bodies}
    assert asked == set(names) - before | {"q2"}, "what was answered or refused is kept, what may pass is asked again"
    rows = read(tmp_path / "out.jsonl")
    assert sorted(one["custom_id"] for one in rows) == sorted(names), "none is lost and none is there twice"
    assert (summary.kept, summary.answered) == (len(before) - 1, len(asked))


def test_a_changed_request_or_model_is_asked_again(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request("a"), request("b")])
    run_batch(options(tmp_path), Scripted())
    write(tmp_path / "in.jsonl", [request("a"), request("b", text="And now?")])
    with pytest.raises(ValueError, match="--replace"):
        run_batch(options(tmp_path), Scripted())
    changed = Scripted()
    run_batch(options(tmp_path, replace=True), changed)
    assert [body["messages"][0]["content"] for body in changed.bodies] == ["And now?"]
    other = Scripted()
    other.identity = "scripted 2"
    run_batch(options(tmp_path, replace=True), other)
    assert len(other.bodies) == 2


def test_rows_that_were_answered_with_another_vector_or_calibration_are_told(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request("plain"), request("steered"), request("flagged")])
    steering = [{"name": "modality-preference", "digest": "a" * 64, "toward": "vision"}]
    applied: dict[str, Any] = {
        "steered": {"applied": {"steering": steering}},
        "flagged": {"diagnostics": {"flags": {"calibration": {"digest": "c" * 64}}}},
    }
    names = iter(("plain", "steered", "flagged"))

    def answered(body: Any) -> Any:
        return completion("hi", **applied.get(next(names), {}))

    asked = options(tmp_path, at_once=1)
    run_batch(asked, Scripted(answered))
    same = Scripted()
    same.known = Digests({"modality-preference": "a" * 64, "other": "d" * 64}, "c" * 64)
    assert run_batch(asked, same).kept == 3, "another vector has come, which no row names"
    for known, why in (
        (
            Digests({"modality-preference": "b" * 64}, "c" * 64),
            "'modality-preference' had the digest a+, and has b+ now",
        ),
        (Digests({"modality-preference": "a" * 64}, "e" * 64), "calibration had the digest c+, and has e+ now"),
    ):
        changed = Scripted()
        changed.known = known
        with pytest.raises(ValueError, match=rf"1 lines that were answered differently: .*{why}.*--replace"):
            run_batch(asked, changed)
        assert len(read(tmp_path / "out.jsonl")) == 3
    summary = run_batch(options(tmp_path, replace=True), changed)
    assert (summary.kept, summary.answered) == (2, 1)


def test_a_transport_tells_the_digests_of_its_vectors_and_calibration(app: Flask, live: Callable[[Flask], str]) -> None:
    local = LocalTransport(app)
    answer = local.send(
        {
            "messages": [user(data_uri(), "What colour is it?")],
            "steering": {"toward": "vision"},
            "diagnostics": {"include": ["flags"]},
            "max_tokens": 4,
        }
    )
    assert isinstance(answer.body, dict)
    (choice,) = answer.body["choices"]
    digest = choice["applied"]["steering"][0]["digest"]
    assert local.digests().vectors["modality-preference"] == digest
    assert local.digests().calibration == choice["diagnostics"]["flags"]["calibration"]["digest"]
    with remote(live(app), None, 1, 30.0) as there:
        assert there.digests().vectors["modality-preference"] == digest


def test_failures_are_rows_and_the_rest_is_answered(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request("a"), "{", request("c", text="bad")])
    bad = Scripted(lambda body: failure(400, "no") if body["messages"][0]["content"] == "bad" else completion("hi"))
    summary = run_batch(options(tmp_path), bad)
    assert (summary.answered, summary.failed) == (1, 2)
    assert summary.reason == "Line 2 is not valid JSON."
    rows = named(tmp_path / "out.jsonl")
    assert rows["line 2", None]["response"] is None
    assert rows["line 2", None]["error"]["code"] == "invalid_json_line"
    assert rows["c", None]["response"]["status_code"] == 400


def test_pictures_are_taken_from_a_folder(tmp_path: Path) -> None:
    """However a request names them; the bytes are those of the file, and no file outside of the folder is read."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    (folder / "a b.png").write_bytes(b"png")
    (folder / "c.jpg").write_bytes(b"jpg")
    (tmp_path / "secret.png").write_bytes(b"secret")
    names = ["file:a%20b.png", f"file://{folder}/c.jpg", "a b.png", "data:image/png;base64,AAAA", "https://x/y.png"]
    bad = ["file:../secret.png", f"file://{tmp_path}/secret.png", "none.png"]
    write(tmp_path / "in.jsonl", [request(name, messages=[user_of(name)]) for name in (*names, *bad)])
    transport = Scripted()
    run_batch(options(tmp_path, pictures=folder), transport)
    sent = [body["messages"][0]["content"][0]["image_url"]["url"] for body in transport.bodies]
    png, jpg = (base64.b64encode(text).decode() for text in (b"png", b"jpg"))
    assert sorted(sent) == sorted(
        [f"data:image/png;base64,{png}", f"data:image/jpeg;base64,{jpg}", f"data:image/png;base64,{png}", *names[3:]]
    )
    rows = named(tmp_path / "out.jsonl")
    for name in bad:
        assert rows[name, None]["error"]["code"] == "invalid_image_url"
    (folder / "c.jpg").write_bytes(b"another")
    again = Scripted()
    run_batch(options(tmp_path, pictures=folder, replace=True), again)
    assert len(again.bodies) == 1, "a picture that changed is asked about again"


def user_of(url: str) -> dict[str, Any]:
    return {"role": "user", "content": [{"type": "image_url", "image_url": {"url": url, "detail": "low"}}]}


def test_no_more_than_allowed_are_asked_at_once() -> None:
    lock, running, most = threading.Lock(), [0], [0]

    def work(item: int) -> int:
        with lock:
            running[0] += 1
            most[0] = max(most[0], running[0])
        time.sleep(0.01)
        with lock:
            running[0] -= 1
        return -item

    assert list(in_order(range(30), work, 3)) == [(item, -item) for item in range(30)]
    assert most[0] == 3


def test_results_do_not_wait_for_items_that_are_not_there_yet() -> None:
    """A follower gives None until there is more: what is done by then is yielded, not kept back."""
    seen: list[int] = []
    before: list[list[int]] = []

    def items() -> Any:
        yield 1
        for _ in range(400):
            yield None
            if seen:
                break
            time.sleep(0.005)
        before.append([*seen])
        yield 2

    def work(item: int) -> int:
        time.sleep(0.05)  # it is not done when it is begun
        return item

    for _, result in in_order(items(), work, 4):
        seen.append(result)
    assert (before, seen) == ([[1]], [1, 2])


def test_a_rate_spaces_requests_evenly() -> None:
    now, waits = [0.0], []

    def sleep(seconds: float) -> None:
        waits.append(seconds)
        now[0] += seconds

    pace = Pace(4, clock=lambda: now[0], sleep=sleep)
    for _ in range(3):
        pace.wait()
    assert now[0] == pytest.approx(0.5)
    now[0] += 10  # a pause earns no burst
    pace.wait()
    pace.wait()
    assert now[0] == pytest.approx(10.75)


def test_the_answers_are_those_of_the_server(app: Flask, client: FlaskClient, tmp_path: Path) -> None:
    """Each condition's answer is that of the same request over HTTP, whatever fields it has."""
    fields = {"logprobs": True, "diagnostics": {"include": ["focus", "residual"]}, "max_tokens": 8, "temperature": 0}
    body = {"messages": [user(data_uri(), "What colour is it?")], **fields}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    write(
        tmp_path / "in.jsonl",
        [line, request("b", text="Hi", n=2, temperature=1.0, seed=3), request("c", max_tokens=-1)],
    )
    (tmp_path / "conditions.toml").write_text('baseline = {}\nvision = "@vision"\n[own]\nsage = true\n')
    transport = LocalTransport(app)
    run_batch(options(tmp_path, conditions=tmp_path / "conditions.toml"), transport)
    rows = named(tmp_path / "out.jsonl")
    for name, more in (
        ("baseline", {}), ("vision", {"steering": {"toward": "vision"}}), ("own", {"sage": True}),
    ):  # fmt: skip
        expected = ask(client, data_uri(), "What colour is it?", **fields, **more)
        found = rows["a", name]["response"]
        assert (found["status_code"], found["request_id"][:4]) == (200, "req_")
        ours, theirs = found["body"]["choices"][0], expected.json["choices"][0]
        assert ours["message"] == theirs["message"]
        assert ours["diagnostics"]["focus"] == close(theirs["diagnostics"]["focus"])
    twice = ask(client, "Hi", n=2, temperature=1.0, seed=3, max_tokens=6)
    said = [choice["message"]["content"] for choice in rows["b", "baseline"]["response"]["body"]["choices"]]
    assert said == [choice["message"]["content"] for choice in twice.json["choices"]]
    refused = rows["c", "own"]["response"]
    assert refused["status_code"] == 400
    assert refused["body"] == ask(client, "What colour is it?", max_tokens=-1, sage=True).json


def test_a_server_at_an_address_gives_the_same_rows(app: Flask, live: Callable[[Flask], str], tmp_path: Path) -> None:
    rows = {}
    (tmp_path / "conditions.toml").write_text('baseline = {}\nvision = "@vision"\n')
    for place in ("here", "there"):
        folder = tmp_path / place
        folder.mkdir()
        picture = [user(data_uri(), "What colour is it?")]
        write(folder / "in.jsonl", [request("a", messages=picture, diagnostics=True), request("b", model="nobody")])
        with ExitStack() as opened:
            transport: Any = LocalTransport(app)
            if place == "there":
                transport = opened.enter_context(remote(live(app), None, 2, 60.0))
            run_batch(options(folder, conditions=tmp_path / "conditions.toml"), transport)
        rows[place] = named(folder / "out.jsonl")
    assert rows["here"].keys() == rows["there"].keys()
    for name, here in rows["here"].items():
        there = rows["there"][name]
        assert here["response"]["status_code"] == there["response"]["status_code"] == (200 if name[0] == "a" else 404)
        if name[0] == "a":
            assert here["response"]["body"]["choices"] == close(there["response"]["body"]["choices"])


def test_a_server_that_went_away_is_asked_again_by_the_next_run(
    app: Flask, live: Callable[[Flask], str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from probes.answering.base import Unanswered
    from probes.answering.endpoint import Endpoint

    def away(*_: Any) -> Any:
        raise Unanswered("it did not answer: Connection refused")

    write(tmp_path / "in.jsonl", [request("a")])
    with remote(live(app), None, 2, 60.0) as transport:
        with monkeypatch.context() as patch:
            patch.setattr(Endpoint, "post", away)
            assert run_batch(options(tmp_path), transport).reason == "it did not answer: Connection refused"
        (row,) = read(tmp_path / "out.jsonl")
        assert (row["response"], row["error"]["code"]) == (None, "no_answer")
        assert run_batch(options(tmp_path), transport).answered == 1
    (row,) = read(tmp_path / "out.jsonl")
    assert row["response"]["status_code"] == 200


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('x = "@visoin"', "condition 'x': the model has no preset '@visoin'; did you mean '@vision'"),
        ("x = 3", "condition 'x': must be fields of a request"),
        ("x = { messages = [] }", "'messages' belongs to the requests"),
        ("x = { steerin = true }", "did you mean 'steering'"),
        ("x = ", "is not valid"),
        ("", "must hold conditions"),
    ],
)
def test_a_wrong_condition_is_named_before_anything_is_asked(text: str, said: str, tmp_path: Path) -> None:
    (tmp_path / "conditions.toml").write_text(text)
    with pytest.raises(ValueError, match=said):
        read_conditions(tmp_path / "conditions.toml", Scripted.models, Scripted.model)


def close(tree: Any) -> Any:
    """Return a tree that equals one whose numbers differ by at most 1e-6."""
    if isinstance(tree, dict):
        return {key: close(value) for key, value in tree.items()}
    if isinstance(tree, list):
        return [close(value) for value in tree]
    return pytest.approx(tree, abs=1e-6) if isinstance(tree, float) else tree
