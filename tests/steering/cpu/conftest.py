"""An engine whose steps were compiled, and what it is asked: of one file, as compiling takes minutes."""

from __future__ import annotations

import math
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import steering
from steering import MLLM, Diagnose, Generate, Request, Sage, Sampling, Vcd
from steering.cpu import compiling, start
from steering.cpu.packages import team
from steering.cpu.step import Variant
from tests.families import build
from tests.families.calling import KINDS
from tests.server.served.model import FAMILY, KEPT, LAYERS
from tests.steering.interventions.pushes import unit_vector

VARIANTS = [Variant("decode"), Variant("prefill"), Variant("decode", "every"), Variant("prefill", "every")]
VARIANTS += [Variant("pictures")]


@pytest.fixture(scope="module")
def folder() -> Path:
    """Return the folder where compiled steps are kept between runs of the suite, those of the server's tests among them."""
    KEPT.mkdir(mode=0o700, parents=True, exist_ok=True)
    return KEPT


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
        threads = torch.get_num_threads()
        torch.set_num_threads(2)  # which share passes of many rows
        yield
        torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def mllm(root: Path) -> MLLM:
    """Load a model of few layers, with the shapes of the one that the server's tests compile: so its steps are theirs."""
    _, _, specials = KINDS["hermes"]
    return steering.load(build(FAMILY, root / "short", specials=specials, layers=LAYERS), device="cpu")


@pytest.fixture(scope="module")
def compiled(mllm: MLLM, folder: Path, few: None) -> steering.Engine:
    """Return an engine with compiled steps."""
    built = engine(mllm, folder)
    assert built.compilation.wait(1200)
    return built


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
    vector = unit_vector(mllm)
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
        return [number for entry in value.values() for number in numbers(entry)]
    if isinstance(value, list | tuple):
        return [number for entry in value for number in numbers(entry)]
    return [float(value)] if isinstance(value, int | float) else []


def check_alike(expected: list[steering.Result], results: list[steering.Result], rel: float = 2e-3) -> None:
    """Check that first answers have the same tokens, log-probabilities, reports and readouts."""
    for first, second in ((a.choices[0], b.choices[0]) for a, b in zip(expected, results, strict=True)):
        assert first.token_ids == second.token_ids
        for a, b in zip(first.logprobs, second.logprobs, strict=True):
            assert a.logprob == pytest.approx(b.logprob, abs=1e-4)
        for report, again in ((first.diagnostics, second.diagnostics), (first.applied, second.applied)):
            assert numbers(again) == pytest.approx(numbers(report), rel=rel, abs=rel / 10, nan_ok=True)


def check_same_answers(
    engine: steering.Engine, plain: steering.Engine, requests: list[Request], rel: float = 2e-3
) -> None:
    """Check that both engines answer alike."""
    check_alike(plain.generate(requests), engine.generate(requests), rel)
