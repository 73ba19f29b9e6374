"""Loading and patching a model: what is read off it, what its decoder receives, and the cache of image features."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import steering
from steering import MLLM, attention
from steering.layout import build_prompt
from steering.mllm import ImageCache
from tests import families
from tests.steering.plain import Plain

LoadMLLM = Callable[[str], MLLM]
LoadPlain = Callable[[str], Plain]
EVERY = families.FAMILIES


def copied(family: str, root: Path, folder: Path) -> Path:
    """A copy of a checkpoint, to be changed."""
    return Path(shutil.copytree(families.checkpoint(family, root), folder))


# --- loading ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_only_the_language_model_is_patched(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    assert mllm.text_config._attn_implementation == attention.NAME
    assert mllm.model.config.vision_config._attn_implementation == "sdpa"
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
    assert (mllm.num_layers, mllm.hidden_size) == (families.LAYERS, families.HIDDEN)
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
    other = steering.load(families.build("llava", tmp_path / "llava", seed=1), device="cpu")
    assert half.dtype == torch.bfloat16
    assert same.fingerprint == half.fingerprint == load_mllm("llava").fingerprint
    assert other.fingerprint != same.fingerprint
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
    """The keyword arguments of the plain model's decoder."""
    out: dict[str, Any] = {}
    handle = plain.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: out.update(kwargs), with_kwargs=True
    )
    with torch.inference_mode():
        plain.model(**inputs)
    handle.remove()
    return out


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("family", EVERY)
def test_embedding_gives_what_the_wrapper_gives_its_decoder(
    family: str, cached: bool, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    inputs = load_plain(family).inputs(families.example_messages(family, 2))
    expected = received(load_plain(family), inputs)
    cache = ImageCache(2**20) if cached else None
    with torch.inference_mode():
        for _ in range(2):
            embedded = load_mllm(family).embed(inputs, cache)
    torch.testing.assert_close(embedded.embeds, expected["inputs_embeds"], rtol=1e-4, atol=1e-4)
    assert embedded.length == inputs["input_ids"].shape[1]
    if expected.get("position_ids") is not None:
        assert torch.equal(embedded.positions, expected["position_ids"])
        # The next token's position is one more than the largest.
        assert embedded.length + embedded.rope_delta == int(expected["position_ids"].max()) + 1
    if cache is not None:
        assert (cache.hits, cache.misses) == (1, 1)
    handle_count = len(load_mllm(family).decoder._forward_pre_hooks)
    assert handle_count == 0


def test_a_failing_picture_leaves_no_hook_behind(load_mllm: LoadMLLM, load_plain: LoadPlain) -> None:
    mllm = load_mllm("qwen2_vl")
    inputs = load_plain("qwen2_vl").inputs(families.example_messages("qwen2_vl"))
    broken = inputs | {"pixel_values": inputs["pixel_values"][:-1]}
    with pytest.raises((RuntimeError, ValueError, IndexError)):
        mllm.embed(broken, ImageCache(2**20))
    assert not mllm.decoder._forward_pre_hooks


# --- the image cache -------------------------------------------------------------------------------------------------


def pictures(number: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.full((4,), float(number)), "image_grid_thw": torch.tensor([[1, 2, 2]])}


class Encoder:
    """Makes features of 100 float32 numbers (400 bytes) and remembers which ones."""

    def __init__(self, cache: ImageCache):
        self.cache = cache
        self.made: list[int] = []

    def get(self, number: int) -> torch.Tensor:
        def encode() -> dict[str, Any]:
            self.made.append(number)
            return {"pooler_output": [torch.full((100,), float(number))], "hidden_states": None}

        features: torch.Tensor = self.cache.get(pictures(number), encode)["pooler_output"][0]
        return features


def test_the_same_picture_is_encoded_once() -> None:
    encoder = Encoder(ImageCache(10_000))
    for number in (1, 2, 1, 1, 2):
        assert float(encoder.get(number)[0]) == number
    assert encoder.made == [1, 2]
    assert (encoder.cache.hits, encoder.cache.misses, encoder.cache.bytes) == (3, 2, 800)


def test_the_least_recently_used_leaves_first_and_the_bytes_are_bounded() -> None:
    encoder = Encoder(ImageCache(1000))
    for number in (1, 2, 1, 3):
        encoder.get(number)
        assert encoder.cache.bytes <= 1000
    assert encoder.made == [1, 2, 3]
    encoder.get(1)
    assert encoder.made == [1, 2, 3]
    encoder.get(2)
    assert encoder.made == [1, 2, 3, 2]
    assert encoder.cache.bytes == 800


def test_what_is_larger_than_the_cache_is_not_kept() -> None:
    encoder = Encoder(ImageCache(399))
    encoder.get(1)
    encoder.get(1)
    assert (encoder.made, encoder.cache.bytes) == ([1, 1], 0)


def test_a_failed_encoding_is_not_remembered() -> None:
    cache = ImageCache(1000)

    def fail() -> None:
        raise RuntimeError("out of memory")

    for _ in range(2):
        with pytest.raises(RuntimeError):
            cache.get(pictures(1), fail)
    assert (cache.bytes, cache.hits) == (0, 0)


@pytest.mark.parametrize(
    "other",
    [
        {"pixel_values": torch.zeros(4, dtype=torch.float64), "image_grid_thw": torch.tensor([[1, 2, 2]])},
        {"pixel_values": torch.zeros(2, 2), "image_grid_thw": torch.tensor([[1, 2, 2]])},
        {"pixel_values": torch.zeros(4), "image_grid_thw": torch.tensor([[1, 1, 4]])},
        {"pixel_values": torch.zeros(4)},
        {"pixels": torch.zeros(4), "image_grid_thw": torch.tensor([[1, 2, 2]])},
    ],
)
def test_everything_that_makes_another_picture_makes_another_key(other: dict[str, torch.Tensor]) -> None:
    cache = ImageCache(1000)
    cache.get(pictures(0), lambda: torch.zeros(1))
    cache.get(other, lambda: torch.zeros(1))
    assert (cache.hits, cache.misses) == (0, 2)


def test_how_pictures_lie_in_memory_does_not_matter() -> None:
    cache = ImageCache(1000)
    pixels = torch.randn(6, 4, dtype=torch.bfloat16)
    cache.get({"pixel_values": pixels}, lambda: torch.zeros(1))
    cache.get({"pixel_values": pixels.T.contiguous().T}, lambda: torch.zeros(1))
    assert (cache.hits, cache.misses) == (1, 1)
