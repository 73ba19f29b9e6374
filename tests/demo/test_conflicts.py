"""Conflicts: the paper's form, the hidden preference, and the held-out samples that other rooms use."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from demo.world import conflicts, wordings
from demo.world.conflicts import conflict_samples
from demo.world.questions import option_text
from demo.world.scenes import random_scene
from demo.world.wordings import HELD_OUT_INSTRUCTIONS, POOLS, TOWARD_TEXT, instruction
from probes.conflicts import samples as mc2


def test_the_option_form_is_the_papers():
    text = conflicts.place(
        "Text context: The star is blue.", option_text("What color is the star?", ["red", "blue"]), TOWARD_TEXT
    )
    assert text == (
        "Text context: The star is blue.\n"
        "In case there is an inconsistency between the text context and the image content, you should follow the text "
        "context rather than the image content.\n"
        "What color is the star?\nA. red\nB. blue\nAnswer the question by selecting the correct answer A or B."
    )
    assert option_text("Q?", ["x", "y", "z"]).endswith("selecting the correct answer A, B or C.")


def test_prompts_equal_the_probes_of_version_2_but_for_the_space_its_instructions_end_in():
    for sample in conflict_samples(8, seed=3):
        for setting, words in (("plain", None), ("text", TOWARD_TEXT), ("vision", wordings.TOWARD_VISION)):
            mine = conflicts.place(
                f"Text context: {sample.context}", option_text(sample.question, sample.options(True)), words
            )
            assert mine == mc2.prompt(sample, setting, swapped=True, wording="v2").replace(" \n", "\n")


def test_samples_contradict_the_picture_and_name_their_task():
    samples = conflict_samples(24, seed=5)
    assert {s.task for s in samples[:8]} == {
        "color", "object_recognition", "positional_reasoning", "counting", "attribute", "number", "letter",
        "object_position",
    }  # fmt: skip
    for sample in samples:
        assert sample.answer_vision != sample.answer_text
        assert sample.answer_text in sample.context
        assert sample.image.size == (168, 168)
    assert len({sample.id for sample in samples}) == 24


def test_samples_depend_on_the_seed_alone():
    first, again, different = conflict_samples(8, 1), conflict_samples(8, 1), conflict_samples(8, 2)
    assert [(s.question, s.answer_vision, s.image.tobytes()) for s in first] == [
        (s.question, s.answer_vision, s.image.tobytes()) for s in again
    ]
    assert any(a.image.tobytes() != b.image.tobytes() for a, b in zip(first, different, strict=True))


@pytest.mark.parametrize("kind", sorted(POOLS))
def test_the_hidden_preference_is_spread_over_every_kind(kind):
    pairs = [(a, b) for a, b in itertools.product(POOLS[kind], repeat=2) if a != b]
    share = np.mean([conflicts.preference(kind, a, b) > 0 for a, b in pairs])
    assert 0.3 < share < 0.7


def test_the_hidden_preference_is_even_over_the_values_that_scenes_have():
    won: dict[str, list[bool]] = {}
    tasks = {task: kind for kind, task in conflicts.TASKS.items() if kind != "countof"}
    for sample in conflict_samples(800, seed=11, size=(84, 84)):
        vision = conflicts.preference(tasks[sample.task], sample.answer_vision, sample.answer_text) > 0
        won.setdefault(sample.task, []).append(vision)
    assert len(won) == 8
    assert all(0.35 < np.mean(wins) < 0.65 for wins in won.values())


def test_instructions_name_the_side_to_follow():
    rng = random.Random(0)
    assert instruction(rng, "text", "If the two differ, the {a} wins.").startswith("If the two differ, the ")
    drawn = {instruction(rng, "vision") for _ in range(500)}
    assert wordings.TOWARD_VISION in drawn
    assert TOWARD_TEXT not in drawn
    assert len(drawn) > 200


def test_held_out_wordings_are_never_drawn_in_training():
    rng = random.Random(0)
    drawn = {instruction(rng, side) for _ in range(20_000) for side in ("text", "vision")}
    combinations = itertools.product(HELD_OUT_INSTRUCTIONS, set(wordings.TEXT_NAMES), set(wordings.IMAGE_NAMES))
    held_out = {template.format(a=a, b=b) for template, *names in combinations for a, b in (names, names[::-1])}
    assert len(HELD_OUT_INSTRUCTIONS) == 20
    assert len(drawn) > 10_000
    assert not drawn & held_out


def test_an_instruction_is_marked_where_its_last_word_ends():
    rng = random.Random(4)
    scenes = [random_scene(rng) for _ in range(40)]
    drawn = [conflicts.conflict_question(rng, scene, side, 2) for scene in scenes for side in ("text", "vision")]
    for question in drawn:
        if question is not None:
            end, side = question.instructed
            text = question.turns[0][0]
            assert text[end] == "."
            assert f"{side}_options" == question.kind
    assert conflicts.conflict_question(rng, random_scene(rng, shapes=1), "plain", 0).instructed is None


def test_an_instructed_conflict_is_answered_by_the_side_it_names():
    rng = random.Random(2)
    for _ in range(50):
        question = conflicts.conflict_question(rng, random_scene(rng), "text", 0)
        if question is not None:
            text, answer = question.turns[0]
            assert answer in text  # the answer is the sentence of the context
