"""Questions over HTTP: to a server that follows a script, and to Helmsight itself, which must answer as its engine does."""

from __future__ import annotations

import base64
import io
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import requests
import torch
from PIL import Image

import steering
from probes.answering import endpoint
from probes.answering.base import Push, Question, Reply
from probes.answering.endpoint import Endpoint
from probes.answering.engine import InProcess
from steering import DROP, Criterion, Generate, Icd, Options, Pai, See, Think, Vcd
from tests import families

ROOT = Path(__file__).parents[3]
PICTURE = families.example_image(0)

PLAIN = {"id": "small", "object": "model", "owned_by": "somebody", "vectors": 3}
HELMSIGHT = PLAIN | {
    "owned_by": "helmsight", "vectors": ["modality-preference", "calm"], "fingerprint": "abc", "limits": {},
}  # fmt: skip

Answer = tuple[int, dict[str, str], Any]  # status, headers, and a body that is JSON unless it is bytes


def said(text: str | None, **more: Any) -> Answer:
    return 200, {}, {"choices": [{"index": 0, "message": {"role": "assistant", "content": text}, **more}]}


def echo(body: dict[str, Any]) -> Answer:
    return said(body["messages"][0]["content"])


def failed(status: int, message: str = "no", **headers: str) -> Answer:
    return status, {name.replace("_", "-"): value for name, value in headers.items()}, {"error": {"message": message}}


class Server(ThreadingHTTPServer):
    """Lists `models` (or answers with that status), answers chats with `answer`, and keeps what it was sent."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.models: list[Any] | Answer = [PLAIN]
        self.answer: Callable[[dict[str, Any]], Answer] = echo
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.paths: list[str] = []
        self.at_once = self.most_at_once = 0
        self.counting = threading.Lock()

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError):  # of a client that did not wait
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        models = self.server.models
        self.send((200, {}, {"data": models}) if isinstance(models, list) else models)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with self.server.counting:
            self.server.bodies.append(body)
            self.server.at_once += 1
            self.server.most_at_once = max(self.server.most_at_once, self.server.at_once)
        answer = self.server.answer(body)
        with self.server.counting:
            self.server.at_once -= 1
        if answer[0]:  # 0 closes the connection without a word
            self.send(answer)

    def send(self, answer: Answer) -> None:
        status, headers, body = answer
        self.server.paths.append(self.path)
        self.server.keys.append(self.headers["Authorization"])
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(data))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *words: Any) -> None:
        pass


@pytest.fixture(autouse=True)
def no_waits_and_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "BACKOFF", 0.0)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


@pytest.fixture
def server() -> Iterator[Server]:
    with Server() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def asked(text: str, **more: Any) -> Question:
    return Question([{"role": "user", "content": text}], **more)


def numbered() -> Iterator[Question]:
    return (asked(str(number)) for number in itertools.count())


def assert_equal_pictures(one: Image.Image, other: Image.Image) -> None:
    assert (one.mode, one.size, one.tobytes()) == (other.mode, other.size, other.tobytes())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("helmsight-endpoint")]


# ------------------------------------------------------------------------------------------ addresses, models, keys


@pytest.mark.parametrize("ending", ["", "/", "/v1", "/v1/"])
def test_an_address_may_end_with_v1_or_not(server: Server, ending: str) -> None:
    there = Endpoint(server.url + ending)
    assert list(there.answers([asked("yes")])) == [Reply("yes")]
    assert server.paths == ["/v1/models", "/v1/chat/completions"]
    assert there.identity == f"{server.url}/v1 small"


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host/v1", "file:///etc", "http://", "http://a:b@host", "https://host/v1?key=1"]
)
def test_what_is_no_address_is_named(url: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"got {url!r}")):
        Endpoint(url)


def test_one_of_several_models_has_to_be_named(server: Server) -> None:
    server.models = [PLAIN, PLAIN | {"id": "large"}]
    with pytest.raises(ValueError, match="2; name one: small, large"):
        Endpoint(server.url)
    list(Endpoint(server.url, model="large").answers([asked("?")]))
    assert server.bodies[0]["model"] == "large"


def test_a_server_that_lists_no_models_needs_a_name(server: Server) -> None:
    server.models = failed(404, "no such route")
    assert list(Endpoint(server.url, model="mine").answers([asked("yes")])) == [Reply("yes")]
    with pytest.raises(ValueError, match="status 404: no such route"):
        Endpoint(server.url)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "not have one model but 0"),
        (failed(401, "Incorrect API key."), "/v1/models answered with status 401: Incorrect API key."),
        ((200, {}, b"<html>"), "something that is not JSON: <html>"),
        ((200, {}, ["small"]), "did not answer with a list of models"),
        ((301, {"Location": "/elsewhere"}, b""), "status 301"),
    ],
)
def test_a_list_of_models_that_is_none_is_an_error(server: Server, models: Any, message: str) -> None:
    server.models = models
    with pytest.raises(ValueError, match=re.escape(message)):
        Endpoint(server.url)


@pytest.mark.parametrize(
    ("given", "environment", "sent"),
    [
        (None, None, None),
        (None, "from-outside\n", "Bearer from-outside"),
        ("own", "from-outside", "Bearer own"),
        ("", "from-outside", None),
    ],
)
def test_the_key_is_sent_where_there_is_one(
    server: Server, monkeypatch: pytest.MonkeyPatch, tmp_path: Path,
    given: str | None, environment: str | None, sent: str | None,
) -> None:  # fmt: skip
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    if sent is not None:  # requests would prefer it to a mere header
        (tmp_path / "netrc").write_text("machine 127.0.0.1 login somebody password else\n")
    if environment is not None:
        monkeypatch.setenv("OPENAI_API_KEY", environment)
    list(Endpoint(server.url, api_key=given).answers([asked("?")]))
    assert server.keys == [sent, sent]


# ------------------------------------------------------------------------------------------------ questions, replies


def test_a_plain_server_gets_nothing_that_openai_does_not_know(server: Server) -> None:
    parts = [{"type": "image", "image": PICTURE}, {"type": "text", "text": "Text context: x", "span": "context"}]
    server.answer = lambda body: said(None)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": parts}]
    assert list(Endpoint(server.url).answers([Question(chat, max_tokens=7)])) == [Reply("")]
    (body,) = server.bodies
    assert set(body) == {"model", "messages", "temperature", "max_tokens"}
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("small", 0, 7)
    assert body["messages"][0] == chat[0]
    assert body["messages"][1]["role"] == "user"
    image, text = body["messages"][1]["content"]
    assert text == {"type": "text", "text": "Text context: x"}
    kind, _, data = image["image_url"]["url"].partition("base64,")
    assert (image["type"], kind) == ("image_url", "data:image/png;")
    assert_equal_pictures(Image.open(io.BytesIO(base64.b64decode(data))), PICTURE)


def test_other_pictures_are_sent_as_rgb(server: Server) -> None:
    picture = Image.new("RGBA", (4, 4), (10, 20, 30, 0))
    server.answer = lambda body: said("x")
    list(Endpoint(server.url).answers([Question([{"role": "user", "content": [{"type": "image", "image": picture}]}])]))
    url = server.bodies[0]["messages"][0]["content"][0]["image_url"]["url"]
    sent = Image.open(io.BytesIO(base64.b64decode(url.partition(",")[2])))
    assert_equal_pictures(sent, Image.new("RGB", (4, 4), (10, 20, 30)))


def test_a_picture_is_encoded_once(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    saved: list[Image.Image] = []
    save = Image.Image.save
    monkeypatch.setattr(
        Image.Image, "save", lambda self, *args, **more: (saved.append(self), save(self, *args, **more))
    )
    pictures = [families.example_image(0), families.example_image(0)]
    chats = [[{"role": "user", "content": [{"type": "image", "image": pictures[i % 2]}]}] for i in range(12)]
    server.answer = lambda body: said(body["messages"][0]["content"][0]["image_url"]["url"])
    replies = list(Endpoint(server.url, concurrency=4).answers(map(Question, chats)))
    assert len(saved) == 2
    assert len({reply.text for reply in replies}) == 1


def test_a_picture_that_took_the_place_of_another_in_memory_is_not_taken_for_it(server: Server) -> None:
    server.answer = lambda body: said(body["messages"][0]["content"][0]["image_url"]["url"])

    def questions() -> Iterator[Question]:
        for shade in range(40):  # each is forgotten before the next is made
            image = Image.new("RGB", (8, 8), (shade, 0, 0))
            yield Question([{"role": "user", "content": [{"type": "image", "image": image}]}])

    replies = [reply.text for reply in Endpoint(server.url, concurrency=1).answers(questions())]
    assert len(set(replies)) == 40


def test_a_helmsight_server_is_asked_to_steer_and_to_measure(server: Server) -> None:
    server.models = [HELMSIGHT]
    auto = {"answer": 0.5, "drop_vision": 0.4}
    applied = {"steering": [{"name": "calm", "toward": "text", "auto": auto}]}
    server.answer = lambda body: said("x", diagnostics={"modality": {"attention_ratio": 0.25}}, applied=applied)
    criteria = (DROP, Criterion("surprise"), Criterion("surprise", 3.5, one_degraded=True))
    there = Endpoint(server.url, concurrency=1)
    assert there.identity == f"{server.url}/v1 small abc"
    assert there.vectors == ("modality-preference", "calm")
    marked = Question([{"role": "user", "content": [{"type": "text", "text": "x", "span": "context"}]}])
    replies = there.answers(
        [
            marked,
            asked("?", push=Push("vision", "calm", 0.5, (1, 2))),
            *(asked("?", push=Push("auto", vector("calm"), criterion=criterion)) for criterion in criteria),
        ]
    )
    automatic = Reply("x", 0.25, {"toward": "text", **auto})
    assert list(replies) == [Reply("x", 0.25), Reply("x", 0.25), *[automatic] * 3]
    plain, stated, found, surprised, bounded = server.bodies
    for body in server.bodies:
        assert (body["diagnostics"], body["repetition_penalty"]) == ({"include": ["modality"]}, 1.0)
    assert "steering" not in plain
    assert plain["messages"] == marked.chat
    assert stated["steering"] == {"vector": "calm", "toward": "vision", "strength": 0.5, "layers": [1, 2]}
    short = {"vector": "calm", "toward": "auto", "strength": 1.0}
    assert found["steering"] == short
    assert surprised["steering"] == {**short, "auto": {"criterion": "surprise", "one_degraded": False}}
    assert bounded["steering"] == {**short, "auto": {"criterion": "surprise", "bound": 3.5, "one_degraded": True}}


def test_a_helmsight_server_is_told_which_interventions_with_all_their_options(server: Server) -> None:
    server.models = [HELMSIGHT]
    server.answer = lambda body: said("x")
    asked_for: list[tuple[Options, ...]] = [
        (),
        (See(alpha=0.2, reading="scale", shallow=3), Generate(weight=0.25, refresh=2)),
        (Think(threshold=1.5),),
        (Vcd(step=700),),
        (Icd(instruction="You are tired."),),
        (Pai(first_layer=1), See()),
    ]
    there = Endpoint(server.url, concurrency=1)
    questions = (replace(asked("?"), interventions=one, attention=False) for one in asked_for)
    assert list(there.answers(questions)) == [Reply("x")] * 6
    assert not any("diagnostics" in body or "steering" in body for body in server.bodies)
    off = {"see": False, "think": False, "generate": False}
    see = {"alpha": 0.1, "reading": See().reading, "ceiling": 1.0, "spans": See().spans}
    assert [{name: body[name] for name in ("sage", "contrast") if name in body} for body in server.bodies] == [
        {},
        {
            "sage": {
                "see": see | {"alpha": 0.2, "reading": "scale", "shallow": 3}, "think": False,
                "generate": {"lambda": 0.25, "top": 0.2, "refresh": 2},
            }
        },
        {"sage": off | {"think": {"gamma": 0.9, "quantile": 0.9, "threshold": 1.5}}},
        {"contrast": {"kind": "vcd", "alpha": 1.0, "beta": 0.1, "step": 700}},
        {"contrast": {"kind": "icd", "alpha": 1.0, "beta": 0.1, "instruction": "You are tired."}},
        {
            "contrast": {"kind": "pai", "alpha": 0.1, "beta": 0.1, "amplify": 0.2, "first_layer": 1},
            "sage": off | {"see": see},
        },
    ]  # fmt: skip


def test_interventions_that_the_server_does_not_know_are_refused_unasked(server: Server) -> None:
    replies = Endpoint(server.url, concurrency=1).answers([replace(asked("?"), interventions=(See(),))])
    with pytest.raises(ValueError, match=r"small at .* cannot be steered: that is not a Helmsight server\."):
        next(replies)
    assert server.bodies == []


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (PLAIN, "small at .* cannot be steered: that is not a Helmsight server"),
        (HELMSIGHT, "no vector 'random-0'; it has modality-preference, calm"),
        (HELMSIGHT | {"vectors": []}, "it has none"),
    ],
)
def test_a_push_that_the_server_cannot_do_is_refused_unasked(server: Server, model: Any, message: str) -> None:
    server.models = [model]
    server.answer = lambda body: said("x", diagnostics={"modality": {"attention_ratio": None}})
    replies = Endpoint(server.url, concurrency=1).answers([asked("?"), asked("?", push=Push("text", "random-0"))])
    assert next(replies) == Reply("x")
    with pytest.raises(ValueError, match=message):
        next(replies)
    assert len(server.bodies) == 1


# ------------------------------------------------------------------------------------------------------------ errors


def play(server: Server, *answers: Answer) -> None:
    """Answer with these, the last one again and again."""
    rest = iter(answers)
    server.answer = lambda body: next(rest, answers[-1])


@pytest.mark.parametrize("first", [failed(429, Retry_After="0"), failed(502), failed(503), failed(504), (0, {}, b"")])
def test_what_may_pass_is_tried_again(server: Server, first: Answer) -> None:
    play(server, first, first, said("well"))
    assert list(Endpoint(server.url).answers([asked("?")])) == [Reply("well")]
    assert len(server.bodies) == 3
    assert server.bodies[0] == server.bodies[2]


def test_the_server_says_how_long_to_wait(server: Server) -> None:
    play(server, failed(429, Retry_After="1"), said("well"))
    begun = time.monotonic()
    assert list(Endpoint(server.url).answers([asked("?")])) == [Reply("well")]
    assert time.monotonic() - begun >= 1.0


@pytest.mark.parametrize(
    ("answer", "attempts", "message"),
    [
        (failed(503, "Still loading."), 6, "status 503: Still loading."),
        (failed(500, "x" * 400), 1, "status 500: " + "x" * 300 + "$"),
        (failed(400, "Unsupported parameter: 'max_tokens'."), 1, r"status 400: Unsupported parameter: 'max_tokens'\."),
        ((500, {}, b"a\n\nb"), 1, "status 500: a b"),
        ((500, {}, {"error": "odd"}), 1, "status 500: .*odd"),
        ((200, {}, b"{"), 1, "not JSON: {"),
        ((200, {}, []), 1, "did not answer with a chat completion"),
        ((200, {}, {"choices": []}), 1, "did not answer with a chat completion"),
        ((200, {}, {"choices": [{"message": {"content": 5}}]}), 1, "did not answer with a chat completion"),
        ((0, {}, b""), 3, "/chat/completions did not answer: "),
    ],
)
def test_what_stays_wrong_is_an_error_with_the_servers_words(
    server: Server, answer: Answer, attempts: int, message: str
) -> None:
    there = Endpoint(server.url)
    play(server, answer)
    with pytest.raises(ValueError, match=message):
        list(there.answers([asked("?")]))
    assert len(server.bodies) == attempts


def test_numbers_that_a_helmsight_server_leaves_out_are_an_error(server: Server) -> None:
    server.models = [HELMSIGHT]
    server.answer = lambda body: said("x", diagnostics=None)
    with pytest.raises(ValueError, match="left out what was measured"):
        list(Endpoint(server.url).answers([asked("?")]))


def test_a_server_that_is_not_there_is_an_error() -> None:
    with Server() as gone:
        url = gone.url
    with pytest.raises(ValueError, match=f"{url}/v1/models did not answer: .*refused"):
        Endpoint(url)


def test_a_server_that_takes_too_long_is_an_error(server: Server) -> None:
    over = threading.Event()
    server.answer = lambda body: said("late" if over.wait(20) else "never")
    with pytest.raises(ValueError, match="timed out"):
        list(Endpoint(server.url, timeout=0.1).answers([asked("?")]))
    over.set()
    assert len(server.bodies) == 3


# ------------------------------------------------------------------------------------------------- several at a time


def test_replies_keep_the_order_though_later_ones_come_first(server: Server) -> None:
    last_is_there = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        number = body["messages"][0]["content"]
        assert number != "0" or last_is_there.wait(20)
        if number == "3":
            last_is_there.set()
        return echo(body)

    server.answer = answer
    replies = Endpoint(server.url, concurrency=4).answers(itertools.islice(numbered(), 4))
    assert [reply.text for reply in replies] == ["0", "1", "2", "3"]


def test_as_many_as_stated_are_under_way(server: Server) -> None:
    together = threading.Barrier(3)

    def answer(body: dict[str, Any]) -> Answer:
        together.wait(20)  # broken, and the answer an error, unless three come together
        time.sleep(0.03)  # for a fourth, if there is one
        return echo(body)

    server.answer = answer
    assert len(list(Endpoint(server.url, concurrency=3).answers(itertools.islice(numbered(), 12)))) == 12
    assert server.most_at_once == 3


def test_questions_are_taken_as_they_are_needed(server: Server) -> None:
    taken: list[Question] = []

    def endless() -> Iterator[Question]:
        for question in numbered():
            taken.append(question)
            yield question

    hold = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        assert hold.wait(20)
        return echo(body)

    server.answer = answer
    replies = Endpoint(server.url, concurrency=2).answers(endless())
    assert taken == []
    threading.Timer(0.2, hold.set).start()
    assert next(replies) == Reply("0")
    assert len(taken) == 4  # none was answered before
    for number in range(1, 20):
        assert next(replies) == Reply(str(number))
        assert len(taken) <= number + 4
    replies.close()
    assert threads() == []


def test_a_reply_does_not_wait_for_the_questions_behind_it(server: Server) -> None:
    def slow() -> Iterator[Question]:
        yield asked("0")
        time.sleep(0.3)  # 0 is answered meanwhile
        yield asked("1")
        raise AssertionError("0 was to be handed over before")

    replies = Endpoint(server.url, concurrency=2).answers(slow())
    assert next(replies) == Reply("0")
    replies.close()


def test_after_a_failure_only_those_under_way_are_finished(server: Server) -> None:
    over = threading.Event()

    def answer(body: dict[str, Any]) -> Answer:
        number = body["messages"][0]["content"]
        if number == "1":
            time.sleep(0.1)  # so that 2 to 4 are there
            return failed(400, "bad")
        assert number == "0" or over.wait(20)
        return echo(body)

    server.answer = answer
    replies = Endpoint(server.url, concurrency=2).answers(numbered())
    assert next(replies) == Reply("0")
    threading.Timer(0.5, over.set).start()
    with pytest.raises(ValueError, match="status 400: bad"):
        next(replies)
    assert threads() == []
    assert {body["messages"][0]["content"] for body in server.bodies} <= {"0", "1", "2", "3"}  # 4 had not begun
    assert list(replies) == []


# ------------------------------------------------------------------------------------------------------ the real one


def vector(name: str, layers: int = 2, width: int = 4, fingerprint: str = "abc") -> steering.SteeringVector:
    direction = torch.randn(layers, width, generator=torch.Generator().manual_seed(0))
    ones = (torch.ones(layers) for _ in range(3))
    return steering.SteeringVector(name, direction, *ones, (1,), fingerprint)


@pytest.fixture(scope="module")
def model(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny checkpoint whose defaults have a penalty, as those of the large Qwens have."""
    folder = tmp_path_factory.mktemp("served") / "tiny"
    shutil.copytree(families.checkpoint("qwen2_vl", root), folder)
    config = folder / "generation_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"repetition_penalty": 1.5}))
    return folder


@pytest.fixture(scope="module")
def engine(model: Path) -> steering.Engine:
    engine = steering.Engine(steering.load(model, device="cpu"), slots=4, max_length=512)
    mllm = engine.mllm
    for name in ("push", "other"):
        made = vector(name, mllm.num_layers, mllm.hidden_size, mllm.fingerprint)
        made.save(model / "vectors" / f"{name}.safetensors")
    return engine


@pytest.fixture(scope="module")
def helmsight(model: Path, engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The URL of `helmsight serve`, a process of its own: this room knows nothing of the server's insides."""
    log = tmp_path_factory.mktemp("log") / "server.log"
    words = {
        "model": model, "device": "cpu", "slots": 4, "max-length": 512, "port": 0, "journal": "off", "threads": 1,
        "vectors": log.parent, "api-key": "key-of-the-test",
    }  # fmt: skip
    command = [sys.executable, "-m", "server.cli", "serve", *(f"--{name}={value}" for name, value in words.items())]
    environ = {name: value for name, value in os.environ.items() if not name.startswith("HELMSIGHT_")}
    with ExitStack() as stack:
        output = stack.enter_context(log.open("w"))
        process = subprocess.Popen(command, cwd=ROOT, env=environ, stdout=output, stderr=subprocess.STDOUT)
        stack.callback(process.wait)
        stack.callback(process.kill)  # where it did not end by itself
        yield wait_until_ready(process, log)
        process.terminate()
        process.wait(20)


def wait_until_ready(process: subprocess.Popen[bytes], log: Path) -> str:
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        if found := re.search(r"Listening at: (http://\S+)", log.read_text()):
            with suppress(requests.RequestException):  # it answers when it has loaded the model, which may take long
                if requests.get(found[1] + "/ready", timeout=5).ok:
                    return found[1]
        time.sleep(0.1)
    raise AssertionError(log.read_text())


def questions(push: Push | None) -> list[Question]:
    out = []
    for number in range(3):
        text = f"Text context: the ball number {number} is blue.\nWhat colour is the ball?"
        parts = [{"type": "image", "image": families.example_image(number)}, {"type": "text", "text": text}]
        out.append(Question([{"role": "user", "content": parts}], push, max_tokens=12))
    return out


@pytest.mark.slow
@pytest.mark.parametrize("toward", [None, "vision", "text", "auto"])
def test_a_server_answers_as_its_engine_does(helmsight: str, engine: steering.Engine, toward: Any) -> None:
    there = Endpoint(helmsight, api_key="key-of-the-test", concurrency=2)
    push = None if toward is None else Push(toward, steering.VectorStore(engine.mllm.path / "vectors").get("push"), 3.0)
    here = list(InProcess(engine).answers(questions(push)))
    replies = list(there.answers(questions(push)))
    assert [reply.text for reply in replies] == [reply.text for reply in here]
    for reply, expected in zip(replies, here, strict=True):
        assert expected.attention_ratio is not None
        assert reply.attention_ratio == pytest.approx(expected.attention_ratio, abs=1e-4)
        assert (reply.auto is None) == (expected.auto is None) == (toward != "auto")
        if toward == "auto":
            assert list(reply.auto) == list(expected.auto)
            for name, value in expected.auto.items():
                exact = value is None or isinstance(value, str)
                assert reply.auto[name] == (
                    value if exact else pytest.approx(value, rel=1e-3, abs=0)
                )  # 1e-113 at least
    if push is not None:  # else the comparison would prove nothing
        assert here != list(InProcess(engine).answers(questions(None)))


@pytest.mark.slow
@pytest.mark.parametrize(
    "what", [(See(alpha=0.4), Generate(refresh=2)), (Think(gamma=0.1, threshold=0.0),), (Icd(),), (Pai(),)]
)
def test_a_server_intervenes_as_its_engine_does(
    helmsight: str, engine: steering.Engine, what: tuple[Options, ...]
) -> None:
    there = Endpoint(helmsight, api_key="key-of-the-test", concurrency=2)
    plain = [replace(one, attention=False) for one in questions(None)]
    changed = [replace(one, interventions=what) for one in plain]
    here = list(InProcess(engine).answers(changed))
    assert list(there.answers(changed)) == here != list(InProcess(engine).answers(plain))


@pytest.mark.slow
def test_a_server_tells_what_it_is_and_refuses_in_its_own_words(helmsight: str, engine: steering.Engine) -> None:
    there = Endpoint(helmsight, api_key="key-of-the-test")
    assert there.is_helmsight
    assert there.identity == f"{helmsight}/v1 tiny {engine.mllm.fingerprint}"
    assert set(there.vectors) == {"push", "other"}
    fetched = there.vector("push")
    torch.testing.assert_close(fetched.delta(1.0), vector("push", *fetched.direction.shape).delta(1.0), rtol=0, atol=0)
    with pytest.raises(ValueError, match="has no vector 'none'; it has"):
        there.vector("none")
    with pytest.raises(ValueError, match=r"status 400: 'steering\.layers' must be layer numbers from 0 to 2"):
        list(there.answers(questions(Push("text", "push", layers=(9,)))))
    with pytest.raises(ValueError, match="status 401: An API key is required"):
        Endpoint(helmsight)
