"""Every family's folder loads by the Auto classes and `load_processor`, and its processor and model fit together."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import logging
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, BatchFeature
from transformers.utils.import_utils import is_torchvision_available

from steering.model.processing.processor import load_processor
from tests import families

EVERY = families.FAMILIES + families.UNSUPPORTED
IMAGES_ARE_TOKENS = tuple(family for family in EVERY if family != "mllama")
TILED = ("llava_next", "llava_onevision", "internvl", "idefics3", "aya_vision")


def processed(processor: Any, messages: list[dict[str, Any]]) -> BatchFeature:
    """Return the processor's whole output for one conversation, called in the way that suits all families."""
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    bos = processor.tokenizer.bos_token
    images = families.images_of(messages)
    output: BatchFeature = processor(
        text=[text],
        images=[images] if images else None,
        return_tensors="pt",
        return_text_replacement_offsets=True,
        return_offsets_mapping=True,
        add_special_tokens=bos is None or not text.startswith(bos),
    )
    return output


def model_inputs(output: BatchFeature) -> dict[str, torch.Tensor]:
    """Return the part of the output that goes into the model."""
    return {k: v for k, v in output.items() if k not in ("text_replacement_offsets", "offset_mapping", "labels")}


@functools.cache
def load(family: str, root: Path) -> tuple[Any, Any]:
    """Read by many tests, changed by none."""
    folder = families.checkpoint(family, root)
    return AutoModelForImageTextToText.from_pretrained(folder).eval(), load_processor(folder)


@pytest.mark.parametrize(("family", "images"), [*((family, 3) for family in IMAGES_ARE_TOKENS), ("qwen2_vl", 1)])
def test_processor_and_model_agree_on_the_image_tokens(family: str, images: int, root: Path) -> None:
    model, processor = load(family, root)
    output = processed(processor, families.example_messages(family, images, system="Be brief."))

    image_token = model.config.image_token_id
    replaced = output["text_replacement_offsets"][0]
    counts = [
        processor.tokenizer(r["replacement"], add_special_tokens=False).input_ids.count(image_token) for r in replaced
    ]
    assert len(counts) == images
    assert all(4 <= count <= 64 for count in counts)
    assert sum(counts) == int((output["input_ids"] == image_token).sum())

    with torch.inference_mode():
        logits = model(**model_inputs(output)).logits
    assert logits.isfinite().all()


@pytest.mark.parametrize("family", EVERY)
def test_generate_runs_and_ends_no_text_by_chance(family: str, root: Path) -> None:
    model, processor = load(family, root)
    inputs = model_inputs(processed(processor, families.example_messages(family)))
    generated = model.generate(**inputs, max_new_tokens=3, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert len(generated) == 3
    assert not set(generated.tolist()) & set(processor.tokenizer.all_special_ids)


@pytest.mark.parametrize("family", EVERY)
def test_the_image_and_the_word_order_change_the_logits(family: str, root: Path) -> None:
    model, processor = load(family, root)

    def ending(**kwargs: Any) -> torch.Tensor:
        inputs = model_inputs(processed(processor, families.example_messages(family, **kwargs)))
        with torch.inference_mode():
            logits: torch.Tensor = model(**inputs).logits
        return logits[0, -1]

    reference = ending()
    assert (reference - ending(seed=1)).abs().max() > 0.1
    assert (ending(text="Is red or blue there") - ending(text="Is blue or red there")).abs().max() > 0.1


@pytest.mark.parametrize("family", EVERY)
def test_template_writes_every_turn_once(family: str, root: Path) -> None:
    _, processor = load(family, root)
    messages = [
        *families.example_messages(family, system="Sys."),
        {"role": "assistant", "content": [{"type": "text", "text": "Green."}]},
        {"role": "user", "content": [{"type": "text", "text": "Sure?"}]},
    ]
    text = processor.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    order = [text.index(words) for words in ("Sys.", "What colour is the small ball?", "Green.", "Sure?")]
    assert order == sorted(order)
    assert text.count(processor.image_token) == 1


@pytest.mark.parametrize("family", EVERY)
def test_bos_stands_once_where_the_family_has_one(family: str, root: Path) -> None:
    _, processor = load(family, root)
    ids = processed(processor, families.example_messages(family))["input_ids"][0].tolist()
    bos = processor.tokenizer.bos_token_id
    assert bos is None or ids.count(bos) == 1


@pytest.mark.parametrize("family", EVERY)
def test_offsets_point_into_the_expanded_text(family: str, root: Path) -> None:
    _, processor = load(family, root)
    output = processed(processor, families.example_messages(family, text="Which of the cubes is larger?"))
    ids, spans = output["input_ids"][0].tolist(), output["offset_mapping"][0].tolist()
    decoded = processor.tokenizer.decode(ids)
    question = re.search("Which of the cubes is larger", decoded)
    assert question is not None
    # Decoding gives the expanded text back, after the bos that the tokenizer adds outside of it.
    shift = len(processor.tokenizer.bos_token) if spans[0] == [0, 0] else 0
    for token, (start, end) in zip(ids, spans, strict=True):
        if question.start() <= start + shift and end + shift <= question.end() and end > start:
            assert processor.tokenizer.decode([token]) == decoded[start + shift : end + shift]


@pytest.mark.parametrize("family", TILED)
def test_some_image_is_cut_into_tiles(family: str, root: Path) -> None:
    _, processor = load(family, root)
    pixels = processed(processor, families.example_messages(family))["pixel_values"]
    assert pixels.shape[:-3].numel() > 1


def test_gemma3_window_is_shorter_than_the_prompt(root: Path) -> None:
    model, processor = load("gemma3", root)
    length = processed(processor, families.example_messages("gemma3"))["input_ids"].shape[1]
    assert model.config.get_text_config().sliding_window < length


@pytest.mark.parametrize("family", EVERY)
def test_folder_is_small(family: str, root: Path) -> None:
    assert sum(file.stat().st_size for file in families.checkpoint(family, root).iterdir()) < 3_000_000


def test_weights_depend_on_the_seed_alone(tmp_path: Path) -> None:
    def weights(name: str, seed: int) -> bytes:
        return (families.build("llava", tmp_path / name, seed=seed) / "model.safetensors").read_bytes()

    state = torch.get_rng_state()
    first = weights("a", 0)
    assert torch.equal(torch.get_rng_state(), state)
    torch.rand(7)
    assert weights("b", 0) == first
    assert weights("c", 1) != first


def test_example_messages_are_deterministic_and_of_different_sizes() -> None:
    first, again = (families.images_of(families.example_messages("llava", 4)) for _ in range(2))
    assert [image.tobytes() for image in first] == [image.tobytes() for image in again]
    assert len({image.size for image in first}) == 4


def test_a_text_beyond_the_models_length_is_not_logged(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = load_processor(families.checkpoint("qwen2_vl", root)).tokenizer
    tokenizer.model_max_length = 3
    logger = logging.getLogger("transformers.tokenization_utils_base")
    logger.addHandler(caplog.handler)
    try:
        assert len(tokenizer("a b c d e f g").input_ids) > 3
    finally:
        logger.removeHandler(caplog.handler)
    assert caplog.messages == []


def test_a_checkpoint_without_a_processor_is_refused(root: Path, tmp_path: Path) -> None:
    source = families.checkpoint("llava", root)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((source / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    with pytest.raises(ValueError, match="no multimodal processor"):
        load_processor(tmp_path)


def test_code_in_a_checkpoint_is_not_run(root: Path, tmp_path: Path) -> None:
    source = families.checkpoint("llava", root)
    for file in source.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    witness = tmp_path / "was_run"
    (tmp_path / "evil.py").write_text(f"open({str(witness)!r}, 'w').close()\nclass Evil: pass\n")
    for name, key in (("processor_config.json", "AutoProcessor"), ("tokenizer_config.json", "AutoTokenizer")):
        config = json.loads((tmp_path / name).read_text())
        config["auto_map"] = {key: "evil.Evil" if key == "AutoProcessor" else [None, "evil.Evil"]}
        config.pop("processor_class", None)
        (tmp_path / name).write_text(json.dumps(config))
    with contextlib.suppress(OSError, ValueError):
        load_processor(tmp_path)
    assert not witness.exists()


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed, so videos work")
def test_without_torchvision_videos_are_refused_and_nothing_stays_replaced(root: Path) -> None:
    auto = importlib.import_module("transformers.models.auto.video_processing_auto")
    real = auto.AutoVideoProcessor
    processor = load_processor(families.checkpoint("qwen2_vl", root))
    assert auto.AutoVideoProcessor is real
    frames = torch.zeros(2, 3, 28, 28)
    with pytest.raises(ImportError, match="torchvision"):
        processor(text=["<|video_pad|>"], videos=[frames], return_tensors="pt")


@pytest.mark.skipif(is_torchvision_available(), reason="torchvision is installed, and resizes")
def test_an_image_processor_for_torchvision_alone_resizes_by_pillow(root: Path) -> None:
    images = load_processor(families.checkpoint("lfm2_vl", root)).image_processor
    picture = families.example_image(1)
    made = images([picture], return_tensors="pt")
    assert made["spatial_shapes"].tolist() == [[8, 4]]
    resized = torch.tensor(np.asarray(picture.resize((28, 56), Image.Resampling.BILINEAR)))
    patches = resized.view(8, 7, 4, 7, 3).transpose(1, 2).reshape(8 * 4, -1)
    pixels, padding = made["pixel_values"][0].split([32, 4])
    torch.testing.assert_close(pixels, patches / 127.5 - 1)
    assert not padding.any()
    assert not {name for name in sys.modules if name.startswith("torchvision")}


@pytest.mark.parametrize("family", EVERY)
def test_tokenizer_is_fast(family: str, root: Path) -> None:
    assert load(family, root)[1].tokenizer.is_fast


def test_arguments_are_sorted_once_and_nobody_changes_what_is_kept(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor = load_processor(families.checkpoint("qwen2_vl", root))
    plain = type(processor).__mro__[1]
    assert type(processor).__name__ == plain.__name__  # which a processor writes into its files
    sort, sorted_ = plain._merge_kwargs, list[dict[str, Any]]()

    def counted(self: Any, *args: Any, **kwargs: Any) -> Any:
        sorted_.append(kwargs)
        return sort(self, *args, **kwargs)

    monkeypatch.setattr(plain, "_merge_kwargs", counted)
    for size in (None, {"shortest_edge": 784, "longest_edge": 7840}, None):
        kwargs = {"return_tensors": "pt", **({} if size is None else {"images_kwargs": {"size": size}})}
        expected = sort(processor, processor.valid_processor_kwargs, processor.tokenizer.init_kwargs, **kwargs)
        for _ in range(2):
            merged = processor._merge_kwargs(
                processor.valid_processor_kwargs, tokenizer_init_kwargs=processor.tokenizer.init_kwargs, **kwargs
            )
            assert merged == expected
            merged["images_kwargs"].clear()  # as a call takes what it needs out of it
    assert len(sorted_) == 2
