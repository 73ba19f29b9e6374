"""An engine whose steps were compiled, and what it is asked: of one file, as compiling takes minutes."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import steering
from steering import MLLM, Diagnose, Generate, Request, Sage, Sampling, Vcd
from steering.accel.cpu import compiling, start
from steering.accel.cpu.keys import surroundings
from steering.accel.cpu.packages import team
from steering.accel.cpu.packages.store import default_folder
from steering.accel.cpu.step import Variant
from steering.vectors.vector import SteeringVector
from tests.families import build

VARIANTS = [Variant("decode"), Variant("prefill"), Variant("decode", "every"), Variant("prefill", "every")]
VARIANTS += [Variant("pictures")]


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the folder where compiled steps are kept between runs of the suite, until their dependencies change."""
    every = default_folder().parent / "compiled-by-tests-of-the-engine"
    digest = hashlib.sha256(json.dumps(surroundings(), sort_keys=True).encode()).hexdigest()[:16]
    for other in every.glob("*"):
        if other.name != digest:
            shutil.rmtree(other, ignore_errors=True)
    (every / digest).mkdir(mode=0o700, parents=True, exist_ok=True)
    return every / digest


@pytest.fixture(scope="module")
def few() -> Iterator[None]:
    """Compile few steps, each as soon as possible beside other tests.

    There is one step of each kind, with the fewest and the most hooks (`test_graphs` has those between).
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(start, "VARIANTS", VARIANTS)
        patch.setattr(compiling, "_CHILD", compiling._CHILD.replace("os.nice(19)", "os.nice(0)"))
        patch.setenv("MKL_NUM_THREADS", "2")  # which forks would wait for
        patch.setattr(team, "LATE", math.inf)  # passes are shared, whatever runs beside
        own = torch.get_num_threads()
        torch.set_num_threads(2)  # which share passes of many rows
        yield
        torch.set_num_threads(own)


@pytest.fixture(scope="module")
def mllm(root: Path) -> MLLM:
    """Load a model of few layers: the time of compiling grows with their number."""
    return steering.load(build("qwen2_vl", root / "short", layers=2), device="cpu")


@pytest.fixture(scope="module")
def compiled(mllm: MLLM, folder: Path, few: None) -> steering.Engine:
    """Return an engine with compiled steps."""
    made = engine(mllm, folder)
    assert made.compilation.wait(1200)
    return made


def engine(mllm: MLLM, folder: Path | str, **options: Any) -> steering.Engine:
    return steering.Engine(
        mllm, slots=4, max_length=512, self_check=False, compiled=True, compiled_folder=str(folder), **options
    )


@pytest.fixture
def nothing_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object, **options: object) -> None:
        raise OSError("there is no compiler")

    monkeypatch.setattr(subprocess, "Popen", refuse)


def requests(mllm: MLLM, count: int, diagnose: bool) -> list[Request]:
    """Prompts of different lengths and settings, every other one steered, some contrasted, the last with diagnostics."""
    ones = torch.ones(mllm.num_layers)
    direction = torch.randn(mllm.num_layers, mllm.hidden_size, generator=torch.Generator().manual_seed(0))
    vector = SteeringVector("v", direction, ones, ones.clone(), ones.clone(), (1,), mllm.fingerprint)
    return [
        Request(
            [{"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": "what " * i}]}],
            Sampling(max_tokens=40, ignore_eos=True, logprobs=2),
            interventions=[
                (steering.Steer(vector, 0.5),) * (i % 2),
                Sage(generate=Generate(refresh=6)) if i == 1 else None,
                Vcd() if i == 2 else None,
            ],
            diagnose=Diagnose() if diagnose and i == count - 1 else None,
        )
        for i, picture in enumerate(Image.linear_gradient("L").resize((112, 84)).convert("RGB") for _ in range(count))
    ]


def numbers(value: Any) -> list[float]:
    """All numbers in a diagnosis, in order."""
    if isinstance(value, dict):
        return [number for one in value.values() for number in numbers(one)]
    if isinstance(value, list | tuple):
        return [number for one in value for number in numbers(one)]
    return [float(value)] if isinstance(value, int | float) else []


def check_same_answers(engine: steering.Engine, plain: steering.Engine, asked: list[Request]) -> None:
    """Check that both engines give the same answers, with log-probabilities and reports."""
    answers = zip(plain.generate(asked), engine.generate(asked), strict=True)
    for one, other in ((a.choices[0], b.choices[0]) for a, b in answers):
        assert one.token_ids == other.token_ids
        for a, b in zip(one.logprobs, other.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        for said, again in ((one.diagnostics, other.diagnostics), (one.applied, other.applied)):
            assert numbers(again) == pytest.approx(numbers(said), rel=2e-3, abs=2e-4, nan_ok=True)
