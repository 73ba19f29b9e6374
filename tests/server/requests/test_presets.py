"""Presets by the model's name: which there are, what they ask for, and what is left out of them where it does not apply."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.engine.runtime import Runtime, Serving
from server.process.sources import load_settings
from server.requests.presets import BESIDE, Presets
from server.settings import PresetTable, Settings, SettingsError
from server.wire.chat import ChatRequest, with_interventions
from steering import Generate, Pai, See, Think
from steering.protocol.intervention import REGISTRY, register
from steering.protocol.request import RANGES
from tests.first_hour.pages import ROOT, blocks
from tests.server.api.choices import QUESTION, choice_of, refused
from tests.server.conftest import ask, data_uri
from tests.server.fakes import FakeEngine
from tests.toys.nudge import Nudge, NudgeSlots
from tests.waiting import PATIENCE

DEMO = "helmsight-demo"
WAYS = ["vision", "text", "auto"]
OF_REGISTRY = [
    "look_at", "sage", "sage.see", "sage.think", "project_out", "sage.generate", "vcd", "icd", "pai", "m3id", "agla",
    "vista", "only", "dola", "opera",
]  # fmt: skip


def written(**presets: Mapping[str, Any]) -> Settings:
    """Return settings whose file has some presets."""
    tables = {name: PresetTable(fields=dict(fields), source="config file x.toml") for name, fields in presets.items()}
    return Settings(presets=tables, vectors=())


def served(fake: FakeEngine, **presets: Mapping[str, Any]) -> FlaskClient:
    return create_app(written(**presets), engine=fake).test_client()  # type: ignore[arg-type]


def listed(client: FlaskClient) -> dict[str, Any]:
    """Return the listed presets by name."""
    model, *presets = client.get("/v1/models").json["data"]  # type: ignore[index]
    assert "preset" not in model
    assert all(one["id"] == f"{model['id']}@{one['preset']}" for one in presets)
    return {one["preset"]: one for one in presets}


def left_out(choice: dict[str, Any]) -> dict[str, str]:
    return {one["field"]: one["why"] for one in choice["applied"]["skipped"]}


# -- which there are -------------------------------------------------------------------------------------------------------


def test_they_follow_from_the_registry_and_the_vectors(client: FlaskClient, fake: FakeEngine) -> None:
    found = listed(client)
    assert [*found][:3] == WAYS
    assert {*OF_REGISTRY} < {*found}
    assert found["text"]["fields"] == {"steering": {"toward": "text"}}
    assert found["sage"]["fields"] == {"sage": True}
    assert found["sage.think"]["fields"] == {"sage": {"see": False, "think": True, "generate": False}}
    assert found["pai"]["fields"] == {"contrast": {"kind": "pai"}}
    assert {one["origin"] for one in found.values()} == {"built-in"}
    assert client.get(f"/v1/models/{DEMO}@vcd").json == found["vcd"]
    assert {*listed(served(fake))} == {*found} - {*WAYS, "project_out"}, "a model without a vector"
    fake.can(interventions=frozenset({"sage.think", "contrast.icd"}))
    assert [*listed(served(fake))] == ["sage", "sage.think", "icd"]


def test_one_that_is_registered_has_one_where_it_needs_no_argument(fake: FakeEngine) -> None:
    class Whole(Nudge):
        path = ("whole",)
        token: int = 3

    known = dict(REGISTRY)
    try:
        register(Nudge, NudgeSlots)
        register(Whole)
        client, before = served(fake), {*listed(served(fake))}
        fake.can(interventions=frozenset(REGISTRY))
        assert {*listed(client)} - before == {"whole"}, "and not the one whose token must be given"
        ask(client, model="fake@whole")
        assert fake.requests[-1].asked == {"whole": Whole()}
    finally:
        REGISTRY.clear()
        REGISTRY.update(known)


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("fake@sagee", "'fake@sage'"),
        ("fake@vdc", "'fake@vcd'"),
        ("fakee", "'fake'"),
        ("fke@sage", "'fake@sage'"),
        ("fake@", None),
        ("fake@bright", None),
        ("gpt-4o", None),
        ("gpt-4o@sage", None),
        ("fake@sage" + 1000 * "e", None),
    ],
)
def test_an_unknown_one_is_a_404_that_names_the_likeliest(fake: FakeEngine, name: str, meant: str | None) -> None:
    client = served(fake, calm={"temperature": 0})
    for response in (ask(client, model=name), client.get(f"/v1/models/{name}")):
        error = refused(response, 404)
        assert (error["code"], error["param"]) == ("model_not_found", "model")
        assert error["message"].startswith(f"The model '{name[:128]}' does not exist; ")
        assert ("did you mean" in error["message"]) == (meant is not None)
        assert meant is None or f"did you mean {meant}?" in error["message"]
        assert error["message"].endswith(", @calm.")
    assert not fake.requests


# -- what they do ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("preset", "fields"),
    [
        ("vision", {"steering": {"toward": "vision"}}),
        ("sage", {"sage": True}),
        ("sage.generate", {"sage": {"see": False, "think": False}}),
        ("icd", {"contrast": {"kind": "icd"}}),
    ],
)
def test_the_answer_is_that_of_the_explicit_fields(client: FlaskClient, preset: str, fields: dict[str, Any]) -> None:
    more = {"logprobs": True, "max_tokens": 4}
    named = ask(client, data_uri(), QUESTION, model=f"{DEMO}@{preset}", **more)
    assert named.json["model"] == f"{DEMO}@{preset}"
    by_name, explicit = choice_of(named), choice_of(ask(client, data_uri(), QUESTION, **fields, **more))
    notes = {"preset": preset, "skipped": []}
    assert by_name.pop("applied") == {**notes, **explicit.pop("applied")}
    assert by_name == explicit


def test_a_stream_names_it_in_every_event(client: FlaskClient) -> None:
    text = ask(client, data_uri(), QUESTION, model=f"{DEMO}@sage.see", stream=True, max_tokens=2).text
    events = text.split("\n\n")[:-2]
    assert all(f'"model":"{DEMO}@sage.see"' in event.replace(" ", "") for event in events)
    assert '"preset"' in events[-1]


def test_fields_of_the_request_replace_its_own(fake: FakeEngine) -> None:
    client = served(fake, calm={"temperature": 0.5, "max_tokens": 7, "sage": {"think": False}, "diagnostics": True})
    plain = ask(client, data_uri(), "hi", model="fake", max_tokens=None, temperature=None)
    assert "applied" not in choice_of(plain)
    calm = {"model": "fake@calm", "max_tokens": None, "temperature": None}
    ask(client, data_uri(), "hi", **calm)
    first = fake.requests[-1]
    assert (first.sampling.temperature, first.sampling.max_tokens) == (0.5, 7)
    assert (set(first.asked), first.readouts) == ({"sage.see", "sage.generate"}, steering.Diagnose())
    calm = {**calm, "temperature": 1, "max_tokens": None, "max_completion_tokens": 3, "diagnostics": False}
    choice = choice_of(ask(client, data_uri(), "hi", **calm, sage={"generate": False}))
    second = fake.requests[-1]
    assert (second.sampling.temperature, second.sampling.max_tokens, second.readouts) == (1, 3, None)
    assert set(second.asked) == {"sage.see", "sage.think"}
    assert choice["applied"] == {"preset": "calm", "skipped": [], "sage": None}


def test_the_same_preset_goes_before_the_built_in_one(fake: FakeEngine) -> None:
    client = served(fake, sage={"sage": {"see": {"alpha": 0.3}, "think": False, "generate": False}})
    assert listed(client)["sage"]["origin"] == "settings"
    ask(client, data_uri(), "hi", model="fake@sage")
    assert fake.requests[-1].asked == {"sage.see": See(alpha=0.3)}


# -- what does not apply ---------------------------------------------------------------------------------------------------


def test_without_an_image_what_needs_one_is_left_out(client: FlaskClient) -> None:
    choice = choice_of(ask(client, "hi", model=f"{DEMO}@sage", max_tokens=1))
    assert left_out(choice) == {
        "sage.see": "'sage.see' needs an image in the request.",
        "sage.generate": "'sage.generate' needs an image in the request.",
    }
    assert choice["applied"]["sage"]["see"] is choice["applied"]["sage"]["generate"] is None
    assert choice["applied"]["sage"]["think"]["suppressed"]
    choice = choice_of(ask(client, "hi", model=f"{DEMO}@auto", max_tokens=1))
    assert left_out(choice) == {
        "steering": "'steering.toward': 'auto' needs an image and a text context in the request."
    }
    assert choice["applied"]["steering"] == []


def test_a_presets_preference_between_modalities_needs_both(client: FlaskClient) -> None:
    asked = {"model": f"{DEMO}@vision"}
    choice = choice_of(ask(client, "hi", max_tokens=1, **asked))
    why = "'steering.toward': 'vision' prefers one modality, but the request holds no image."
    assert left_out(choice) == {"steering": why}
    assert choice["applied"]["steering"] == []
    assert choice_of(ask(client, data_uri(), "hi", max_tokens=1, **asked))["applied"]["steering"]
    for strict in (True, False):
        explicit = choice_of(ask(client, "hi", max_tokens=1, steering={"toward": "vision"}, strict=strict))
        assert explicit["applied"]["steering"], "said by the request itself, it is done"


def test_a_strength_beyond_the_limit_is_refused_although_it_would_be_skipped(client: FlaskClient) -> None:
    steering = {"toward": "vision", "strength": 1e30}
    error = refused(ask(client, "hi", max_tokens=1, steering=steering, strict=False))
    assert (error["param"], "must be at most" in error["message"]) == ("steering.strength", True)


def test_an_explicit_field_is_refused_unless_the_request_is_not_strict(client: FlaskClient) -> None:
    for strict in ({}, {"strict": True}, {"strict": None}):
        assert refused(ask(client, "hi", contrast={"kind": "vcd"}, **strict))["param"] == "contrast"
        own = {"model": f"{DEMO}@sage", "contrast": {"kind": "vcd"}, **strict}
        assert refused(ask(client, "hi", **own))["param"] == "contrast", "beside a preset, too"
    choice = choice_of(ask(client, "hi", contrast={"kind": "vcd"}, strict=False, max_tokens=1))
    why = "'contrast' of kind vcd needs an image in the request."
    assert choice["applied"] == {"skipped": [{"field": "contrast", "why": why}], "contrast": None}
    assert choice_of(ask(client, "hi", strict=False, max_tokens=1))["applied"] == {"skipped": []}


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"sage": {"see": {"alpha": 2}}}, "sage.see.alpha"),
        ({"contrasts": {"kind": "vcd"}}, "contrasts"),
        ({"steering": {"strength": -1}}, "steering.strength"),
        ({"steering": {"strength": 1000}}, "steering.strength"),
        ({"sage": True, "contrast": {"kind": "vcd"}}, "contrast"),
        ({"strict": "no"}, "strict"),
    ],
)
def test_what_is_wrong_in_itself_is_refused_all_the_same(client: FlaskClient, fields: Any, param: str) -> None:
    assert refused(ask(client, data_uri(), "hi", **{"strict": False, **fields}))["param"] == param


TOOL = {"type": "function", "function": {"name": "look"}}


@pytest.mark.parametrize(
    ("fields", "place", "why"),
    [
        ({"steering": {"vector": "nobody"}}, "steering", "There is no steering vector 'nobody'"),
        ({"steering": {"vector": "stranger"}}, "steering", "was made for a model with fingerprint 0000"),
        ({"steering": {"apply": {"tokens": "image:2"}}}, "steering", "but the request holds 1 image"),
        (
            {"steering": {"vectors": [{"name": "modality-preference", "apply": {"tokens": "image:2"}}]}},
            "steering",
            "'steering.vectors[0].apply.tokens' is 'image:2', but the request holds 1 image.",
        ),
        ({"contrast": {"kind": "pai", "first_layer": 8}}, "contrast", "must be below 8, the model's layers"),
        ({"tools": [TOOL]}, "tools", "this model's chat template supports no tools"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tools", "this model's chat template supports no tools"),
        ({"diagnostics": {"target_image": 2}}, "diagnostics.target_image", "but the request holds 1 image"),
        ({"diagnostics": {"layers": [40]}}, "diagnostics.layers", "must be different layer numbers from 0 to 7"),
        ({"diagnostics": {"layers": {"last": 40}}}, "diagnostics", "must be from 1 to 8"),
    ],
)
def test_each_thing_that_does_not_apply_says_why(client: FlaskClient, fields: Any, place: str, why: str) -> None:
    assert refused(ask(client, data_uri(), "hi", **fields, max_tokens=1))["param"].startswith(place)
    choice = choice_of(ask(client, data_uri(), "hi", **fields, strict=False, max_tokens=1))
    ((found, said),) = left_out(choice).items()
    assert found == place
    assert why in said
    readouts = choice.get("diagnostics", {})
    assert readouts is None if place == "diagnostics" else (readouts or "diagnostics" not in fields)


def test_a_contrast_of_the_requests_own_goes_before_that_of_its_preset(client: FlaskClient) -> None:
    choice = choice_of(ask(client, data_uri(), QUESTION, model=f"{DEMO}@sage", contrast={"kind": "icd"}))
    assert left_out(choice) == {
        "sage.generate": "'sage.generate' and 'contrast' both need the contrast branch; the request's own is used."
    }
    explicit = {"sage": {"generate": False}, "contrast": {"kind": "icd"}}
    assert choice["message"] == choice_of(ask(client, data_uri(), QUESTION, **explicit))["message"]


def test_what_an_engine_cannot_do_is_left_out(fake: FakeEngine) -> None:
    fake.can(interventions=frozenset({"sage.think"}), readouts=frozenset({"residual"}))
    client = served(fake, all={"sage": True, "steering": {"toward": "auto"}, "diagnostics": {"include": ["tam"]}})
    choice = choice_of(ask(client, data_uri(), "hi", model="fake@all"))
    assert {*left_out(choice)} == {"sage.see", "sage.generate", "steering", "diagnostics"}
    assert (fake.requests[-1].asked, fake.requests[-1].readouts) == ({"sage.think": Think()}, None)


def test_neighbours_of_a_preset_keep_their_answer(engine: steering.Engine, client: FlaskClient) -> None:
    """Skipped fields leave nothing behind: the request that remains is the plain one."""
    plain = choice_of(ask(client, "hi", logprobs=True))
    skipped = choice_of(ask(client, "hi", logprobs=True, model=f"{DEMO}@vcd"))
    assert left_out(skipped).keys() == {"contrast"}
    assert skipped["logprobs"] == plain["logprobs"]


# -- those of the settings -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "fields", "said"),
    [
        ("calm", {"steerin": True}, "'steerin' cannot be part of a preset; did you mean 'steering'?"),
        ("calm", {"messages": []}, "'messages' cannot be part of a preset"),
        ("calm", {"sage": {"see": {"alpha": 2}}}, "'sage.see.alpha' must be from 0 to 1; got 2."),
        ("calm", {"steering": {"towards": "text"}}, "'steering.towards' is unknown; allowed: vector, toward"),
        ("calm", {"diagnostics": {"include": ["tan"]}}, "'diagnostics.include' does not know tan"),
        ("calm", {"temperature": 9}, "'temperature' must be at least 0.0 and at most 2.0; got 9"),
        ("calm", {"max_tokens": "many"}, "'max_tokens' must be an integer; got 'many'."),
        ("calm", {"sage": True, "contrast": {"kind": "icd"}}, "both need the contrast branch; keep one."),
        ("Calm", {}, "its name must match"),
    ],
)
def test_a_wrong_one_is_an_error_at_the_start(fake: FakeEngine, name: str, fields: Any, said: str) -> None:
    with pytest.raises(SettingsError) as caught:
        served(fake, **{name: fields})
    assert str(caught.value).startswith(f"preset {name!r} (config file x.toml): ")
    assert said in str(caught.value)


def test_one_that_is_wrong_for_the_vector_is_an_error_once_there_is_a_model(
    engine: steering.Engine, vectors: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def started(**fields: Any) -> None:
        create_app(written(calm=fields).model_copy(update={"vectors": (str(vectors),)}), engine=engine)

    with pytest.raises(
        SettingsError, match=r"preset 'calm' \(config file x.toml\): 'steering.strength' must be at most"
    ):
        started(steering={"strength": 1000})
    started(steering={"vector": "later"}, sage=True)
    assert caplog.messages == [
        "preset 'calm' (config file x.toml) is used without 'steering': There is no steering vector 'later'; "
        "available: damaged, modality-preference, stranger."
    ]


def test_one_may_ask_for_several_interventions(fake: FakeEngine) -> None:
    both = {"sage": {"see": True, "think": False, "generate": False}, "contrast": {"kind": "pai"}}
    ask(served(fake, both=both), data_uri(), "hi", model="fake@both")
    assert fake.requests[-1].asked == {"sage.see": See(), "contrast.pai": Pai()}


def test_those_of_the_file_know_where_they_stand(tmp_path: Path) -> None:
    config = tmp_path / "helmsight.toml"
    config.write_text('[presets.calm]\ntemperature = 0\nsteering = {toward = "text", strength = 0.5}\n')
    (preset,) = Presets.of(load_settings({}, {}, str(config)), with_interventions(ChatRequest)).own.values()
    assert preset.fields == {"temperature": 0, "steering": {"toward": "text", "strength": 0.5}}
    assert preset.source == f"config file {config}"
    config.write_text("presets = 3\n")
    with pytest.raises(SettingsError, match=r"setting 'presets' \(config file .*\)"):
        load_settings({}, {}, str(config))


def test_a_model_that_a_preset_is_wrong_for_is_not_served(fake: FakeEngine) -> None:
    settings = written(calm={"sage": True, "contrast": {"kind": "icd"}})
    failed = threading.Event()
    runtime = Runtime(settings, loader=lambda _: Serving.of(fake, settings), on_failure=failed.set)
    client = create_app(settings, runtime=runtime).test_client()
    runtime.start()
    assert failed.wait(PATIENCE)
    assert runtime.error == (
        "SettingsError: preset 'calm' (config file x.toml): 'sage.generate' and 'contrast' both need the contrast "
        "branch; keep one."
    )
    assert (refused(client.get("/v1/models"), 503)["code"], fake.stopped) == ("model_failed", 0.0)


def test_every_field_that_one_may_have_is_one_of_a_request() -> None:
    chats = with_interventions(ChatRequest)
    assert {*BESIDE, *RANGES} <= chats.model_fields.keys()


def test_a_dry_run_knows_them(client: FlaskClient) -> None:
    def told(**fields: Any) -> Any:
        return client.post("/v1/steering/validate", json=fields).json

    named, explicit = told(model=f"{DEMO}@text"), told(steering={"toward": "text"})
    assert named == {**explicit, "model": f"{DEMO}@text", "preset": "text", "skipped": []}
    assert len(named["steering"]) == 1
    lenient = told(steering={"vector": "nobody"}, strict=False)
    assert (lenient["steering"], [one["field"] for one in lenient["skipped"]]) == ([], ["steering"])


def test_the_file_that_the_guide_shows_is_one(fake: FakeEngine, tmp_path: Path) -> None:
    (shown,) = [block.text for block in blocks(ROOT / "docs" / "operate.md") if block.language == "toml"]
    config = tmp_path / "helmsight.toml"
    config.write_text(shown)
    settings = load_settings({"vectors": ()}, {"HELMSIGHT_JOURNAL": "off"}, str(config))
    client = create_app(settings, engine=fake).test_client()  # type: ignore[arg-type]
    assert [name for name, one in listed(client).items() if one["origin"] == "settings"] == ["careful", "sage-deep"]
    ask(client, data_uri(), "hi", model="fake@sage-deep")
    assert fake.requests[-1].asked == {
        "sage.see": See(alpha=0.2), "sage.think": Think(), "sage.generate": Generate(refresh=16)
    }  # fmt: skip
