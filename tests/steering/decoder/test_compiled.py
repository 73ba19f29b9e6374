"""The compiled decode step: the same answers, and no compiling again once the engine is ready."""

from __future__ import annotations

import shutil

import pytest
import torch
from PIL import Image

import steering
from steering import MLLM, Diagnose, Generate, Request, Sage, Sampling, UnsupportedModel, Vcd
from steering.decoder import attention
from steering.prompt.layout import build_prompt
from steering.vectors.vector import SteeringVector
from tests import families
from tests.steering.conftest import LoadMLLM

pytestmark = [
    pytest.mark.skipif(shutil.which("g++") is None, reason="torch compiles for the CPU with g++"),
    pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning"),  # torch's own compiler uses it
]


@pytest.fixture(autouse=True)
def _nothing_compiled_before() -> None:
    torch.compiler.reset()  # compiled code of other models counts against the same limit


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


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_vl", "gemma3"])
def test_answers_are_those_of_the_plain_step_and_nothing_is_compiled_later(family: str, load_mllm: LoadMLLM) -> None:
    assert family in families.FAMILIES
    mllm = load_mllm(family)
    longest = max(build_prompt(mllm, request.messages).length for request in requests(mllm, 4, False)) + 40
    expected = steering.Engine(mllm, slots=4, max_length=longest, self_check=False)
    compiled = steering.Engine(mllm, slots=4, max_length=longest, compiled=True)
    with torch.compiler.set_stance("fail_on_recompile"):
        for count, diagnose in ((1, True), (3, False), (4, True), (4, False), (1, False)):
            asked = requests(mllm, count, diagnose)
            for one, other in zip(expected.generate(asked), compiled.generate(asked), strict=True):
                assert one.choices[0].token_ids == other.choices[0].token_ids
                for a, b in zip(one.choices[0].logprobs, other.choices[0].logprobs, strict=True):
                    assert a.logprob == pytest.approx(b.logprob, abs=1e-4)


def test_a_step_that_cannot_be_compiled_is_refused_at_the_start(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = attention.Decode.attend

    def attend(*args: object) -> torch.Tensor:
        torch._dynamo.graph_break()
        return real(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(attention.Decode, "attend", attend)
    with pytest.raises(UnsupportedModel, match="compile"):
        steering.Engine(load_mllm("qwen2_vl"), slots=1, max_length=256, compiled=True)
