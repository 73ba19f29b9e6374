"""Hidden states that requests get equal those of plain transformers, by forward hooks on its layers."""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors

from steering import Choice, Diagnose, Engine, Request, RequestError, Steer, load
from steering.prompt.layout import build_prompt
from steering.protocol import readout
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.plain import Answer
from tests.steering.readouts.matrices import SAMPLING, STEPS, chats, vector

FAMILIES = ("qwen2_vl", "qwen3_vl_moe", "llava", "gemma3", "idefics3")
WANTED: list[dict[str, Any]] = [
    {},
    {"layers": [1, 0], "positions": "generated"},
    {"layers": [1], "positions": [0, 5]},
    {"positions": [3, 10_000]},
]
"""The last one ends behind every answer."""


def states_of(choice: Choice) -> tuple[dict[str, Any], torch.Tensor]:
    assert choice.diagnostics is not None
    report = choice.diagnostics["states"]
    (tensor,) = load_tensors(base64.b64decode(report["safetensors"])).values()
    assert report["shape"] == list(tensor.shape)
    assert report["positions"][1] - report["positions"][0] == tensor.shape[1]
    return report, tensor


def expected(answer: Answer, wanted: dict[str, Any], added: torch.Tensor | float = 0.0) -> torch.Tensor:
    """Return the plain model's states, (layers, positions, d), with what a vector adds to them, (layers, 1, d)."""
    hidden, n = answer.hidden + added, answer.prompt_length
    positions = wanted.get("positions", "last")
    first, end = {"last": (n - 1, n), "generated": (n, None)}[positions] if isinstance(positions, str) else positions
    return hidden[wanted.get("layers", slice(None)), first:end]


@pytest.mark.parametrize("family", FAMILIES)
def test_states_are_those_of_the_plain_model(family: str, make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    """Twice: the second time most of each prompt comes from the cache, where its states are not wanted."""
    engine, plain = (
        make_engine(family, prefill_budget=40, max_length=1024, prefix_cache_bytes=2**28),
        load_plain(family),
    )
    requests = [
        Request(chat, SAMPLING, diagnose=Diagnose(["states"], states=wanted)) for chat in chats() for wanted in WANTED
    ]
    answers = [plain.answer(chat, STEPS) for chat in chats()]
    for _ in range(2):
        for number, result in enumerate(engine.generate(requests)):
            answer, wanted = answers[number // len(WANTED)], WANTED[number % len(WANTED)]
            report, states = states_of(result.choices[0])
            assert list(result.choices[0].token_ids) == answer.tokens
            torch.testing.assert_close(states, expected(answer, wanted), rtol=1e-4, atol=1e-4)
            assert report["layers"] == wanted.get("layers", [*range(engine.mllm.num_layers)])


def test_interventions_are_included_and_each_answer_has_its_own(make_engine: MakeEngine, load_plain: LoadPlain) -> None:
    engine, plain = make_engine("qwen2_vl"), load_plain("qwen2_vl")
    wanted, (chat, *_) = {"positions": [2, 10_000]}, chats()
    steer = Steer(vector(engine.mllm), 0.8)
    diagnose = Diagnose(["states"], states=wanted)
    request = Request(chat, SAMPLING, (steer,), diagnose=diagnose, n=2, baseline=True)
    neighbour = Request(chat, SAMPLING)
    _, result = engine.generate([neighbour, request])
    steered = expected(plain.answer(chat, STEPS, add=[(steer.delta, "all")]), wanted, steer.delta[:, None])
    baseline = expected(plain.answer(chat, STEPS), wanted)
    for choice in result.choices:
        torch.testing.assert_close(states_of(choice)[1], steered, rtol=1e-4, atol=1e-4)
        assert choice.baseline is not None
        torch.testing.assert_close(states_of(choice.baseline)[1], baseline, rtol=1e-4, atol=1e-4)
    assert (steered - baseline).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_have_the_dtype_of_the_model(dtype: torch.dtype, root: Path) -> None:
    """They are the same bits as those of `Request.states`, which are read by another recorder."""
    engine = Engine(load(families.checkpoint("qwen2_vl", root), device="cpu", dtype=dtype), slots=2, self_check=False)
    (chat, *_) = chats()
    (result,) = engine.generate([Request(chat, SAMPLING, diagnose=["states"], states=True)])
    (choice,) = result.choices
    report, states = states_of(choice)
    assert choice.states is not None
    assert report["dtype"] == str(dtype).removeprefix("torch.")
    assert states.dtype == dtype
    assert torch.equal(states[:, 0].float(), choice.states)


@pytest.mark.parametrize(
    ("wanted", "problem"),
    [
        ("all", "'diagnostics.states' must be an object; got 'all'."),
        ({"layer": [1]}, "'diagnostics.states.layer' is unknown; allowed: layers, positions."),
        ({"layers": "some"}, "'diagnostics.states.layers' must be \"all\" or a list of whole numbers; got 'some'."),
        ({"layers": [99]}, "'diagnostics.states.layers' must be different layer numbers from 0 to 2; got [99]."),
        ({"positions": "first"}, 'must be "last", "generated" or [from, to]; got \'first\'.'),
        ({"positions": [True, 2]}, 'must be "last", "generated" or [from, to]; got [True, 2].'),
        ({"positions": [3, 3]}, "must be [from, to] with 0 <= from < to; got [3, 3]."),
        ({"positions": [100_000, 100_001]}, "'diagnostics.states.positions' must begin within the prompt's "),
    ],
)
def test_a_wrong_choice_is_refused_by_name(wanted: Any, problem: str, make_engine: MakeEngine) -> None:
    (chat, *_) = chats()
    with pytest.raises(RequestError, match=re.escape(problem)) as error:
        make_engine("qwen2_vl").generate([Request(chat, SAMPLING, diagnose=Diagnose(["states"], states=wanted))])
    assert error.value.param is not None
    assert error.value.param.startswith("diagnostics.states")


def test_too_many_states_are_refused_before_they_are_computed(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, (chat, *_) = make_engine("qwen2_vl"), chats()
    prompt, width = len(build_prompt(engine.mllm, chat).ids), 4 * engine.mllm.hidden_size
    request = Request(chat, SAMPLING, diagnose=Diagnose(["states"], states={"layers": [0], "positions": [1, 10_000]}))
    monkeypatch.setattr(readout, "MAX_BYTES", (prompt + STEPS - 1) * width)
    engine.generate([request])
    monkeypatch.setattr(readout, "MAX_BYTES", (prompt + STEPS - 1) * width - 1)
    with pytest.raises(RequestError, match="for fewer layers, fewer positions or fewer 'max_tokens'"):
        engine.generate([request])
