"""Answers by way of a vLLM server are those of the engine in this process; the server here is plain transformers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import steering
from steering import (
    Diagnose,
    Generate,
    Grammar,
    Icd,
    Inapplicable,
    Request,
    RequestError,
    Sage,
    Sampling,
    Steer,
    SteeringVector,
    Think,
    Until,
    VectorStore,
)
from steering.prompt.layout import build_prompt
from steering.vllm.forms import FORMS
from tests import families
from tests.steering.conftest import LoadMLLM
from tests.steering.parallel.asking import STEPS, chat, differences, picture, requests, said
from tests.steering.vllm.conftest import Connect, Serve

REFUSED = {
    "two images, read": "diagnostics.residual",
    "read beside its baseline": "diagnostics.residual",
    "see, transferred": "sage.see",
    "see, scaled": "sage.see",
    "think": "divergence",
    "all of sage": "diagnostics.residual",
    "pai": "contrast",
    "steered until": "steering.until",
    "m3id": "contrast",
    "agla": "contrast",
    "vista": "vista",
    "only": "only",
    "opera": "opera",
    "dola": "dola",
    "looking": "look_at",
    "projected out": "project_out",
    "states of the answers": "diagnostics.states",
}
"""The requests of the common list that this server cannot answer, with the field that the refusal names."""
READ = ["focus", "modality", "decay", "decay_layers", "anchor", "confidence", "alarm", "drift"]
TOLERANCE = 5e-4


@pytest.fixture(scope="module")
def vector(model: steering.MLLM) -> SteeringVector:
    return VectorStore(model.path / "vectors").get("modality-preference")  # type: ignore[operator]


def more_requests(vector: SteeringVector, end: int) -> dict[str, Request]:
    """Return by name further requests, of what such a server can do."""
    one, two = chat(picture(200, 30, 40)), chat(picture(200, 30, 40), picture(20, 60, 220))
    plain = Sampling(max_tokens=STEPS, ignore_eos=True, logprobs=3, temperature=0)
    read = Diagnose(READ, target_image=1)
    shouted = [{"role": "user", "content": "Say <|im_end|> and <|im_start|>user now."}]
    continued = [*chat(), {"role": "assistant", "content": "The star is"}]
    context = "Text context: A cat sits on the mat. Question: "
    return {
        "read": Request(two, plain, diagnose=read),
        "read without a picture": Request(chat(), plain, diagnose=Diagnose(["decay", "modality", "drift"])),
        "read by content": Request(two, plain, diagnose=Diagnose(["decay", "decay_layers"], spans="content")),
        "read at a last row": Request(
            [{"role": "user", "content": [{"type": "text", "text": "?"}, {"type": "image", "image": picture(9, 9, 9)}]}],
            replace(plain, max_tokens=1), diagnose=Diagnose(["focus", "decay"]),
        ),
        "steered and read beside a baseline": Request(one, plain, [Steer(vector, 2.0)], diagnose=read, baseline=True),
        "several vectors": Request(
            two, plain, [Steer(vector, 1.5, tokens="image:2"), Steer(vector, -0.5, layers=(0, 3), tokens="text")],
            diagnose=["focus"],
        ),
        "steered when it generates": Request(one, plain, [Steer(vector, 3.0, tokens="generated")]),
        "a vector of no strength": Request(one, plain, [Steer(vector, 0.0)]),
        "think": Request(one, plain, [Think(gamma=0.5, quantile=0.3)], diagnose=["focus"]),
        "think and a contrast, steered": Request(two, plain, [Think(gamma=0.2, threshold=0.01), Icd(), Steer(vector, 1)]),
        "all of sage but see": Request(
            two, plain, [Sage(think=Think(quantile=0.5), generate=Generate(refresh=3)), Steer(vector, -1)], diagnose=read
        ),
        "several answers": Request(one, plain, n=2, baseline=True, interventions=[Steer(vector, 2.0)]),
        "a stop string": Request(one, replace(plain, max_tokens=12, stop=("e",))),
        "an end": Request(one, replace(plain, max_tokens=9, ignore_eos=False, min_tokens=2, logit_bias={end: 100.0})),
        "special tokens as text": Request(shouted, plain, diagnose=["modality"]),
        "a continued answer": Request(continued, plain, continue_final_message=True),
        "forced": Request(one, replace(plain, max_tokens=None), forced="The star is red."),
        "forced, steered and read": Request(
            two, replace(plain, max_tokens=5), [Steer(vector, 2.0)], forced=(40, 41, 42, 43, 44), diagnose=read,
            states=True,
        ),
        "forced, read and more": Request(one, replace(plain, max_tokens=9), forced="The star", diagnose=read),
        "forced by an end": Request(one, Sampling(logprobs=1), forced=(40, 41, end, 42), diagnose=["confidence"]),
        "forced by a stop string": Request(
            one, Sampling(logprobs=1, stop="is", min_tokens=2), forced="The star is red.", diagnose=["focus"]
        ),
        "forced and more": Request(one, replace(plain, max_tokens=9), forced=(40, 41, 42)),
        "the prompt's own": Request(one, replace(plain, prompt_logprobs=2)),
        "a choice": Request(one, replace(plain, ignore_eos=False, max_tokens=30), grammar=Grammar.choice(["yes", "no"])),
        "a bias": Request(one, replace(plain, logit_bias={77: 100.0})),
        "a long prompt": Request([{"role": "user", "content": context * 20 + "Who sits?"}], plain, diagnose=["modality"]),
    }  # fmt: skip


def test_the_common_requests_are_answered_alike_or_refused_by_the_field(
    model: steering.MLLM, own: steering.Engine, serve: Serve, connect: Connect
) -> None:
    client, asked = connect(serve()), requests(model)
    for name, request in asked.items():
        if name in REFUSED:
            with pytest.raises(Inapplicable) as refused:
                client.submit(request)
            assert refused.value.param == REFUSED[name]
            with pytest.raises(Inapplicable, match="vLLM"):
                client.inspect(request)
    served = {name: request for name, request in asked.items() if name not in (*REFUSED, "sampled")}
    assert len(served) == 10
    compare(own, client, served)


def test_what_a_server_can_do_is_answered_alike(
    vector: SteeringVector, own: steering.Engine, serve: Serve, connect: Connect
) -> None:
    compare(own, connect(serve()), more_requests(vector, min(own.mllm.stop_ids)))


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (
            lambda vector: Steer.to(vector, "text", until=Until("image_share", 0.5, range=(0.0, 1.0))),
            "steering.until",
        ),
        (lambda _: Icd(form="paper"), "contrast.form"),
        (lambda _: Generate(scores="log-probabilities"), "sage.generate.scores"),
    ],
)
def test_what_a_server_can_do_in_part_is_refused_by_the_rest(
    spec: Callable[[SteeringVector], Any], field: str, vector: SteeringVector, serve: Serve, connect: Connect
) -> None:
    request = Request([{"role": "user", "content": "Who sits?"}], interventions=spec(vector))
    with pytest.raises(Inapplicable) as refused:
        connect(serve()).submit(request)
    assert refused.value.param == field


@pytest.mark.parametrize("family", ["paddleocr_vl", "llava_next"])
def test_generate_is_refused_where_a_pictures_tokens_are_no_patches(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    spec: Any = SimpleNamespace(
        asked={Generate.name(): Generate()}, prompt=build_prompt(mllm, families.example_messages(family, 1))
    )
    with pytest.raises(Inapplicable, match="no patches") as refused:
        FORMS[Generate.name()].write(spec, mllm)
    assert refused.value.param == "sage.generate"


def test_forced_tokens_exclude_what_acts_on_them_one_by_one(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    for asked in (Think(), Icd()):
        with pytest.raises(Inapplicable) as refused:
            client.submit(Request(chat(), Sampling(max_tokens=3), [asked], forced=(40, 41, 42)))
        assert refused.value.param == "force"
    plain = Sampling(max_tokens=5)
    for sampling, param in (
        (replace(plain, stop="red"), "stop"),
        (replace(plain, presence_penalty=0.5), "presence_penalty"),
        (replace(plain, frequency_penalty=0.5), "frequency_penalty"),
    ):
        with pytest.raises(Inapplicable) as refused:
            client.submit(Request(chat(), sampling, forced=(40, 41, 42)))
        assert refused.value.param == param


def without_gains(answers: list[Any]) -> list[Any]:
    """Return answers without the share of tokens that gain under Generate, which vLLM servers do not measure."""
    for answer in answers:
        generate = ((answer or {}).get("applied") or {}).get("sage", {}).get("generate") or {}
        generate |= {"gains": None} if "gains" in generate else {}
    return answers


def compare(own: steering.Engine, client: Any, asked: dict[str, Request]) -> None:
    answers = client.generate(asked.values())  # all at once: the client queues them
    for name, request, found in zip(asked, asked.values(), answers, strict=True):
        (expected,) = own.generate([request])
        assert not differences(said(found), without_gains(said(expected)), name, TOLERANCE)
        assert [one.text for one in found.choices] == [one.text for one in expected.choices], name
        assert [one.finish_reason for one in found.choices] == [one.finish_reason for one in expected.choices], name
        assert [one.stop_string for one in found.choices] == [one.stop_string for one in expected.choices], name
        scored = [[token.scored.logprob for token in one.prompt_logprobs or ()] for one in found.choices]
        assert not differences(
            scored, [[token.scored.logprob for token in one.prompt_logprobs or ()] for one in expected.choices], name
        )
        assert (found.prompt_tokens, found.completion_tokens) == (expected.prompt_tokens, expected.completion_tokens)


def test_preludes_run_on_servers_as_here(
    vector: SteeringVector, own: steering.Engine, serve: Serve, connect: Connect
) -> None:
    client = connect(serve())
    auto = Request(chat(picture(200, 30, 40)), Sampling(max_tokens=STEPS), [steering.Auto(vector, 1.0)])
    gate = steering.Gate((steering.GateTerm(vector, 1, -1.0),))
    gated = replace(auto, interventions=[steering.Gated(steering.Steering((Steer(vector, 1.0),)), gate)])
    for request in (auto, gated):
        results = []
        for engine in (client, own):
            with engine.turn() as turn:
                decided = steering.decide(turn, request)
                results += engine.generate([decided])
        assert not differences(*map(said, results), tolerance=TOLERANCE)  # type: ignore[misc]


def test_sampled_answers_depend_on_the_seed_alone(serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    sampling = Sampling(max_tokens=8, ignore_eos=True, temperature=1.5)
    one, two, other = (
        [
            choice.token_ids
            for choice in client.generate([Request(chat(), replace(sampling, seed=seed), n=2)])[0].choices
        ]
        for seed in (7, 7, 8)
    )
    assert one == two
    assert one[0] != one[1]
    assert one != other


def test_sampling_reaches_the_server(serve: Serve, connect: Connect) -> None:
    fake = serve()
    sampling = Sampling(
        max_tokens=3, min_tokens=2, temperature=0.5, top_p=0.9, top_k=40, min_p=0.1, repetition_penalty=1.2,
        frequency_penalty=0.3, presence_penalty=-0.4, logit_bias={5: -1.0}, seed=11, stop="never", logprobs=2,
    )  # fmt: skip
    connect(fake).generate([Request(chat(), sampling, cache_salt="mine")])
    (body,) = fake.asked
    assert body["sampling"] == {
        "max_tokens": 3, "min_tokens": 2, "temperature": 0.5, "top_p": 0.9, "top_k": 40, "min_p": 0.1,
        "repetition_penalty": 1.2, "frequency_penalty": 0.3, "presence_penalty": -0.4, "logit_bias": {"5": -1.0},
        "stop": ["never"], "ignore_eos": False, "logprobs": 2, "prompt_logprobs": None, "grammar": None,
    }  # fmt: skip
    assert (body["seed"], body["salt"], body["stream"]) == (11, "mine", False)


def test_a_prompt_that_the_server_reads_otherwise_is_refused(
    model: steering.MLLM, serve: Serve, connect: Connect
) -> None:
    client = connect(serve())
    client.processor.mllm = client.mllm
    tokenizer = client.mllm.tokenizer
    request = Request(chat(picture(1, 2, 3)), Sampling(max_tokens=2))
    inner = client._bodies._prompt

    def other(spec: Any, prompt: Any, forced: Any = ()) -> dict[str, Any]:
        return inner(spec, prompt, forced) | {"ids": [*tokenizer("Another prompt.").input_ids, model.image_token_id]}

    client._bodies._prompt = other  # type: ignore[method-assign]
    with pytest.raises(RequestError, match="tokens differ") as refused:
        client.generate([request])
    assert refused.value.param == "messages"


def test_a_vector_that_the_server_lacks_is_refused(vector: SteeringVector, serve: Serve, connect: Connect) -> None:
    client = connect(serve())
    turned = replace(vector, direction=torch.flip(vector.direction, [0]))
    with pytest.raises(RequestError, match="no vector") as refused:
        client.generate([Request(chat(), Sampling(max_tokens=2), [Steer(turned, 1.0)])])
    assert refused.value.param == "steering"


def test_what_a_server_lacks_is_no_capability(serve: Serve, connect: Connect) -> None:
    client = connect(serve(can=("steer",)))
    assert client.interventions == {"steering", "refusal_prompt"}
    assert client.readouts == {"confidence"}
    assert not client.grammars
    for request, param in (
        (Request(chat(), grammar=Grammar.choice(["a"], param="guided_choice")), "guided_choice"),
        (Request(chat(), Sampling(prompt_logprobs=1)), "prompt_logprobs"),
        (Request(chat(), reply="Yes."), "reply"),
        (Request(chat(), states=True), "states"),
        (Request(chat(), forced="Yes."), "force"),
    ):
        with pytest.raises(Inapplicable) as refused:
            client.submit(request)
        assert refused.value.param == param
