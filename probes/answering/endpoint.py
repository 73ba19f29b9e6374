"""An answerer behind any server that speaks OpenAI's protocol; a Helmsight server also steers and measures."""

from __future__ import annotations

import base64
import contextlib
import io
import json
import os
import re
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import requests
from PIL import Image
from requests.adapters import HTTPAdapter
from urllib3.exceptions import DecodeError, HTTPError, ProtocolError
from urllib3.util import Retry

from probes.answering import wire
from probes.answering.base import Push, Question, Reply, Unanswered
from probes.answering.odds import ALTERNATIVES, log_odds
from steering import SteeringVector
from steering.protocol.readout import REGISTRY
from steering.readiness import PARTS, PartState

ATTEMPTS = 6
"""The most attempts at a request; half as many if its connection broke or it timed out, which takes long."""

AGAIN = (429, 500, 502, 503, 504)
"""HTTP statuses of failures that may pass."""

BACKOFF = 0.5
"""The base of the growing waits between attempts, in seconds, if the server does not say how long to wait."""

LARGEST = 64 * 2**20
"""The largest answer in bytes: a longer one is no chat completion, and an endless one would fill the memory."""

SOURCE = "X-Helmsight-Source"
"""The header by which a Helmsight server counts these requests apart from live ones."""

PICTURES = 16
"""The most encoded pictures that are kept."""


class Endpoint:
    """The answers of `model` behind `base_url`, a server's root or its /v1; an `Answerer`.

    `model` may be left out if there is only one; `api_key` defaults to OPENAI_API_KEY. Up to `concurrency` questions are in
    flight at once, each attempt for at most `timeout` seconds. `models` are all names that the server lists; `vectors`
    (names) and `fingerprint` are those of a Helmsight server, whose journal and metrics count the questions under `source`.
    Raises ValueError if the address is invalid, the server fails, or the model has to be named.
    """

    is_helmsight = False
    """True once the server's list of models says so."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        concurrency: int = 8,
        timeout: float = 300.0,
        source: str = "eval",
    ) -> None:
        self.base_url = _base(base_url)
        self.concurrency = concurrency
        self.timeout = timeout
        self.source = source
        self._key = (os.environ.get("OPENAI_API_KEY", "") if api_key is None else api_key).strip()
        self._pictures: OrderedDict[int, tuple[Image.Image, str]] = OrderedDict()
        self._encoding = threading.Lock()
        self.models: frozenset[str] = frozenset()
        self.model, entry = self._find(model)
        self.is_helmsight = (
            entry.get("owned_by") == "helmsight" and {"vectors", "fingerprint", "limits"} <= entry.keys()
        )
        self.vectors: tuple[str, ...] = tuple(entry["vectors"]) if self.is_helmsight else ()
        self.fingerprint: str | None = entry["fingerprint"] if self.is_helmsight else None
        self._parts = {part["part"]: bool(part["there"]) for part in entry.get("prepared", ())}
        self._preset = json.dumps(entry["fields"], sort_keys=True) if entry.get("preset") else None

    def prepared(self) -> list[PartState]:
        """Return the state of the parts that are measured once for the server's model; empty for another server."""
        return [PartState(part, self._parts[part.name]) for part in PARTS if part.name in self._parts]

    @property
    def identity(self) -> str:
        return " ".join(filter(None, (self.base_url, self.model, self.fingerprint, self._preset)))

    def digests(self) -> Mapping[str, str]:
        """Return the digests of the server's vectors by name; empty for another server."""
        if not self.is_helmsight:
            return {}
        with self._session() as session:
            listed = _json(self._send(session, "GET", "/steering/vectors"))["data"]
        return {vector["name"]: vector["digest"] for vector in listed if vector.get("digest")}

    def vector(self, name: str) -> SteeringVector:
        """Return the server's vector of that name, so that the ledger distinguishes it from another of that name."""
        self._check_vector(name)
        with self._session() as session:
            response = self._send(session, "GET", f"/steering/vectors/{name}/file")
        if response.status_code != 200:
            _json(response)
        return SteeringVector.from_bytes(response.content)

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        """Yield the replies in order, taking at most twice `concurrency` questions ahead of them.

        A vector stands for the server's of that name. Raises ValueError if a question cannot be asked or is refused, after
        the replies before it; questions not begun by then are not asked.
        """
        thread_local = threading.local()
        pending: deque[Future[Reply]] = deque()
        with contextlib.ExitStack() as sessions:  # one per thread: requests does not promise thread safety

            def begin() -> None:
                thread_local.session = sessions.enter_context(self._session())

            workers = ThreadPoolExecutor(self.concurrency, "helmsight-endpoint", begin)
            try:
                for question in questions:
                    pending.append(
                        workers.submit(lambda question: self._reply(thread_local.session, question), question)
                    )
                    while pending and (pending[0].done() or len(pending) >= 2 * self.concurrency):
                        yield pending.popleft().result()
                while pending:
                    yield pending.popleft().result()
            finally:
                workers.shutdown(cancel_futures=True)

    def open(self) -> requests.Session:
        """Open a connection for one thread."""
        return self._session()

    def post(self, session: requests.Session, body: Mapping[str, Any]) -> requests.Response:
        """Return the response to a chat, whatever its status; raises Unanswered if there is none after all attempts."""
        return self._send(session, "POST", "/chat/completions", body)

    def _find(self, model: str | None) -> tuple[str, Mapping[str, Any]]:
        """Return the model's name, and its entry in the server's list."""
        with self._session(connect=0) as session:
            response = self._send(session, "GET", "/models")
        if response.status_code == 404 and model is not None:
            return model, {}
        try:
            listed: dict[str, Mapping[str, Any]] = {entry["id"]: entry for entry in _json(response)["data"]}
        except (KeyError, TypeError):
            raise ValueError(f"{response.url} did not answer with a list of models.") from None
        self.models = frozenset(listed)
        alone = [name for name, entry in listed.items() if not entry.get("preset")]
        if model is None and len(alone) != 1:
            raise ValueError(f"{self.base_url} has {len(alone)} models; choose one: {', '.join(alone)}")
        model = alone[0] if model is None else model
        entry = listed.get(model, {})
        return model, {**listed.get(entry.get("root", ""), {}), **entry}  # a preset inherits its model's entry

    def _reply(self, session: requests.Session, question: Question) -> Reply:
        response = self._send(session, "POST", "/chat/completions", self._body(question))
        match _json(response):
            case {"choices": [{"message": {"content": str() | None as text}} as choice, *_]}:
                pass
            case _:
                raise ValueError(f"{response.url} did not answer with a chat completion.")
        try:
            diagnostics, auto, logprobs, odds = None, None, None, None
            if question.odds:
                first = ((choice.get("logprobs") or {}).get("content") or [{}])[0].get("top_logprobs") or ()
                odds = log_odds((token["token"], float(token["logprob"])) for token in first) if first else None
            if question.logprobs:
                logprobs = [float(token["logprob"]) for token in choice["logprobs"]["content"]]
            if self.is_helmsight and question.diagnose is not None:
                diagnostics = choice["diagnostics"]
                for name in question.diagnose.include:
                    diagnostics[REGISTRY[name].part_of or name]
            if question.push is not None and question.push.toward == "auto":
                applied = choice["applied"]["steering"][0]
                auto = {"toward": applied["toward"], **applied["auto"]}
        except (KeyError, IndexError, TypeError) as error:
            raise ValueError(f"{response.url} left out measured values: {error!r}.") from None
        return Reply(text or "", diagnostics, auto, logprobs, odds)

    def _body(self, question: Question) -> dict[str, Any]:
        chat, interventions = question.chat, question.interventions
        if not self.is_helmsight:
            for intervention in (intervention for intervention in interventions if intervention.only_chat):
                chat = intervention.chat(chat)
            interventions = tuple(intervention for intervention in interventions if not intervention.only_chat)
        messages = [{**message, "content": self._content(message["content"])} for message in chat]
        body = {"model": self.model, "messages": messages, "temperature": 0, "max_tokens": question.max_tokens}
        if self.is_helmsight:
            # A server applies the checkpoint's own penalty by default; `InProcess` does not.
            body["repetition_penalty"] = 1.0
            if question.diagnose is not None:
                body["diagnostics"] = wire.diagnostics(question.diagnose)
        if question.temperature:
            body |= {"temperature": question.temperature, "seed": question.seed}
        if question.logprobs or question.odds:
            body["logprobs"] = True
        if question.odds:
            body["top_logprobs"] = ALTERNATIVES
        if question.force is not None:
            self.check_interventions()
            body["force"] = question.force
            del body["max_tokens"]
        if question.push is not None:
            body["steering"] = self._steering(question.push)
        if interventions:
            self.check_interventions()
        return body | wire.fields(interventions)

    def _steering(self, push: Push) -> dict[str, Any]:
        name = push.vector if isinstance(push.vector, str) else push.vector.name
        self._check_vector(name)
        return wire.steering(push, name)

    def check_interventions(self) -> None:
        """Raise ValueError if the server supports no interventions."""
        if not self.is_helmsight:
            raise ValueError(f"{self.model} at {self.base_url} cannot be steered: it is not a Helmsight server.")

    def _check_vector(self, name: str) -> None:
        self.check_interventions()
        if name not in self.vectors:
            raise ValueError(f"{self.base_url} has no vector {name!r}; it has {', '.join(self.vectors) or 'none'}.")

    def _content(self, content: str | Iterable[Mapping[str, Any]]) -> str | list[Mapping[str, Any]]:
        if isinstance(content, str):
            return content
        parts: list[Mapping[str, Any]] = []
        for part in content:
            if part["type"] == "image":
                parts.append({"type": "image_url", "image_url": {"url": self._picture(part["image"])}})
            else:  # only Helmsight accepts a "span"
                parts.append(part if self.is_helmsight else {"type": "text", "text": part["text"]})
        return parts

    def _picture(self, image: Image.Image) -> str:
        """Return the data: URL of a picture, cached with it so that its id stays valid; many questions share one."""
        with self._encoding:  # also the lookup: two threads must not read one lazily loaded file
            if id(image) not in self._pictures:
                buffer = io.BytesIO()
                image.convert("RGB").save(buffer, "PNG", compress_level=1)  # servers differ on other modes
                url = "data:image/png;base64," + base64.b64encode(buffer.getvalue()).decode()
                self._pictures[id(image)] = image, url
                if len(self._pictures) > PICTURES:
                    self._pictures.popitem(last=False)
            return self._pictures[id(image)][1]

    def _session(self, connect: int | None = None) -> requests.Session:
        """Open a session; `connect` is how often a refused connection is retried, if not as often as all else."""
        retry = Retry(
            total=ATTEMPTS - 1, connect=connect, read=ATTEMPTS // 2 - 1, allowed_methods=("GET", "POST"),
            backoff_factor=BACKOFF, status_forcelist=AGAIN, respect_retry_after_header=True,
            raise_on_status=False,
        )  # fmt: skip
        session = requests.Session()
        if self.is_helmsight:
            session.headers[SOURCE] = self.source
        session.mount("http://", HTTPAdapter(max_retries=retry))
        session.mount("https://", HTTPAdapter(max_retries=retry))
        if self._key:
            session.auth = self._authorize  # ~/.netrc would override a session header
        return session

    def _authorize(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = f"Bearer {self._key}"
        return request

    def _send(self, session: requests.Session, method: str, path: str, body: Any = None) -> requests.Response:
        """Return the last response, whatever its status; a redirect, which would turn a POST into a GET, is not followed."""
        url, limits = self.base_url + path, (min(10.0, self.timeout), self.timeout)
        attempts = ATTEMPTS // 2
        try:
            while True:
                try:
                    until = time.monotonic() + sum(limits)
                    response = session.request(
                        method, url, json=body, timeout=limits, allow_redirects=False, stream=True
                    )
                    with contextlib.closing(response.raw):
                        response.raw = io.BytesIO(_content(response, until))
                    return response
                except (ProtocolError, DecodeError):  # a break within the body, which the adapter does not retry
                    attempts -= 1
                    if not attempts:
                        raise
                time.sleep(BACKOFF * 2 ** (ATTEMPTS // 2 - attempts))
        except (requests.RequestException, HTTPError) as error:
            system = re.search(r"\[Errno -?\d+\] ([^'\")]+)", str(error))
            why = f"{system[1]}; is the server running?" if system else _short(str(error))
            raise Unanswered(f"{url} did not answer: {why}") from error


def _content(response: requests.Response, until: float) -> bytes:
    """Return the decoded body; raise Unanswered if it does not end, since a timeout bounds each read, not all of them."""
    read = bytearray()
    for piece in response.raw.stream(1024, decode_content=True):
        read += piece
        if len(read) > LARGEST or time.monotonic() > until:
            bound = f"{LARGEST} bytes" if len(read) > LARGEST else "the time that an answer has"
            raise Unanswered(f"{response.url} did not answer: its answer takes more than {bound}")
    response.headers.pop("Content-Encoding", None)
    return bytes(read)


def _base(url: str) -> str:
    if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", url, re.IGNORECASE):
        raise ValueError(f"The address of a server must be like http://127.0.0.1:8000/v1; got {url!r}.")
    base = url.rstrip("/")
    return base if base.endswith("/v1") else base + "/v1"


def _json(response: requests.Response) -> Any:
    """Return the body of a successful response; raise ValueError with the server's own message for any other."""
    try:
        body = response.json()
    except (requests.JSONDecodeError, RecursionError):
        body = None
    if response.status_code == 200 and body is not None:
        return body
    match body:
        case {"error": {"message": str() as reason}}:
            pass
        case _:
            reason = response.text
    what = "something that is not JSON" if response.status_code == 200 else f"status {response.status_code}"
    raise Unanswered(f"{response.url} answered with {what}: {_short(reason)}")


def _short(text: str) -> str:
    return " ".join(text.split())[:300]
