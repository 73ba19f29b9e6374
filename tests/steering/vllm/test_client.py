"""The client of vLLM servers: streams, cancellation, refusals, servers that are lost, and two of which one is killed."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import steering
from steering import Busy, Fault, Request, RequestError, Sampling
from steering.grammar.grammar import Grammar
from steering.vllm import client as client_module
from steering.vllm.client import VllmClient
from steering.vllm.servers import Server, ServerLost
from tests.forked import forked
from tests.ports import own_port
from tests.steering.parallel.asking import chat, picture
from tests.steering.vllm.computing import PlainAnswers
from tests.steering.vllm.conftest import Connect, Serve
from tests.steering.vllm.fake import FakeVllm, facts_of
from tests.waiting import PATIENCE, wait_for

Body = dict[str, Any]
ASKED = Request(chat(), Sampling(max_tokens=20, ignore_eos=True, logprobs=2))


def scripted(count: int = 20, end: bool = True, wait: threading.Event | None = None) -> Callable[[Body], Iterator[Any]]:
    """Return the answer of a server that says `count` tokens, waits for an event before the last, and ends."""

    def answer(body: Body) -> Iterator[Any]:
        for number in range(count):
            if number == count - 1 and wait is not None:
                wait.wait(PATIENCE)
            yield {"tokens": [40 + number], "logprobs": [-0.5], "top": [[[40 + number, -0.5], [9, -2.0]]]}
        if end:
            yield {"ended": {"reason": "length", "reused": 3, "taken": {}}}

    return answer


def server_of(client: VllmClient, completion: Any) -> Any:
    """Return the server that answers a request."""
    (number,) = (number for number, running in client._running.items() if running is completion)
    return next(answer.server for answer in client._alive.values() if answer.number == number)


def outcome(completion: Any) -> Any:
    """Return the tokens of an answer, or its error."""
    try:
        return completion.result().choices[0].token_ids
    except Fault as error:
        return error


def question(seed: int) -> Request:
    content = f"Question {seed}?"
    return Request([{"role": "user", "content": content}], Sampling(max_tokens=20, seed=seed, ignore_eos=True))


def tokens_of(result: steering.Result) -> list[int]:
    return list(result.choices[0].token_ids)


def test_pieces_add_up_to_the_answer(serve: Serve, connect: Connect) -> None:
    client = connect(serve(answer=scripted()))
    whole = client.submit(ASKED).result().choices[0]
    chunks = list(completion := client.submit(ASKED))
    assert "".join(chunk.text for chunk in chunks) == whole.text
    assert [one for chunk in chunks for one in chunk.logprobs] == list(whole.logprobs or ())
    assert chunks[-1].choice == whole
    assert len(chunks) > 10
    assert completion.first_at is not None
    assert list(whole.token_ids) == list(range(40, 60))
    assert [chunk.choice for chunk in client.submit(ASKED).whole()] == [whole]
    assert client.submit(ASKED).result().cached_tokens == 3
    stats = client.stats()
    assert (stats["generated_tokens"], stats["finished"], stats["running"], stats["waiting"]) == (80, 4, 0, 0)
    assert client.bins["inter_token_seconds"].cumulative()[-1] > 30


def test_the_first_token_is_seen_before_the_last_is_there(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    client = connect(serve(answer=scripted(wait=release)))
    completion = client.submit(ASKED)
    first = next(iter(completion))
    assert first.choice is None
    assert not completion.done
    assert client.stats()["running"] == 1
    release.set()
    assert completion.result().completion_tokens == 20


def test_a_cancelled_answer_is_ended_on_the_server(
    serve: Serve, connect: Connect, caplog: pytest.LogCaptureFixture
) -> None:
    fake = serve(answer=scripted(10_000), pause=0.01)
    client = connect(fake)
    completion = client.submit(Request(chat(), Sampling(max_tokens=500, ignore_eos=True)))
    next(iter(completion))
    completion.cancel()
    assert fake.aborted.acquire(timeout=PATIENCE)
    assert 0 < completion.generated(0) < 200
    wait_for(lambda: client.stats()["running"] == 0)
    assert client.stats()["cancelled"] == 1
    assert "is gone" not in caplog.text
    assert client.healthy
    assert sum(server.running for server in client.servers) == 0


def test_a_cancelled_answer_that_waits_never_reaches_a_server(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    fake = serve(answer=scripted(wait=release), slots=1)
    client = connect(fake)
    first, second = client.submit(ASKED), client.submit(ASKED)
    second.cancel()
    assert client.stats()["waiting"] == 0
    release.set()
    assert first.result().completion_tokens == 20
    with pytest.raises(Fault, match="cancelled"):
        second.result()
    assert len(fake.asked) == 1


def test_what_does_not_fit_is_refused(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    client = connect(serve(answer=scripted(wait=release), slots=1), max_waiting=1)
    running = [client.submit(ASKED), client.submit(ASKED)]
    with pytest.raises(Busy):
        client.submit(ASKED)
    assert client.stats()["refused"] == 1
    release.set()
    assert [completion.result().completion_tokens for completion in running] == [20, 20]


def test_groups_take_turns(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    fake = serve(answer=scripted(wait=release), slots=1)
    client = connect(fake)

    def asked(group: str, seed: int) -> Any:
        with client.turn(group) as turn:
            return turn.submit(Request(chat(), Sampling(max_tokens=20, seed=seed)))

    running = [asked(group, seed) for seed, group in enumerate(["one", "one", "one", "one", "two"])]
    release.set()
    for completion in running:
        completion.result()
    assert [body["seed"] for body in fake.asked].index(4) == 2


@pytest.mark.parametrize(
    "answer", [scripted(3, end=False), lambda body: iter([{"ended": {"reason": "stop", "taken": 5}}])]
)
def test_an_answer_that_makes_no_sense_is_a_fault(serve: Serve, connect: Connect, answer: Any) -> None:
    client = connect(serve(answer=answer))
    request = Request(chat(), Sampling(max_tokens=20), diagnose=["focus"])
    with pytest.raises(Fault):
        client.submit(request).result()
    assert client.stats()["faults"] == 1
    assert client.stats()["running"] == 0


def test_an_error_in_a_stream_is_the_answers(serve: Serve, connect: Connect) -> None:
    def answer(body: Body) -> Iterator[Any]:
        yield {"tokens": [40]}
        yield {"error": {"message": "the engine core died", "param": None, "code": "engine"}}

    with pytest.raises(Fault, match="the engine core died"):
        connect(serve(answer=answer)).submit(ASKED).result()


def test_an_answer_whose_engine_ends_runs_on_another_server(serve: Serve, connect: Connect) -> None:
    def answer(body: Body) -> Iterator[Any]:
        yield {"error": {"message": "vLLM's engine has ended.", "param": None, "code": "engine_dead"}}

    dead, well = serve(answer=answer), serve(answer=scripted())
    results = connect(dead, well).generate([question(seed) for seed in range(12)])
    assert [tokens_of(result) for result in results] == [list(range(40, 60))] * 12
    assert dead.asked
    with pytest.raises(ServerLost):
        connect(dead).submit(ASKED).result()


@pytest.mark.parametrize(
    "schema", [{"enum": []}, {"type": "integer", "multipleOf": 99991, "minimum": 1}, {"$ref": "#"}]
)
def test_a_schema_that_cannot_be_followed_is_refused_before_a_server_is_asked(
    serve: Serve, connect: Connect, schema: dict[str, Any]
) -> None:
    server = serve(answer=scripted())
    client = connect(server)
    with pytest.raises(RequestError) as refused:
        client.submit(
            replace(question(1), sampling=Sampling(), grammar=Grammar.json_schema(schema, param="response_format"))
        )
    assert refused.value.param == "response_format"
    assert not server.asked


def test_an_answer_whose_server_is_lost_before_its_first_token_runs_on_another(serve: Serve, connect: Connect) -> None:
    lost, well = serve(answer=scripted()), serve(answer=scripted())
    client = connect(lost, well)
    lost.stop()
    # of as many questions, one has the lost server as its home
    results = client.generate([question(seed) for seed in range(12)])
    assert [tokens_of(result) for result in results] == [list(range(40, 60))] * 12
    assert len(well.asked) == 12
    assert client.stats()["servers_ready"] == 1
    assert client.healthy


def test_a_streamed_answer_whose_server_breaks_off_fails_and_a_whole_one_runs_again(
    serve: Serve, connect: Connect
) -> None:
    breaking, well = serve(answer=scripted(5, end=False)), serve(answer=scripted())
    client = connect(breaking, well)
    both = 0
    for seed in range(20):  # until both servers were an answer's home
        request = question(seed)
        before = len(breaking.asked)
        (result,) = client.generate([request])
        assert tokens_of(result) == list(range(40, 60))
        for server in client.servers:
            wait_for(lambda server=server: server.well or server.look())  # type: ignore[misc]
        if len(breaking.asked) > before:
            both += 1
            completion = client.submit(request)
            with pytest.raises(Fault, match=r"broke off|ended the stream"):
                list(completion)
            break
    assert both == 1


def test_what_runs_is_answered_before_it_stops(serve: Serve, connect: Connect) -> None:
    client = connect(serve(answer=scripted(), pause=0.01))
    running = [client.submit(ASKED) for _ in range(3)]
    client.stop(drain=20)
    assert [completion.result().completion_tokens for completion in running] == [20] * 3
    with pytest.raises(Fault, match="shutting down"):
        client.submit(ASKED)


def test_whoever_runs_when_it_stops_is_told_and_the_server_too(serve: Serve, connect: Connect) -> None:
    fake = serve(answer=scripted(10_000), pause=0.01)
    client = connect(fake)
    completion = client.submit(Request(chat(), Sampling(max_tokens=500, ignore_eos=True)))
    next(iter(completion))
    client.stop()
    with pytest.raises(Fault, match="shutting down"):
        completion.result()
    assert fake.aborted.acquire(timeout=PATIENCE)


def test_a_machine_that_vanishes_without_a_word_does_not_hold_its_answers(
    serve: Serve, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client_module, "EVERY", 0.02)
    monkeypatch.setattr(client_module, "GONE", 0.1)
    fake = serve(answer=scripted(wait=threading.Event()))
    client = connect(fake)
    completion = client.submit(ASKED)
    next(iter(completion))
    fake.broken = True
    with pytest.raises(Fault):
        completion.result()


def test_an_answer_goes_home_while_there_is_room(serve: Serve, connect: Connect) -> None:
    release = threading.Event()
    release.set()
    fakes = [serve(answer=scripted(wait=release), slots=2) for _ in range(3)]
    client = connect(*fakes)
    for colour in range(4):
        request = Request(chat(picture(colour * 50, 9, 9)), Sampling(max_tokens=20))
        for _ in range(3):
            client.submit(request).result()
    counts = sorted(len(fake.asked) for fake in fakes)
    assert sum(counts) == 12
    assert all(count % 3 == 0 for count in counts)
    for fake in fakes:
        fake.asked.clear()
    release.clear()
    running = [client.submit(Request(chat(picture(1, 2, 3)), Sampling(max_tokens=20))) for _ in range(6)]
    wait_for(lambda: sum(len(fake.asked) for fake in fakes) == 6)
    release.set()
    assert [completion.result().completion_tokens for completion in running] == [20] * 6
    assert [len(fake.asked) for fake in fakes] == [2, 2, 2]


def test_two_servers_of_which_one_is_killed_while_it_answers(
    answers: PlainAnswers, own: steering.Engine, connect: Connect, tmp_path: Path
) -> None:
    """Streamed answers of the killed one end with an error, whole ones are all there, and the other one goes on."""
    ports = [own_port() for _ in range(2)]
    facts = facts_of(answers, slots=32)

    def serving(port: int) -> Callable[[], None]:
        def serve() -> None:  # the port is bound in the process itself
            FakeVllm(answers.answer, facts, pause=0.05, port=port).server.serve_forever()

        return serve

    with ExitStack() as stack:
        processes = [stack.enter_context(forked(serving(port), tmp_path / str(port))) for port in ports]
        fakes: list[Any] = [SimpleNamespace(url=f"http://127.0.0.1:{port}", key=None) for port in ports]
        for fake in fakes:
            wait_for(lambda fake=fake: Server(fake.url).look())  # type: ignore[misc]
        client = connect(*fakes)
        questions = [[{"role": "user", "content": f"Question {number}: what is it?"}] for number in range(24)]
        asked = [Request(question, Sampling(max_tokens=16, ignore_eos=True)) for question in questions]
        expected = [result.choices[0].token_ids for result in own.generate(asked)]
        begun: list[Any] = []
        with ThreadPoolExecutor(1) as aside:
            whole = aside.submit(client.generate, asked[12:], begun.append)
            streamed = [client.submit(request) for request in asked[:12]]
            assert all(next(iter(completion)) is not None for completion in streamed)
            wait_for(lambda: len(begun) == 12)
            servers, homes = list(client.servers), [server_of(client, completion) for completion in streamed]
            killed = max(servers, key=homes.count)
            processes[servers.index(killed)].kill()
            assert [result.choices[0].token_ids for result in whole.result()] == expected[12:]
        for completion, home, tokens in zip(streamed, homes, expected, strict=False):
            found = outcome(completion)
            assert isinstance(found, Fault) if home is killed else found == tokens
        assert 0 < homes.count(killed) < len(homes)
        assert client.healthy
        assert [result.choices[0].token_ids for result in client.generate(asked[:3])] == expected[:3]
        assert sum(server.running for server in client.servers) == 0
