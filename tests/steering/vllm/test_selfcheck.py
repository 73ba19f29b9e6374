"""At the start, servers that answer otherwise than plain transformers are refused, and the refusal says where."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import SteeringVector, UnsupportedModel
from steering.vllm.arrays import array_of, tensor_of
from steering.vllm.reference import QUESTIONS, STRENGTHS, Reference, ReferenceTask, compute, computed_apart
from steering.vllm.selfcheck import check_servers
from tests.steering.vllm.computing import PlainAnswers
from tests.steering.vllm.conftest import Connect, Serve

Body = dict[str, Any]


@pytest.fixture(scope="module")
def task(folder: Path) -> ReferenceTask:
    return ReferenceTask(str(folder), vectors=(str(folder / "config.json"), str(vector_of(folder))))


@pytest.fixture(scope="module")
def reference(task: ReferenceTask) -> Reference:
    return compute(task)


def vector_of(folder: Path) -> Path:
    return folder / "vectors" / "modality-preference.safetensors"


@pytest.fixture(scope="module")
def vector(folder: Path) -> SteeringVector:
    return SteeringVector.load(vector_of(folder))


def test_references_are_plain_transformers_answers(
    reference: Reference, own: steering.Engine, vector: SteeringVector
) -> None:
    assert reference.vector is not None
    assert len(reference.answers) == len(QUESTIONS) * len(STRENGTHS)
    steered = {answer.tokens for answer in reference.answers}
    assert len(steered) > len(QUESTIONS), "the vector changes answers"
    check_servers(own, reference, vector, states=True)  # our own engine answers the same


def test_a_process_of_its_own_computes_them_once(
    task: ReferenceTask, reference: Reference, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "kept" / "reference.bin"
    computed = computed_apart(task, file)
    assert computed.facts.fingerprint == reference.facts.fingerprint
    assert [answer.tokens for answer in computed.answers] == [answer.tokens for answer in reference.answers]
    torch.testing.assert_close(computed.answers[-1].states, reference.answers[-1].states)
    monkeypatch.setattr("subprocess.run", None)
    assert computed_apart(task, file).facts.fingerprint == reference.facts.fingerprint


def test_a_model_that_cannot_be_computed_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"could not be computed: .*nowhere"):
        computed_apart(ReferenceTask(str(tmp_path / "nowhere")), tmp_path / "reference.bin")


def test_right_servers_pass(reference: Reference, vector: SteeringVector, serve: Serve, connect: Connect) -> None:
    fake = serve()
    check_servers(connect(fake), reference, vector, states=True)
    assert len(fake.asked) == len(reference.answers)
    assert sum("steering" in body for body in fake.asked) == 2 * len(QUESTIONS)


def deaf(answers: PlainAnswers) -> Callable[[Body], Iterator[Any]]:
    """Return the answers of a server that steers nothing."""

    def answer(body: Body) -> Iterator[Any]:
        for vector in body.get("steering", {"vectors": []})["vectors"]:
            vector["scale"] = 0.0
        return answers.answer(body)

    return answer


def off_at(layer: int, answers: PlainAnswers) -> Callable[[Body], Iterator[Any]]:
    """Return the answers of a server whose states are wrong from a layer on."""

    def answer(body: Body) -> Iterator[Any]:
        for message in answers.answer(body):
            if "ended" in message and "states" in message["ended"]["taken"]:
                states = tensor_of(message["ended"]["taken"]["states"])
                states[layer:] *= 1.01
                message["ended"]["taken"]["states"] = array_of(states)
            yield message

    return answer


def test_a_server_that_does_not_steer_is_refused(
    reference: Reference, vector: SteeringVector, answers: PlainAnswers, serve: Serve, connect: Connect
) -> None:
    client = connect(serve(answer=deaf(answers)))
    with pytest.raises(UnsupportedModel, match=r"first at decoder layer 1 .*steered by 1"):
        check_servers(client, reference, vector, states=True)
    with pytest.raises(UnsupportedModel, match=r"token \d of an answer is .*steered"):
        check_servers(client, reference, vector, states=False)
    check_servers(client, reference, None, states=True)  # its plain answers are right


def test_the_first_layer_that_differs_is_named(
    reference: Reference, vector: SteeringVector, answers: PlainAnswers, serve: Serve, connect: Connect
) -> None:
    client = connect(serve(answer=off_at(3, answers)))
    with pytest.raises(UnsupportedModel, match=r"differ from the plain model's by 1.0e-02, first at decoder layer 3"):
        check_servers(client, reference, vector, states=True)


def test_a_server_that_fails_is_refused(
    reference: Reference, vector: SteeringVector, serve: Serve, connect: Connect
) -> None:
    fake = serve(answer=lambda body: iter([{"error": {"message": "no such kernel"}}]))
    with pytest.raises(UnsupportedModel, match=r"failed in the self-check: .*no such kernel"):
        check_servers(connect(fake), reference, vector, states=True)
