"""The self-check lets exact engines pass and refuses sabotaged ones, naming where they first go wrong."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForImageTextToText, LlamaConfig

import steering
from steering import MLLM, UnsupportedModel
from steering.decoder import attention, kernels
from steering.decoder.attention import Decode
from steering.decoder.hooks import Hooks
from steering.decoder.kv import KVPool
from steering.decoder.prompts import Prefill
from steering.model import loading
from steering.model.embedded import Embedded
from steering.prompt import layout
from steering.recorders.attention import PrefillCapture
from steering.runner import selfcheck
from tests import families
from tests.steering.conftest import OF_EACH_KIND, LoadMLLM

MROPE = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v")  # an image of 4 x 4 tokens counts as 4 positions
WINDOWED = ("gemma3", "aya_vision")
TOLD_NOTHING: dict[str, Any] = {"text_replacement_offsets": None}


@pytest.fixture
def load_mllm(load_mllm: LoadMLLM) -> LoadMLLM:
    """Return copies, since a check writes to a model what it found: sabotage must not be remembered by the shared one."""
    return lambda family: copy.copy(load_mllm(family))


@pytest.mark.parametrize("family", families.ANSWERING)
def test_supported_families_pass(family: str, load_mllm: LoadMLLM) -> None:
    selfcheck.check_model(load_mllm(family))


@pytest.mark.parametrize(
    ("family", "reason"),
    [("mllama", "cross-attention")],
)
def test_unsupported_families_are_refused_by_their_structure(family: str, reason: str, root: Path) -> None:
    with pytest.raises(UnsupportedModel, match=rf"{family} cannot be served: .*{reason}"):
        steering.load(families.checkpoint(family, root), device="cpu")


def test_a_model_that_takes_no_images_is_refused(tmp_path: Path) -> None:
    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedModel, match="llama cannot be served: it takes no images"):
        steering.load(tmp_path, device="cpu")


@pytest.mark.parametrize(
    ("model_type", "text", "reason"),
    [
        ("llama4", {}, "layers of type chunked_attention"),
        ("gemma3n", {}, "several residual streams"),
        (
            "step3p7",
            {"layer_types": ["full_attention", "sliding_attention"], "num_hidden_layers": 2}
            | {"attention_other_setting": {"num_attention_heads": 96}},
            "layers have different numbers of attention heads",
        ),
        ("blip-2", {}, "names no token that stands for the features of images"),
    ],
)
def test_a_structure_that_cannot_be_held_is_refused_by_the_config(
    model_type: str, text: dict[str, Any], reason: str
) -> None:
    with pytest.raises(UnsupportedModel, match=f"{model_type} cannot be served: .*{reason}"):
        loading.refuse_structure(AutoConfig.for_model(model_type, **({"text_config": text} if text else {})))


def test_a_processor_that_does_not_tell_where_images_are_is_refused(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode = layout._encode
    monkeypatch.setattr(layout, "_encode", lambda *args, **kwargs: encode(*args, **kwargs) | TOLD_NOTHING)
    with pytest.raises(UnsupportedModel, match="does not tell which tokens stand for an image"):
        selfcheck.check_model(load_mllm("llava"))


def test_every_unsupported_family_has_its_refusal_tested() -> None:
    assert set(families.UNSUPPORTED) == {"mllama"}


@pytest.mark.parametrize("family", ["mllama"])
def test_a_structure_that_the_config_does_not_give_away_is_refused_by_the_check(
    family: str, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "refuse_structure", lambda config: None)
    with pytest.raises(UnsupportedModel, match="cannot be served"):
        steering.Engine(steering.load(families.checkpoint(family, root), device="cpu"), slots=2, max_length=512)


def test_the_engine_checks_unless_told_not_to(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Embedded, "rope_delta", 0)
    with pytest.raises(UnsupportedModel):
        steering.Engine(load_mllm("qwen2_vl"), slots=1)
    steering.Engine(load_mllm("qwen2_vl"), slots=1, self_check=False)


# --- sabotage --------------------------------------------------------------------------------------------------------


def refusal(model: MLLM) -> str:
    """Return the place where the check says that the engine first differs."""
    with pytest.raises(UnsupportedModel) as refused:
        selfcheck.check_model(model)
    match = re.search(r"differ from the plain model's by .* of their range, first at (.*)\.$", str(refused.value))
    assert match is not None, refused.value
    return match[1]


@pytest.mark.parametrize("family", MROPE)
def test_wrong_rotary_positions_after_an_image_are_refused(
    family: str, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Embedded, "rope_delta", 0)
    assert refusal(load_mllm(family)) == "decoding step 1"


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_decoding_that_writes_one_column_off_is_refused(
    family: str, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Decode.attend

    def attend(self: Decode, heads: Any, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        output = real(self, heads, query, key, value, mask)
        for pool in self.pool.layer(heads.layer, key, value):
            rows = torch.arange(len(key))
            pool[rows, :, self.positions - 1] = pool[rows, :, self.positions]
            pool[rows, :, self.positions] = 0.0
        return output

    monkeypatch.setattr(Decode, "attend", attend)
    assert refusal(load_mllm(family)) == "decoding step 2"


@pytest.mark.parametrize("family", OF_EACH_KIND)
def test_prefill_that_writes_one_column_off_is_refused(
    family: str, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Prefill.attend

    def attend(self: Prefill, heads: Any, query: Any, key: Any, value: Any, mask: Any) -> torch.Tensor:
        output = real(self, heads, query, key, value, mask)
        for pool in self.pool.layer(heads.layer, key, value):
            pool[self.rows] = pool[self.rows].roll(1, dims=2)
        return output

    monkeypatch.setattr(Prefill, "attend", attend)
    # A prompt in chunks already reads what the first chunk wrote.
    assert refusal(load_mllm(family)) in ("decoding step 1", "the prompt's last logits")


@pytest.mark.parametrize("family", WINDOWED)
def test_an_ignored_attention_window_is_refused(
    family: str, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = kernels.visible
    monkeypatch.setattr(kernels, "visible", lambda rows, columns, window: real(rows, columns, None))
    # A prompt's first chunk makes its own masks, too, unless the wrapper makes them.
    assert refusal(load_mllm(family)).startswith(("decoding step 1", "the prompt's last logits", "decoder layer 0"))


def test_an_ignored_soft_cap_is_refused(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    # The tiny model's scores are far below its cap of 50; a cap of 1 bites.
    model = load_mllm("paligemma2")
    for layer in model.layers:
        monkeypatch.setattr(layer.self_attn, "attn_logit_softcapping", 1.0)
    selfcheck.check_model(model)
    real = attention.Heads
    monkeypatch.setattr(
        attention, "Heads", lambda layer, scaling, window, softcap, sinks: real(layer, scaling, window, None)
    )
    assert refusal(model).startswith("decoder layer 0")


def test_a_slot_that_reads_its_neighbours_keys_is_refused(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    real = KVPool.layer

    def layer(self: KVPool, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = real(self, index, key, value)
        return (keys.flip(0), values) if key.shape[2] == 1 and len(keys) > 1 else (keys, values)

    monkeypatch.setattr(KVPool, "layer", layer)
    assert refusal(load_mllm("llava")) == "decoding step 1"


@pytest.mark.parametrize(
    ("family", "broken"), [*((family, 1) for family in (*OF_EACH_KIND, "glm4v", "mistral3")), ("qwen2_vl", 0)]
)
def test_a_layer_one_percent_too_strong_is_refused(
    family: str, broken: int, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Hooks.after_layer

    def after_layer(self: Any, layer: int, *layers: Any) -> torch.Tensor:
        return real(self, layer, *layers) * (1.01 if layer == broken else 1.0)

    monkeypatch.setattr(Hooks, "after_layer", after_layer)
    model = load_mllm(family)
    assert refusal(model) == f"decoder layer {broken} ({type(model.layers[broken]).__name__})"


def test_a_layer_wrong_only_in_decoding_is_refused(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def after_layer(self: Any, layer: int, before: Any, hidden: torch.Tensor, updates: Any) -> torch.Tensor:
        return hidden * (1.01 if layer == 1 and hidden.shape[1] == 1 else 1.0)

    monkeypatch.setattr(Hooks, "after_layer", after_layer)
    assert refusal(load_mllm("llava")) == "decoding step 1"


@pytest.mark.parametrize(
    ("name", "forgetting"),
    [("beside", lambda out, log_sums, sinks: out), ("softmax", lambda scores, sinks: scores.softmax(-1))],
)
def test_sinks_that_are_forgotten_are_noticed(
    name: str, forgetting: Any, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A fused kernel may forget them, or what reads and changes weights."""
    monkeypatch.setattr(kernels, name, forgetting)
    with pytest.raises(UnsupportedModel, match="cannot be served exactly: its logits differ"):
        selfcheck.check_model(load_mllm("gpt_oss"))


def test_nan_logits_are_refused(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Hooks, "after_layer", lambda self, layer, before, hidden, updates: hidden * torch.nan)
    assert refusal(load_mllm("llava")).startswith("decoder layer 0")


def test_a_chat_template_without_images_is_refused(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_mllm("llava")
    monkeypatch.setattr(model.processor, "chat_template", "{% for m in messages %}{{ m.role }}{% endfor %}")
    with pytest.raises(UnsupportedModel, match="llava cannot be served: its chat template"):
        selfcheck.check_model(model)


def test_the_check_leaves_the_model_as_it_was(load_mllm: LoadMLLM) -> None:
    model = load_mllm("qwen2_vl")
    prompt = layout.build_prompt(model, families.example_messages("qwen2_vl"))
    before = model.model(**prompt.inputs).logits
    selfcheck.check_model(model)
    assert model.text_config._attn_implementation == attention.NAME
    assert torch.equal(model.model(**prompt.inputs).logits, before)
    assert model.model.model.rope_deltas is None or model.model.model.rope_deltas.numel()


# --- half precision --------------------------------------------------------------------------------------------------

HALVES = (torch.bfloat16, torch.float16)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        *(("qwen2_vl", dtype) for dtype in HALVES),
        *((family, torch.bfloat16) for family in ("qwen3_vl_moe", "gemma3", "paligemma2", "gpt_oss")),
        ("idefics3", torch.float16),
    ],
    ids=str,
)
def test_half_precision_is_judged_by_the_same_model_in_float32(family: str, dtype: torch.dtype, root: Path) -> None:
    folder = families.checkpoint(family, root)
    model = steering.load(folder, dtype=dtype, device="cpu")
    selfcheck.check_model(model)
    wide = AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype, attn_implementation="eager").float()
    inputs = dict(layout.build_prompt(model, families.example_messages(family)).inputs)
    with torch.inference_mode(), selfcheck.plain(model) as narrow:
        rounded = narrow(**inputs, use_cache=False).logits
        with selfcheck.in_float32(narrow):
            judged = narrow(**inputs, use_cache=False).logits
        exact = wide(**inputs, use_cache=False).logits
        assert narrow(**inputs, use_cache=False).logits.equal(rounded)  # the weights are what they were
    assert judged.dtype == torch.float32
    # Pixels are rounded on their way in; the plain model rounds everywhere.
    assert float((judged - exact).abs().max()) < 0.5 * float((rounded - exact).abs().max())


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_scores_that_are_rounded_to_half_precision_are_refused(
    dtype: torch.dtype, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rounding that plain transformers does not do either: to eight bits."""
    model = steering.load(families.checkpoint("qwen2_vl", root), dtype=dtype, device="cpu")
    real = kernels._products
    monkeypatch.setattr(kernels, "_products", lambda query, key: real(query, key).to(torch.float8_e5m2).float())
    with pytest.raises(UnsupportedModel, match="cannot be served exactly"):
        selfcheck.check_model(model)


@pytest.mark.parametrize(
    ("plain", "ours", "refusal"),
    [
        (0.001, 0.0019, None),
        (0.2, 0.35, None),
        (0.2, 0.45, "by 4.5e-01 of their range, first at decoding step 1"),
        (0.001, 0.06, "by 6.0e-02 of their range, first at decoding step 1"),
        (0.01, 0.045, "are 3.9e-02 of their range from those of float32, the plain model's 1.0e-02"),
        ([0.02, 0.02, 0.05, 0.02], [0, 0.08, 0.01, 0.01], None),
        ([0.02, 0.02, 0.05, 0.02], [0, 0.12, 0.01, 0.01], "by 1.2e-01 of their range, first at decoding step 1"),
    ],
)
def test_rounding_is_judged_by_the_plain_model_s(
    plain: float | list[float], ours: float | list[float], refusal: str | None
) -> None:
    """A random model may round by a third of its range, and so may the engine: both are as far from float32.

    Rounding that changes the choice of an expert may fall into any of the steps, for both.
    """
    noise = torch.randn(3, 4, 5000, generator=torch.Generator().manual_seed(0))
    exact, own, others = noise / noise.square().mean(-1, keepdim=True).sqrt()
    scale = exact.abs().max()
    got = exact + scale * torch.tensor(ours).reshape(-1, 1) * own
    got[0] = exact[0]  # a difference in the first step would be looked for in each layer
    reference = selfcheck._Reference(
        [], exact + scale * torch.tensor(plain).reshape(-1, 1) * others, exact, *torch.zeros(2, 1)
    )
    rounding = SimpleNamespace(name="it", rounds=True, quantization=None, dtype=torch.bfloat16)

    def compare() -> None:
        selfcheck._compare_logits(rounding, [None], [reference], [got])  # type: ignore[arg-type, list-item]

    if refusal is None:
        compare()
    else:
        with pytest.raises(UnsupportedModel, match=refusal):
            compare()


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_attention_that_is_read_wrongly_is_refused(
    dtype: torch.dtype, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = steering.load(families.checkpoint("qwen2_vl", root), dtype=dtype, device="cpu")
    real = PrefillCapture.settle

    def settle(self: PrefillCapture, positions: torch.Tensor | None) -> None:
        real(self, positions)
        if self.last_sums is not None:
            self.last_sums *= 1.5

    monkeypatch.setattr(PrefillCapture, "settle", settle)
    with pytest.raises(UnsupportedModel, match="its attention to an image is read"):
        selfcheck.check_model(model)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
def test_the_embedded_model_passes_in_every_dtype(dtype: torch.dtype) -> None:
    selfcheck.check_model(steering.load(Path(__file__).parents[3] / "demo" / "checkpoint", dtype=dtype, device="cpu"))
