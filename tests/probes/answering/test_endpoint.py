"""The requests of an endpoint to a server, and the reading of the replies."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from probes.answering.base import Push, Question, Reply
from probes.answering.endpoint import Endpoint
from steering import DROP, Criterion, Generate, Icd, Options, Pai, RefusalPrompt, See, Think, Vcd
from tests import families
from tests.probes.answering.scripted_server import (
    HELMSIGHT,
    PLAIN,
    Server,
    asked,
    assert_equal_pictures,
    failed,
    said,
    vector,
)
from tests.probes.conftest import seen

PICTURE = families.example_image(0)


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
    with pytest.raises(ValueError, match="has 2 models; choose one: small, large"):
        Endpoint(server.url)
    list(Endpoint(server.url, model="large").answers([asked("?")]))
    assert server.bodies[0]["model"] == "large"


def test_a_preset_is_asked_for_by_name_alone_and_measures_as_its_model_does(server: Server) -> None:
    preset = {
        "id": "small@sage",
        "owned_by": "helmsight",
        "root": HELMSIGHT["id"],
        "preset": "sage",
        "fields": {"sage": True},
    }
    server.models = [HELMSIGHT, preset]
    assert Endpoint(server.url).model == HELMSIGHT["id"]
    there = Endpoint(server.url, model="small@sage")
    assert (there.is_helmsight, there.fingerprint) == (True, HELMSIGHT["fingerprint"])
    assert there.identity.endswith(' small@sage abc {"sage": true}'), "which may mean something else tomorrow"
    list(there.answers([asked("?", diagnose=None)]))
    assert server.bodies[0]["model"] == "small@sage"


def test_a_server_that_lists_no_models_needs_a_name(server: Server) -> None:
    server.models = failed(404, "no such route")
    assert list(Endpoint(server.url, model="mine").answers([asked("yes")])) == [Reply("yes")]
    with pytest.raises(ValueError, match="status 404: no such route"):
        Endpoint(server.url)


@pytest.mark.parametrize(
    ("models", "message"),
    [
        ([], "has 0 models"),
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
    assert server.sources == [None, None]
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
    server.answer = lambda body: said("x", diagnostics=seen(0.25), applied=applied)
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
    automatic = Reply("x", seen(0.25), {"toward": "text", **auto})
    assert list(replies) == [Reply("x", seen(0.25)), Reply("x", seen(0.25)), *[automatic] * 3]
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
    questions = (replace(asked("?"), interventions=one, diagnose=None) for one in asked_for)
    assert list(there.answers(questions)) == [Reply("x")] * 6
    assert not any("diagnostics" in body or "steering" in body for body in server.bodies)
    off = {"see": False, "think": False, "generate": False}
    see = {"alpha": 0.1, "reading": See().reading, "ceiling": 1.0, "spans": See().spans, "from": "all"}
    assert [{name: body[name] for name in ("sage", "contrast") if name in body} for body in server.bodies] == [
        {},
        {
            "sage": {
                "see": see | {"alpha": 0.2, "reading": "scale", "shallow": 3}, "think": False,
                "generate": {"lambda": 0.25, "top": 0.2, "refresh": 2, "scores": "logits"},
            }
        },
        {"sage": off | {"think": {"gamma": 0.9, "quantile": 0.9, "threshold": 1.5}}},
        {"contrast": {"kind": "vcd", "alpha": 1.0, "beta": 0.1, "step": 700}},
        {
            "contrast": {
                "kind": "icd", "alpha": 1.0, "beta": 0.1, "instruction": "You are tired.", "place": "system",
                "form": "released",
            }
        },
        {
            "contrast": {
                "kind": "pai", "alpha": 0.1, "beta": 0.1, "amplify": 0.2, "first_layer": 1, "first_token": "released",
            },
            "sage": off | {"see": see},
        },
    ]  # fmt: skip


def test_interventions_that_the_server_does_not_know_are_refused_unasked(server: Server) -> None:
    replies = Endpoint(server.url, concurrency=1).answers([replace(asked("?"), interventions=(See(),))])
    with pytest.raises(ValueError, match=r"small at .* cannot be steered: it is not a Helmsight server\."):
        next(replies)
    assert server.bodies == []


def test_what_an_intervention_only_says_is_said_to_any_server_and_asked_of_helmsight(server: Server) -> None:
    question = replace(asked("?"), interventions=(RefusalPrompt(text="Or pass."),))
    server.answer = lambda body: said("x", diagnostics=seen(None))
    for model in (PLAIN, HELMSIGHT):
        server.models = [model]
        assert [one.text for one in Endpoint(server.url).answers([question])] == ["x"]
    other, own = server.bodies
    (message,) = RefusalPrompt(text="Or pass.").chat(own["messages"])
    assert other["messages"] == [message] != own["messages"]
    assert "refusal_prompt" not in other
    assert own["refusal_prompt"] == {"text": "Or pass.", "place": "user"}


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (PLAIN, "small at .* cannot be steered: it is not a Helmsight server"),
        (HELMSIGHT, "no vector 'random-0'; it has modality-preference, calm"),
        (HELMSIGHT | {"vectors": []}, "it has none"),
    ],
)
def test_a_push_that_the_server_cannot_do_is_refused_unasked(server: Server, model: Any, message: str) -> None:
    server.models = [model]
    server.answer = lambda body: said("x", diagnostics=seen(None))
    replies = Endpoint(server.url, concurrency=1).answers([asked("?"), asked("?", push=Push("text", "random-0"))])
    assert next(replies).text == "x"
    with pytest.raises(ValueError, match=message):
        next(replies)
    assert len(server.bodies) == 1
