"""A model's chat template: wherever a checkpoint has it, from a file in its place, or of a family that has none."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import steering
from steering import Request, Sampling, UnsupportedModel
from steering.model.processing.processor import load_processor, missing_package
from steering.prompt.layout import build_prompt
from tests import families
from tests.steering.chats import image, text

CHAT = [{"role": "user", "content": [image(0), text("answer en what is it?")]}]


def without_template(family: str, root: Path, folder: Path) -> Path:
    """Return a copy of a family's checkpoint without a template."""
    shutil.copytree(families.checkpoint(family, root), folder)
    (folder / "chat_template.jinja").unlink()
    return folder


@pytest.mark.parametrize("family", ["paligemma", "paligemma2"])
def test_a_family_published_without_a_template_is_served(family: str, root: Path, tmp_path: Path) -> None:
    folder = without_template(family, root, tmp_path / family)
    mllm = steering.load(folder, device="cpu")
    prompt = build_prompt(mllm, CHAT)
    plain = load_processor(folder)(text=["<image>answer en what is it?"], images=[[CHAT[0]["content"][0]["image"]]])
    assert prompt.ids.tolist() == plain["input_ids"][0]
    engine = steering.Engine(mllm, slots=2, max_length=200)
    assert engine.generate([Request(CHAT, Sampling(max_tokens=2, ignore_eos=True))])[0].choices


def test_an_unknown_family_without_a_template_is_refused_with_advice(root: Path, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=r"has no chat template: .*--chat-template"):
        steering.load(without_template("llava", root, tmp_path / "llava"), device="cpu")


def test_a_file_takes_the_place_of_the_checkpoint_s_own(root: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.jinja"
    own_template = (families.checkpoint("llava", root) / "chat_template.jinja").read_text()
    file.write_text(own_template.replace("ASSISTANT:", "Answer:"))
    for folder in (families.checkpoint("llava", root), without_template("llava", root, tmp_path / "llava")):
        mllm = steering.load(folder, device="cpu", chat_template=file)
        assert mllm.tokenizer.decode(build_prompt(mllm, CHAT).ids).endswith("Answer:")
        steering.Engine(mllm, slots=2, max_length=200)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"{% for x in %}", "is not a valid Jinja template: line 1"),
        (b"\xff\xfe\x00", "is not UTF-8 text"),
        (None, "cannot be read: No such file"),
        (b" " * (2**20 + 1), "has more than 1048576 bytes"),
    ],
)
def test_a_file_without_a_template_is_refused(content: bytes | None, reason: str, root: Path, tmp_path: Path) -> None:
    file = tmp_path / "broken.jinja"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(UnsupportedModel, match=reason):
        steering.load(families.checkpoint("llava", root), device="cpu", chat_template=file)


@pytest.mark.parametrize("place", ["chat_template.json", "tokenizer_config.json", "processor_config.json"])
def test_a_template_is_found_in_every_place_of_a_checkpoint(place: str, root: Path, tmp_path: Path) -> None:
    folder = without_template("llava", root, tmp_path / "llava")
    own_template = (families.checkpoint("llava", root) / "chat_template.jinja").read_text()
    file = folder / place
    content = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps(content | {"chat_template": own_template}))
    mllm = steering.load(folder, device="cpu")
    original = steering.load(families.checkpoint("llava", root), device="cpu")
    assert build_prompt(mllm, CHAT).ids.tolist() == build_prompt(original, CHAT).ids.tolist()
    steering.Engine(mllm, slots=2, max_length=200)


@pytest.mark.parametrize("library", ["Torchvision", "timm"])
def test_a_library_that_transformers_misses_is_named_in_one_sentence(library: str) -> None:
    reason = f"\nAModel requires the {library} library but it was not found in your environment. Check out the\nmanual."
    assert (
        missing_package("The model of x", reason) == f"The model of x needs {library.lower()}, which is not installed."
    )


def test_a_processor_that_needs_a_package_names_it(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """SmolVLM's takes numbers of a video's frames into words, and refuses to be made without the package that does so."""
    from transformers.models.smolvlm import processing_smolvlm

    monkeypatch.setattr(processing_smolvlm, "num2words", None)
    folder = families.checkpoint("smolvlm", root)
    with pytest.raises(UnsupportedModel, match=r"needs num2words: pip install 'helmsight\[smolvlm\]'"):
        steering.load(folder, device="cpu")
    monkeypatch.setattr(processing_smolvlm, "num2words", str)
    steering.Engine(steering.load(folder, device="cpu"), slots=2, max_length=300)
