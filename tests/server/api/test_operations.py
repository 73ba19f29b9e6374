"""Keys, readiness, capacity, catalogue and metrics."""

from __future__ import annotations

import re
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any, ClassVar

import pytest
from flask.testing import FlaskClient
from pydantic import SecretStr

import steering
from server.app import create_app
from server.engine.resources import prepared_at_once
from server.engine.runtime import Runtime, Serving
from server.settings import Settings
from steering.auto import reliability
from steering.protocol import intervention, readout
from steering.protocol.readout import FinishedAnswer, Readout, Scalar
from steering.protocol.signals import Signal
from tests.server.conftest import ask, data_uri, user
from tests.server.fakes import FakeEngine
from tests.waiting import PATIENCE, wait_for

CHAT = "/v1/chat/completions"
KEY, OTHER = "sk-first-key", "sk-second-key"


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


@pytest.fixture
def locked(fake: FakeEngine) -> FlaskClient:
    settings = Settings(api_keys=(SecretStr(KEY), SecretStr(OTHER)))
    return create_app(settings, engine=fake).test_client()  # type: ignore[arg-type]


@pytest.mark.parametrize("route", ["/v1/models", "/metrics", "/v1/steering/vectors", "/nowhere"])
def test_a_key_is_needed_everywhere_but_for_the_probes(locked: FlaskClient, route: str) -> None:
    response = locked.get(route)
    assert (response.status_code, response.json["error"]["code"]) == (401, "missing_api_key")
    assert response.headers["WWW-Authenticate"].startswith("Bearer")
    for key in (KEY, OTHER):
        assert locked.get(route, headers=bearer(key)).status_code in (200, 404)


@pytest.mark.parametrize("route", ["/health", "/ready"])
def test_probes_are_open(locked: FlaskClient, route: str) -> None:
    assert locked.get(route).status_code == 200


def test_an_upgrade_that_is_not_taken_is_ignored(locked: FlaskClient) -> None:
    upgrade = {"Connection": "Upgrade", "Upgrade": "websocket", "Sec-WebSocket-Version": "13"}
    assert locked.get("/health", headers=upgrade).status_code == 200
    refused = locked.post("/v1/chat/completions", json={"messages": []}, headers=upgrade | bearer(KEY))
    assert refused.json["error"]["param"] == "messages"


@pytest.mark.parametrize(
    "header", ["Bearer wrong-key-here", "Bearer ", f"Basic {KEY}", KEY, f"Bearer {KEY}x", "Bearer \xe9\xff", "Bearer"]
)
def test_wrong_keys_are_refused_before_the_body_is_read(locked: FlaskClient, header: str) -> None:
    response = locked.post("/v1/chat/completions", data="not json", headers={"Authorization": header})
    assert response.status_code == 401
    assert response.json["error"]["type"] == "authentication_error"


def test_keys_do_not_show_in_the_settings(locked: FlaskClient) -> None:
    assert KEY not in repr(Settings(api_keys=(SecretStr(KEY),)))


def test_a_full_server_says_when_to_come_back(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    fake.refusal = steering.Busy(64, retry_after=2.3)
    response = ask(client)
    assert (response.status_code, response.headers["Retry-After"]) == (429, "3")
    assert response.json["error"]["type"] == "rate_limit_error"


def test_a_full_server_refuses_before_it_decodes_images(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    fake.full = True
    assert ask(client, "data:image/png;base64,broken").status_code == 429


def test_a_real_engine_that_is_full_answers_429(client: FlaskClient) -> None:
    """Many ask at once for answers that do not end; as many are begun as there are slots and places to wait."""
    body = {"messages": [user("Hi!")], "ignore_eos": True, "max_tokens": 1500, "stream": True}
    with ThreadPoolExecutor(24) as pool, ExitStack() as held:
        answers = list(pool.map(lambda _: client.application.test_client().post(CHAT, json=body), range(24)))
        for answer in answers:
            held.callback(answer.close)
        assert Counter(answer.status_code for answer in answers) == {200: 4 + 8, 429: 12}
        refused = [answer for answer in answers if answer.status_code == 429]
        assert all(int(answer.headers["Retry-After"]) >= 1 for answer in refused)
    wait_for(lambda: ask(client, max_tokens=1).status_code == 200)


def test_ready_follows_the_life_of_the_model(fake: FakeEngine) -> None:
    loading = threading.Event()

    def loader(settings: Settings) -> Serving:
        assert loading.wait(PATIENCE)
        return Serving(fake, steering.VectorStore())  # type: ignore[arg-type]

    settings = Settings()
    runtime = Runtime(settings, loader=loader)
    client = create_app(settings, runtime=runtime).test_client()
    runtime.start()

    def status(route: str) -> tuple[int, str]:
        response = client.get(route)
        return response.status_code, response.json["status"]

    assert (status("/health"), status("/ready")) == ((200, "ok"), (503, "loading"))
    refused = ask(client)
    assert (refused.status_code, refused.json["error"]["code"]) == (503, "model_loading")
    assert int(refused.headers["Retry-After"]) >= 1
    assert client.get("/v1/models").status_code == 503

    loading.set()
    while runtime.state == "loading":
        pass
    assert status("/ready") == (200, "ready")

    runtime.drain(1.5)
    assert fake.stopped == 1.5
    assert (status("/health"), status("/ready")) == ((200, "ok"), (503, "draining"))
    assert ask(client).json["error"]["code"] == "model_draining"


def test_pictures_that_wait_are_counted_and_refused_at_once_when_the_server_drains(fake: FakeEngine) -> None:
    serving = Serving(fake, steering.VectorStore())  # type: ignore[arg-type]
    runtime = Runtime(Settings(), loader=lambda settings: serving)
    client = create_app(Settings(), runtime=runtime).test_client()
    runtime.start()
    wait_for(lambda: runtime.state == "ready")
    answers: list[Any] = []
    with ExitStack() as held:
        for _ in range(prepared_at_once()):
            held.enter_context(serving.pictures.turn("others"))
        waiting = threading.Thread(target=lambda: answers.append(ask(client, data_uri())))
        waiting.start()
        reading = f"helmsight_reading {prepared_at_once() + 1}.0"
        wait_for(lambda: reading in client.get("/metrics").text)
        runtime.drain(0)
        waiting.join(PATIENCE)
        assert [(one.status_code, one.json["error"]["code"]) for one in answers] == [(503, "model_draining")]
    assert serving.pictures.held == 0


def test_a_dead_engine_is_neither_ready_nor_healthy(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    fake.healthy = False
    assert (client.get("/health").status_code, client.get("/ready").status_code) == (503, 503)
    assert ask(client).status_code == 503


def test_a_model_that_cannot_be_loaded_is_reported() -> None:
    def loader(settings: Settings) -> Serving:
        raise steering.UnsupportedModel("no")

    failed = threading.Event()
    runtime = Runtime(Settings(), loader=loader, on_failure=failed.set)
    runtime.start()
    assert failed.wait(PATIENCE)
    assert runtime.state == "failed"
    assert create_app(Settings(), runtime=runtime).test_client().get("/health").status_code == 503


def test_loading_that_ends_with_the_server_is_no_failure() -> None:
    """The error is that of a thread that finds the interpreter on its way out."""
    leave, failed = threading.Event(), threading.Event()

    def loader(settings: Settings) -> Serving:
        leave.wait(PATIENCE)
        raise RuntimeError("cannot schedule new futures after interpreter shutdown")

    runtime = Runtime(Settings(), loader=loader, on_failure=failed.set)
    runtime.start()
    runtime.drain(0)
    leave.set()
    assert not failed.wait(0.3)
    assert (runtime.state, runtime.error) == ("draining", None)


def test_the_model_and_its_limits(client: FlaskClient, engine: steering.Engine) -> None:
    model, *_ = client.get("/v1/models").json["data"]
    assert model == client.get(f"/v1/models/{model['id']}").json
    assert (model["id"], model["fingerprint"]) == (engine.mllm.name, engine.mllm.fingerprint)
    assert (model["layers"], model["context_length"]) == (engine.mllm.num_layers, engine.max_length)
    assert model["compiled"] is False
    assert model["vectors"] == ["modality-preference"]
    assert model["limits"]["slots"] == 4
    assert client.get("/v1/models/gpt-4o").json["error"]["code"] == "model_not_found"
    assert client.get("/v1/models/org/name").status_code == 404


def test_the_vectors(client: FlaskClient) -> None:
    listed = {vector["name"]: vector for vector in client.get("/v1/steering/vectors").json["data"]}
    assert listed["modality-preference"]["matches"] is True
    assert listed["stranger"]["matches"] is False
    assert "error" in listed["damaged"]
    shown = client.get("/v1/steering/vectors/modality-preference").json
    assert (shown["name"], shown["layers"]) == ("modality-preference", [1, 2])
    for name in ("nobody", "..%2f..%2fetc", "x" * 300):
        assert client.get(f"/v1/steering/vectors/{name}").status_code == 404
    assert client.get("/v1/steering/vectors/damaged").status_code == 400


def samples(client: FlaskClient, headers: dict[str, str] | None = None) -> dict[str, float]:
    lines = client.get("/metrics", headers=headers).text.splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))}


def total(found: Mapping[str, float], name: str, **labels: str) -> float:
    """Return the sum of a metric's samples that have these labels, whatever others they have."""
    wanted = {f'{label}="{value}"' for label, value in labels.items()}
    return sum(
        value
        for sample, value in found.items()
        if re.match(rf"{name}(\{{|$)", sample) and wanted <= set(re.findall(r'\w+="[^"]*"', sample))
    )


def test_metrics_count_what_happened(engine: steering.Engine, settings: Settings) -> None:
    client = create_app(settings, engine=engine).test_client()
    before = samples(client)
    ask(client, data_uri(), "What is it?", steering={"toward": "text"}, diagnostics={"include": ["modality"]})
    ask(client, data_uri(), "What is it?", steering=True, stream=True, baseline=True)
    ask(client, n=0)
    client.get("/no/such/thing", buffered=True)
    after = samples(client)
    chat = 'helmsight_requests_total{method="POST",route="/v1/chat/completions",status="%s"}'
    assert (after[chat % 200], after[chat % 400]) == (2, 1)
    assert after['helmsight_requests_total{method="GET",route="unknown",status="404"}'] == 1
    assert after['helmsight_interventions_total{kind="steering",toward="text"}'] == 1
    assert after['helmsight_interventions_total{kind="steering",toward="vision"}'] == 1
    assert after['helmsight_interventions_total{kind="baseline",toward=""}'] == 1
    assert after['helmsight_diagnostics_total{readout="modality"}'] == 1
    assert after["helmsight_time_to_first_token_seconds_count"] == 2
    generated = 'helmsight_tokens_total{kind="generated"}'
    assert after[generated] > before[generated]
    assert (after["helmsight_ready"], after["helmsight_running"], after["helmsight_slots"]) == (1, 0, 4)


def test_metrics_name_interventions_and_whither_they_push(client: FlaskClient) -> None:
    def counted(kind: str) -> dict[str, float]:
        head = f'helmsight_interventions_total{{kind="{kind}",'
        return {name: value for name, value in samples(client).items() if name.startswith(head)}

    before = {kind: counted(kind) for kind in ("sage.see", "sage.think", "contrast.icd")}
    ask(client, data_uri(), "What is it?", sage={"generate": False}, contrast={"kind": "icd"})
    for kind, known in before.items():
        name = f'helmsight_interventions_total{{kind="{kind}",toward=""}}'
        assert counted(kind) == known | {name: known.get(name, 0) + 1}


LABELS = ("model", "intervention", "source")


@pytest.mark.parametrize(
    ("fields", "group"),
    [
        ({}, "none"),
        ({"steering": {"toward": "text"}}, "steer:text"),
        ({"steering": True}, "steer:vision"),
        ({"steering": {"strength": 0}}, "none"),
        ({"sage": True}, "sage"),
        ({"contrast": {"kind": "icd"}}, "contrast:icd"),
        ({"steering": True, "sage": {"generate": False}}, "several"),
        ({"look_at": True, "dola": True, "project_out": True}, "several"),
    ],
)
def test_the_numbers_of_answers_say_of_which_model_intervention_and_source(
    fields: dict[str, Any], group: str, settings: Settings, engine: steering.Engine
) -> None:
    client = create_app(settings, engine=engine).test_client()
    asked = {"messages": [user(data_uri(), "Text context: red. What?")], "max_tokens": 2, **fields}
    asked |= {"diagnostics": {"include": ["modality", "focus", "flags"], "target_image": 1}}
    for source in ("eval", None):
        headers = {} if source is None else {"X-Helmsight-Source": source}
        assert client.post("/v1/chat/completions", json=asked, headers=headers).status_code == 200
        found, expected = samples(client), (engine.mllm.name, group, source or "live")
        labels = dict(zip(LABELS, expected, strict=True))
        for name in ("attention_ratio_count", "image_share_count", "focus_share_count", "focus_total"):
            assert total(found, f"helmsight_{name}", **labels) == 1, name
        assert total(found, "helmsight_choices_total", source=labels["source"]) == 1
    assert total(found, "helmsight_attention_ratio_count") == 2


def test_an_unknown_source_is_refused(client: FlaskClient) -> None:
    """Otherwise a client could make as many series as it likes."""
    asked = {"messages": [user("What?")]}
    refused = client.post("/v1/chat/completions", json=asked, headers={"X-Helmsight-Source": "mine"})
    assert (refused.status_code, refused.json["error"]["param"]) == (400, "X-Helmsight-Source")
    assert "live, eval, probe, batch, observe" in refused.json["error"]["message"]
    assert not any("mine" in name for name in samples(client))


def test_what_readouts_keep_is_counted(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    class Length(Readout):
        name = "length"
        scalars: ClassVar[dict[str, type]] = {"state_norm": float, "overlong": bool, "steps_taken": int}

        def signals(self, options: steering.Diagnose) -> frozenset[Signal]:
            return frozenset()

        def read(self, answer: FinishedAnswer) -> Any:
            raise NotImplementedError

        def summary(self, report: Any) -> Mapping[str, Scalar]:
            return {"state_norm": report["norm"], "overlong": report["long"], "steps_taken": 3}

    monkeypatch.setitem(readout.REGISTRY, "length", Length())
    fake.can(readouts=frozenset(readout.REGISTRY))
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    for said in (
        {"norm": 2.5, "long": True},
        {"norm": float("nan"), "long": False},
        {"norm": None, "long": None},
        None,
    ):
        fake.diagnostics = {"length": said, "focus": {"image": 1, "share": 0.35, "target_image": 2, "correct": False}}
        assert ask(client, diagnostics={"include": ["length", "focus"]}).status_code == 200
    found = samples(client)
    assert (total(found, "helmsight_state_norm_count"), total(found, "helmsight_state_norm_sum")) == (1, 2.5)
    assert total(found, "helmsight_flags_total", flag="overlong", raised="true") == 1
    assert total(found, "helmsight_flags_total", flag="overlong", raised="false") == 1
    assert total(found, "helmsight_focus_total", correct="false") == 4
    assert [total(found, "helmsight_focus_share_bucket", le=edge) for edge in ("0.3", "0.4")] == [0, 4]
    assert found['helmsight_diagnostics_total{readout="length"}'] == 4
    assert not any("steps_taken" in name for name in found)
    described = {one["name"]: one for one in client.get("/v1/models").json["data"][0]["readout_schemas"]}["length"]
    assert described["scalars"] == {"state_norm": "number", "overlong": "boolean", "steps_taken": "integer"}
    assert (described["cheap"], described["own_key"]) == (False, True)


def test_the_catalogue_describes_every_intervention(client: FlaskClient) -> None:
    model, *_ = client.get("/v1/models").json["data"]
    listed = {one["name"]: one for one in model["interventions"]}
    assert list(listed) == list(intervention.REGISTRY)
    see, icd, steered = listed["sage.see"], listed["contrast.icd"], listed["steering"]
    assert (see["path"], see["kind"]) == (["sage", "see"], None)
    assert (icd["path"], icd["kind"]) == (["contrast"], "icd")
    assert (see["twin"], icd["twin"]) == (False, True)
    assert see["schema"]["properties"]["alpha"].items() >= {"default": 0.1, "minimum": 0, "maximum": 1}.items()
    assert "lambda" in listed["sage.generate"]["schema"]["properties"]
    assert steered["schema"]["properties"]["toward"]["enum"] == ["vision", "text", "auto"]
    assert [one["name"] for one in model["readout_schemas"]] == model["readouts"]
    assert {one["name"] for one in model["readout_schemas"] if one["cheap"]} == {"focus", "modality", "decay"}


def test_every_answer_has_a_request_id(client: FlaskClient) -> None:
    first, second = (client.get(route).headers["X-Request-Id"] for route in ("/health", "/nowhere"))
    assert first != second


def test_a_server_that_drains_finishes_what_it_measures_for_a_request(
    engine: steering.Engine, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = steering.Engine(engine.mllm, slots=2, self_check=False)
    own.start()
    app = create_app(settings, engine=own)
    runtime: Runtime = app.extensions["helmsight"].runtime
    stoppers: list[threading.Thread] = []
    words = reliability._words

    def stop_after_the_plain_answer(result: steering.Result) -> tuple[int, ...]:
        stoppers.append(threading.Thread(target=runtime.drain, args=(30.0,)))
        stoppers[0].start()
        while runtime.state != "draining" or own.healthy:
            time.sleep(0.005)
        return words(result)

    monkeypatch.setattr(reliability, "_words", stop_after_the_plain_answer)
    text = "Text context: The circle is green.\nWhat is the background colour?"
    response = ask(app.test_client(), data_uri(), text, steering={"toward": "auto"})
    assert response.status_code == 200, response.text
    assert response.json["choices"][0]["applied"]["steering"][0]["auto"]["answer"] > 0
    stoppers[0].join(PATIENCE)
    assert not stoppers[0].is_alive()
    assert ask(app.test_client(), data_uri(), text).status_code == 503
