"""Prompts and chats word for word, answers read by hand, shares by hand and their intervals by an independent bootstrap."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from probes.conflicts import samples as mc2
from probes.conflicts.samples import Sample, Shares

SAMPLE = Sample(
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
    assert len(mc2.WORDINGS) == len(TEXT)


@pytest.mark.parametrize("wording", ["paper", "v1", "v2"])
def test_an_instructed_prompt_word_for_word(wording: mc2.Wording) -> None:
    """As the authors' steer_qwen_search_scale.py joins it: the instruction, its space, a new line, the question."""
    for side, instruction in (("text", TEXT[wording]), ("vision", VISION)):
        said = (
            "Text context: The ball is blue.\n" + instruction + "\nWhat color is the ball?\nA. blue\nB. red\n"
            "Answer the question by selecting the correct answer A or B."
        )
        assert mc2.prompt(SAMPLE, side, swapped=True, wording=wording) == said  # type: ignore[arg-type]
        (message,) = mc2.messages(SAMPLE, side, swapped=True, wording=wording)  # type: ignore[arg-type]
        assert message["content"][1]["text"] == said


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
    neutral = mc2.prompt(Sample("1", "t", SAMPLE.image, "Q?", "x", "y", ""), "plain", swapped=False)
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


def shot(number: int) -> Sample:
    return Sample(
        id=f"shot-{number}",
        task="size",
        image=Image.new("RGB", (8, 8), (number, 0, 0)),
        question=f"How large is {number}?",
        answer_vision=f"seen {number}",
        answer_text=f"read {number}",
        context=f"It is {number}.",
    )


@pytest.mark.parametrize(
    ("setting", "said"), [("shots_vision", ["A", "B", "A", "B"]), ("shots_text", ["B", "A", "B", "A"])]
)
@pytest.mark.parametrize("swapped", [False, True])
def test_four_shots_are_solved_turns_before_the_plain_question(
    setting: mc2.Setting, said: list[str], swapped: bool
) -> None:
    shots = [shot(number) for number in range(4)]
    chat = mc2.messages(SAMPLE, setting, swapped, shots)
    assert [message["role"] for message in chat] == ["user", "assistant"] * 4 + ["user"]
    assert [message["content"] for message in chat[1::2]] == said
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
    made: list[Image.Image] = []

    def make() -> Image.Image:
        made.append(Image.new("RGB", (4, 4), (len(made), 0, 0)))
        return made[-1]

    sample = dataclasses.replace(SAMPLE, image=make)
    assert made == []
    for setting in ("plain", "image_only"):
        (message,) = mc2.messages(sample, setting, swapped=False)
        assert message["content"][0]["image"] is made[-1]
    assert len(made) == 2
    mc2.messages(sample, "context_only", swapped=False)
    assert len(made) == 2


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("A", "A"),
        (" B\n", "B"),
        ("a", "A"),
        ("(B)", "B"),
        ("**A**", "A"),
        ("B.", "B"),
        ("A. red", "A"),
        ("B: blue", "B"),
        ("A) red, as the image shows", "A"),
        ("A - red", "A"),
        ("A\nThe ball is red.", "A"),
        ("A red", "A"),
        ("B blue", "B"),
        ("Answer: A", "A"),
        ("The correct answer is B.", "B"),
        ("The correct answer is B because the text says so.", "B"),
        ("the answer is (A) red", "A"),
        ("I would choose option B", "B"),
        ("It is red, so A.", "A"),
        ("The ball is red.", "A"),
        ("BLUE", "B"),
        ("", None),
        ("Sorry, I can't help with it.", None),
        ("A and B", None),
        ("A or B", None),
        ("The answer is A or the answer is B", None),
        ("The ball is red or blue.", None),
        ("A dog is in the image.", None),
        ("reddish", None),
        ("C", None),
    ],
)
def test_answers_read_by_hand(answer: str, chosen: str | None) -> None:
    assert mc2.letter(answer, ("red", "blue")) == chosen


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("The picture shows a red ball. The text says it is blue.\nThe answer is B", "B"),
        ("First, the text context says blue. So the image is to be ignored. The answer is A.", "A"),
        ("Option A matches the image and option B matches the text. The text counts, so the answer is B.", "B"),
        ("A. red is what the image shows.\nB. blue is what the text says.\nThe answer is B", "B"),
        ("A) red or B) blue? I follow the picture.\n\n**The answer is A**", "A"),
        ("The answer is not B. Option A fits the picture and B) the text. Therefore the answer is A. red", "A"),
        ("At first sight the answer is A. But the text says otherwise: the answer is (B) blue.", "B"),
        ("I am to end with 'The answer is A' or 'The answer is B'.", None),
        ("It may be that the answer is A or that the answer is B", None),
        ("Option A matches the image and option B", None),
    ],
)
def test_a_chain_of_thought_is_read_by_its_end(answer: str, chosen: str | None) -> None:
    assert mc2.letter(answer, ("red", "blue")) == chosen


@pytest.mark.parametrize(
    ("answer", "chosen"),
    [
        ("<think>The image shows A. red, the text says B.</think> <answer>B</answer>", "B"),
        ("<think>red or blue</think>\n<answer> A. red </answer>", "A"),
        ("<answer>A</answer> No: the text counts. <answer>blue</answer>", "B"),
        ("<think>I am to use <answer> </answer> tags. It is red.</think><answer>B", "B"),  # cut off before it closed
        ("<THINK>A</THINK><Answer>B. blue</Answer> The answer is A", "B"),
        ("<answer></answer>", None),
        ("<answer>A or B</answer> so A", None),
        # without an <answer> what follows the thoughts is read, and thoughts that do not end are no answer
        ("<think>The image shows A. red.</think> The answer is B.", "B"),
        ("The image shows A. red.</think> B", "B"),
        ("<think>The image shows A. red, so the answer is A", None),
    ],
)
def test_a_chain_of_thought_is_read_by_its_tags(answer: str, chosen: str | None) -> None:
    assert mc2.letter(answer, ("red", "blue")) == chosen


def test_an_option_inside_the_other_is_not_taken_for_it() -> None:
    assert mc2.letter("It is light blue.", ("light blue", "blue")) == "A"
    assert mc2.letter("It is blue.", ("light blue", "blue")) == "B"


@pytest.mark.parametrize(
    ("first", "second", "category"),
    [
        ("A", "B", "vision"),
        ("B", "A", "text"),
        ("A", "A", "others"),
        ("B", "B", "others"),
        ("A", None, "others"),
        (None, None, "others"),
    ],
)
def test_only_consistent_answers_count(first: str | None, second: str | None, category: str) -> None:
    assert mc2.outcome(first, second) == category


def test_shares_by_hand() -> None:
    shares = Shares.of(["vision", "vision", "vision", "text", "others"])
    assert shares == Shares(0.6, 0.2, 0.2, 0.75, 5)
    assert shares.to_json() == {"s_vision": 0.6, "s_text": 0.2, "s_others": 0.2, "vision_ratio": 0.75, "n": 5}


def test_the_ratio_is_null_where_no_answer_follows_a_modality() -> None:
    assert Shares.of(["others", "others"]).to_json()["vision_ratio"] is None
    assert Shares.of([]) == Shares(0.0, 0.0, 0.0, None, 0)


def resampled(outcomes: list[mc2.Outcome], resamples: int) -> dict[str, tuple[float, float]]:
    """The 95 % intervals from samples that are really drawn anew."""
    rng = np.random.default_rng(12)
    names = np.array(outcomes)
    values: dict[str, list[float]] = {"s_vision": [], "s_text": [], "s_others": [], "vision_ratio": []}
    for _ in range(resamples):
        drawn = names[rng.integers(len(names), size=len(names))]
        vision, text, others = ((drawn == name).sum() for name in ("vision", "text", "others"))
        for name, count in (("s_vision", vision), ("s_text", text), ("s_others", others)):
            values[name].append(count / len(names))
        if vision + text:
            values["vision_ratio"].append(vision / (vision + text))
    return {name: (np.quantile(one, 0.025), np.quantile(one, 0.975)) for name, one in values.items()}


@pytest.mark.parametrize("counts", [(240, 100, 60), (3, 2, 15)])
def test_intervals_are_those_of_a_bootstrap_over_samples(counts: tuple[int, int, int]) -> None:
    outcomes: list[mc2.Outcome] = [*["vision"] * counts[0], *["text"] * counts[1], *["others"] * counts[2]]
    shares = Shares.of(outcomes, resamples=4000, seed=3)
    expected = resampled(outcomes, 4000)
    assert set(shares.intervals) == set(expected)
    for name, interval in shares.intervals.items():
        step = 1 / (counts[0] + counts[1] if name == "vision_ratio" else len(outcomes))
        assert interval == pytest.approx(expected[name], abs=1.5 * step), name
        assert interval[0] < getattr(shares, name) < interval[1], name


def test_intervals_are_seeded_and_reported_by_field() -> None:
    outcomes: list[mc2.Outcome] = [*["vision"] * 30, *["text"] * 10]
    shares = Shares.of(outcomes, resamples=200, seed=3)
    assert shares == Shares.of(outcomes, resamples=200, seed=3)
    assert shares.intervals != Shares.of(outcomes, resamples=200, seed=4).intervals
    report = shares.to_json()
    assert report["vision_ratio_95"] == list(shares.intervals["vision_ratio"])
    assert report["s_text_95"] == list(shares.intervals["s_text"])
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_intervals_where_nothing_varies() -> None:
    vision = Shares.of(["vision"] * 5, resamples=100).intervals
    assert vision == {"s_vision": (1, 1), "s_text": (0, 0), "s_others": (0, 0), "vision_ratio": (1, 1)}
    assert Shares.of(["text"], resamples=100).intervals["vision_ratio"] == (0, 0)
    others = Shares.of(["others"] * 5, resamples=100)
    assert others.intervals == {"s_vision": (0, 0), "s_text": (0, 0), "s_others": (1, 1)}
    assert "vision_ratio_95" not in others.to_json()
    assert Shares.of([], resamples=100).intervals == {}


def test_a_ratio_that_some_resamples_lack_is_that_of_the_others() -> None:
    low, high = Shares.of(["vision", "others", "others"], resamples=500).intervals["vision_ratio"]
    assert (low, high) == (1.0, 1.0)


def test_a_share_toward_a_side_is_that_sides() -> None:
    shares = Shares.of(["vision", "vision", "text", "others"])
    assert (shares.toward("vision"), shares.toward("text")) == (0.5, 0.25)
