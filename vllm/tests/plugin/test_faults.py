"""A fault of the plugin in what one answer asked for ends that answer alone: injected in each place of an engine's step."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helmsight_vllm import pairs, runtime
from helmsight_vllm.answer import Answer
from helmsight_vllm.faults import Chosen, Faults, Part
from helmsight_vllm.kernel import KernelMethod
from helmsight_vllm.plan import Plan
from PIL import Image
from safetensors import safe_open

from plugin.engine import Engine, running

MODEL = Path(__file__).resolve().parents[3] / "demo" / "checkpoint"
VECTOR = "modality-preference"
LAYERS, LENGTH, PICTURE = 8, 40, 6
FAULTY = LENGTH + 1
"""The length of the prompt of answers in which a fault is injected, but for those with a picture."""
FAULTY_WEIGHT = 3.25
"""The weight of contrasts in which a fault is injected."""
TOKENS = 6
SAMPLING = {"max_tokens": TOKENS, "ignore_eos": True}
Lines = list[dict[str, Any]]
Spoil = Callable[[pytest.MonkeyPatch], None]


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HELMSIGHT_VECTORS", str(MODEL / "vectors"))
        with running(MODEL) as engine:
            yield engine


def prompt_of(ids: list[int], expanded: list[int] | None = None) -> dict[str, Any]:
    whole = np.array(expanded or ids, "<i4")
    return {"ids": ids, "length": len(whole), "sha256": hashlib.sha256(whole.tobytes()).hexdigest()}


def text_of(length: int, first: int = 20) -> dict[str, Any]:
    return prompt_of([first + number for number in range(length)])


def steering() -> dict[str, Any]:
    with safe_open(MODEL / "vectors" / f"{VECTOR}.safetensors", "pt") as file:
        digest = file.metadata()["sha256"]
    vector = {
        "name": VECTOR,
        "digest": digest,
        "scale": 2.0,
        "layers": [*range(LAYERS)],
        "classes": [0],
        "generated": True,
    }
    return {"classes": 1, "vectors": [vector]}


def fields(length: int = LENGTH) -> dict[str, dict[str, Any]]:
    """Return by kind what answers to prompts of a length ask for."""
    read = {"labels": [[0, 20], [1, length - 20]], "rows": {"question": [[30, length - 1]]}, "steps": True}
    return {
        "plain": {},
        "steered": {"steering": steering()},
        "read": {"attention": read},
        "states": {"state_position": -1, "residual": {}},
        "damped": {"think": {"gamma": 0.5, "thresholds": [1e-3] * LAYERS}},
        "pair": {"twin": {"rule": {"weight": 1.0}, "prompt": text_of(LENGTH, 60)}},
    }


def body_of(asked: dict[str, Any], length: int = LENGTH) -> dict[str, Any]:
    prompt = text_of(length) | ({"classes": [[0, length]]} if "steering" in asked else {})
    return {"prompt": prompt, "sampling": SAMPLING, **asked}


def masked_body(engine: Engine, weight: float) -> dict[str, Any]:
    """Return the body of an answer about a picture that is masked for the other side, anew after two tokens."""
    picture, file = Image.effect_mandelbrot((112, 112), (-2, -1.5, 1, 1.5), 60).convert("RGB"), io.BytesIO()
    picture.save(file, "PNG")
    ids = [20, 21, PICTURE, 22, 23, 24]
    asked = {"prompt_token_ids": ids, "multi_modal_data": {"image": [picture]}}
    (inputs,) = asyncio.run(engine.renderer.render_cmpl_async([asked], skip_mm_cache=True))
    expanded = inputs["prompt_token_ids"]
    columns = [place for place, token in enumerate(expanded) if token == PICTURE]
    assert len(columns) > 4
    mask = {"top": 0.5, "refresh": 2, "images": [columns], "layers": [3, 4]}
    return {
        "prompt": prompt_of(ids, expanded),
        "sampling": SAMPLING,
        "images": [base64.b64encode(file.getvalue()).decode()],
        "twin": {"rule": {"weight": weight}, "mask": mask},
    }


@pytest.fixture(scope="module")
def bodies(engine: Engine) -> dict[str, dict[str, Any]]:
    return {kind: body_of(asked) for kind, asked in fields().items()} | {"masked": masked_body(engine, 1.0)}


@pytest.fixture(scope="module")
def alone(engine: Engine, bodies: dict[str, dict[str, Any]]) -> dict[str, Lines]:
    """Return the answers, each computed alone."""
    return {name: engine.answer({name: body})[name] for name, body in bodies.items()}


def tokens_of(lines: Lines) -> list[int]:
    return [token for line in lines for token in line.get("tokens", ())]


def logprobs_of(lines: Lines) -> list[float]:
    return [logprob for line in lines for logprob in line.get("logprobs", ())]


def assert_same(found: Lines, expected: Lines) -> None:
    """Assert that answers have the same tokens, and measurements within rounding."""
    assert tokens_of(found) == tokens_of(expected)
    assert_close(found[-1]["ended"]["taken"], expected[-1]["ended"]["taken"])


def assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict) and "data" in expected:
        assert found["shape"] == expected["shape"]
        first, second = (np.frombuffer(base64.b64decode(array["data"]), "<f4") for array in (found, expected))
        assert np.abs(first - second).max(initial=0) <= 1e-4 * max(1.0, np.abs(second).max(initial=0))
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_close(found[name], expected[name])
    else:
        assert found == expected


def raising(method: str, when: Callable[..., bool], owner: Any = Answer) -> Spoil:
    """Return what lets a method raise where `when` says so of its arguments."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        plain = getattr(owner, method)

        def spoilt(*args: Any, **kwargs: Any) -> Any:
            if when(*args, **kwargs):
                raise KeyError("injected")
            return plain(*args, **kwargs)

        patch.setattr(owner, method, spoilt)

    return spoil


def planned(change: Callable[[Plan], Plan], when: Callable[[Plan], bool] = lambda plan: plan.length == FAULTY) -> Spoil:
    """Return what lets faulty answers have another plan."""

    def spoil(patch: pytest.MonkeyPatch) -> None:
        plain = Plan.of

        def of(extra: Any) -> Plan | None:
            plan = plain(extra)
            return change(plan) if plan is not None and when(plan) else plan

        patch.setattr(runtime.Plan, "of", of)

    return spoil


def refused(plan: Plan) -> Plan:
    raise KeyError("injected")


def is_faulty(answer: Any, *args: Any) -> bool:
    return bool(answer.plan.length == FAULTY)


def is_masked(answer: Any, *args: Any) -> bool:
    return answer.plan.mask is not None and answer.plan.rule["weight"] == FAULTY_WEIGHT


def reads_faulty(method: Any, *args: Any) -> bool:
    return any(is_faulty(look.answer) for look in method._looks)


FAULTS: dict[str, tuple[str, Spoil]] = {
    "plan": ("steered", planned(refused)),
    "rows of the table": ("steered", raising("rows_at", is_faulty)),
    "classes": ("steered", planned(lambda plan: replace(plan, classes=plan.classes[:5]))),
    "rows that are read": ("read", raising("looks_at", is_faulty)),
    "labels": ("read", raising("labels_at", is_faulty)),
    "kernel": ("read", raising("sum_into", reads_faulty, KernelMethod)),
    "sums": ("read", raising("add_attention", is_faulty)),
    "states": ("states", raising("add_states", is_faulty)),
    "thresholds": ("damped", planned(lambda plan: replace(plan, think={"gamma": 0.5, "thresholds": [1e-3] * 3}))),
    "divergence": ("damped", raising("add_thoughts", is_faulty)),
    "contrast": ("pair", raising("contrasted", lambda *args: args[2] == FAULTY_WEIGHT, pairs)),
    "map": ("masked", raising("map", lambda method, look, of: is_masked(look.answer), KernelMethod)),
    "states of pictures": ("masked", raising("add_image_states", is_masked)),
    "mask": ("masked", raising("add_mask", is_masked)),
    "second mask": ("masked", raising("add_mask", lambda answer, tokens, _: is_masked(answer) and tokens == 2)),
    "a later token": ("states", raising("add_states", lambda answer, at, _: is_faulty(answer) and at == FAULTY + 2)),
}
"""By place, the kind of the faulty answer, and what injects the fault."""
LATER = {"second mask": 2, "a later token": 3}
"""The number of tokens that go out before the fault, where it does not lie in the first step."""


def faulty_body(engine: Engine, kind: str) -> dict[str, Any]:
    if kind == "masked":
        return masked_body(engine, FAULTY_WEIGHT)
    asked = fields(FAULTY)[kind]
    if kind == "pair":
        asked["twin"]["rule"]["weight"] = FAULTY_WEIGHT
    return body_of(asked, FAULTY)


@pytest.mark.parametrize("place", FAULTS)
def test_a_fault_ends_one_answer_and_leaves_the_others(
    engine: Engine,
    bodies: dict[str, dict[str, Any]],
    alone: dict[str, Lines],
    place: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    kind, spoil = FAULTS[place]
    faulty = faulty_body(engine, kind)
    expected = engine.answer({"faulty": faulty})["faulty"]
    with monkeypatch.context() as patch:
        spoil(patch)
        found = engine.answer({"faulty": faulty, **bodies})
    *before, last = found.pop("faulty")
    assert "The plugin failed" in last["error"]["message"], last
    assert tokens_of(before) == tokens_of(expected)[: LATER.get(place, 0)]
    assert any(record.exc_info for record in caplog.records)
    for name, lines in found.items():
        assert_same(lines, alone[name])
    assert_same(engine.answer({"faulty": faulty})["faulty"], expected)
    engine.answer({"plain": bodies["plain"]})
    held = engine.worker.helmsight_steps()
    assert (held["running"], held["kept"]) == (1, 0)  # the runner learns of the last one's end with the next step


@pytest.mark.parametrize("together", [False, True])
def test_keys_of_an_answer_that_was_not_steered_are_not_used(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, together: bool
) -> None:
    """A faulty steered answer leaves plain keys behind; one that has taken them in the same step ends, too."""
    prompt, other = (text_of(LENGTH, first) | {"classes": [[0, LENGTH]]} for first in (20, 60))
    asked: dict[str, Any] = {"sampling": {**SAMPLING, "logprobs": 0}, "steering": steering()}
    faulty = {"prompt": prompt, "state_position": -2, **asked}
    pair = {"prompt": other, "twin": {"rule": {"weight": 1.0}, "prompt": prompt}, **asked}
    engine.inner.reset_prefix_cache()
    expected = engine.answer({"pair": pair})["pair"]
    engine.inner.reset_prefix_cache()
    with monkeypatch.context() as patch:
        planned(refused, lambda plan: plan.state_position == -2)(patch)
        found = engine.answer({"faulty": faulty, **({"pair": pair} if together else {})})
    assert "injected" in found["faulty"][-1]["error"]["message"]
    if together:
        assert "error" in found["pair"][-1]
    again = engine.answer({"pair": pair})["pair"]
    assert_same(again, expected)
    assert logprobs_of(again) == pytest.approx(logprobs_of(expected), abs=1e-4)


class Failing:
    """An answer by name."""

    def __init__(self, name: str):
        self.name, self.failed = name, False


def test_what_fails_together_is_computed_for_each_alone() -> None:
    first, faulty, last = answers = [Failing(name) for name in ("first", "faulty", "last")]
    parts = [Part(answer, 2 * place, 2 * place + 2, 0) for place, answer in enumerate(answers)]
    chosen, faults, calls = Chosen(torch.arange(6), parts), Faults(), list[int]()

    def compute(where: slice, chosen_parts: Any) -> torch.Tensor:
        calls.append(len(chosen_parts))
        if any(part.answer is faulty for part in chosen_parts):
            raise ValueError("injected")
        return chosen.rows[where] * 10.0

    found = faults.computed(chosen, compute)
    assert found is not None
    assert found.tolist() == [0, 10, 0, 0, 40, 50]
    assert calls == [3, 1, 1, 1]
    assert (first.failed, faulty.failed, last.failed) == (False, True, False)
    assert faults.errors == {"faulty": "ValueError: injected"}


def test_ranks_agree_on_what_failed() -> None:
    """A name fails on a rank where the sum over ranks says so, and where it is known the first error stays."""
    faults = Faults()
    faults.fail("here", KeyError("mine"))
    names = ["here", None, "there", "nowhere"]
    assert faults.agree(names, lambda own: own + torch.tensor([0.0, 0.0, 1.0, 0.0])) == {"here", "there"}
    assert faults.errors == {"here": "KeyError: 'mine'", "there": "RuntimeError: another rank failed in this answer"}
