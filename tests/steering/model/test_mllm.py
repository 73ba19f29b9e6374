"""Loading and patching a model: what is read off it, what its decoder receives."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering.decoder import attention
from steering.prompt.layout import build_prompt
from steering.vision import attention as tower
from tests import families
from tests.steering.conftest import LoadMLLM, LoadPlain
from tests.steering.plain import Plain

EVERY = families.FAMILIES


def copied(family: str, root: Path, folder: Path) -> Path:
    """Return a copy of a checkpoint that may be changed."""
    return Path(shutil.copytree(families.checkpoint(family, root), folder))


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_attention_is_ours_in_the_language_model_and_in_towers_that_pack_pictures(
    family: str, load_mllm: LoadMLLM
) -> None:
    mllm = load_mllm(family)
    assert mllm.text_config._attn_implementation == attention.NAME
    packs = "image_grid_thw" in mllm.processor.model_input_names
    assert mllm.model.config.vision_config._attn_implementation == (tower.NAME if packs else "sdpa")
    assert not mllm.model.training
    assert not any(parameter.requires_grad for parameter in mllm.model.parameters())


@pytest.mark.parametrize("family", EVERY)
def test_the_patched_model_still_runs_as_a_plain_one(family: str, load_mllm: LoadMLLM, load_plain: LoadPlain) -> None:
    inputs = load_plain(family).inputs(families.example_messages(family, 2))
    models = load_mllm(family).model, load_plain(family).model
    options = {"output_logits": True, "return_dict_in_generate": True}
    with torch.inference_mode():
        ours, theirs = (model.generate(**inputs, max_new_tokens=4, do_sample=False, **options) for model in models)
    assert torch.equal(ours.sequences, theirs.sequences)
    torch.testing.assert_close(torch.cat(ours.logits), torch.cat(theirs.logits), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", EVERY)
def test_facts_about_the_model(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    assert (mllm.num_layers, mllm.hidden_size) == (mllm.text_config.num_hidden_layers, families.HIDDEN)
    assert mllm.context_length == 4096
    assert mllm.vocab_size >= len(mllm.tokenizer)
    assert mllm.name == family
    assert mllm.stop_ids == {mllm.tokenizer.eos_token_id}
    assert mllm.dtype == torch.float32


def test_the_fingerprint_follows_the_language_models_weights(root: Path, tmp_path: Path, load_mllm: LoadMLLM) -> None:
    fingerprints = {load_mllm(family).fingerprint for family in EVERY}
    assert len(fingerprints) == len(EVERY)
    same = steering.load(families.checkpoint("llava", root), device="cpu", name="another name")
    half = steering.load(families.checkpoint("llava", root), device="cpu", dtype="bfloat16")
    other_model = steering.load(families.build("llava", tmp_path / "llava", seed=1), device="cpu")
    assert half.dtype == torch.bfloat16
    assert same.fingerprint == half.fingerprint == load_mllm("llava").fingerprint
    assert other_model.fingerprint != same.fingerprint
    assert same.name == "another name"


@pytest.mark.parametrize(
    ("written", "defaults"),
    [
        ({}, {}),
        (
            {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        ({"do_sample": True, "repetition_penalty": 1.05, "min_p": 0.1}, {"repetition_penalty": 1.05, "min_p": 0.1}),
        ({"do_sample": False}, {"temperature": 0.0}),
    ],
)
def test_sampling_defaults_of_the_checkpoint(
    written: dict[str, Any], defaults: dict[str, float], root: Path, tmp_path: Path
) -> None:
    folder = copied("llava", root, tmp_path / "llava")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | written))
    assert steering.load(folder, device="cpu").generation_defaults == defaults


def test_several_end_tokens(root: Path, tmp_path: Path) -> None:
    folder = copied("llava", root, tmp_path / "llava")
    file = folder / "generation_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"eos_token_id": [2, 5]}))
    mllm = steering.load(folder, device="cpu")
    assert mllm.stop_ids == {2, 5}
    engine = steering.Engine(mllm, slots=1, max_length=128)
    sampling = steering.Sampling(max_tokens=5, logit_bias={5: 100.0})
    request = steering.Request(families.example_messages("llava"), sampling)
    assert engine.generate([request])[0].choices[0].finish_reason == "stop"


def test_settings_of_the_checkpoint_folder(root: Path, tmp_path: Path) -> None:
    folder = copied("qwen2_vl", root, tmp_path / "qwen")
    (folder / "helmsight.json").write_text(json.dumps({"name": "demo", "image_size": [42, 28], "focus_layers": 2}))
    mllm = steering.load(folder, device="cpu")
    assert (mllm.name, mllm.image_size, mllm.focus_layers) == ("demo", (42, 28), 2)
    prompt = build_prompt(mllm, families.example_messages("qwen2_vl", 2))
    assert [image.grid for image in prompt.layout.images] == [(2, 3), (2, 3)]
    assert steering.Engine(mllm, slots=1).focus_layers == 2
    assert steering.load(folder, device="cpu", name="mine").name == "mine"


def test_without_settings_the_focus_is_on_the_last_quarter(load_mllm: LoadMLLM) -> None:
    assert (load_mllm("llava").focus_layers, load_mllm("llava").image_size) == (1, None)


def test_a_missing_checkpoint_says_so(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nowhere"):
        steering.load(tmp_path / "nowhere", device="cpu")


def test_pickled_weights_are_not_loaded(root: Path, tmp_path: Path) -> None:
    folder = copied("llava", root, tmp_path / "llava")
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        steering.load(folder, device="cpu")


# --- what the decoder receives ---------------------------------------------------------------------------------------


def received(plain: Plain, inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """Return the keyword arguments of the plain model's decoder."""
    out: dict[str, Any] = {}
    handle = plain.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: out.update(kwargs), with_kwargs=True
    )
    with torch.inference_mode():
        plain.model(**inputs)
    handle.remove()
    return out


@pytest.mark.parametrize("encoded_before", [False, True])
@pytest.mark.parametrize("family", EVERY)
def test_embedding_gives_what_the_wrapper_gives_its_decoder(
    family: str, encoded_before: bool, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    inputs = load_plain(family).inputs(families.example_messages(family, 2))
    expected = received(load_plain(family), inputs)
    mllm = load_mllm(family)
    with torch.inference_mode():
        features = mllm.image_features(inputs) if encoded_before else None
        embedded = mllm.embed(inputs, features)
    torch.testing.assert_close(embedded.embeds, expected["inputs_embeds"], rtol=1e-4, atol=1e-4)
    assert embedded.length == inputs["input_ids"].shape[1]
    if expected.get("position_ids") is not None:
        assert torch.equal(embedded.positions, expected["position_ids"])
        # The next token's position is one more than the largest.
        assert embedded.length + embedded.rope_delta == int(expected["position_ids"].max()) + 1
    assert len(mllm.decoder._forward_pre_hooks) == 0


def test_a_failing_picture_leaves_no_hook_behind(load_mllm: LoadMLLM, load_plain: LoadPlain) -> None:
    mllm = load_mllm("qwen2_vl")
    inputs = load_plain("qwen2_vl").inputs(families.example_messages("qwen2_vl"))
    broken = inputs | {"pixel_values": inputs["pixel_values"][:-1]}
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        mllm.embed(broken)
    assert not mllm.decoder._forward_pre_hooks


def test_a_device_that_is_not_there_is_named(root: Path) -> None:
    with pytest.raises(steering.UnsupportedModel, match=r"There is no device cuda:99: torch sees \d+ of its kind\.$"):
        steering.load(families.checkpoint("qwen2_vl", root), device="cuda:99")


def test_weights_that_do_not_fit_the_config_are_told_in_a_sentence(root: Path, tmp_path: Path) -> None:
    folder = copied("qwen2_vl", root, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    config["text_config"]["intermediate_size"] *= 2
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(steering.UnsupportedModel, match=r"differ in size from those that its config\.json states\.$"):
        steering.load(folder, device="cpu")


@pytest.mark.parametrize(
    ("family", "change"),
    [("ovis2", {"vocab_size": 5000}), ("gemma4", {"text_config": {"vocab_size_per_layer_input": 50}})],
)
def test_a_token_that_could_not_be_read_again_is_no_models(
    family: str, change: dict[str, Any], root: Path, tmp_path: Path
) -> None:
    """Once sampled, it is an index out of range, which on a GPU ends the process and all answers."""
    folder = copied(family, root, tmp_path / "model")
    config = json.loads((folder / "config.json").read_text())
    for key, value in change.items():
        config[key] = config[key] | value if isinstance(value, dict) else value
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(steering.UnsupportedModel, match=r"its output layer knows \d+ tokens, its embeddings \d+\.$"):
        steering.load(folder, device="cpu", unread="none")


def test_convolutions_of_float32_are_computed_in_float32(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    steering.load(families.checkpoint("qwen2_vl", root), device="cpu", unread="none")
    assert not torch.backends.cudnn.allow_tf32


def test_a_processors_additional_inputs_are_known_only_if_zero(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mllm = load_mllm("qwen2_vl")
    real = mllm.processor

    def beside(change: Callable[[Any], Any]) -> tuple[str, ...] | None:
        vars(mllm).pop("beside_text", None)
        monkeypatch.setattr(mllm, "processor", lambda **kwargs: change(real(**kwargs)))
        return mllm.beside_text

    def refused(inputs: Any) -> Any:
        raise ValueError("no picture")

    try:
        assert beside(lambda inputs: inputs) == ("mm_token_type_ids",)
        assert beside(lambda inputs: {name: inputs[name] for name in ("input_ids", "attention_mask")}) == ()
        assert beside(lambda inputs: {**inputs, "input_ids": inputs["input_ids"] + 1}) is None
        assert beside(lambda inputs: {**inputs, "mm_token_type_ids": inputs["mm_token_type_ids"] + 1}) is None
        assert beside(lambda inputs: {"input_ids": inputs["input_ids"]}) is None
        assert beside(refused) is None
    finally:
        vars(mllm).pop("beside_text", None)


@pytest.mark.parametrize("clock", [False, True])
def test_a_rendered_chat_is_cached_unless_the_template_uses_the_time(
    clock: bool, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mllm = steering.load(families.checkpoint("qwen2_vl", root))
    if clock:
        monkeypatch.setattr(mllm.processor, "chat_template", mllm.template + "{{ strftime_now('%Y') }}")
    chat: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    expected, calls = mllm.chat.render(chat), list[Any]()
    monkeypatch.setattr(mllm.chat, "render", lambda *arguments: calls.append(arguments) or expected)
    assert [mllm.chat.render_form(json.dumps([chat])) for _ in range(3)] == [expected] * 3
    assert len(calls) == (3 if clock else 1)


@pytest.mark.parametrize("family", ["qwen2_vl", "gemma4", "gpt_oss"])
def test_the_gpu_s_kernel_decodes_only_where_layers_are_alike(
    family: str, load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mllm, chosen = copy.copy(load_mllm(family)), list[Any]()
    vars(mllm).pop("decode_attention", None)
    column = mllm.column()
    monkeypatch.setattr(mllm, "column", lambda: column)
    monkeypatch.setattr(mllm, "device", torch.device("cuda"))
    monkeypatch.setattr("steering.model.mllm.decode_kernel", lambda *shape: chosen.append(shape) or "kernel")
    wanted = None if family == "gemma4" else "kernel"
    assert mllm.decode_attention == wanted
    assert [has_sinks for *_, has_sinks in chosen] == ([] if wanted is None else [family == "gpt_oss"])
