"""The measurements of `helmsight bench`, on a model that runs quickly on two processors."""

from __future__ import annotations

import functools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType

from server import cli
from steering import Diagnose, Engine, Fault, Request, Sampling
from steering.bench import extras, run, sections, speed
from steering.bench.answering import answered
from steering.bench.asking import chat
from steering.bench.device import graphed
from steering.bench.launches import Launched, launched
from steering.bench.rows import Gauge, Unavailable, as_json, as_page
from steering.bench.sections import SECTIONS, Section, rows_of
from steering.bench.shapes import SHAPES
from steering.bench.trial import Trial
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill
from steering.protocol import intervention, readout
from steering.protocol.intervention_spec import InterventionSpec

TINY = Trial("tiny", "cpu", "float32", quick=True)


@pytest.fixture(scope="module", autouse=True)
def one_model() -> Iterator[None]:
    """Every section makes a model, of the same numbers each time; here all have the same."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(Trial, "model", functools.cache(Trial.model))
        yield


@pytest.fixture(scope="module")
def engine() -> Engine:
    return TINY.engine(4)


def of(rows: list[Gauge], label: str) -> list[Gauge]:
    return [row for row in rows if row.what.startswith(label)]


def test_decoding_is_compared_with_the_limit_of_bandwidth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "bandwidth", lambda device, size: 1e9)
    rows = list(rows_of("decode", TINY))
    text = TINY.size.text
    d, ffn, layers = text["hidden_size"], text["intermediate_size"], text["num_hidden_layers"]
    kv = d // text["num_attention_heads"] * text["num_key_value_heads"]
    weights = layers * (2 * d * d + d + 2 * d * kv + 2 * kv + 3 * d * ffn + 2 * d) + d + d * text["vocab_size"]
    (read,) = of(rows, "weights read")
    assert read.value == pytest.approx(4 * weights / 1e9)
    for batch in TINY.size.batches:
        least = 4 * (weights + batch * (TINY.size.prompt + TINY.tokens) * layers * 2 * kv) / 1e9
        columns = TINY.size.prompt + TINY.tokens
        step, share = of(rows, f"the model alone, {columns} columns, {batch} at once")
        assert isinstance(step.value, float)
        assert share.value == pytest.approx(100 * least / (step.value / 1e3))
        (graph,) = of(rows, f"the model alone, {columns} columns, as a CUDA graph, {batch}")
        assert (graph.value, graph.note) == (None, "cpu has no CUDA graphs.")
        assert of(rows, f"engine, {batch} at once")[0].unit == "ms a step"
    assert of(rows, "most memory")[0].value > 0  # type: ignore[operator]


def test_states_are_read_and_written_beside_keys_and_values(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "bandwidth", lambda device, size: 1e9)
    large, tiny = SHAPES["9b"], TINY.size
    text = {**large.text, "hidden_size": 64, "num_hidden_layers": 4, "intermediate_size": 96, "vocab_size": 1024}
    vision = {**large.vision, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "depth": 2}
    shrunk = replace(tiny, name="shrunk", text=text, vision=vision, model_type=large.model_type)
    monkeypatch.setitem(SHAPES, "shrunk", shrunk)
    trial = replace(TINY, shape="shrunk")
    engine, columns = trial.engine(2), 90
    weights = speed.weights_read(engine.mllm)
    matrices, inputs = 32 * 128 * 128, 3 * (2 * 16 + 32) * 128  # of each of three layers
    keys = 2 * 4 * 256  # of the fourth
    expected = weights + 2 * 4 * (columns * keys + 2 * 3 * (matrices + inputs))
    assert speed.bytes_read(engine, 2, columns) == pytest.approx(expected)
    step = speed.model_alone(engine.mllm, 2, columns)
    with torch.inference_mode():
        torch.testing.assert_close(step(), step())
    picture = trial.ask(text=3, picture=(2, 2), tokens=2)
    assert len(engine.generate([picture])[0].choices[0].token_ids) == 2


def test_the_model_alone_computes_the_engines_logits(engine: Engine) -> None:
    """A token at the first column sees nothing but itself, and the zeros before others."""
    mllm = engine.mllm
    alone = speed.model_alone(mllm, rows=2, columns=1)
    with torch.inference_mode():
        got = alone()
        embeds = mllm.model.get_input_embeddings()(torch.zeros(1, 1, dtype=torch.int64))
        step = Prefill(KVPool(1, 1), slice(0, 1))
        out = mllm.decoder(inputs_embeds=embeds, position_ids=torch.zeros(1, 1).long(), use_cache=False, step=step)
        torch.testing.assert_close(got, mllm.head(out.last_hidden_state[:, -1]).expand(2, -1), rtol=1e-4, atol=1e-5)


def test_the_first_token_s_parts_are_the_whole() -> None:
    rows = list(rows_of("first token", TINY))
    assert "failed" not in [row.what for row in rows]
    total, processor, engine_s = (row.value for row in of(rows, "12 image tokens")[:3])
    assert total == pytest.approx(processor + engine_s)  # type: ignore[operator]


def test_every_intervention_and_every_readout_is_measured() -> None:
    rows = list(rows_of("overhead", TINY))
    names = {row.what for row in rows if row.unit == "of a plain step"}
    readouts = {f"readout {name}" for name in readout.REGISTRY}
    assert names >= {*intervention.REGISTRY, *readouts, "every readout", *extras.SAMPLINGS}


def test_an_intervention_without_defaults_has_a_row_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Odd(InterventionSpec):
        path = ("odd",)

    monkeypatch.setattr(intervention, "REGISTRY", {"odd": (Odd, None)})
    monkeypatch.setattr(readout, "REGISTRY", {})
    (odd,) = of(list(extras.overhead(TINY)), "odd")
    assert odd.value is None
    assert "add one to steering/bench/extras.py" in odd.note


def test_only_pure_decode_steps_are_counted(engine: Engine) -> None:
    times = answered(engine, [TINY.ask(tokens=5) for _ in range(3)])
    assert len(times.steps) == 2  # two tokens come with the prompt, and the last step ends the answers
    assert times.first + sum(times.steps) < times.whole
    with pytest.raises(Fault, match="too short"):
        answered(engine, [TINY.ask(tokens=2)])


def test_drawn_models_have_their_shape_and_generate_known_tokens(engine: Engine) -> None:
    model = engine.mllm
    assert (model.num_layers, model.hidden_size) == (4, 64)
    request = Request(chat("red?"), Sampling(max_tokens=8, ignore_eos=True), diagnose=Diagnose())
    (choice,) = engine.generate([request])[0].choices
    assert max(choice.token_ids) < len(model.tokenizer)
    assert choice.text


def test_half_precision_is_compared_with_float32() -> None:
    rows = list(rows_of("precision", TINY))
    assert [row.value for row in of(rows, "self-check")] == ["passed"] * 3
    for name in ("bfloat16", "float16"):
        same, apart = of(rows, name)
        assert same.value > 90  # type: ignore[operator]
        assert 0 < apart.value < 0.1  # type: ignore[operator]


def an_event(name: str, device: DeviceType, parent: Any = None, us: float = 0.0) -> SimpleNamespace:
    span = SimpleNamespace(elapsed_us=lambda: us)
    return SimpleNamespace(name=name, device_type=device, cpu_parent=parent, time_range=span)


def test_kernels_copies_and_waits_are_told_apart() -> None:
    outer = an_event("aten::linear", DeviceType.CPU)
    counted = launched(
        [
            outer,
            an_event("aten::addmm", DeviceType.CPU, outer),
            an_event("cudaLaunchKernel", DeviceType.CPU, outer),
            an_event("cudaStreamSynchronize", DeviceType.CPU),
            an_event("ampere_sgemm", DeviceType.CUDA, us=30.0),
            an_event("Memcpy HtoD (Pinned -> Device)", DeviceType.CUDA, us=10.0),
        ]
    )
    assert counted == Launched(operators=1, kernels=1, copies=1, seconds=pytest.approx(40e-6), waits=1)


def test_operators_of_a_step_are_counted() -> None:
    rows = list(rows_of("launches", TINY))
    plain, read = (of(rows, f"decode, {kind_}, 1 at once: operators")[0].value for kind_ in ("plain", "every readout"))
    assert 50 < plain < read  # type: ignore[operator]
    assert of(rows, "decode, plain, 1 at once: kernels")[0].note == "The profiler saw no kernels: only GPUs have them."


def test_there_are_no_graphs_without_cuda() -> None:
    with pytest.raises(Unavailable):
        graphed(torch.device("cpu"), lambda: None)


def test_a_failing_section_keeps_its_rows_and_adds_the_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(trial: Trial) -> Iterator[Gauge]:
        yield Gauge("broken", "one", 1.0)
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried to allocate 20 GiB")

    monkeypatch.setitem(SECTIONS, "broken", Section(broken, 1))
    rows = list(rows_of("broken", TINY))
    assert [row.what for row in rows] == ["one", "failed", "most memory, resident"]
    assert rows[1].note == "OutOfMemoryError: CUDA out of memory."


def test_budgets_are_less_than_eight_minutes() -> None:
    assert sum(section.budget for section in SECTIONS.values() if section.usual) < 480
    assert set(run.usual()) == set(SECTIONS) - {"eager"}


FIGURE = Gauge("limits", "one", 1.5, "GB/s")


@pytest.fixture
def ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Replace a section's process by one that reports a figure, and then runs `last`."""

    def made(last: str) -> None:
        lines = [json.dumps({"machine": {"device": "none"}}), json.dumps({"row": asdict(FIGURE)})]
        program = tmp_path / "python"
        program.write_text("#!/bin/sh\n" + "".join(f"echo '{line}'\n" for line in lines) + last + "\n")
        program.chmod(0o755)
        monkeypatch.setattr(run.sys, "executable", str(program))

    return made


def test_a_section_s_process_is_ended_with_its_budget(ending: Callable[[str], None]) -> None:
    ending("exec sleep 600")
    sheet, begun = run.Sheet(), time.monotonic()
    run.section(sheet, "limits", TINY, budget=4)
    assert sheet.rows == [FIGURE, Gauge("limits", "ended", None, note="Its 4 seconds were over.")]
    assert time.monotonic() - begun < 300


def test_a_section_whose_process_dies_keeps_its_rows(ending: Callable[[str], None]) -> None:
    ending("echo 'no luck' >&2; exit 7")
    sheet = run.Sheet()
    run.section(sheet, "limits", TINY, budget=60)
    assert sheet.rows == [FIGURE, Gauge("limits", "ended", None, note="Its process ended with status 7: no luck")]


def test_a_process_writes_its_section_as_lines(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sections.sys, "argv", ["", "limits", json.dumps(asdict(TINY))])
    assert sections.main() == 0
    machine, *rows = map(json.loads, capfd.readouterr().out.splitlines())
    assert machine["machine"]["torch"] == version("torch")
    assert [row["row"]["what"] for row in rows][:2] == ["copy of 1 MiB", "product of 256 x 256 in float32"]


def test_the_command_writes_a_page_and_json(
    ending: Callable[[str], None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ending("exit 0")
    assert cli.main(["bench", "--quick", "--write", str(tmp_path / "found")]) == 0
    page = capsys.readouterr().out
    assert (tmp_path / "found.md").read_text() == page
    written = json.loads((tmp_path / "found.json").read_text())
    assert written["machine"] | {"seconds": 0} == {
        "device": "none", "model": "random tiny, float32, on cpu, quick", "seconds": 0,
    }  # fmt: skip
    assert written["rows"] == [asdict(FIGURE)] * len(run.usual())
    assert "| limits | one | 1.5 | GB/s |  |" in page


def test_a_missing_gpu_is_reported(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", "--gpu"]) == 1
    assert "sees no GPU" in capsys.readouterr().err


def test_cells_do_not_break_the_table() -> None:
    rows = [Gauge("a", "b|c", None, note="two\nlines")]
    assert "| a | b/c | - |  | two lines |" in as_page({"torch": "2"}, rows)
    assert json.loads(as_json({}, rows))["rows"][0]["what"] == "b|c"
    assert sections.in_one_line(ValueError("")) == "ValueError: "
