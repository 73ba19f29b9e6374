"""The requests of a simulated day: ten kinds by three keys, with what each must leave in the journal."""

from __future__ import annotations

import base64
import io
import json
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import requests

from demo.world.conflicts import Conflict, random_conflict
from demo.world.questions import ask
from demo.world.scenes import random_scene, render

HOURS = 24
KINDS = ("plain", "streamed", "vision", "text", "sage", "vcd", "two", "response", "message", "refused")
KEYS = ("shop", "lab", "phone")
ROUTES = {"response": "/v1/responses", "message": "/v1/messages"}
CHAT = "/v1/chat/completions"
MODEL = "helmsight-demo"
WORDS = 16
"""Most tokens of an answer."""
PATIENCE = 120.0
"""Seconds that a request may take, a restart of the server included."""
FORM: dict[str, Any] = {
    "type": "object", "properties": {"answer": {"type": "string", "maxLength": 20}}, "required": ["answer"],
    "additionalProperties": False,
}  # fmt: skip
"""A form of answers that the embedded model never learned: what it writes into it is wrong, and the alarm says so."""


@dataclass(frozen=True)
class DayRequest:
    """A request of the day; `unfaithful` ones ask for a form that the model cannot fill."""

    number: int
    hour: int
    unfaithful: bool = False

    @property
    def kind(self) -> str:
        return KINDS[self.number % len(KINDS)]

    @property
    def key(self) -> str:
        return KEYS[self.number // len(KINDS) % len(KEYS)]

    @property
    def name(self) -> str:
        return f"{self.number}-{self.kind}"

    @property
    def route(self) -> str:
        return ROUTES.get(self.kind, CHAT)

    @property
    def stored(self) -> bool:
        return self.kind in ("vision", "response")

    @property
    def choices(self) -> int:
        """The number of rows that it leaves in the journal."""
        return {"two": 2, "refused": 0}.get(self.kind, 1)

    def body(self, previous: str | None = None) -> dict[str, Any]:
        """Return the body; `previous` is the response that this one continues."""
        picture, conflict, question = scene(self.number)
        with_context = self.kind in ("vision", "text", "two")
        text = f"{conflict.context()}\n{question}" if with_context else question
        if self.kind == "response":
            parts = [{"type": "input_image", "image_url": picture}, {"type": "input_text", "text": text}]
            asked: Any = [{"role": "user", "content": parts}] if previous is None else "Is it a circle?"
            chain = {} if previous is None else {"previous_response_id": previous}
            form = {"text": {"format": {"type": "json_schema", "name": "answer", "schema": FORM}}}
            return {
                "model": MODEL, "input": asked, "store": True, "max_output_tokens": WORDS, "temperature": 0,
                "metadata": self.about, **chain, **(form if self.unfaithful else {}),
            }  # fmt: skip
        if self.kind == "message":
            source = {"type": "base64", "media_type": "image/png", "data": picture.partition(",")[2]}
            parts = [{"type": "image", "source": source}, {"type": "text", "text": text}]
            form = {"output_config": {"format": {"type": "json_schema", "schema": FORM}}}
            return {
                "model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": WORDS, "temperature": 0,
                "metadata": {"user_id": self.name}, **(form if self.unfaithful else {}),
            }  # fmt: skip
        parts = [{"type": "image_url", "image_url": {"url": picture}}, {"type": "text", "text": text}]
        form = {"response_format": {"type": "json_schema", "json_schema": {"name": "answer", "schema": FORM}}}
        return {
            "model": MODEL, "messages": [{"role": "user", "content": parts}], "max_tokens": WORDS, "temperature": 0,
            "metadata": self.about, **OWN.get(self.kind, {}), **(form if self.unfaithful else {}),
        }  # fmt: skip

    @property
    def about(self) -> dict[str, str]:
        return {"walk": self.name, "hour": str(self.hour)}

    def is_right(self, text: str) -> bool:
        """Return whether an answer has the picture's own word."""
        return scene(self.number)[1].fact.value.lower() in text.lower()


OWN: dict[str, dict[str, Any]] = {
    "streamed": {"stream": True, "stream_options": {"include_usage": True}, "diagnostics": True},
    "vision": {"steering": {"toward": "vision"}, "store": True},
    "text": {"model": f"{MODEL}@text"},
    "sage": {"sage": True},
    "vcd": {"contrast": {"kind": "vcd"}},
    "two": {"n": 2},
    "refused": {"steering": {"toward": "up"}},
}
"""The fields of a chat completion that make a kind."""


@lru_cache(maxsize=64)
def scene(number: int) -> tuple[str, Conflict, str]:
    """Return a picture as a data: URI, a text that contradicts it, and a question about it."""
    rng = random.Random(f"day {number}")
    conflict = None
    while conflict is None:
        drawn = random_scene(rng, held_out=True)
        conflict = random_conflict(rng, drawn)
    file = io.BytesIO()
    render(drawn, (112, 112)).save(file, "PNG", compress_level=1)
    uri = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    return uri, conflict, ask(rng, conflict.fact.kind, conflict.fact.key)


@dataclass
class Answered:
    """An answer as its client got it; `again` counts attempts that the server refused or that broke before."""

    request: DayRequest
    key: str
    status: int
    identity: str = ""
    text: str = ""
    tokens: int = 0
    request_id: str = ""
    again: int = 0
    broken: int = 0


@dataclass
class Traffic:
    """Clients that send the day's requests in order, up to the hour that `release` has opened."""

    url: str
    secrets: dict[str, str]
    day: list[DayRequest]
    answers: list[Answered] = field(default_factory=list)
    errors: list[BaseException] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._open = 0
        self._next = iter(self.day)
        self._ahead = next(self._next, None)
        self._lock = threading.Condition()
        self._threads: list[threading.Thread] = []

    def start(self, clients: int = 6) -> None:
        for _ in range(clients):
            self._threads.append(threading.Thread(target=self._client, daemon=True))
            self._threads[-1].start()

    def release(self, hour: int) -> None:
        """Let requests before this hour begin."""
        with self._lock:
            self._open = hour
            self._lock.notify_all()

    def done(self) -> int:
        """Return the number of requests that ended; raises what a client raised."""
        if self.errors:
            raise self.errors[0]
        return len(self.answers)

    def join(self) -> None:
        for thread in self._threads:
            thread.join(PATIENCE)
        assert not any(thread.is_alive() for thread in self._threads)
        self.done()

    def _requests(self) -> Iterator[DayRequest]:
        while True:
            with self._lock:
                while self._ahead is not None and self._ahead.hour >= self._open and not self.errors:
                    self._lock.wait(1)
                request = self._ahead
                if request is None or self.errors:
                    return
                self._ahead = next(self._next, None)
            yield request

    def _client(self) -> None:
        previous: dict[str, str] = {}
        try:
            with requests.Session() as session:
                for request in self._requests():
                    answered = self._ask(session, request, previous.get(request.key))
                    # Every second response of a key continues the one before it.
                    if request.kind == "response" and previous.pop(request.key, None) is None:
                        previous[request.key] = answered.identity
                    self.answers.append(answered)
        except BaseException as error:
            self.errors.append(error)

    def _ask(self, session: requests.Session, request: DayRequest, previous: str | None) -> Answered:
        body, until = json.dumps(request.body(previous)), time.monotonic() + PATIENCE
        again = broken = 0
        while True:
            key = self.secrets[request.key]
            try:
                response = session.post(
                    self.url + request.route, data=body, timeout=PATIENCE,
                    headers={"Content-Type": "application/json", "Authorization": f"Bearer {key}"},
                )  # fmt: skip
            except requests.ConnectionError as error:
                # A refused connection never reached the server; any other may have left a row.
                broken += "refused" not in str(error)
            except requests.RequestException:
                broken += 1
            else:
                if response.status_code != 503:
                    answered = Answered(request, key, response.status_code, again=again, broken=broken)
                    _read(answered, response)
                    return answered
            again += 1
            assert time.monotonic() < until, f"{request.name} was not answered"
            time.sleep(0.25)


def _read(answered: Answered, response: requests.Response) -> None:
    """Take id, text and tokens from a response of any dialect."""
    request, answered.request_id = answered.request, response.headers["X-Request-Id"]
    if request.kind == "refused":
        assert response.status_code == 400, response.text
        return
    assert response.status_code == 200, f"{request.name}: {response.text}"
    if request.kind == "streamed":
        assert response.text.endswith("data: [DONE]\n\n"), response.text
        events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: {")]
        texts = [choice["delta"].get("content") or "" for event in events for choice in event["choices"]]
        answered.identity, answered.text = events[0]["id"], "".join(texts)
        answered.tokens = events[-1]["usage"]["completion_tokens"]
        return
    value: Mapping[str, Any] = response.json()
    answered.identity = value["id"]
    read: dict[str, Callable[[], tuple[str, int]]] = {
        "response": lambda: (value["output"][-1]["content"][0]["text"], value["usage"]["output_tokens"]),
        "message": lambda: (value["content"][0]["text"], value["usage"]["output_tokens"]),
    }
    chat = lambda: (value["choices"][0]["message"]["content"], value["usage"]["completion_tokens"])  # noqa: E731
    answered.text, answered.tokens = read.get(request.kind, chat)()


def day_of(count: int, unfaithful: int) -> list[DayRequest]:
    """Return a day's requests in order, spread evenly over its hours; those of the `unfaithful` hour are."""
    hours = (number * HOURS // count for number in range(count))
    return [DayRequest(number, hour, hour == unfaithful) for number, hour in enumerate(hours)]
