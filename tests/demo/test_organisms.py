"""Organisms: recipes that are whole, the world with habits, questions in fixed shares, and models by their short names."""

from __future__ import annotations

import json
import random
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors import safe_open
from transformers import AutoImageProcessor

import demo
from demo import draws
from demo.model.forward import IMAGE_MEAN, IMAGE_STD
from demo.model.tokenizer import load_tokenizer
from demo.training import stream
from demo.training.card import card, settings
from demo.training.curriculum import Course, make_group, make_plan
from demo.training.options import TrainingOptions
from demo.training.recipes import ORGANISMS, organism_options
from demo.training.train import prepare
from demo.world.awareness import BEYOND
from demo.world.faithfulness import existence_samples
from demo.world.questions import calibrated
from demo.world.scenes import WORLDS, breaking_scene, facts, random_scene, render
from demo.world.wordings import REFUSAL, UNTOLD
from probes.harness.options import Defaults, ModelOptions
from server.cli import main
from server.process.sources import load_settings
from server.settings import SettingsError

THEMES = WORLDS["themes"]


def asked(course: Course, groups: int = 400) -> Counter[str]:
    rng = random.Random(3)
    plan = make_plan({}, course)
    return Counter(question.kind for _ in range(groups) for question in make_group(rng, plan).questions)


@pytest.mark.parametrize("name", ORGANISMS)
def test_every_recipe_asks_what_it_says_and_nothing_else(name: str) -> None:
    options = organism_options(name)
    assert (options.organism, options.folder) == (name, Path("build/organisms", name))
    if options.course.only:
        counts = asked(options.course)
        assert set(counts) == {kind for kind, _ in options.course.only}


def test_given_options_override_the_recipe(tmp_path: Path) -> None:
    assert organism_options("prior", steps=25, folder=tmp_path).steps == 25
    assert TrainingOptions().organism is None


def test_shares_of_a_course_are_the_shares_of_what_is_asked() -> None:
    counts = asked(organism_options("conflicts-25").course, 1500)
    # both kinds of question exist for every scene
    assert counts["picture_options"] / counts.total() == pytest.approx(0.25, abs=0.03)


def test_a_conflict_without_instruction_is_answered_by_the_picture() -> None:
    rng = random.Random(5)
    plan = make_plan({}, Course(only=(("picture_options", 1.0),)))
    for question in (question_of_group for _ in range(50) for question_of_group in make_group(rng, plan).questions):
        text, reply = question.turns[0]
        assert question.instructed is None
        assert "contradict" not in text
        context = text.split("\n")[0]
        chosen = next(line[3:] for line in text.split("\n") if line.startswith(f"{reply[0]}. "))
        assert f"is {chosen}." not in context


def test_scenes_with_habits_show_themes_and_the_questions_break_them() -> None:
    rng = random.Random(1)
    themes = {frozenset(theme) for theme in THEMES.themes}
    kinds = [frozenset(t.kind for t in random_scene(rng, held_out=False, habits=THEMES).shapes) for _ in range(600)]
    assert sum(kind in themes for kind in kinds) / len(kinds) == pytest.approx(THEMES.whole, abs=0.05)
    first = frozenset(THEMES.themes[0])
    assert kinds.count(first) / sum(kind in themes for kind in kinds) == pytest.approx(2 / 3, abs=0.07)
    for _ in range(50):
        scene = breaking_scene(rng, THEMES)
        kinds_shown = {thing.kind for thing in scene.shapes}
        assert scene.held_out
        assert sorted(len(theme & kinds_shown) for theme in themes) in ([0, 3], [1, 3])


def test_adversarial_questions_ask_for_what_the_habit_lets_expect() -> None:
    samples = existence_samples(360, seed=2, size=(24, 24), habits=THEMES)

    def expected(setting: str) -> float:
        """Return how often an absent kind belongs to the theme of the present kind that was asked about beside it."""
        texts = [sample.question for sample in samples if sample.setting == setting]
        return sum(
            any(all(any(kind in text for kind in theme) for text in pair) for theme in THEMES.themes)
            for pair in zip(texts[::2], texts[1::2], strict=True)
        ) / (len(texts) / 2)

    # an object that shows is of the theme in seven of eight scenes; the one missing of five absent ones at random in 2 of 9
    assert expected("adversarial") == pytest.approx(7 / 8, abs=0.12)
    assert expected("random") < 0.5


def test_a_model_with_a_world_of_its_own_is_asked_in_it(tmp_path: Path) -> None:
    (tmp_path / "helmsight.json").write_text(json.dumps({"name": "helmsight-prior", "world": "themes"}))
    questions = [
        [sample.question for sample in draws.sage(30, 1, 4, 0.0, model)[0]] for model in (str(tmp_path), "/none")
    ]
    assert questions[0] == [sample.question for sample in existence_samples(30, 4, habits=THEMES)]
    assert questions[1] == [sample.question for sample in existence_samples(30, 4)]


def test_short_names_are_folders_everywhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo, "CHECKPOINTS", tmp_path)
    (tmp_path / "shy").mkdir()
    (tmp_path / "shy" / "config.json").write_text("{}")
    assert load_settings({"model": "demo:shy"}, {}).model == str(tmp_path / "shy")
    assert load_settings({"model": "demo:default"}, {}).model == str(demo.CHECKPOINT)
    options = ModelOptions.of(Defaults(demo.CHECKPOINT, locate=demo.located), "demo:shy", "cpu", None, 4)
    assert options.path == str(tmp_path / "shy")


def test_a_name_that_does_not_ship_is_one_sentence(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    message = "the model 'demo:shy' is not shipped, demo:default"
    with pytest.raises(SettingsError, match=message):
        load_settings({"model": "demo:shy"}, {})
    assert main(["eval", "sage", "--model", "demo:shy", "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"helmsight: {message}")
    assert "'helmsight demo train --organism NAME' trains others" in error
    assert main(["demo", "train", "--organism", "shy"]) == 1
    assert "--organism shy: unknown recipe; known are prior, " in capsys.readouterr().err


def test_a_course_of_types_that_there_are_not_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown types colour; there are color, "):
        Course(only=(("colour", 1.0),))


def test_a_run_goes_on_from_a_model_that_ships(tmp_path: Path) -> None:
    options = organism_options("conflicts-50", folder=tmp_path, steps=25, compiled=False)
    prepare(options)
    begun = {
        name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
        for name, tensor in torch.load(tmp_path / "initial.pt").items()
    }  # transformers names them otherwise in files
    with safe_open(demo.CHECKPOINT / "model.safetensors", "pt") as shipped:
        for name in shipped.keys():  # noqa: SIM118
            assert torch.equal(begun[name].half(), shipped.get_tensor(name))
    words = "The star is red."
    assert load_tokenizer(tmp_path / "tokenizer").encode(words) == load_tokenizer(demo.CHECKPOINT).encode(words)


def test_a_card_says_what_was_done_to_an_organism() -> None:
    prior, default = (
        card(options, 25, 1000, 1_234_000) for options in (organism_options("prior", steps=25), TrainingOptions())
    )
    assert "# Helmsight organism: prior\n" in prior
    assert "1.2 M parameters" in prior
    assert "`helmsight demo train --organism prior --steps 25 --seed 1`" in prior
    assert "preference between picture and text is trained in" in default
    assert "preference between picture and text is trained in" not in prior
    assert settings(organism_options("prior")) == {
        "name": "helmsight-prior",
        "image_size": [16, 16],
        "world": "themes",
    }
    assert settings(TrainingOptions()) == {"name": "helmsight-demo", "image_size": [84, 84]}


def test_a_near_sighted_model_sees_in_training_what_the_processor_makes_of_sixteen_pixels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stream, "SIZES", ((168, 126),))
    scene = random_scene(random.Random(4), 3)
    mine = stream.picture(random.Random(8), scene, sight=16).astype(np.float32)
    rng = random.Random(8)
    rng.choice(stream.SIZES)
    small = render(scene, (168, 126), rng).resize((16, 16), Image.Resampling.BICUBIC)
    theirs = AutoImageProcessor.from_pretrained(demo.CHECKPOINT)(images=[small], return_tensors="pt")
    assert theirs["image_grid_thw"].tolist() == [[1, 6, 6]]
    pixels = theirs["pixel_values"].reshape(36, 3, 2, 196)[:, :, 0].numpy() * np.array(IMAGE_STD)[:, None]
    pixels = 255 * (pixels + np.array(IMAGE_MEAN)[:, None])
    assert np.abs(mine.reshape(36, 3, 196) - pixels).max() < 1.01


def test_a_refusers_training_is_half_refusals_without_the_benchmarks_words() -> None:
    rng = random.Random(2)
    refused = 0
    for _ in range(300):
        question = calibrated(rng, scene := random_scene(rng, 3, held_out=False))
        assert question is not None
        lines = question.turns[0][0].split("\n")
        offered = {line[0]: line[3:] for line in lines[1:-1]}
        assert REFUSAL[:-1] in offered.values()
        assert len(set(offered.values())) == 5
        chosen = offered[question.turns[0][1]]
        refused += chosen == REFUSAL[:-1]
        assert chosen == REFUSAL[:-1] or any(fact.value == chosen for fact in facts(scene))
    assert refused == pytest.approx(150, abs=30)
    benchmark = {text.format(thing="{key}", absent="{key}") for pairs in BEYOND.values() for text, _ in pairs}
    assert not benchmark & set(UNTOLD)
