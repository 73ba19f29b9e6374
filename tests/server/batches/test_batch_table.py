"""The table of a batch: a row for each answer, with numbers that pandas reads as numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pandas
import pytest
from flask import Flask

from server.batches.flat import check_table, write_table
from server.batches.run import BatchOptions, run_batch
from server.batches.transport import LocalTransport
from tests.server.batches.files import Scripted, completion, failure, read, request, write
from tests.server.conftest import data_uri, user


def test_a_table_has_the_answers_their_numbers_and_their_metadata(app: Flask, tmp_path: Path) -> None:
    """The numbers are compared with those in the responses, read by hand."""
    messages = [user(data_uri(), "Text context: It is blue.\nWhat colour is it?")]
    asked = {"messages": messages, "diagnostics": {"include": ["modality", "focus"]}, "logprobs": True}
    write(
        tmp_path / "in.jsonl",
        [
            request("a", **asked, metadata={"truth": "red", "file": "a.png"}),
            request("b", **asked, n=2, metadata={"truth": "blue"}),
            request("c", max_tokens=-1),
        ],
    )
    (tmp_path / "conditions.json").write_text(json.dumps({"baseline": {}, "vision": "@vision"}))
    table = tmp_path / "flat.csv"
    options = BatchOptions(
        tmp_path / "in.jsonl", tmp_path / "out.jsonl", tmp_path / "conditions.json", table, quiet=True
    )
    run_batch(options, LocalTransport(app))
    frame = pandas.read_csv(table)
    assert list(zip(frame.custom_id, frame.condition, frame.choice.fillna(-1), strict=True)) == [
        *(("a", "baseline", 0), ("a", "vision", 0)),
        *(("b", "baseline", 0), ("b", "baseline", 1), ("b", "vision", 0), ("b", "vision", 1)),
        *(("c", "baseline", -1), ("c", "vision", -1)),
    ]
    assert list(frame["metadata.truth"].fillna("")) == ["red"] * 2 + ["blue"] * 4 + [""] * 2
    assert list(frame["metadata.file"].fillna("")) == ["a.png"] * 2 + [""] * 6
    assert list(frame.status) == [200] * 6 + [400] * 2
    assert frame.error[6].startswith("'max_tokens'")
    for index, row in enumerate(read(tmp_path / "out.jsonl")[:2]):
        body = row["response"]["body"]
        (choice,) = body["choices"]
        assert frame.answer[index] == choice["message"]["content"]
        assert frame.completion_tokens[index] == body["usage"]["completion_tokens"]
        assert frame.attention_ratio[index] == pytest.approx(choice["diagnostics"]["modality"]["attention_ratio"])
        total = math.fsum(token["logprob"] for token in choice["logprobs"]["content"])
        assert frame.logprob[index] == pytest.approx(total)
    assert math.isnan(frame.dose[0])
    assert frame.dose[1] > 0
    assert math.isnan(frame.completion_tokens[2]), "the usage counts the tokens of both answers"


def test_lines_of_json_have_every_column_and_the_exact_text(tmp_path: Path) -> None:
    write(tmp_path / "in.jsonl", [request("a", metadata={"k": "=1"}), request("b", text="bad")])

    def answer(body: object) -> object:
        return failure(404, "none") if "bad" in str(body) else completion("=SUM(A1)")

    responses = tmp_path / "out.jsonl"
    run_batch(BatchOptions(tmp_path / "in.jsonl", responses, quiet=True), Scripted(answer))
    assert write_table(tmp_path / "in.jsonl", responses, tmp_path / "flat.jsonl") == 2
    a, b = read(tmp_path / "flat.jsonl")
    assert a.keys() == b.keys()
    assert (a["answer"], a["metadata.k"], b["error"], b["answer"]) == ("=SUM(A1)", "=1", "none", None)
    write_table(tmp_path / "in.jsonl", responses, tmp_path / "flat.csv")
    assert pandas.read_csv(tmp_path / "flat.csv").answer[0] == "'=SUM(A1)", "no spreadsheet takes it for a formula"


def test_a_table_of_another_kind_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"must end in \.csv or \.jsonl"):
        check_table(tmp_path / "flat.xlsx")
