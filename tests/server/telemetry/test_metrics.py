"""Metrics of times, batches, memory and refusals; a page and its files count as one route."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.journal.reading.view import VIEW
from server.settings import Settings
from steering import Histogram, devices
from steering.core.budget import StepBudget
from tests.server.api.test_operations import samples
from tests.server.conftest import ask, data_uri
from tests.server.fakes import FakeEngine
from tests.server.telemetry.exposed import families

ROOT = Path(__file__).parents[3]


def test_a_spread_counts_as_prometheus_does() -> None:
    bins = Histogram((0.1, 1.0))
    for value in (0.05, 0.1, 0.5, 7.0):
        bins.add(value)
    assert bins.cumulative() == [2, 3, 4]
    assert bins.total == pytest.approx(7.65)
    bins.clear()
    assert (bins.cumulative(), bins.total) == ([0, 0, 0], 0.0)


def test_times_and_batches_of_an_answer(engine: steering.Engine, settings: Settings) -> None:
    client = create_app(settings, engine=engine).test_client()
    before = samples(client)
    answer = ask(client, max_tokens=5)
    tokens = answer.json["usage"]["completion_tokens"]
    after = samples(client)

    def more(name: str) -> float:
        return after[name] - before.get(name, 0.0)

    assert more("helmsight_queue_seconds_count") == more("helmsight_prefill_seconds_count") == 1
    assert more("helmsight_inter_token_seconds_count") == tokens - 1
    assert more('helmsight_batch_size_bucket{le="1.0"}') == more("helmsight_batch_size_count") == tokens - 1
    assert more("helmsight_batch_size_sum") == tokens - 1
    plain = '{kind="none"}'
    assert after[f"helmsight_intervention_tokens_total{plain}"] == tokens
    # An application that is new: what its own counter says of the answer is what the engine says of all that came since.
    assert after[f"helmsight_intervention_decode_seconds_total{plain}"] == pytest.approx(
        more("helmsight_inter_token_seconds_sum")
    )


def test_each_intervention_of_an_answer_counts_its_tokens(client: FlaskClient) -> None:
    def counted() -> dict[str, float]:
        head = 'helmsight_intervention_tokens_total{kind="'
        return {name: value for name, value in samples(client).items() if name.startswith(head)}

    before = counted()
    answer = ask(client, data_uri(), "What is it?", steering={"toward": "text"}, contrast={"kind": "icd"}, max_tokens=3)
    tokens = answer.json["usage"]["completion_tokens"]
    grown = {name: value - before.get(name, 0) for name, value in counted().items() if value != before.get(name)}
    named = 'helmsight_intervention_tokens_total{kind="%s"}'
    assert grown == {named % "steering": tokens, named % "contrast.icd": tokens}


def test_memory_and_builds(engine: steering.Engine, settings: Settings) -> None:
    client = create_app(settings, engine=engine).test_client()
    ask(client)
    found = samples(client)
    config = engine.mllm.model.config.get_text_config()
    width = config.num_key_value_heads * (config.hidden_size // config.num_attention_heads)
    a_token = 2 * config.num_hidden_layers * width * 4  # keys and values of every layer, in float32
    assert found["helmsight_kv_cache_max_tokens"] == 4 * engine.max_length
    assert found["helmsight_kv_cache_bytes"] == 4 * engine.max_length * a_token
    assert found["helmsight_slot_state_bytes"] > 0
    assert found["process_resident_memory_bytes"] > 2**20
    build = next(name for name in found if name.startswith("helmsight_build_info"))
    assert f'torch="{torch.__version__}"' in build
    model = next(name for name in found if name.startswith("helmsight_model_info"))
    assert f'model="{engine.mllm.name}"' in model
    assert not any(name.startswith("helmsight_gpu") for name in found)


def test_prices_of_passes(engine: steering.Engine, settings: Settings) -> None:
    """Prices are made up: 20 ms plus 0.1 ms a token, a decode of 5 ms; two passes exceed a step's 30 ms."""
    budget = StepBudget(1024, 0.030)
    for tokens in (100, 100, 400):
        budget.prompt.learn(tokens, 0.020 + 0.0001 * tokens)
    budget.decode.learn(1, 0.005)
    budget.picture.learn(9408, 0.007)
    before, engine.core.steps.budget = engine.core.steps.budget, budget
    try:
        found = samples(create_app(settings, engine=engine).test_client())
    finally:
        engine.core.steps.budget = before
    assert found["helmsight_pass_seconds"] == pytest.approx(0.020)
    assert found["helmsight_prompt_token_seconds"] == pytest.approx(0.0001)
    assert found["helmsight_decode_seconds"] == pytest.approx(0.005)
    assert found["helmsight_picture_seconds"] == pytest.approx(0.007)
    assert found["helmsight_prompt_chunk_tokens"] == 200
    assert found["helmsight_gap_unreachable"] == 1


def test_memory_of_gpus(fake: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    told = SimpleNamespace(
        mem_get_info=lambda device: (10 + device.index, 80),
        memory_allocated=lambda device: 50,
        memory_reserved=lambda device: 60,
    )
    monkeypatch.setattr(devices.torch, "cuda", told)
    memory = devices.gpu_memory([torch.device(name) for name in ("cpu", "cuda:0", "cuda:1")])
    fake.numbers |= memory
    found = samples(create_app(Settings(), engine=fake).test_client())  # type: ignore[arg-type]
    sizes = {
        name.removeprefix("helmsight_gpu_memory_"): size
        for name, size in found.items()
        if name.startswith("helmsight_gpu_memory_")
    }
    expected = {"allocated": (50, 50), "reserved": (60, 60), "free": (10, 11), "total": (80, 80)}
    assert sizes == {
        f'{kind}_bytes{{device="cuda:{index}"}}': both[index] for kind, both in expected.items() for index in range(2)
    }


def test_refusals_are_counted_by_reason(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    fake.refusal = steering.Busy(64, retry_after=2.3)
    ask(client)
    fake.refusal = None
    ask(client, temperature=-1)
    client.get("/nowhere/at/all", buffered=True)
    found = {name: value for name, value in samples(client).items() if "refusals_total" in name}
    refused = 'helmsight_refusals_total{reason="%s",status="%d"}'
    assert found == {
        refused % ("rate_limit_exceeded", 429): 1,
        refused % ("invalid_value", 400): 1,
        refused % ("unknown_route", 404): 1,
    }


def test_pages_and_their_files_are_one_route(fake: FakeEngine) -> None:
    client = create_app(Settings(), engine=fake).test_client()  # type: ignore[arg-type]
    for path in ("/", "/dashboard", "/static/playground.js", "/static/style.css"):
        client.get(path, buffered=True)
    routes = {name.partition('route="')[2].partition('"')[0] for name in samples(client) if "request_seconds" in name}
    assert routes == {"pages"}


def test_the_docs_have_every_metric_by_its_kind(engine: steering.Engine, tmp_path: Path) -> None:
    known = {name: kind for name, kind in families(engine, tmp_path).items() if name.startswith("helmsight_")}
    page = (ROOT / "docs" / "operations.md").read_text().partition("## Metrics")[2].partition("## Logs")[0]
    told = {
        name: kind
        for names, kind in re.findall(r"(?m)^\| (`.+?) \| (\w+) \|", page)
        for name in re.findall(r"`(\w+)`", names)
    }
    assert told == known


def test_pages_name_metrics_that_exist(engine: steering.Engine, fake: FakeEngine, tmp_path: Path) -> None:
    fake.numbers |= {"servers": 1, "servers_ready": 1}  # as an engine in front of vLLM counts them
    in_front = samples(create_app(Settings(), engine=fake).test_client())  # type: ignore[arg-type]
    known = {*families(engine, tmp_path), *in_front}
    for page in (ROOT / "docs").glob("*.md"):
        if page.name != "extending.md":  # whose toys have some of their own
            named = set(re.findall(r"\bhelmsight_(?!observed_)\w+", page.read_text()))  # those of another process
            assert named <= {*known, VIEW}, page.name


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_no_fault(client: FlaskClient) -> None:
    ask(client, data_uri(), "What is it?", steering=True, diagnostics=True)
    said = client.get("/metrics").data
    checked = subprocess.run(["promtool", "check", "metrics"], input=said, capture_output=True, check=False)
    assert (checked.returncode, checked.stdout, checked.stderr) == (0, b"", b"")


def test_the_shares_of_a_flags_calibration_are_shown(engine: steering.Engine, settings: Settings) -> None:
    found = samples(create_app(settings, engine=engine).test_client())
    name = 'helmsight_flag_calibrated_share{answers="%s",flag="%s"}'
    calibration = engine.mllm.calibration
    assert calibration is not None
    assert calibration.alarm is not None
    assert calibration.flags is not None
    raised = {"alarm": calibration.alarm.raised, **calibration.flags.raised}
    assert raised.keys() == {"alarm", "perceptual_blindness", "dissociation"}
    for flag, shares in raised.items():
        for answers in ("right", "wrong"):
            assert found[name % (answers, flag)] == shares[answers][0]
    assert 0 < found[name % ("right", "alarm")] < found[name % ("wrong", "alarm")] < 1


def test_a_model_without_a_calibration_has_no_such_shares(fake: FakeEngine) -> None:
    found = samples(create_app(Settings(), engine=fake).test_client())  # type: ignore[arg-type]
    assert not [name for name in found if "calibrated_share" in name]


def test_readouts_of_the_journal_are_shown(fake: FakeEngine, tmp_path: Path) -> None:
    settings = Settings(journal=str(tmp_path / "journal.db"), journal_readouts=("focus", "alarm"))  # type: ignore[arg-type]
    found = samples(create_app(settings, engine=fake).test_client())  # type: ignore[arg-type]
    shown = {name: value for name, value in found.items() if "journal_readouts" in name}
    assert shown == {f'helmsight_journal_readouts{{readout="{name}"}}': 1 for name in ("focus", "alarm")}
