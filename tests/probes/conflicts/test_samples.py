"""Prompts and chats word for word."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from PIL import Image

from probes.conflicts import samples as mc2
from probes.conflicts.samples import ConflictSample

SAMPLE = ConflictSample(
    id="1",
    task="color",
    image=Image.new("RGB", (8, 8), "red"),
    question="What color is the ball?",
    answer_vision="red",
    answer_text="blue",
    context="The ball is blue.",
)


def test_plain_prompt_word_for_word() -> None:
    assert mc2.prompt(SAMPLE, "plain", swapped=False) == (
        "Text context: The ball is blue.\n"
        "What color is the ball?\n"
        "A. red\n"
        "B. blue\n"
        "Answer the question by selecting the correct answer A or B."
    )


# From prompt.py of github.com/EchoDreamer/Modality-Preference, commit 024631d, its spaces at the ends included.
VISION = (
    "In case there is an inconsistency between the text context and the image content, you should follow the image content "
    "rather than the text context. "
)
TEXT = {
    "paper": "In case there is an inconsistency between the Text Context and the input image content, you must rely on the "
    "text context rather than the input image content. ",
    "v1": "In case there is an inconsistency between the text context and the input image content, prioritize the "
    "information from the text context. ",
    "v2": "In case there is an inconsistency between the text context and the image content, you should follow the text "
    "context rather than the image content. ",
}


def test_the_instructions_are_the_authors_to_the_last_space() -> None:
    for name, text in TEXT.items():
        assert dict(mc2.WORDINGS)[name] == {"text": text, "vision": VISION}  # type: ignore[index]
    assert mc2.WORDINGS.keys() - TEXT.keys() == {"case"}


def test_the_instruction_of_the_papers_case() -> None:
    """Figure 12: "... In case of inconsistency, prioritize the text context"."""
    text = mc2.prompt(SAMPLE, "text", swapped=False, wording="case")
    assert "\nIn case of inconsistency, prioritize the text context. \nWhat color" in text
    assert "prioritize the image content. \n" in mc2.prompt(SAMPLE, "vision", swapped=False, wording="case")


@pytest.mark.parametrize("wording", ["paper", "v1", "v2"])
def test_an_instructed_prompt_word_for_word(wording: mc2.Wording) -> None:
    """The prompt joins as in the authors' steer_qwen_search_scale.py: instruction, its space, a new line, question."""
    for side, instruction in (("text", TEXT[wording]), ("vision", VISION)):
        expected = (
            "Text context: The ball is blue.\n" + instruction + "\nWhat color is the ball?\nA. blue\nB. red\n"
            "Answer the question by selecting the correct answer A or B."
        )
        assert mc2.prompt(SAMPLE, side, swapped=True, wording=wording) == expected  # type: ignore[arg-type]
        (message,) = mc2.messages(SAMPLE, side, swapped=True, wording=wording)  # type: ignore[arg-type]
        assert message["content"][1]["text"] == expected


def test_the_papers_wording_is_the_default() -> None:
    assert TEXT["paper"] in mc2.prompt(SAMPLE, "text", swapped=False)


def test_single_modality_leaves_the_other_out() -> None:
    image_only = mc2.messages(SAMPLE, "image_only", swapped=False)[0]["content"]
    context_only = mc2.messages(SAMPLE, "context_only", swapped=False)[0]["content"]
    assert [part["type"] for part in image_only] == ["image", "text"]
    assert "Text context" not in image_only[1]["text"]
    assert [part["type"] for part in context_only] == ["text"]
    assert context_only[0]["text"].startswith("Text context: The ball is blue.\n")


def test_a_sample_without_context_has_no_context_line() -> None:
    neutral = mc2.prompt(ConflictSample("1", "t", SAMPLE.image, "Q?", "x", "y", ""), "plain", swapped=False)
    assert neutral.startswith("Q?\nA. x\n")


@pytest.mark.parametrize("side", mc2.SIDES)
@pytest.mark.parametrize("wording", ["paper", "v2"])
def test_a_chain_of_thought_is_asked_for_in_the_authors_words(side: mc2.Side, wording: mc2.Wording) -> None:
    """Their template is "{Question} Carefully ... tags."; the prompt up to its options stands for the question."""
    setting: mc2.Setting = "chain_vision" if side == "vision" else "chain_text"
    instruction = VISION if side == "vision" else TEXT[wording]
    assert mc2.prompt(SAMPLE, setting, swapped=False, wording=wording) == (
        "Text context: The ball is blue.\n" + instruction + "\nWhat color is the ball?\nA. red\nB. blue"
        " Carefully distinguish between image and text content and output the thinking process in <think> </think> and "
        "final answer option in <answer> </answer> tags."
    )


def shot(number: int) -> ConflictSample:
    return ConflictSample(
        id=f"shot-{number}",
        task="size",
        image=Image.new("RGB", (8, 8), (number, 0, 0)),
        question=f"How large is {number}?",
        answer_vision=f"seen {number}",
        answer_text=f"read {number}",
        context=f"It is {number}.",
    )


@pytest.mark.parametrize(
    ("setting", "answers"), [("shots_vision", ["A", "B", "A", "B"]), ("shots_text", ["B", "A", "B", "A"])]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_four_shots_are_solved_turns_before_the_plain_question(
    setting: mc2.Setting, answers: list[str], swapped: bool
) -> None:
    shots = [shot(number) for number in range(4)]
    chat = mc2.messages(SAMPLE, setting, swapped, shots)
    assert [message["role"] for message in chat] == ["user", "assistant"] * 4 + ["user"]
    assert [message["content"] for message in chat[1::2]] == answers
    for number, turn in enumerate(chat[:-1:2]):
        image, text = turn["content"]
        assert image == {"type": "image", "image": shots[number].image}
        first, second = (f"seen {number}", f"read {number}")[:: -1 if number % 2 else 1]
        assert text["text"] == (
            f"Text context: It is {number}.\nHow large is {number}?\nA. {first}\nB. {second}\n"
            "Answer the question by selecting the correct answer A or B."
        )
    assert chat[-1:] == mc2.messages(SAMPLE, "plain", swapped)


@pytest.mark.parametrize(
    "setting", ["plain", "text", "vision", "chain_text", "chain_vision", "context_only", "image_only"]
)
def test_other_settings_show_no_shots(setting: mc2.Setting) -> None:
    chat = mc2.messages(SAMPLE, setting, False, [shot(0), shot(1)])
    assert chat == mc2.messages(SAMPLE, setting, False)
    assert len(chat) == 1


def test_the_image_stands_before_the_text() -> None:
    (message,) = mc2.messages(SAMPLE, "plain", swapped=True)
    assert message == {
        "role": "user",
        "content": [
            {"type": "image", "image": SAMPLE.image},
            {"type": "text", "text": mc2.prompt(SAMPLE, "plain", True)},
        ],
    }


def test_an_image_that_does_not_decode_names_the_sample_and_the_file(tmp_path: Path) -> None:
    Image.effect_noise((64, 64), 50).save(tmp_path / "whole.png")
    whole = (tmp_path / "whole.png").read_bytes()
    broken = {"empty": b"", "text": b"not a picture", "cut": whole[: len(whole) // 2]}
    for name, content in broken.items():
        path = tmp_path / f"{name}.jpg"
        path.write_bytes(content)
        with pytest.raises(ValueError, match=rf"sample 7-3 does not decode: .*{name}\.jpg"):
            dataclasses.replace(SAMPLE, id="7-3", image=path).picture()
    with pytest.raises(ValueError, match=r"sample 7-3 does not decode: .*absent\.jpg"):
        dataclasses.replace(SAMPLE, id="7-3", image=tmp_path / "absent.jpg").picture()


def test_a_picture_of_any_mode_is_shown_as_rgb(tmp_path: Path) -> None:
    Image.new("LA", (5, 4), (200, 128)).save(tmp_path / "grey.png")
    picture = dataclasses.replace(SAMPLE, image=tmp_path / "grey.png").picture()
    assert (picture.mode, picture.size, picture.getpixel((0, 0))) == ("RGB", (5, 4), (200, 200, 200))


def test_a_picture_that_is_made_is_made_each_time_it_is_shown() -> None:
    drawn: list[Image.Image] = []

    def make() -> Image.Image:
        drawn.append(Image.new("RGB", (4, 4), (len(drawn), 0, 0)))
        return drawn[-1]

    sample = dataclasses.replace(SAMPLE, image=make)
    assert drawn == []
    for setting in ("plain", "image_only"):
        (message,) = mc2.messages(sample, setting, swapped=False)
        assert message["content"][0]["image"] is drawn[-1]
    assert len(drawn) == 2
    mc2.messages(sample, "context_only", swapped=False)
    assert len(drawn) == 2
