"""Servers that come back, differ, refuse a key, or fail an answer."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from steering import Fault, Request, Sampling, UnsupportedModel
from steering.vllm import client as client_module
from steering.vllm import servers as servers_module
from steering.vllm.servers import Server, ServerLost, Servers
from tests.steering.parallel.asking import chat
from tests.steering.vllm.computing import PlainAnswers
from tests.steering.vllm.conftest import Connect, Serve
from tests.steering.vllm.fake import FakeVllm
from tests.steering.vllm.test_client import ASKED, Body, scripted, tokens_of
from tests.waiting import wait_for


def test_a_server_that_comes_back_is_used_again(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    monkeypatch.setattr(client_module, "GRACE", 0.0)
    fake = serve(answer=scripted())
    client = connect(fake)
    fake.broken = True
    wait_for(lambda: not client.healthy)
    with pytest.raises(Fault, match="No vLLM server"):
        client.submit(ASKED).result()
    fake.broken = False
    wait_for(lambda: client.healthy)
    assert client.submit(ASKED).result().completion_tokens == 20


def test_answers_wait_for_the_only_server_for_a_while(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is back within that time answers what has waited, and behind it what waits fails, without a new request."""
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    fake = serve(answer=scripted())
    client = connect(fake)
    fake.broken = True
    wait_for(lambda: not client.healthy)
    waiting = client.submit(ASKED)
    wait_for(lambda: client.stats()["waiting"] == 1)
    fake.broken = False
    assert waiting.result().completion_tokens == 20
    fake.broken = True
    wait_for(lambda: not client.healthy)
    waiting = client.submit(ASKED)
    wait_for(lambda: client.stats()["waiting"] == 1)
    monkeypatch.setattr(client_module, "GRACE", 0.0)
    with pytest.raises(Fault, match="No vLLM server"):
        waiting.result()
    assert len(fake.asked) == 1


def test_an_answer_of_the_only_server_is_asked_for_again_unless_something_was_sent(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    release = threading.Event()
    killed = serve(answer=scripted(wait=release))
    client = connect(killed)
    streamed = client.submit(ASKED)
    next(iter(streamed))
    with ThreadPoolExecutor(1) as thread:
        whole = thread.submit(client.generate, [ASKED])
        wait_for(lambda: len(killed.asked) == 2)
        killed.stop()
        with pytest.raises(Fault, match="broke off"):
            streamed.result()
        wait_for(lambda: client.stats()["waiting"] == 1)
        release.set()
        back = serve(answer=scripted(), port=killed.server.server_port)
        assert [tokens_of(result) for result in whole.result()] == [list(range(40, 60))]
    assert len(back.asked) == 1


def test_an_answer_that_breaks_off_on_the_only_server_is_asked_for_twice(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    fake = serve(answer=scripted(5, end=False))  # it may be the answer that ends the server
    client = connect(fake)
    with pytest.raises(Fault, match="ended the stream"):
        client.generate([ASKED])
    assert len(fake.asked) == 2


def test_a_server_whose_stream_goes_on_is_not_lost_by_looks_that_it_misses(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    monkeypatch.setattr(client_module, "GONE", 0.0)
    fake = serve(answer=scripted(500), pause=0.01)
    client = connect(fake)
    completion = client.submit(Request(chat(), Sampling(max_tokens=500, ignore_eos=True)))
    chunks = iter(completion)
    next(chunks)
    fake.broken = True
    looks = fake.looks
    for _ in chunks:
        assert client.healthy
        if fake.looks > looks + 10:
            break
    else:
        raise AssertionError("the answer ended before it was looked at")
    completion.cancel()
    monkeypatch.setattr(servers_module, "HEARD", 0.0)
    wait_for(lambda: not client.healthy)


def test_answers_of_a_server_that_is_lost_go_on_while_they_bring_tokens(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are given up once nothing has come for a while, whatever the looks say."""
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    monkeypatch.setattr(client_module, "GONE", 0.5)
    monkeypatch.setattr(servers_module, "HEARD", -1.0)  # so that looks alone decide
    release = threading.Event()
    fake = serve(answer=scripted(60, wait=release), pause=0.03)
    client = connect(fake)
    completion = client.submit(Request(chat(), Sampling(max_tokens=60, ignore_eos=True)))
    next(iter(completion))
    fake.broken = True
    wait_for(lambda: not client.healthy)
    with pytest.raises(Fault, match=r"broke off|ended the stream"):
        completion.result()
    release.set()
    assert completion.generated(0) == 59


def test_a_server_of_another_model_is_not_used(
    serve: Serve, connect: Connect, answers: PlainAnswers, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    first, other = serve(answer=scripted()), serve(answer=scripted())
    client = connect(first, other)
    other.facts = {**other.facts, "model": {**other.facts["model"], "layers": 99}}
    other.broken = True
    wait_for(lambda: len(client.servers.well) == 1)
    other.broken = False
    wait_for(lambda: "another model" in caplog.text)
    assert len(client.servers.well) == 1


@pytest.mark.parametrize(
    ("facts", "match"),
    [(None, "no plugin"), ({"contract": 2, "plugin": "9.9"}, "upgrade"), ({"contract": 1}, "another form")],
)
def test_a_server_that_does_not_speak_the_contract_is_refused(serve: Serve, facts: Any, match: str) -> None:
    fake = serve(answer=scripted())
    fake.facts = facts if facts is not None else {"detail": "Not Found"}
    with pytest.raises(UnsupportedModel, match=match):
        Server(fake.url).look()


def looked_at(*fakes: FakeVllm) -> Servers:
    servers = Servers([Server(fake.url) for fake in fakes])
    for server in servers:
        server.look()
    return servers


def test_two_servers_of_different_models_are_refused(serve: Serve) -> None:
    fakes = [serve(answer=scripted()) for _ in range(2)]
    fakes[1].facts["model"]["layers"] = 99
    with pytest.raises(UnsupportedModel, match="layers 99, not"):
        looked_at(*fakes).facts()


def test_servers_do_together_what_all_of_them_can(serve: Serve, connect: Connect) -> None:
    fakes = [serve(answer=scripted(), can=("steer", "think")), serve(answer=scripted(), can=("think", "states"))]
    client = connect(*fakes)
    assert client.interventions >= {"sage.think"}
    assert "steering" not in client.interventions
    assert len(client.servers.well) == 2


def test_a_server_that_comes_back_with_less_is_not_used(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    fake = serve(answer=scripted(), can=("steer", "think"))
    client = connect(fake)
    fake.broken = True
    wait_for(lambda: not client.healthy)
    fake.facts = {**fake.facts, "can": ["steer"], "plugin": "0.0.1"}
    fake.broken = False
    wait_for(lambda: "no think" in caplog.text)
    assert "helmsight-vllm 0.0.1" in caplog.text
    assert not client.healthy
    fake.facts = {**fake.facts, "can": ["steer", "think", "generate"]}
    wait_for(lambda: client.healthy)


def test_a_server_whose_check_broke_is_looked_at_again(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    monkeypatch.setattr(servers_module, "RESTART", 0.0)
    client = connect(serve(answer=scripted()))
    (server,) = client.servers
    faults = [RuntimeError("no thread can be started")]

    def vet(looked: Server) -> None:
        if faults:
            raise faults.pop()

    server.vet = vet
    server.lose(ServerLost("it ended"))
    wait_for(lambda: server.well)
    assert "no thread can be started" in caplog.text


def test_a_server_is_vetted_before_it_is_used_and_left_alone_where_it_is_refused(
    serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    vetted, verdict = [], UnsupportedModel("its answers differ")
    server = Server(serve(answer=scripted()).url)

    def vet(looked: Server) -> None:
        vetted.append(looked)
        if verdict is not None:
            raise verdict

    server.vet = vet
    with pytest.raises(UnsupportedModel, match="answers differ"):
        server.look()
    assert not server.look()
    assert (len(vetted), server.well) == (1, False)
    verdict = None
    monkeypatch.setattr(server, "_refused_until", 0.0)
    assert server.look()
    assert not server.look()
    assert (len(vetted), server.well) == (2, True)
    server.lose(ServerLost("busy"))
    assert server.look()
    assert len(vetted) == 2
    monkeypatch.setattr(servers_module, "RESTART", 0.0)
    server.lose(ServerLost("it ended"))
    assert server.look()
    assert len(vetted) == 3


def test_an_answer_that_a_server_fails_by_its_own_word_runs_on_another(serve: Serve, connect: Connect) -> None:
    def failing(body: Body) -> Iterator[Any]:
        yield {"error": {"message": "EngineDeadError", "param": None, "code": "engine_error"}}

    fakes = [serve(answer=failing), serve(answer=scripted())]
    client = connect(*fakes)
    asked = [Request([{"role": "user", "content": f"Question {seed}?"}], ASKED.sampling) for seed in range(12)]
    assert [tokens_of(result) for result in client.generate(asked)] == [list(range(40, 60))] * 12
    assert len(fakes[0].asked) > 0
    assert len(client.servers.well) == 2  # what fails one answer need not fail others


def test_a_connection_that_the_server_closes_while_a_body_is_on_its_way_costs_no_answer() -> None:
    """The server answers the first request of each connection, and closes it when the second one comes."""
    listening, taken = socket.create_server(("127.0.0.1", 0)), []

    def serving() -> None:
        for _ in range(2):
            connection, _ = listening.accept()
            with connection, connection.makefile("rb") as lines:
                for answers in (True, False):
                    head = b"".join(iter(lines.readline, b"\r\n"))
                    body = lines.read(2)
                    taken.append((head.split()[0], body))
                    if answers:
                        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 3\r\n\r\n{}\n")
                    else:
                        connection.shutdown(socket.SHUT_RDWR)

    thread = threading.Thread(target=serving, daemon=True)
    thread.start()
    server = Server(f"http://127.0.0.1:{listening.getsockname()[1]}")
    for _ in range(2):
        with server.answer("/v1/helmsight/answer", b"{}") as stream:
            assert list(stream) == [{}]
    assert taken == [(b"POST", b"{}")] * 3
    listening.close()


def test_the_key_is_sent_and_a_wrong_one_is_told(serve: Serve, connect: Connect) -> None:
    fake = serve(answer=scripted(), key="a secret")
    assert connect(fake).submit(ASKED).result().completion_tokens == 20
    server = Server(fake.url, "another")
    with pytest.raises(ServerLost, match="401"):
        server.get("/v1/helmsight/facts")
    with pytest.raises(Fault, match="refuses the key"), server.answer("/v1/helmsight/answer", b"{}"):
        pass
