"""Batch files: OpenAI's form of both, whoever wrote them, and what of an earlier run is kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.batches.file import BatchResponse, Problem, ResponseFile, answered_in, identity, passing, requests_in, row
from tests.server.batches.files import completion, failure, read, request, write


def test_a_request_is_read_as_openai_and_vllm_write_it(tmp_path: Path) -> None:
    """The second has the url that vllm's examples have; blank lines are skipped, as vllm skips them."""
    path = write(tmp_path / "in.jsonl", [request("a"), "", request("b", model="m")])
    a, b = requests_in(path)
    assert (a.custom_id, a.problem, a.body["max_tokens"]) == ("a", None, 6)
    assert (b.custom_id, b.problem, b.body["model"]) == ("b", None, "m")


@pytest.mark.parametrize(
    ("line", "name", "code"),
    [
        ("{", "line 2", "invalid_json_line"),
        ("[1]", "line 2", "invalid_request"),
        ({"body": {}}, "line 2", "missing_required_parameter"),
        ({"custom_id": "x", "method": "GET", "body": {}}, "x", "invalid_method"),
        ({"custom_id": "x", "url": "/v1/embeddings", "body": {}}, "x", "invalid_url"),
        ({"custom_id": "x"}, "x", "missing_required_parameter"),
        (request("a"), "a (line 2)", "duplicate_custom_id"),
    ],
)
def test_a_line_that_is_no_request_has_a_problem_and_costs_no_other(
    line: Any, name: str, code: str, tmp_path: Path
) -> None:
    first, wrong, last = requests_in(write(tmp_path / "in.jsonl", [request("a"), line, request("b")]))
    assert (first.problem, last.problem) == (None, None)
    assert wrong.problem is not None
    assert (wrong.custom_id, wrong.problem.code) == (name, code)
    assert "Line 2 " in wrong.problem.message


def test_a_row_has_the_keys_of_openais_response_files() -> None:
    """The expected rows are those of OpenAI's guide to batches: a success, an HTTP error, and no response at all."""
    ok = row("batch_req_1", "a", completion("hi"))
    assert list(ok) == ["id", "custom_id", "response", "error"]
    assert ok["error"] is None
    assert (ok["response"]["status_code"], ok["response"]["request_id"]) == (200, "req_1")
    assert ok["response"]["body"]["choices"][0]["message"]["content"] == "hi"
    refused = row("batch_req_2", "b", failure(400, "bad"))
    assert (refused["response"]["status_code"], refused["error"]) == (400, None)
    assert refused["response"]["body"]["error"]["message"] == "bad"
    gone = row("batch_req_3", "c", BatchResponse(problem=Problem("no_answer", "gone")), condition="x")
    assert gone == {
        "id": "batch_req_3", "custom_id": "c", "condition": "x", "response": None,
        "error": {"code": "no_answer", "message": "gone"},
    }  # fmt: skip


@pytest.mark.parametrize(
    ("given", "ok", "reason"),
    [
        (row("i", "a", completion("hi")), True, None),
        (row("i", "a", failure(400, "bad")), False, "bad"),
        # vllm's run_batch puts the error beside a response without a body, as an object or as a text.
        ({"response": {"status_code": 400, "request_id": "r"}, "error": {"error": {"message": "bad"}}}, False, "bad"),
        ({"response": {"status_code": 400, "request_id": "r", "body": None}, "error": "bad"}, False, "bad"),
        ({"response": None, "error": {"code": "batch_expired", "message": "late"}}, False, "late"),
        ({}, False, "There is no response."),
    ],
)
def test_a_response_is_read_whoever_wrote_it(given: dict[str, Any], ok: bool, reason: str | None) -> None:
    answered = answered_in(given)
    assert (answered.ok, answered.reason) == (ok, reason)


def test_an_id_is_the_same_for_the_same_request_alone() -> None:
    body = {"a": 1, "b": [2]}
    assert identity("model", "x", None, body) == identity("model", "x", None, {"b": [2], "a": 1})
    others = [
        ("other", "x", None, body),
        ("model", "y", None, body),
        ("model", "x", "c", body),
        ("model", "x", None, {}),
    ]
    assert len({identity("model", "x", None, body), *(identity(*other) for other in others)}) == 5


def test_rows_of_an_earlier_run_are_kept_and_what_may_pass_is_asked_again(tmp_path: Path) -> None:
    path = tmp_path / "out.jsonl"
    kept = [row("1", "a", completion("hi")), row("2", "b", failure(400)), row("3", "c", failure(503))]
    write(path, [*kept, row("4", "d", BatchResponse(problem=Problem("no_answer", "gone"))), '{"id": "5", "custom'])
    path.write_text(path.read_text().rstrip("\n"))  # the last line was cut
    with ResponseFile(path, {"1", "2", "3", "4", "5"}) as rows:
        assert rows.kept == {"1", "2"}
        rows.write(row("3", "c", completion("ho")))
    assert [found["id"] for found in read(path)] == ["1", "2", "3"]
    assert read(path)[2]["response"]["status_code"] == 200


def test_rows_of_other_requests_are_not_lost_by_mistake(tmp_path: Path) -> None:
    path = write(tmp_path / "out.jsonl", [row("1", "a", completion("hi")), row("2", "b", completion("ho"))])
    before = path.read_bytes()
    with pytest.raises(ValueError, match="has 1 lines that answer other requests"):
        ResponseFile(path, {"1"})
    assert path.read_bytes() == before
    assert [one.name for one in tmp_path.iterdir()] == ["out.jsonl"]
    with ResponseFile(path, {"1"}, replace=True) as rows:
        assert rows.kept == {"1"}
    assert [found["id"] for found in read(path)] == ["1"]


def test_a_line_of_the_requests_that_was_mended_leaves_no_row(tmp_path: Path) -> None:
    """Its row says that it was no request, which nobody needs once it is one."""
    path = write(tmp_path / "out.jsonl", [row("1", "line 2", BatchResponse(problem=Problem("invalid_json_line", "x")))])
    with ResponseFile(path, {"2"}) as rows:
        assert rows.kept == set()
    assert read(path) == []


@pytest.mark.parametrize(("status", "again"), [(200, False), (400, False), (404, False), (429, True), (500, True)])
def test_what_may_pass(status: int, again: bool) -> None:
    assert passing(completion("hi") if status == 200 else failure(status)) is again
