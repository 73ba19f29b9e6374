"""The wire follows the registry.

All that is registered when the application is made can be asked for, in the words of its options, and nothing else has
to know of it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.errors import BadRequest
from server.settings import Settings
from server.wire.chat import ChatRequest, with_interventions
from server.wire.interventions import OWN_FORMS
from server.wire.parse import parse
from steering import Options
from steering.protocol.intervention import REGISTRY, register
from steering.protocol.intervention_spec import InterventionSpec
from tests.server.conftest import ask, data_uri
from tests.server.fakes import FakeEngine
from tests.toys.renamed import Renamed, RenamedSlots


@pytest.fixture
def registered() -> Iterator[Callable[..., None]]:
    """Register interventions for one test."""
    known = dict(REGISTRY)

    yield register
    REGISTRY.clear()
    REGISTRY.update(known)


@pytest.fixture
def nudged(registered: Callable[..., None], fake: FakeEngine) -> FlaskClient:
    registered(Renamed, RenamedSlots)
    fake.can(interventions=frozenset(REGISTRY))
    return create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]


def option(*path: str, kind: str = "") -> type[Options]:
    """Return a new intervention with a number."""

    class Toy(Options):
        x: int = 1

    Toy.path, Toy.kind = path, kind
    return Toy


@pytest.mark.parametrize("value", [True, {}])
def test_a_registered_intervention_reaches_the_engine(nudged: FlaskClient, fake: FakeEngine, value: Any) -> None:
    assert ask(nudged, nudge=value).status_code == 200
    assert fake.requests[-1].asked == {"nudge": Renamed()}
    assert ask(nudged, nudge={"id": 7, "amount": 2}).status_code == 200
    assert fake.requests[-1].asked == {"nudge": Renamed(token=7, amount=2)}
    assert ask(nudged, nudge=False).status_code == 200
    assert fake.requests[-1].asked == {}


@pytest.mark.parametrize(
    ("value", "param", "code", "message"),
    [
        (1, "nudge", "invalid_value", "'nudge' must be true, false or an object; got 1."),
        ({"amount": 0}, "nudge.amount", "invalid_value", "'nudge.amount' must be above 0 and at most 1000; got 0."),
        ({"amount": "x"}, "nudge.amount", "invalid_value", "'nudge.amount' must be a number; got 'x'."),
        ({"size": 1}, "nudge.size", "unknown_parameter", "'nudge.size' is unknown; allowed: amount, id."),
        ({"token": 1}, "nudge.token", "unknown_parameter", "'nudge.token' is unknown; allowed: amount, id."),
        ({"self": 1}, "nudge.self", "unknown_parameter", "'nudge.self' is unknown; allowed: amount, id."),
    ],
)
def test_its_options_are_checked_in_the_projects_words(
    nudged: FlaskClient, value: Any, param: str, code: str, message: str
) -> None:
    response = ask(nudged, nudge=value)
    error = response.json["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, param, code)
    assert error["message"] == message


def test_a_name_that_is_nearly_its_own_is_refused(nudged: FlaskClient) -> None:
    error = ask(nudged, nudges=True).json["error"]
    assert (error["param"], error["message"]) == ("nudges", "'nudges' is unknown; did you mean 'nudge'?")


def test_it_acts_and_is_reported_over_http(registered: Callable[..., None], engine: steering.Engine) -> None:
    registered(Renamed, RenamedSlots)
    own = steering.Engine(engine.mllm, slots=2, self_check=False)
    own.start()
    client = create_app(Settings(), engine=own).test_client()
    plain = ask(client, max_tokens=3, baseline=True, nudge={"id": 9}).json["choices"][0]
    assert plain["applied"] == {"nudge": {"amount": 100.0, "id": 9}}
    assert plain["message"]["content"] == engine.mllm.tokenizer.decode([9, 9, 9])
    assert plain["baseline"]["message"] != plain["message"]
    assert 'helmsight_interventions_total{kind="nudge",toward=""} 1.0' in client.get("/metrics").text
    own.stop()


def test_what_was_registered_after_the_engine_was_made_is_refused(
    registered: Callable[..., None], engine: steering.Engine
) -> None:
    registered(Renamed, RenamedSlots)
    client = create_app(Settings(), engine=engine).test_client()
    response = ask(client, nudge=True)
    assert (response.status_code, response.json["error"]["param"]) == (400, "nudge")
    assert "nudge" not in {one["name"] for one in client.get("/v1/models").json["data"][0]["interventions"]}


def body(**fields: Any) -> bytes:
    return json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode()


def test_groups_and_kinds_nest_as_their_paths_say(registered: Callable[..., None]) -> None:
    first = option("group", "first")
    some = [option("group", "some", kind=kind) for kind in ("a", "b")]
    for one in (first, *some):
        registered(one)
    chats = with_interventions(ChatRequest)

    def asked(**fields: Any) -> list[str]:
        given = parse(body(**fields), chats).interventions
        return [one.name() for each in given.values() for one in each.asked]

    assert asked(group=True) == ["group.first"], "which kind is not known"
    assert asked(group={"first": False, "some": {"kind": "b", "x": 2}}) == ["group.some.b"]
    assert asked(group={"some": {"kind": "a"}}, sage={"think": True, "see": None}) == [
        "sage.think", "sage.generate", "group.first", "group.some.a",
    ]  # fmt: skip
    for value, param in (
        ({"third": 1}, "group.third"),
        ({"some": {"kind": ["a"]}}, "group.some.kind"),
        ({"some": {"kind": "c"}}, "group.some.kind"),
        ({"some": {"kind": "a", "y": 1}}, "group.some.y"),
        ([], "group"),
    ):
        with pytest.raises(BadRequest) as caught:
            parse(body(group=value), chats)
        assert caught.value.param == param


@pytest.mark.parametrize(
    ("paths", "why"),
    [
        ([("two",), ("two",)], "an intervention 'two' already"),
        ([("two",), ("two", "below")], "'two' cannot be both"),
        ([("seed",)], "'seed', which is part of a request already"),
        ([("model_fields",)], "'model_fields', which is part of a request already"),
    ],
)
def test_interventions_that_cannot_be_told_apart_end_the_start(
    registered: Callable[..., None], paths: list[tuple[str, ...]], why: str
) -> None:
    *first, last = paths
    for path in first:
        registered(option(*path))
    made = option(*last)
    with pytest.raises(ValueError, match=why):  # noqa: PT012 -- the one raises or the other
        registered(made)
        with_interventions(ChatRequest)


def test_what_is_no_options_is_for_callers_of_the_library(registered: Callable[..., None]) -> None:
    class Inner(InterventionSpec):
        path: ClassVar[tuple[str, ...]] = ("inner",)

    registered(Inner)
    assert "inner" not in with_interventions(ChatRequest).model_fields


def test_every_form_of_its_own_is_one_of_an_intervention() -> None:
    assert OWN_FORMS.keys() <= {kind.path for kind, _ in REGISTRY.values()}


@pytest.mark.parametrize(
    ("sage", "status"),
    [
        ({"generate": {"refresh": 10**6}}, 200),
        ({"generate": {"refresh": 10**400}}, 400),
        ({"think": {"threshold": 3.5e38}}, 400),
        ({"see": {"shallow": 10**400}}, 400),
        ({"think": {"gamma": 10**400}}, 400),
    ],
)
def test_numbers_without_end_are_harmless_or_refused(client: FlaskClient, sage: dict[str, Any], status: int) -> None:
    assert ask(client, data_uri(), "What is it?", sage=sage).status_code == status


def test_the_published_schemas_are_what_is_accepted(client: FlaskClient) -> None:
    model, *_ = client.get("/v1/models").json["data"]
    schemas = {one["name"]: one["schema"] for one in model["interventions"]}
    layers = model["layers"]
    vcd = schemas["contrast.vcd"]
    assert vcd["properties"]["kind"] == {"const": "vcd"}
    assert vcd["required"] == ["kind"]
    assert schemas["contrast.pai"]["properties"]["first_layer"]["maximum"] == layers - 1
    shallow = schemas["sage.see"]["properties"]["shallow"]
    assert shallow["maximum"] == layers
    steering_, named = schemas["steering"], schemas["steering"]["$defs"]["NamedVector"]
    assert steering_["additionalProperties"] is named["additionalProperties"] is False
    assert {"scale", "strength", "coefficient"} < named["properties"].keys()
    (numbers,) = [one for one in steering_["properties"]["layers"]["anyOf"] if one["type"] == "array"]
    assert (numbers["items"]["minimum"], numbers["items"]["maximum"]) == (0, layers - 1)
    assert "x-layers" not in json.dumps(model)
    for field, bound, beyond in (
        ("sage", {"see": {"shallow": layers}}, {"see": {"shallow": layers + 1}}),
        ("contrast", {"kind": "pai", "first_layer": layers - 1}, {"kind": "pai", "first_layer": layers}),
        ("steering", {"layers": [layers - 1]}, {"layers": [layers]}),
    ):
        assert ask(client, data_uri(), "What is it?", max_tokens=1, **{field: bound}).status_code == 200, bound
        assert ask(client, data_uri(), "What is it?", max_tokens=1, **{field: beyond}).status_code == 400, beyond
