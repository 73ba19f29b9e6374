"""A journal whose rows and summary the test knows, answered in the browser itself."""

from __future__ import annotations

import time
from typing import Any
from urllib.parse import parse_qs, urlsplit

NOW = int(time.time())
HOUR = NOW // 3600 * 3600


def row(number: int, **changes: Any) -> dict[str, Any]:
    """Return a row of the journal; the lowest number is the newest."""
    return {
        "object": "diagnostics.row",
        "id": f"chatcmpl-{number}",
        "choice": 0,
        "created": NOW - 60 * number,
        "model": "demo",
        "finish_reason": "stop",
        "streamed": True,
        "interventions": [],
        "asked": {"steering": None, "sage": None, "contrast": None},
        "applied": None,
        "sampling": {"temperature": 0.0, "max_tokens": 8},
        "usage": {"prompt_tokens": 30, "completion_tokens": number},
        "images": 2,
        "latency": {"first_token": 0.02, "total": 0.25},
        "diagnostics": {
            "attention_ratio": 0.1 * number,
            "focused_image": 1,
            "focus_share": 0.75,
            "target_image": 1,
            "correct": True,
            "decay_slope": -0.01,
            "kl": 2.0,
            "perceptual_blindness": False,
            "dissociation": number == 2,
            "dose": None,
        },
        "metadata": None,
        "texts": None,
        **changes,
    }


def period(start: int, count: int, ratio: float, blind: int, apart: int) -> dict[str, Any]:
    """Return an hour of the summary."""
    means = {"attention_ratio": ratio, "focus_share": 0.9, "decay_slope": -0.02}
    times = {"first_token": {"p50": 0.1, "p90": 0.2}, "total": {"p50": 1.0, "p90": 2.0}}
    flags = {"perceptual_blindness": blind, "dissociation": apart}
    return {"start": start, "count": count, "errors": 1, "cancelled": 2, **means, **times, "flags": flags}


VECTOR = {"name": "v", "toward": "text", "strength": 1.5, "layers": [3], "tokens": 7, "dose": 0.5, "warning": None}
STEERED = row(
    2,
    interventions=["steering"],
    asked={"steering": {"toward": "text", "strength": 1.5}, "diagnostics": True},
    applied={"steering": [VECTOR]},
    metadata={"run": "<i>seven</i>"},
    texts={"prompt": "<script>alert(1)</script>", "answer": "The star is red."},
)
SAGE = {  # as the journal keeps it: statistics of long lists, counts of patches
    "see": {
        "reading": "scale",
        "alpha": {"count": 9, "mean": 0.07, "max": 0.1},
        "share_before": 0.1,
        "share_after": 0.2,
    },
    "think": {"suppressed": [0.1, 0.3], "divergence": {"count": 80, "mean": 12.5, "max": 60.0}},
    "generate": {"masking": "pixels", "masked": [1, 0, 2], "changed": 1},
}
ROWS = [
    row(1),
    STEERED,
    row(
        3,
        interventions=["sage.see", "sage.generate"],
        asked={"sage": {"think": False}},
        applied={"sage": SAGE},
        finish_reason="length",
        guard="retry",
    ),
    row(4, asked={"omitted": 20000}, applied={"omitted": 20000}, diagnostics={}, usage={}, sampling={}),
]
SPREAD = {"count": 4, "mean": 0.2, "min": 0.1, "p10": 0.13, "p50": 0.25, "p90": 0.37, "max": 0.4}
NAMES = ("attention_ratio", "focus_share", "decay_slope", "kl", "first_token", "total", "completion_tokens")
PLAIN = {"attention_ratio": 0.2, "focus_share": 0.9, "decay_slope": -0.01, "accuracy": 0.9}
TEXT = {"attention_ratio": 0.1, "focus_share": None, "decay_slope": None, "accuracy": None}
SUMMARY = {
    "object": "diagnostics.summary",
    "since": None,
    "until": None,
    "count": 1234,
    "guards": {"quiet": 90, "retry": 6, "first": 4},
    "finish_reasons": {"stop": 1200, "cancelled": 30, "error": 4},
    "values": {**dict.fromkeys(NAMES, SPREAD), "dose": {**dict.fromkeys(SPREAD), "count": 0}},
    "flags": {"perceptual_blindness": {"known": 200, "raised": 3}, "dissociation": {"known": 0, "raised": 0}},
    "focus": {"known": 50, "correct": 45, "accuracy": 0.9},
    "ivm": {"known": 40, "implicit": 6, "rate": 0.15},
    "by_intervention": [
        {"intervention": "none", "count": 1000, **PLAIN},
        {"intervention": "steer:text", "count": 234, **TEXT},
    ],
    "refusals": {
        "count": 7,
        "by_code": [
            {"status": 429, "code": "rate_limit_exceeded", "route": "/v1/chat/completions", "count": 5},
            {"status": 400, "code": "invalid_value", "route": "/v1/chat/completions", "count": 2},
        ],
        "by_time": {
            "bucket": 3600,
            "rows": [
                {"start": HOUR - 3600, "count": 2, "statuses": {"400": 2}},
                {"start": HOUR, "count": 5, "statuses": {"429": 5}},
            ],
        },
    },
    "by_time": {"bucket": 3600, "rows": [period(HOUR - 7200, 30, 0.5, 1, 2), period(HOUR, 10, 0.25, 0, 0)]},
}
NO_ANSWER = {"error": {"message": "The journal holds no answer with this id.", "param": "id", "code": "unknown_answer"}}


class Journal:
    """Answers the dashboard's requests in the browser, on a visit that stays at `NOW`; keeps the queries."""

    def __init__(self, page: Any):
        self.summary: Any = SUMMARY
        self.queries: list[dict[str, str]] = []
        assert page.evaluate("Date.now()") == 1000 * NOW, "the hour of the rows stays the last one"
        page.route("**/v1/diagnostics**", self.answer)

    def summaries(self) -> list[dict[str, str]]:
        """Return the queries for the summary so far."""
        return [query for query in self.queries if query["path"].endswith("/summary")]

    def answer(self, route: Any) -> None:
        url = urlsplit(route.request.url)
        query = {name: value for name, (value,) in parse_qs(url.query).items()}
        self.queries.append({"path": url.path, **query})
        if url.path.endswith("/summary"):
            route.fulfill(json=self.summary)
        elif url.path.startswith("/v1/diagnostics/"):
            found = [found for found in ROWS if found["id"] == url.path.rpartition("/")[2]]
            route.fulfill(json={"data": found}) if found else route.fulfill(status=404, json=NO_ANSWER)
        elif "before" in query:
            route.fulfill(json={"data": ROWS[2:], "has_more": False, "next": None})
        else:
            route.fulfill(json={"data": ROWS[:2], "has_more": True, "next": "cursor-2"})
