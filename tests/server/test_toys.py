"""A new intervention and a new readout are a file and a line each.

`toys/` has the files, a fixture the lines; no other line of the project knows of them. See `docs/extending.md`.
"""

from __future__ import annotations

import importlib
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient
from PIL import Image

import steering
from probes.answering.wire import fields
from server.app import create_app
from server.settings import Settings
from steering.protocol import intervention, readout
from steering.protocol.text import texts_of
from tests.forked import forked
from tests.server.api.test_operations import samples, total
from tests.server.conftest import ask, data_uri
from tests.server.fakes import checkpoint
from tests.server.journal.journals import settled
from tests.server.web.browser import Visit
from tests.steering.plain import Answer, Plain
from tests.test_house import FLOORS
from tests.toys.norm import Norm
from tests.toys.nudge import Nudge, NudgeSlots

PAGE = Path(__file__).parents[2] / "docs" / "extending.md"
QUESTION = "What colour is the star?"
STEPS = 4
CLOSE = {"rel": 0.0, "abs": 2e-4}
"""Tolerance between log-probabilities of two implementations in float32."""


@contextmanager
def registered() -> Iterator[None]:
    """Register the toys, and remove every trace of them afterwards."""
    interventions, readouts = dict(intervention.REGISTRY), dict(readout.REGISTRY)
    intervention.register(Nudge, NudgeSlots)
    readout.register(Norm())
    try:
        yield
    finally:
        for registry, before in ((intervention.REGISTRY, interventions), (readout.REGISTRY, readouts)):
            registry.clear()
            registry.update(before)


@pytest.fixture(scope="module")
def engine() -> Iterator[steering.Engine]:
    """Yield the embedded model's engine with the toys, stepped by whoever waits, so that a test knows its batches."""
    with registered():
        yield steering.Engine(steering.load(checkpoint(), device="cpu"), slots=4, threads=1, self_check=False)


@pytest.fixture(scope="module")
def app(engine: steering.Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Flask]:
    """Yield an application with a running engine of its own and a journal that wants the toy readout of every answer."""
    running = steering.Engine(engine.mllm, slots=4, threads=1, self_check=False)
    running.start()
    journal = tmp_path_factory.mktemp("toys") / "journal.db"
    made = create_app(Settings(journal=str(journal), journal_readouts=("norm",)), engine=running)  # type: ignore[arg-type]
    yield made
    running.stop()
    made.extensions["helmsight"].journal.close()


@pytest.fixture
def client(app: Flask) -> FlaskClient:
    return app.test_client()


@pytest.fixture(scope="module")
def picture() -> Image.Image:
    return Image.new("RGB", (84, 84), "red")


@pytest.fixture(scope="module")
def plain() -> Plain:
    """Return the checkpoint in transformers alone, in the engine's precision."""
    plain = Plain(checkpoint())
    plain.model.float()
    return plain


def chat(picture: Image.Image, question: str = QUESTION) -> list[dict[str, Any]]:
    content = [{"type": "image", "image": picture}, {"type": "text", "text": question}]
    return [{"role": "user", "content": content}]


def expected(answer: Answer, nudge: Nudge | None = None) -> torch.Tensor:
    """Return log-probabilities (steps, vocabulary) of plain transformers' answer, with one logit moved by hand."""
    logits = answer.logits.clone()
    if nudge is not None:
        logits[:, nudge.token] += nudge.by
    return logits.log_softmax(-1)


def reported(choice: steering.Choice) -> list[dict[int, float]]:
    """Return for each step the log-probability of each token that is reported."""
    assert choice.logprobs is not None
    return [{one.token_id: one.logprob for one in (step, *step.top)} for step in choice.logprobs]


def check(choice: steering.Choice, of: torch.Tensor) -> None:
    """Assert that the choice took the likeliest tokens of log-probabilities (steps, vocabulary), and reports them."""
    assert list(choice.token_ids) == of.argmax(-1).tolist()
    for step, row in zip(reported(choice), of, strict=True):
        assert step == {token: pytest.approx(float(row[token]), **CLOSE) for token in step}


def test_nothing_of_them_is_left_behind() -> None:
    """First of this file: the engine of the others keeps the toys registered."""
    before = [*intervention.REGISTRY, *readout.REGISTRY]
    with registered():
        assert {*intervention.REGISTRY, *readout.REGISTRY} - {*before} == {"nudge", "norm"}
    assert [*intervention.REGISTRY, *readout.REGISTRY] == before


# -- the intervention ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", [-100.0, 3.0, 100.0])
def test_the_logit_moves_by_the_constant_alone_and_beside_others(
    engine: steering.Engine, plain: Plain, picture: Image.Image, by: float
) -> None:
    token = plain.answer(chat(picture), 1).tokens[0]
    nudge, other = Nudge(token=token, by=by), Nudge(token=7, by=2.5)
    sampling = steering.Sampling(max_tokens=STEPS, logprobs=5, ignore_eos=True)
    questions = (QUESTION, "Where is the circle?", QUESTION, QUESTION)
    asked = ((nudge,), (), (), (other,))
    requests = [
        steering.Request(chat(picture, question), sampling, some)
        for question, some in zip(questions, asked, strict=True)
    ]
    (alone,) = engine.generate(requests[:1])
    together = engine.generate(requests)
    assert alone.choices[0].token_ids == together[0].choices[0].token_ids
    for result, question, some in zip([alone, *together], (QUESTION, *questions), ((nudge,), *asked), strict=True):
        (choice,) = result.choices
        reference = plain.answer(chat(picture, question), STEPS, forced=choice.token_ids)
        check(choice, expected(reference, *some))


def test_neighbours_of_it_keep_every_bit(engine: steering.Engine, picture: Image.Image) -> None:
    sampling = steering.Sampling(max_tokens=STEPS, logprobs=5, ignore_eos=True)
    neighbour = steering.Request(chat(picture), sampling)

    def beside(*asked: steering.InterventionSpec) -> Any:
        _, result = engine.generate([steering.Request(chat(picture), sampling, asked), neighbour])
        return reported(result.choices[0])

    assert beside(Nudge(token=9, by=50.0)) == beside()


@pytest.mark.parametrize("contrast", [steering.Icd(beta=0.0), steering.Generate(), steering.Generate(refresh=2)])
def test_beside_a_contrast_it_moves_the_contrasted_logit_once(
    engine: steering.Engine, picture: Image.Image, contrast: steering.Options
) -> None:
    sampling = steering.Sampling(max_tokens=6, logprobs=20, ignore_eos=True)
    said = engine.generate([steering.Request(chat(picture), sampling, (contrast,))])[0].choices[0]
    nudge = Nudge(token=said.token_ids[0], by=4.0)
    again = steering.Request(chat(picture), sampling, (contrast, nudge), forced=said.token_ids)
    for without, with_it in zip(reported(said), reported(engine.generate([again])[0].choices[0]), strict=True):
        moved = {token: with_it[token] - without[token] for token in with_it.keys() & without.keys()}
        own = moved.pop(nudge.token, None)
        assert len(moved) > 10
        lost = next(iter(moved.values()))  # what the others' probabilities lose to it
        assert moved == {token: pytest.approx(lost, **CLOSE) for token in moved}
        assert own is None or own - lost == pytest.approx(nudge.by, **CLOSE)
    assert nudge.token in reported(said)[0]


@pytest.mark.parametrize(
    ("value", "param", "code", "message"),
    [
        ({"token": 9, "by": 101}, "nudge.by", "invalid_value", "'nudge.by' must be from -100 to 100; got 101."),
        ({"token": -1}, "nudge.token", "invalid_value", "'nudge.token' must be at least 0; got -1."),
        ({"token": 1024}, "nudge.token", "invalid_value", "'nudge.token' must be from 0 to 1023; got 1024."),
        ({"token": "9"}, "nudge.token", "invalid_value", "'nudge.token' must be an integer; got '9'."),
        ({"token": 9, "to": 1}, "nudge.to", "unknown_parameter", "'nudge.to' is unknown; allowed: token, by."),
        ({"by": 1}, "nudge.token", "missing_required_parameter", "'nudge.token' is required."),
        (True, "nudge.token", "missing_required_parameter", "'nudge.token' is required."),
        (9, "nudge", "invalid_value", "'nudge' must be true, false or an object; got 9."),
    ],
)
def test_its_options_are_checked_in_the_projects_words(
    client: FlaskClient, value: Any, param: str, code: str, message: str
) -> None:
    response = ask(client, nudge=value)
    error = response.json["error"]
    assert (response.status_code, error["param"], error["code"], error["message"]) == (400, param, code, message)


def test_over_http_it_moves_the_logit_and_says_so(client: FlaskClient, plain: Plain, picture: Image.Image) -> None:
    nudge = Nudge(token=9, by=100.0)
    asked = {"nudge": {"token": 9, "by": 100}, "baseline": True, "logprobs": True, "top_logprobs": 3}
    (choice,) = ask(client, data_uri(picture), QUESTION, max_tokens=STEPS, **asked).json["choices"]
    assert choice["applied"] == {"nudge": {"token": 9, "by": 100.0}}
    text_of = texts_of(plain.tokenizer)
    for said, one in ((choice, nudge), (choice["baseline"], None)):
        content = said["logprobs"]["content"]
        of = expected(plain.answer(chat(picture), STEPS, forced=[9] * STEPS if one else None), one)
        assert len(content) >= 2
        for step, row in zip(content, of, strict=False):  # the baseline may end before
            best, token = row.topk(3)
            names = [text_of(int(number))[0] for number in token]
            found = [(item["token"], item["logprob"]) for item in step["top_logprobs"]]
            assert found == [(name, pytest.approx(float(x), **CLOSE)) for name, x in zip(names, best, strict=True)]
    assert choice["message"]["content"] == plain.tokenizer.decode([9] * STEPS)
    assert choice["baseline"]["message"] != choice["message"]


def test_a_benchmark_can_ask_for_it() -> None:
    assert fields([Nudge(token=9)]) == {"nudge": {"token": 9, "by": 1.0}}


# -- the readout -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, STEPS])
def test_the_readout_comes_over_http(client: FlaskClient, plain: Plain, picture: Image.Image, steps: int) -> None:
    asked = ask(client, data_uri(picture), QUESTION, max_tokens=steps, diagnostics={"include": ["norm"]})
    (choice,) = asked.json["choices"]
    reference = plain.answer(chat(picture), steps)
    norms = reference.hidden[:, -1].norm(dim=-1).tolist()
    assert choice["diagnostics"]["norm"] == {"by_layer": pytest.approx(norms, rel=1e-4)}
    assert "focus" not in choice["diagnostics"]


def test_a_readout_that_nobody_knows_is_refused_with_those_that_there_are(client: FlaskClient) -> None:
    error = ask(client, diagnostics={"include": ["norms"]}).json["error"]
    assert error["param"] == "diagnostics.include"
    assert error["message"].startswith("'diagnostics.include' does not know norms; allowed: focus, ")
    assert error["message"].endswith(", norm.")


# -- both, wherever the server tells of what it does -----------------------------------------------------------------------


def test_metrics_and_journal_tell_of_both(client: FlaskClient, app: Flask) -> None:
    journal, before = app.extensions["helmsight"].journal, samples(client)
    written = journal.written
    nudged = ask(client, nudge={"token": 9}, diagnostics={"include": ["norm"]}).json
    plain = ask(client).json
    settled(journal, written + 2)
    after = samples(client)
    names = {
        'helmsight_interventions_total{kind="nudge",toward=""}': 1,
        'helmsight_diagnostics_total{readout="norm"}': 1,
    }
    assert {name: after[name] - before.get(name, 0.0) for name in names} == names
    # Of the plain answer, too: the journal asks for it.
    assert total(after, "helmsight_last_norm_count") - total(before, "helmsight_last_norm_count") == 2
    (row,) = client.get("/v1/diagnostics?intervention=nudge&limit=1").json["data"]
    assert (row["id"], row["interventions"]) == (nudged["id"], ["nudge"])
    assert row["asked"]["nudge"] == {"token": 9}
    assert row["applied"] == {"nudge": {"token": 9, "by": 1.0}}
    said = nudged["choices"][0]["diagnostics"]["norm"]
    assert row["diagnostics"]["last_norm"] == said["by_layer"][-1] > 0
    assert "diagnostics" not in plain["choices"][0]
    (row,) = client.get("/v1/diagnostics?intervention=none&limit=1").json["data"]
    assert (row["id"], row["asked"]["nudge"]) == (plain["id"], None)
    assert row["diagnostics"]["last_norm"] > 0
    norms = [row["diagnostics"]["last_norm"] for row in client.get("/v1/diagnostics").json["data"]]
    spread = client.get("/v1/diagnostics/summary").json["values"]["last_norm"]
    assert (spread["count"], spread["min"], spread["max"]) == (len(norms), min(norms), max(norms))
    refused = client.get("/v1/diagnostics?intervention=nudges").json["error"]["message"]
    assert ", nudge, none; got 'nudges'" in refused


def test_the_catalogue_describes_both(client: FlaskClient) -> None:
    model, *_ = client.get("/v1/models").json["data"]
    (described,) = [one for one in model["interventions"] if one["name"] == "nudge"]
    schema = described.pop("schema")
    assert described == {"name": "nudge", "path": ["nudge"], "kind": None} | dict.fromkeys(("twin", "vectors"), False)
    assert schema["properties"] == {
        "token": {"minimum": 0, "title": "Token", "type": "integer"},
        "by": {"default": 1.0, "maximum": 100, "minimum": -100, "title": "By", "type": "number"},
    }
    assert (schema["required"], schema["additionalProperties"]) == (["token"], False)
    assert "norm" in model["readouts"]
    card = {"name": "norm", "cheap": False, "own_key": True, "scalars": {"last_norm": "number"}, "quantities": {}}
    assert {**card, "available": True} in model["readout_schemas"]


def test_the_page_asks_for_both_and_shows_them(
    app: Flask,
    live: Callable[[Flask], str],
    visit: Callable[..., Visit],
) -> None:
    opened = visit()
    page = opened.page
    page.goto(live(app))
    page.locator("#asked-nudge").check()
    assert page.locator("#interventions small", has_text="One token becomes likelier").count() == 1
    page.get_by_label("token", exact=True).fill("9")
    page.get_by_label("by", exact=True).fill("100")
    page.get_by_text("Sampling and readouts").click()
    page.get_by_role("checkbox", name="norm").check()
    page.locator("#max-tokens").fill("2")
    page.locator("#question").fill(QUESTION)
    page.get_by_role("button", name="Send").click()
    page.locator("#card-norm").wait_for()
    applied = page.locator("#card-applied .applied div").all_inner_texts()
    assert applied == ["Nudge\ntoken 9, by 100"]


# -- the page that explains them -------------------------------------------------------------------------------------------


def blocks(language: str) -> list[str]:
    """Return the page's blocks of code."""
    return [found.strip() for found in re.findall(rf"```{language}\n(.*?)```", PAGE.read_text(), re.DOTALL)]


def test_the_page_shows_the_code_that_is_tested() -> None:
    here = Path(__file__).parents[1]
    toys = [(here / "toys" / name).read_text().strip() for name in ("nudge.py", "norm.py")]
    others = [Path(__file__).read_text(), (here / "probes" / "harness" / "toy.py").read_text()]
    shown = blocks("python")
    assert [block for block in shown if block in toys] == toys, "each toy, whole"
    rest = [block for block in shown if block not in toys]
    lines = [block for block in rest if block.startswith("from steering.")]
    assert [line.splitlines()[-1] for line in lines] == ["register(Nudge, NudgeSlots)", "register(Norm())"]
    assert not [block for block in rest if block not in lines and not any(block in text for text in others)]


def test_the_toys_work_where_the_page_puts_them(tmp_path: Path) -> None:
    """In the package, with the lines that the page shows."""
    root = PAGE.parents[1]
    shutil.copytree(root / "steering", tmp_path / "steering")  # with what is compiled of it
    lines = [block for block in blocks("python") if block.startswith("from steering.")]
    for room, toy, line in zip(("interventions", "readouts"), ("nudge.py", "norm.py"), lines, strict=True):
        shutil.copy(root / "tests" / "toys" / toy, tmp_path / "steering" / room)
        with (tmp_path / "steering" / room / "registry.py").open("a") as registry:
            registry.write(f"\n{line}\n")

    def read_anew() -> None:
        for name in [name for name in sys.modules if name.partition(".")[0] == "steering"]:
            del sys.modules[name]
        sys.path.insert(0, str(tmp_path))
        place = importlib.import_module("steering").__file__
        registries = [
            importlib.import_module(f"steering.protocol.{one}").REGISTRY for one in ("intervention", "readout")
        ]
        assert place == str(tmp_path / "steering" / "__init__.py")
        assert [toy in one for toy, one in zip(("nudge", "norm"), registries, strict=True)] == [True, True]

    with forked(read_anew, said := tmp_path / "said") as process:
        process.join()
    assert process.exitcode == 0, said.read_text()


def test_the_page_shows_what_comes_back(client: FlaskClient, picture: Image.Image) -> None:
    shown = [json.loads(block) for block in blocks("json")]
    assert len(shown) == 4
    for asked, said in zip(shown[::2], shown[1::2], strict=True):
        (choice,) = ask(client, data_uri(picture), QUESTION, **asked).json["choices"]
        assert "applied" not in said or choice["applied"] == said["applied"]
        if "diagnostics" in said:
            (norms,) = said["diagnostics"]["norm"].values()
            assert choice["diagnostics"]["norm"] == {"by_layer": pytest.approx(norms, rel=1e-2)}


def test_every_link_and_path_of_the_pages_is_there() -> None:
    root = PAGE.parents[1]
    rooms = {"docs", ".ci", *(file.parent.name for place in (root, root / "steering") for file in place.glob("*/*.py"))}
    assert {"demo", "deploy", "core"} <= rooms  # folders of code; what commands make, such as build/, is none
    for page in (root / "README.md", *sorted(PAGE.parent.glob("*.md"))):
        text = page.read_text()
        for target in re.findall(r"\]\(([^)#]+)\)", text):
            assert target.startswith("http") or (page.parent / target).exists(), f"{page.name}: {target}"
        for path in re.findall(rf"`((?:{'|'.join(rooms)})/[\w/.]*)`", text):
            found = any((place / path).exists() for place in (root, root / "steering"))
            assert found or "NAME" in path, f"{page.name}: {path}"


def test_the_floors_of_the_page_are_those_of_the_house() -> None:
    page = (PAGE.parent / "house.md").read_text()
    (table,) = re.findall(r"The floors of `steering/`:\n\n(.*?)\n\n", page, re.DOTALL)
    assert re.findall(r"^\| `([\w/]+)`", table, re.M) == [floor.replace(".", "/") for floor in FLOORS["steering"]]
