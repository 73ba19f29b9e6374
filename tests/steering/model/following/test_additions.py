"""Residual readouts and Think rest on what a layer adds, whatever its family; where that is unknown, both are refused."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.functional import cosine_similarity
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

import steering
from steering import Diagnose, Request, RequestError, Sampling, See, Think
from steering.runner.selfcheck import check_model
from tests import families
from tests.steering.chats import image, text
from tests.steering.conftest import LoadMLLM, LoadPlain
from tests.steering.plain import scale_of

INTO_THE_FFN = {
    "olmo2": "mlp",
    "exaone4": "mlp",
    "granite_vision": "post_attention_layernorm",
    "granite_moe": "post_attention_layernorm",
    "glm4v": "post_attention_layernorm",
    "gemma3": "pre_feedforward_layernorm",
    "gemma4_large": "pre_feedforward_layernorm",
    "llava": "post_attention_layernorm",
    "lfm2_vl": "ffn_norm",
}
"""The module that is given the stream between attention and FFN."""


CHAT = [{"role": "user", "content": [image(0), text("What is this?")]}]
WANTED = Diagnose(["residual"])


@pytest.mark.parametrize(("family", "module"), INTO_THE_FFN.items())
def test_the_stream_between_attention_and_ffn_is_the_plain_model_s(
    family: str, module: str, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    engine = steering.Engine(load_mllm(family), slots=2, max_length=512, self_check=False)
    (choice,) = engine.generate([Request(CHAT, Sampling(max_tokens=1), diagnose=WANTED)])[0].choices
    assert choice.diagnostics is not None

    plain, streams = load_plain(family), list[tuple[torch.Tensor, ...]]()

    def given(layer: Any) -> Iterator[Any]:
        captured: dict[str, torch.Tensor] = {}

        def entered(module: Any, args: Any, kwargs: Any) -> None:
            captured["in"] = args[0] if args else kwargs["hidden_states"]

        def between(module: Any, args: Any, kwargs: Any) -> None:
            captured.setdefault("mid", args[0] if args else kwargs["hidden_states"])

        def left(module: Any, args: Any, output: torch.Tensor) -> None:
            streams.append((scale_of(layer) * captured["in"], scale_of(layer) * captured.pop("mid"), output))

        yield layer.register_forward_pre_hook(entered, with_kwargs=True)
        yield layer.get_submodule(module).register_forward_pre_hook(between, with_kwargs=True)
        yield layer.register_forward_hook(left)

    handles = [handle for layer in plain.layers for handle in given(layer)]
    with torch.inference_mode():
        plain.model(**plain.inputs(CHAT), use_cache=False)
    for handle in handles:
        handle.remove()
    expected: dict[str, list[float]] = {}
    for stream in streams:
        before, middle, after = (state[0, -1] for state in stream)
        for name, value in {
            "mha_cosine": cosine_similarity(before, middle, dim=-1),
            "ffn_cosine": cosine_similarity(middle, after, dim=-1),
            "mha_norm": (middle - before).norm(),
            "ffn_norm": (after - middle).norm(),
            "update_norm": (after - before).norm(),
            "kl": _divergence(middle - before, after - middle),
        }.items():
            expected.setdefault(name, []).append(float(value))
    for name, values in expected.items():
        assert choice.diagnostics["residual"][name] == pytest.approx(values, rel=1e-3, abs=1e-5), name


def _divergence(mha: torch.Tensor, ffn: torch.Tensor) -> torch.Tensor:
    p, q = mha.softmax(-1), ffn.softmax(-1)
    return (p * (p / q).log()).sum()


@pytest.mark.parametrize("family", ["olmo2", "granite_moe", "gemma4_large", "lfm2_vl"])
def test_think_damps_what_the_ffn_adds(family: str, load_mllm: LoadMLLM, load_plain: LoadPlain) -> None:
    """With a threshold of 0 and gamma 0 nothing of the FFN is left: each layer hands on the stream that the FFN is given."""
    engine = steering.Engine(load_mllm(family), slots=2, max_length=512, self_check=False)
    request = Request(CHAT, Sampling(max_tokens=1, logprobs=1), Think(gamma=0.0, threshold=0.0))
    (choice,) = engine.generate([request])[0].choices

    plain = load_plain(family)

    def middle(module: Any, args: Any, kwargs: Any) -> None:
        module.stream = args[0] if args else kwargs["hidden_states"]

    handles = []
    for layer in plain.layers:
        inner = layer.get_submodule(INTO_THE_FFN[family])
        handles.append(inner.register_forward_pre_hook(middle, with_kwargs=True))
        handles.append(
            layer.register_forward_hook(lambda layer, args, output, inner=inner: scale_of(layer) * inner.stream)
        )
    with torch.inference_mode():
        logprobs = plain.model(**plain.inputs(CHAT), use_cache=False).logits[0, -1].float().log_softmax(-1)
    for handle in handles:
        handle.remove()
    assert choice.logprobs is not None
    assert choice.logprobs[0].token_id == int(logprobs.argmax())
    assert choice.logprobs[0].logprob == pytest.approx(float(logprobs.max()), abs=1e-3)


class _Scaled(LlamaDecoderLayer):
    """A layer that scales what it hands on, as some families do by a number of their own."""

    def forward(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        output: torch.Tensor = super().forward(*args, **kwargs).clone()
        return torch.cat([output[..., :1] * 1.5, output[..., 1:]], -1)


@pytest.fixture
def scaled(root: Path, monkeypatch: pytest.MonkeyPatch) -> steering.MLLM:
    """Load a model with such layers."""
    monkeypatch.setattr("transformers.models.llama.modeling_llama.LlamaDecoderLayer", _Scaled)
    return steering.load(families.checkpoint("llava", root), device="cpu")


@pytest.mark.parametrize(
    ("param", "options"),
    [
        ("diagnostics.residual", {"diagnose": WANTED}),
        ("diagnostics.drift", {"diagnose": Diagnose(["drift"]), "baseline": True}),
        ("sage.think", {"interventions": Think(threshold=1.0)}),
        ("divergence", {"divergence": True}),
    ],
)
def test_options_that_need_unknown_updates_are_refused_by_name(
    param: str, options: dict[str, Any], scaled: steering.MLLM
) -> None:
    engine = steering.Engine(scaled, slots=2, max_length=512)
    with pytest.raises(RequestError, match="add something else to the residual stream") as refused:
        engine.submit(Request(CHAT, Sampling(max_tokens=2), **options))
    assert refused.value.param == param
    (choice,) = engine.generate([Request(CHAT, Sampling(max_tokens=2), See(), diagnose=["modality"])])[0].choices
    assert choice.diagnostics is not None


def test_slightly_wrong_updates_are_detected(root: Path) -> None:
    mllm = steering.load(families.checkpoint("olmo2", root), device="cpu")
    check_model(mllm)
    assert mllm.updates_add_up
    updates = mllm._updates[1]
    mha, ffn = updates._terms
    updates._terms = {module: 1.01 * factor for module, factor in mha.items()}, ffn
    check_model(mllm)
    assert not mllm.updates_add_up


def test_rounding_in_half_precision_is_tolerated(root: Path) -> None:
    for dtype in ("bfloat16", "float16"):
        mllm = steering.load(families.checkpoint("granite_vision", root), device="cpu", dtype=dtype)
        check_model(mllm)
        assert mllm.updates_add_up


def test_families_are_found_by_their_additions(load_mllm: LoadMLLM) -> None:
    for family in families.FAMILIES:
        mllm = load_mllm(family)
        mllm.column()
        # The layers of small Gemma 4 models add what a token has for each layer, too.
        assert mllm.updates_add_up == (family != "gemma4"), family
