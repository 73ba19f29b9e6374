"""Steps that were compiled beside what is served: the same answers, found at the next start, and nothing that fails."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import steering
from steering import MLLM, Diagnose, Generate, Request, Sage, Sampling, See, Think
from steering.accel.tensors import Bound
from steering.cpu import compiling, start
from steering.cpu.packages.package import Package
from steering.cpu.packages.team import Team
from steering.cpu.steps import SHARED_ROWS
from steering.model.images import joined
from steering.prompt.layout import build_prompt
from steering.protocol.readout import REGISTRY
from tests.steering.cpu.conftest import VARIANTS, check_same_answers, engine, requests
from tests.steering.interventions.pushes import unit_vector
from tests.waiting import PATIENCE

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++"),
    pytest.mark.usefixtures("few"),
]


def test_compiled_answers_equal_eager_answers(compiled: steering.Engine) -> None:
    plain = steering.Engine(compiled.mllm, slots=4, max_length=512, self_check=False)
    for count, diagnose in ((1, True), (3, False), (4, True), (4, False), (1, False)):
        before = compiled.stats()["compiled_steps"]
        check_same_answers(compiled, plain, requests(compiled.mllm, count, diagnose), rel=1e-3)
        assert compiled.stats()["compiled_steps"] - before >= 39


def test_compiled_answers_with_all_options_equal_eager_answers(compiled: steering.Engine) -> None:
    """Attention and updates are changed and read, alone and beside each other and a plain request."""
    mllm = compiled.mllm
    plain = steering.Engine(mllm, slots=4, max_length=512, self_check=False)
    everything = Diagnose(frozenset(REGISTRY) - {"states"}, causal=True, residual_rows="answer")
    picture = Image.linear_gradient("L").resize((112, 84)).convert("RGB")
    words = [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what is it"}]}]

    def asked(
        *interventions: steering.Sage | steering.Pai | None, diagnose: Diagnose | None = None, words: Any = words
    ) -> Request:
        return Request(words, Sampling(max_tokens=24, ignore_eos=True, logprobs=2), interventions, diagnose=diagnose)

    see, think = See(alpha=0.4, shallow=1), Think(threshold=0.01)
    text = [{"role": "user", "content": "what?"}]
    longer = [{"role": "user", "content": [*words[0]["content"], {"type": "text", "text": "what? " * 75}]}]
    whole_prompt = Diagnose(frozenset({"residual"}), residual_rows="prompt")
    for passes, several in (
        (24, [asked(Sage(see=see))]),
        (24, [asked(Sage(see=See(alpha=0.3, reading="scale", ceiling=0.5)), diagnose=everything), asked(words=text)]),
        (24, [asked(Sage(think=think)), asked(diagnose=everything, words=text)]),
        (24, [asked(Sage(see), diagnose=everything, words=longer), asked(diagnose=Diagnose(), words=text)]),
        # whose prompts run as they are
        (23, [asked(Sage(see=See(shallow=mllm.num_layers))), asked(diagnose=whole_prompt, words=text)]),
        (
            23,
            [
                asked(steering.Pai(amplify=0.5, first_layer=0)),
                asked(Sage(see, think, Generate(refresh=5)), diagnose=everything),
            ],
        ),
    ):
        before, steps = compiled.stats()["compiled_steps"], compiled.stats()["steps"]
        check_same_answers(compiled, plain, several)
        assert compiled.stats()["compiled_steps"] - before >= passes
        assert compiled.stats()["steps"] - steps <= 40


def test_a_strength_that_follows_a_number_runs_in_compiled_steps(compiled: steering.Engine) -> None:
    mllm = compiled.mllm
    plain = steering.Engine(mllm, slots=4, max_length=512, self_check=False)
    picture = Image.linear_gradient("L").resize((112, 84)).convert("RGB")
    context = {"type": "text", "text": "It is gray.", "span": "context"}
    parts = [{"type": "image", "image": picture}, context, {"type": "text", "text": "what is it"}]
    until = steering.Until("attention_ratio", 0.9, gain=0.3, band=0.0, range=(0.0, 2.0))
    looped = steering.Steer.to(unit_vector(mllm), "vision", 0.5, until=until)
    sampling = Sampling(max_tokens=24, ignore_eos=True, logprobs=2)
    asked = [
        Request([{"role": "user", "content": parts}], sampling, (looped,)),
        Request([{"role": "user", "content": "what?"}], sampling),
        Request([{"role": "user", "content": parts}], sampling, (steering.Steer(unit_vector(mllm), 0.5),)),
    ]
    before = compiled.stats()["compiled_steps"]
    check_same_answers(compiled, plain, asked)
    assert compiled.stats()["compiled_steps"] - before >= 23
    (report,) = plain.generate(asked)[0].choices[0].applied["steering"]  # type: ignore[index]
    assert report["until"]["strength"]["last"] > 0.5, "it moves"


def test_compiled_prefill_equals_eager_prefill(compiled: steering.Engine) -> None:
    """Alone and several at once, of different lengths, with pictures and without, in parts, and behind what is known."""
    mllm = compiled.mllm
    options = {"slots": 4, "max_length": 512, "self_check": False, "prefill_budget": 40, "prefix_cache_bytes": 2**24}
    ours, plain = (steering.Engine(mllm, **options) for _ in range(2))  # type: ignore[arg-type]
    steps: Any = compiled.compilation.steps
    ours.core.runner.passes.use(steps)
    picture = Image.linear_gradient("L").resize((112, 84)).convert("RGB")
    words = [[{"type": "text", "text": "what is this " * n}] for n in (1, 2, 3, 25)]
    asked = [
        Request(
            [{"role": "user", "content": [*({"type": "image", "image": picture},) * pictures_shown, *content]}],
            Sampling(max_tokens=2, ignore_eos=True, logprobs=2),
        )
        for pictures_shown in (0, 1)
        for content in words
    ]
    for engine_ in (ours, plain):
        engine_.generate([asked[0]])  # keys and values are made
    before, hits = steps.taken, ours.stats()["prefix_cache_hits"]
    for several in (asked[:1], asked[:4], asked[4:8], asked[3:4], [asked[3], asked[7]]):
        check_same_answers(ours, plain, several)
    assert steps.taken - before >= 15  # 5 decodes, and no prompt ran as it is
    assert ours.stats()["prefix_cache_hits"] > hits


def test_rows_shared_by_threads_equal_eager_rows(compiled: steering.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Few rows and many, prompts too, of all kinds beside each other."""
    mllm, steps = compiled.mllm, compiled.compilation.steps
    assert steps is not None
    options = {"slots": 26, "max_length": 512, "self_check": False}
    plain, ours = (steering.Engine(mllm, **options) for _ in range(2))  # type: ignore[arg-type]
    ours.core.runner.passes.use(steps)
    shared: list[tuple[str, int]] = []
    real_shares = Team.shares

    def shares(team: Team, rows: int, least: int) -> list[slice]:
        rows_by_thread = real_shares(team, rows, least)
        shared.append(("decode" if least == SHARED_ROWS else "prefill", len(rows_by_thread)))
        return rows_by_thread

    monkeypatch.setattr(Team, "shares", shares)
    everything = Diagnose(frozenset(REGISTRY) - {"states"}, causal=True, residual_rows="answer")
    sage = Sage(See(alpha=0.4, shallow=1), Think(threshold=0.01), Generate())
    several = requests(mllm, 7, False)
    texts = [
        Request(
            [{"role": "user", "content": f"{number} " * (1 + number % 5)}],
            Sampling(max_tokens=5, ignore_eos=True, logprobs=2),
        )
        for number in range(26)
    ]
    mixed = [*texts[:4], *(replace(request, interventions=(sage,), diagnose=everything) for request in several[:3])]
    for batch in (several, texts, mixed):
        check_same_answers(ours, plain, batch)
    assert {("decode", 2), ("prefill", 2)} <= set(shared)


def test_other_threads_run_during_a_compiled_step(compiled: steering.Engine) -> None:
    """With torch's own loader, no other thread had the interpreter while a step ran."""
    engine_ = compiled
    assert engine_.compilation.steps is not None
    kinds = engine_.compilation.steps._ready.items()
    ready = [package for (kind, _), packages in kinds if kind == "prefill" for package in packages]
    (package,) = (package for package in ready if package.given(Bound([])) == [])  # that for no hooks
    engine_.generate([Request([{"role": "user", "content": "?"}], Sampling(max_tokens=1))])
    axes, width = engine_.core.runner.embedder.rope_axes, 400
    embeds, places = torch.zeros(4, width, engine_.mllm.hidden_size), torch.zeros(4, dtype=torch.int64)
    positions = torch.arange(width).expand(axes or 1, 4, -1) if axes else torch.arange(width).expand(4, -1)
    times, ended = [0.0], threading.Event()

    def watch() -> None:
        while not ended.is_set():
            times[0] = time.perf_counter()

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        during = 0
        for _ in range(20):
            begun, processor = time.perf_counter(), time.thread_time()
            inputs = (embeds, positions, torch.arange(4), places, places + width - 1, width)
            package.prefill([], [], *inputs, engine_.core.runner.pool, [slice(0, 4)])
            last = times[0]  # what the other thread saw before this one had the interpreter back
            during += last - begun > (time.thread_time() - processor) / 2
    finally:
        ended.set()
        watcher.join()
    assert during > 5


def test_all_columns_of_a_slot_can_be_read(compiled: steering.Engine) -> None:
    """A step that reads whole slots is no other one, which torch's own compiler would compile anew."""
    mllm = compiled.mllm
    (request,) = requests(mllm, 1, False)
    longest = build_prompt(mllm, request.messages).length + 40
    plain = steering.Engine(mllm, slots=1, max_length=longest, self_check=False)
    compiled_too = steering.Engine(mllm, slots=1, max_length=longest, self_check=False)
    compiled_too.core.runner.passes.use(compiled.compilation.steps)
    (first,), (second,) = plain.generate([request]), compiled_too.generate([request])
    assert first.choices[0].token_ids == second.choices[0].token_ids


def test_compiled_picture_encoding_equals_the_eager_encoder(
    compiled: steering.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A single picture, and as many as threads share, are compiled; others, and larger batches, use the plain tower."""
    mllm, steps = compiled.mllm, compiled.compilation.steps
    assert steps is not None

    def inputs(*sizes: tuple[int, int]) -> dict[str, torch.Tensor]:
        rng = np.random.default_rng(0)
        images = [Image.fromarray(rng.integers(0, 255, (*size, 3), dtype=np.uint8)) for size in sizes]
        parts = [{"type": "image", "image": image} for image in images]
        return joined(build_prompt(mllm, [{"role": "user", "content": parts}]).pictures)

    for sizes in ([(56, 84)], [(84, 56)] * 5, [(28, 28)] * 2, [(112, 112)]):
        before, pictures = steps.taken, inputs(*sizes)
        with torch.inference_mode():
            features, expected = steps.features(pictures), mllm.image_features(pictures).pooler_output
        assert features is not None
        assert steps.taken == before + 1
        for actual, wanted_features in zip(features.pooler_output, expected, strict=True):
            torch.testing.assert_close(actual, wanted_features, rtol=1e-4, atol=1e-5)
    assert steps.features(inputs((56, 84), (84, 56))) is None
    monkeypatch.setattr("steering.cpu.steps.MOST_PATCHES", 6 * 8)
    assert steps.features(inputs((56, 84))) is not None
    assert steps.features(inputs((56, 84), (56, 84))) is None


def test_a_new_picture_is_encoded_by_the_compiled_step(
    compiled: steering.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = Image.effect_noise((84, 84), 80).convert("RGB")
    monkeypatch.setattr(type(compiled.mllm), "image_features", lambda *_: pytest.fail("it ran as it is"))
    words = [{"role": "user", "content": [{"type": "image", "image": plain}, {"type": "text", "text": "what?"}]}]
    compiled.generate([Request(words, Sampling(max_tokens=2, ignore_eos=True))])


def test_the_end_of_a_long_prompt_runs_compiled(compiled: steering.Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """A further turn of a chat is compiled; many new tokens, or several such prompts at once, run eagerly."""
    steps = compiled.compilation.steps
    assert steps is not None
    monkeypatch.setattr("steering.cpu.steps.LONGEST", 100)
    options = {"slots": 3, "max_length": 512, "self_check": False, "prefix_cache_bytes": 2**24}
    plain, ours = (steering.Engine(compiled.mllm, **options) for _ in range(2))  # type: ignore[arg-type]
    ours.core.runner.passes.use(steps)
    widths: list[int] = []
    prefill = Package.prefill

    def noted(package: Package, hooks: Any, values: Any, embeds: torch.Tensor, *others: Any) -> Any:
        widths.append(embeds.shape[1])
        return prefill(package, hooks, values, embeds, *others)

    monkeypatch.setattr(Package, "prefill", noted)

    def asked(*endings: str) -> list[Request]:
        texts = [f"{'word ' * 70}{ending}" for ending in endings]
        return [Request([{"role": "user", "content": text}], Sampling(max_tokens=5, ignore_eos=True)) for text in texts]

    for requests_, compiles in (
        (asked("a"), False),
        (asked("b"), True),
        (asked("c " * 60), False),
        (asked("d", "e"), False),
    ):
        widths.clear()
        expected, token_ids = ([a.choices[0].token_ids for a in e.generate(requests_)] for e in (plain, ours))
        assert token_ids == expected
        assert bool(widths) is compiles
    assert ours.stats()["prefix_cache_hits"] == 4


@pytest.mark.usefixtures("compiled", "nothing_compiles")
def test_the_next_start_loads_stored_packages(mllm: MLLM, folder: Path) -> None:
    again = engine(mllm, folder)
    assert again.compilation.state == "ready"
    assert again.stats()["compiled_in_use"] == len(VARIANTS)
    text = Request([{"role": "user", "content": "what?"}], Sampling(max_tokens=4, ignore_eos=True))
    again.generate([text])  # whose positions have one axis, but a picture's more
    assert again.stats()["compiled_steps"] == 4
    again.generate(requests(again.mllm, 1, False))
    assert again.stats()["compiled_steps"] > 4


@pytest.mark.usefixtures("compiled")
@pytest.mark.parametrize(
    ("fails", "expected"),
    [
        ("raise ValueError('it is too hard')", "ValueError: it is too hard"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "a compiling process exited with status -9"),
    ],
)
def test_a_step_that_cannot_be_compiled_does_not_prevent_others(
    fails: str, expected: str, mllm: MLLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    """The first of two, of processes that have the other one from where it lies."""
    child = f"""
import hashlib, os, shutil, signal, sys
from steering.cpu import child

def make(making, wanted):
    if wanted["variant"] == ["decode", "plain"]:
        {fails}
    name = hashlib.sha256(wanted["key"].encode()).hexdigest()
    shutil.copytree({str(folder)!r} + "/" + name, making.store.folder / name)

child.Making.make, child.build_loops = make, lambda *_: None
sys.exit(child.main())
"""
    monkeypatch.setattr(compiling, "_CHILD", child)
    monkeypatch.setattr(start, "VARIANTS", VARIANTS[:2])
    failing = engine(mllm, tmp_path)
    assert not failing.compilation.wait(100)
    assert failing.compilation.state == "failed"
    assert failing.stats()["compiled_in_use"] == 1
    assert expected in caplog.text


@pytest.mark.usefixtures("compiled", "nothing_compiles")
def test_a_broken_package_is_compiled_again_and_no_answer_fails(mllm: MLLM, folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".*"))  # what another run builds
    for place in copy.glob("*/step.so"):  # code that says that it is what was written, and is none
        place.write_bytes(b"nothing")
        notes = json.loads((place.parent / "about.json").read_text())
        notes["digest"] = hashlib.sha256(b"nothing").hexdigest()
        (place.parent / "about.json").write_text(json.dumps(notes))
    restarted = engine(mllm, copy)
    assert not restarted.compilation.wait(60)
    assert (restarted.compilation.state, restarted.stats()["compiled_in_use"]) == ("failed", 0)
    (answer,) = restarted.generate(requests(restarted.mllm, 1, False))
    assert len(answer.choices[0].token_ids) == 40


@pytest.mark.usefixtures("compiled", "nothing_compiles")
@pytest.mark.parametrize(
    ("off", "scaled", "expected"),
    [
        (lambda logits: logits + 0.01 * logits.abs().max(), lambda out: 1.01 * out, "differs from the eager one by"),
        (torch.Tensor.double, torch.Tensor.double, "the eager one returns TensorForm(dtype=torch.float32"),
        (lambda logits: logits.T.contiguous().T, lambda tensor: tensor.transpose(0, 1), "one returns TensorForm("),
    ],
)
def test_a_step_with_other_side_effects_is_not_used(
    off: Any, scaled: Any, expected: str,
    mllm: MLLM, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns(".*"))  # what another run builds
    for kind in ("decode", "prefill"):
        real = getattr(Package, kind)

        def other(*args: Any, real: Any = real) -> tuple[torch.Tensor, torch.Tensor]:
            hidden, logits = real(*args)
            return hidden, off(logits)

        monkeypatch.setattr(Package, kind, other)
    monkeypatch.setattr(Package, "encode", lambda *args, encode=Package.encode: scaled(encode(*args)))
    restarted = engine(mllm, copy)
    assert (restarted.compilation.wait(60), restarted.stats()["compiled_in_use"]) == (False, 0)
    assert expected in caplog.text
    assert sum(1 for _ in copy.glob("*/step.so")) <= sum(1 for _ in folder.glob("*/step.so")) - len(VARIANTS)


def test_a_folder_that_others_may_write_is_not_used(
    mllm: MLLM, tmp_path: Path, caplog: pytest.LogCaptureFixture, nothing_compiles: None
) -> None:
    tmp_path.chmod(0o777)
    engine(mllm, tmp_path)
    assert "others than this user may write" in caplog.text
    assert not list(tmp_path.iterdir())
    tmp_path.chmod(0o700)


@pytest.mark.usefixtures("nothing_compiles")
def test_without_a_working_compiler_steps_run_eagerly(mllm: MLLM, caplog: pytest.LogCaptureFixture) -> None:
    uncompiled = engine(mllm, "off")
    assert not uncompiled.compilation.wait(60)
    assert "there is no compiler" in caplog.text
    (answer,) = uncompiled.generate(requests(uncompiled.mllm, 1, False))
    assert len(answer.choices[0].token_ids) == 40


def test_stopping_an_engine_ends_its_compilation(mllm: MLLM, tmp_path: Path) -> None:
    stopping = engine(mllm, tmp_path)
    assert stopping.compilation._ahead is not None
    while (process := stopping.compilation._ahead.compiling._process) is None:
        time.sleep(0.01)
    time.sleep(3)  # it imports
    stopping.stop()
    assert process.poll() is not None
    assert not stopping.compilation.wait(PATIENCE)
    assert not list(tmp_path.iterdir())
