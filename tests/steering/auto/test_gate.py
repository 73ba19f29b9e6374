"""Conditional steering: exact against plain transformers both ways, in one batch, alone and over HTTP."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from server.app import create_app
from server.settings import Settings
from steering import Gate, Gated, GateTerm, Request, RequestError, Sampling, Steer, Steering, SteeringVector
from tests import families
from tests.server.api.choices import refused
from tests.server.conftest import ask, data_uri
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.pushes import unit_vector

FAMILY = "qwen2_vl"
SAMPLING = Sampling(max_tokens=4, ignore_eos=True, logprobs=0)


def drawn(mllm: steering.MLLM, seed: int) -> SteeringVector:
    return unit_vector(mllm, seed, (0, 1), f"drawn-{seed}")


@pytest.mark.parametrize(("measure", "layer"), [("cosine", 0), ("projection", 1), ("probe", 1)])
def test_it_steers_where_the_state_of_plain_transformers_says_so(
    make_engine: MakeEngine, load_plain: LoadPlain, measure: str, layer: int
) -> None:
    engine, plain = make_engine(FAMILY), load_plain(FAMILY)
    vector, condition = drawn(engine.mllm, 1), drawn(engine.mllm, 2)
    chats = [families.example_messages(FAMILY, 1), families.example_messages(FAMILY, 1, text="Is it red or blue?")]
    bias = [0.25 * layer for layer in range(engine.mllm.num_layers)]
    small = condition.direction * 0.02  # for which no probability is nearly 0 or 1
    condition = replace(
        condition, direction=small, info={"gate": {"layer": 1, "threshold": 0.5, "measure": "probe", "bias": bias}}
    )
    steer = Steer(vector, 2.0)
    values, expected = [], {True: [], False: []}
    for chat in chats:
        alone = plain.answer(chat, 4)
        state, direction = alone.hidden[layer, alone.prompt_length - 1].double(), condition.direction[layer].double()
        along = float(state @ direction / direction.norm())
        logit = float(state @ direction) + bias[layer]
        by_name = {"projection": along, "cosine": along / float(state.norm()), "probe": 1 / (1 + math.exp(-logit))}
        values.append(by_name[measure])
        expected[False].append(alone)
        expected[True].append(plain.answer(chat, 4, add=[(steer.delta, "all")]))
    between = sum(values) / 2
    assert abs(values[0] - values[1]) > 1e-3
    for below in (False, True):
        gate = Gate((GateTerm(condition, layer, between, measure, below),))
        requests = [Request(chat, SAMPLING, interventions=Gated(Steering((steer,)), gate)) for chat in chats]
        decided = [steering.decide(engine, request) for request in requests]
        for number, result in enumerate(engine.generate(decided)):  # one batch, of which one row is steered
            opens = (values[number] < between) is below
            (choice,), answer = result.choices, expected[opens][number]
            assert choice.applied is not None
            (report,) = choice.applied["steering"]
            assert report["gate"]["open"] is opens
            assert report["gate"]["terms"][0]["value"] == pytest.approx(values[number], abs=1e-4)
            assert report["scale"] == (2.0 if opens else 0.0)
            assert list(choice.token_ids) == answer.tokens
            logprobs = [token.logprob for token in choice.logprobs or ()]
            chosen_logprobs = answer.logprobs.gather(1, torch.tensor(answer.tokens)[:, None])[:, 0]
            assert logprobs == pytest.approx(chosen_logprobs.tolist(), abs=2e-4)


def test_several_conditions_are_joined() -> None:
    states = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    weights = [torch.ones(2) for _ in range(3)]
    across = SteeringVector("across", torch.tensor([[1.0, 0.0], [1.0, 0.0]]), *weights, (0,), "f")
    along = GateTerm(across, 0, 0.5)  # .6
    beyond = GateTerm(across, 0, 2.5, "projection")  # 3
    less = GateTerm(across, 1, 0.9, below=True)  # 1
    assert [term.value(states) for term in (along, beyond, less)] == pytest.approx([0.6, 3.0, 1.0])
    for terms, every, opens in (
        ((along, beyond), True, True),
        ((along, less), True, False),
        ((along, less), False, True),
        ((less,), False, False),
    ):
        report = Gate(terms, every).report(states)
        assert report["open"] is opens
        assert [term["holds"] for term in report["terms"]] == [term is not less for term in terms]


def test_groups_of_conditions_are_joined() -> None:
    states = torch.tensor([[3.0, 4.0]])
    across = SteeringVector("across", torch.tensor([[1.0, 0.0]]), *(torch.ones(1) for _ in range(3)), (0,), "f")
    true, false = GateTerm(across, 0, 0.5), GateTerm(across, 0, 0.7)
    for first, second, third in itertools.product((true, false), repeat=3):
        a, b, c = (term is true for term in (first, second, third))
        for every in (True, False):
            gate = Gate((first, Gate((second, third), not every)), every)
            report = gate.report(states)
            assert report["open"] is ((a and (b or c)) if every else (a or (b and c)))
            inner = report["terms"][1]
            assert inner["holds"] is ((b or c) if every else (b and c))
            assert [term["holds"] for term in inner["terms"]] == [b, c]
            assert [*gate.conditions] == [first, second, third]


def test_invalid_conditions_are_refused() -> None:
    weights = [torch.ones(2) for _ in range(3)]
    vector = SteeringVector("across", torch.ones(2, 2), *weights, (0,), "f")
    probe = replace(vector, info={"gate": {"layer": 0, "threshold": 0.5, "measure": "probe", "bias": [0.0, 0.0]}})
    for threshold, measured, measure in (
        (1.0, vector, "cosine"),
        (-1.0, vector, "cosine"),
        (5.0, vector, "projection"),
    ):
        assert GateTerm(measured, 0, threshold, measure).threshold == threshold
    for wrong, param in (
        ({"layer": 2}, "layer"), ({"measure": "angle"}, "measure"), ({"threshold": float("nan")}, "above"),
        ({"measure": "probe"}, "measure"), ({"threshold": 5.0}, "above"), ({"threshold": -1.01, "below": True}, "below"),
        ({"measure": "probe", "threshold": 1e308, "vector": probe}, "above"),
        ({"measure": "probe", "threshold": -0.1, "vector": probe}, "above"),
    ):  # fmt: skip
        with pytest.raises(RequestError) as error:
            GateTerm(**{"vector": vector, "layer": 0, "threshold": 0.0, **wrong})
        assert error.value.param == f"steering.when.{param}"


def test_a_gate_is_requested_over_http(tmp_path: Path) -> None:
    from tests.server.fakes import checkpoint

    mllm = steering.load(checkpoint(), device="cpu")
    condition = drawn(mllm, 5)
    gate = {"layer": 3, "threshold": 0.0, "measure": "cosine"}
    condition.save(tmp_path / "drawn-5.safetensors")
    calibrated = SteeringVector(
        "known", condition.direction, condition.weight, condition.mean_abs, condition.std, (3,), mllm.fingerprint,
        kind="condition", info={"gate": gate},
    )  # fmt: skip
    calibrated.save(tmp_path / "known.safetensors")
    engine = steering.Engine(mllm, slots=4, threads=1, self_check=False)
    engine.start()
    client = create_app(Settings(vectors=(str(tmp_path),)), engine=engine).test_client()

    def steered(when: Any, **fields: Any) -> Any:
        return ask(client, data_uri(), "What is it?", steering={"toward": "vision", "when": when, **fields})

    def opened(when: Any, **fields: Any) -> bool:
        (report,) = steered(when, **fields).json["choices"][0]["applied"]["steering"]
        assert (report["scale"] != 0) is report["gate"]["open"]
        return bool(report["gate"]["open"])

    above, below = {"vector": "drawn-5", "above": -1.0}, {"vector": "drawn-5", "below": -1.0}
    assert opened(above)
    assert not opened(below)
    assert opened({"any": [below, above]})
    assert not opened({"all": [below, above]})
    assert opened({"all": [above, {"any": [below, above]}]})
    assert not opened({"any": [below, {"all": [above, below]}]})
    assert opened({"vector": "known"}) is not opened({"vector": "known", "below": 0.0})
    assert opened(above, apply={"tokens": "generated"})
    answer = ask(
        client, data_uri(), "What is it?", steering={"vectors": [{"name": "drawn-5", "scale": 0.1}], "when": above}
    )
    assert answer.json["choices"][0]["applied"]["steering"][0]["gate"]["open"]
    for when, param in (
        ({"vector": "drawn-5"}, "steering.when.above"),
        ({"vector": "nothing", "above": 0}, "steering.when.vector"),
        ({"vector": "drawn-5", "above": 0, "layer": 99}, "steering.when.layer"),
        ({"all": [above, {"vector": "drawn-5", "above": 0, "layer": 99}]}, "steering.when.all[1].layer"),
        ({"all": [above], "any": [above]}, "steering.when"),
        ({"all": [{"any": [above, {"vector": "nothing", "above": 0}]}]}, "steering.when.all[0].any[1].vector"),
        ({"all": [{"any": [above, {"vector": "x", "above": "y"}]}]}, "steering.when.all[0].any[1].above"),
        ({"all": [{"any": [{"all": [above]}]}]}, "steering.when.all[0].any[0].all"),
        ({"all": [{"any": [above] * 9}, {"any": [above] * 8}]}, "steering.when"),
        ({"vector": "drawn-5", "measure": "probe", "above": 0.5}, "steering.when.measure"),
        ({"vector": "drawn-5", "above": 0, "below": 1}, "steering.when"),
    ):
        assert refused(steered(when))["param"] == param, when
    engine.stop()
