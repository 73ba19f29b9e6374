"""Combined information from several replicas."""

from __future__ import annotations

import json

from prometheus_client.parser import text_string_to_metric_families

from server.replicas.call import AnswerHead, Whole
from server.replicas.gathered import health, metrics, ready

JSON = (("Content-Type", "application/json"), ("Content-Length", "3"))
TEXT = """# HELP answers_total Answers
# TYPE answers_total counter
answers_total{kind="a"} 3.0
# HELP seconds Time
# TYPE seconds histogram
seconds_bucket{le="1.0"} 2.0
seconds_bucket{le="+Inf"} 3.0
seconds_count 3.0
seconds_sum 4.5
# HELP up Whether
# TYPE up gauge
up 1.0
"""


def said(name: str, status: int, word: str) -> Whole:
    return Whole(name, AnswerHead(status, JSON), json.dumps({"status": word}).encode())


def test_one_replica_that_serves_is_enough() -> None:
    both = [said("a", 503, "draining"), said("b", 200, "ready")]
    whole = ready(both)
    assert whole.head.status == 200
    assert json.loads(whole.body) == {
        "status": "ready", "replicas": {"a": {"status": "draining"}, "b": {"status": "ready"}},
    }  # fmt: skip
    assert dict(whole.head.headers)["Content-Length"] == str(len(whole.body))
    assert len(whole.head.headers) == 2
    assert ready(both[:1]).head.status == 503


def test_before_the_first_replica_the_server_loads_and_lives() -> None:
    assert (ready([]).head.status, json.loads(ready([]).body)["status"]) == (503, "loading")
    assert (health([]).head.status, json.loads(health([]).body)["status"]) == (200, "ok")
    assert health([said("a", 503, "failed")]).head.status == 503


def test_metrics_have_the_replica_as_a_label_and_lose_nothing() -> None:
    other = TEXT.replace("3.0", "7.0")
    text = metrics(
        [Whole("a", AnswerHead(200, ()), TEXT.encode()), Whole("b", AnswerHead(200, ()), other.encode())]
    ).body.decode()
    assert text.count("# TYPE answers_total counter") == 1
    assert {line for line in text.splitlines() if line.startswith("answers")} == {
        'answers_total{kind="a",replica="a"} 3.0', 'answers_total{kind="a",replica="b"} 7.0',
    }  # fmt: skip
    for name, one in (("a", TEXT), ("b", other)):
        alone = {
            (s.name, *sorted(s.labels.items()), s.value) for f in text_string_to_metric_families(one) for s in f.samples
        }
        found = {
            (s.name, *sorted((key, value) for key, value in s.labels.items() if key != "replica"), s.value)
            for f in text_string_to_metric_families(text)
            for s in f.samples
            if s.labels["replica"] == name
        }
        assert found == alone


def test_the_journal_is_that_of_all() -> None:
    def with_journal(name: str, state: str, written: int) -> Whole:
        journal = {"state": state, "written": written, "dropped": 0, "waiting": 1}
        return Whole(name, AnswerHead(200, JSON), json.dumps({"status": "ready", "journal": journal}).encode())

    both = [with_journal("a", "ok", 60), with_journal("b", "failing", 251)]
    expected = {"state": "failing", "written": 311, "dropped": 0, "waiting": 2}
    assert json.loads(ready(both).body)["journal"] == expected


def test_what_the_front_counts_is_among_the_metrics() -> None:
    replica = Whole("a", AnswerHead(200, ()), TEXT.encode())
    text = metrics([replica], TEXT.replace("3.0", "9.0").encode()).body.decode()
    assert 'answers_total{kind="a",replica="front"} 9.0' in text.splitlines()
    assert 'answers_total{kind="a",replica="a"} 3.0' in text.splitlines()


def test_a_refusal_of_metrics_is_handed_on() -> None:
    refused = said("a", 401, "no")
    assert metrics([Whole("b", AnswerHead(200, ()), TEXT.encode()), refused]) is refused
