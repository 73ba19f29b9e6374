"""Packing, the training forward against transformers, and a short run that learns and resumes."""

from __future__ import annotations

import fcntl
import json
import random

import numpy as np
import pytest
import torch

from demo.model.embedded import make_config, new_model
from demo.model.forward import IMAGE_MEAN, IMAGE_STD, branch_mask, logits_at, picture_loss, side_loss, text_hidden
from demo.training.curriculum import TYPES, TaskGroup, corpus, make_plan
from demo.training.muon import orthogonalise
from demo.training.options import TrainingOptions, learning_rate
from demo.training.stream import Packer, Rows, Shape
from demo.training.train import run_rank, train
from demo.world.questions import SceneQuestion
from demo.world.scenes import random_scene

SHORT = SceneQuestion("color", (("What color is the star?", "The star is red."),), cell=4)


def pack(tokenizer, group: TaskGroup) -> dict[str, np.ndarray]:
    rows = Rows(Shape(rows=1))
    assert rows.add(random.Random(1), Packer(tokenizer), group)
    return rows.arrays()


def test_a_branch_sees_the_shared_prefix_and_itself_only():
    group = torch.tensor([[1, 1, 1, 1, 1, 2, -1]])
    branch = torch.tensor([[0, 0, 1, 2, 2, 0, 0]])
    assert branch_mask(group, branch)[0].int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0],
        [1, 1, 0, 1, 0, 0, 0],
        [1, 1, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 0, 0, 1],
    ]


def test_packed_branches_give_the_logits_they_would_give_alone(tokenizer):
    model = new_model(make_config(tokenizer, 96, 6), seed=1)
    scene = random_scene(random.Random(3), shapes=2)
    second_question = SceneQuestion("shape", (("Which shape is red?", "The red object is a star."),), cell=4)

    def answer_logits(questions: list[SceneQuestion]) -> list[torch.Tensor]:
        arrays = pack(tokenizer, TaskGroup([scene], questions))
        batch = {k: torch.from_numpy(v) for k, v in arrays.items()}
        states, _ = text_hidden(model, batch)
        logits = logits_at(model, states[-1], batch["source"])
        return [logits[(batch["question"] == i) & (batch["weight"] > 0)] for i in range(len(questions))]

    with torch.no_grad():
        together, alone = answer_logits([SHORT, second_question]), answer_logits([second_question])
    assert torch.allclose(together[1], alone[0], atol=1e-5)


@pytest.mark.parametrize("text_first", [False, True])
@pytest.mark.parametrize("pictures", [1, 3])
def test_tokens_and_logits_equal_transformers_own(tokenizer, pictures, text_first):
    model = new_model(make_config(tokenizer, 96, 6), seed=1).eval()
    rng = random.Random(5)
    group = TaskGroup([random_scene(rng) for _ in range(pictures)], [SHORT], "Be precise.", text_first)
    arrays = pack(tokenizer, group)
    used = int((arrays["group"] >= 0).sum())

    text, images = [{"type": "text", "text": SHORT.turns[0][0]}], [{"type": "image"}] * pictures
    content = text + images if text_first else images + text
    messages = [{"role": "system", "content": "Be precise."}, {"role": "user", "content": content}]
    rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert ("Picture 1: " in rendered) == (pictures > 1)
    full = rendered.replace("<|image_pad|>", "<|image_pad|>" * 9) + SHORT.turns[0][1]
    ids = tokenizer(full, return_tensors="pt", add_special_tokens=False)["input_ids"]
    assert ids[0].tolist() == arrays["ids"][0, :used].tolist()

    pixels = arrays["pixels"][:pictures].reshape(pictures * 36, 3, 1, 196) / np.float32(255)
    pixels = (pixels - np.array(IMAGE_MEAN)[:, None, None]) / np.array(IMAGE_STD)[:, None, None]
    pixels = torch.from_numpy(np.repeat(pixels, 2, axis=2).reshape(pictures * 36, 1176)).float()
    with torch.no_grad():
        reference = model(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            pixel_values=pixels,
            image_grid_thw=torch.tensor([[1, 6, 6]] * pictures),
            mm_token_type_ids=(ids == model.config.image_token_id).int(),
        ).logits[0]
        batch = {k: torch.from_numpy(v) for k, v in arrays.items()}
        states, _ = text_hidden(model, batch)
        mine = logits_at(model, states[-1], torch.arange(used))
    assert (mine - reference).abs().max() < 1e-4


def test_picture_loss_is_the_cross_entropy_of_sigma_over_pictures():
    weights = torch.zeros(1, 2, 4, 4)  # tokens: picture 1, picture 2, question, answer
    weights[0, :, 2] = torch.tensor([[0.2, 0.6, 0.2, 0.0], [0.4, 0.4, 0.2, 0.0]])
    weights[0, :, 3] = torch.tensor([[0.1, 0.9, 0.0, 0.0], [0.3, 0.1, 0.6, 0.0]])
    batch = {
        "ordinal": torch.tensor([[1, 2, 0, 0]]),
        "asks": torch.tensor([[1, 1, 0, 0]]),  # one question; 1 is the number that stands for none
        "target": torch.tensor([1]),
    }
    # the mass on picture 2 is .6 + .4 + .9 + .1 = 2.0, on picture 1 it is .2 + .4 + .1 + .3 = 1.0
    assert picture_loss(weights, batch).item() == pytest.approx(-np.log(2 / 3), abs=1e-4)


def test_side_loss_is_the_cross_entropy_of_the_two_words_where_an_instruction_ends(tokenizer):
    model = new_model(make_config(tokenizer, 96, 6), seed=1)
    hidden = torch.randn(1, 3, 96, generator=torch.Generator().manual_seed(0))
    words = torch.tensor([5, 9])
    normed = hidden[0, 1] / hidden[0, 1].pow(2).mean().sqrt()
    first, second = (model.lm_head.weight[words] @ normed).tolist()
    loss = side_loss(model, hidden, torch.tensor([[-1, 1, -1]]), words)
    assert loss.item() == pytest.approx(np.log1p(np.exp(first - second)), abs=1e-4)


def test_the_side_stands_at_the_last_token_of_the_instruction(tokenizer):
    text = "Trust the image.\nWhat color is the star?"
    question = SceneQuestion("vision_open", ((text, "The star is red."),), instructed=(15, "vision"))
    arrays = pack(tokenizer, TaskGroup([random_scene(random.Random(3))], [question]))
    (row,), (column,) = np.nonzero(arrays["side"] >= 0)
    assert arrays["side"][row, column] == 1
    assert tokenizer.decode(arrays["ids"][row, : column + 1]).endswith("Trust the image")


def test_batches_depend_on_seed_rank_and_index_only(tokenizer):
    plan = make_plan(dict.fromkeys(TYPES, 0.95))
    first, again = (Packer(tokenizer).batch(1, 0, 7, plan) for _ in range(2))
    different = Packer(tokenizer).batch(1, 1, 7, plan)
    assert all(np.array_equal(first[key], again[key]) for key in first)
    assert not np.array_equal(first["ids"], different["ids"])


def test_the_curriculum_opens_with_accuracy():
    fresh, grown = make_plan({}), make_plan(dict.fromkeys(TYPES, 0.95))
    assert fresh.several_share == 0
    assert "options" not in fresh.single
    assert grown.several_share > 0.3
    assert "plain_options" in grown.single
    assert grown.pictures == (2, 3, 3, 4)


def test_orthogonalise_brings_singular_values_near_one():
    matrices = torch.randn(3, 16, 40, generator=torch.Generator().manual_seed(0))
    values = torch.linalg.svdvals(orthogonalise(matrices))
    assert values.min() > 0.6
    assert values.max() < 1.3


def test_the_rate_warms_up_holds_and_falls_to_nearly_zero():
    options = TrainingOptions(steps=1000)
    assert learning_rate(0, options) == pytest.approx(0.01)
    assert learning_rate(500, options) == 1.0
    assert learning_rate(850, options) == pytest.approx(0.5, abs=0.01)
    assert learning_rate(999, options) == pytest.approx(0.01)


def test_options_refuse_what_cannot_run():
    with pytest.raises(ValueError, match="multiple of 25"):
        TrainingOptions(steps=30)
    with pytest.raises(ValueError, match="several ranks"):
        TrainingOptions(device="cuda", ranks=2)


def test_two_runs_never_share_a_folder(tmp_path):
    with (tmp_path / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(RuntimeError, match="another run is using"):
            run_rank(0, TrainingOptions(folder=tmp_path, ranks=1))


def test_a_short_run_learns_exports_and_resumes(tmp_path, monkeypatch):
    monkeypatch.setattr("demo.training.train.corpus", lambda count: corpus(min(count, 600)))  # words enough

    def run(steps: int) -> list[dict]:
        options = TrainingOptions(
            folder=tmp_path, steps=steps, vision_steps=2, hidden=96, layers=6, ranks=1, compiled=False,
            background=False, save_minutes=0, shape=Shape(rows=1, pictures=8, answers=120, questions=32), log_every=5,
        )  # fmt: skip
        train(options)
        return [json.loads(line) for line in (tmp_path / "history.jsonl").read_text().splitlines()]

    assert [entry["step"] for entry in run(25)] == list(range(5, 26, 5))
    history = run(50)
    assert [entry["step"] for entry in history] == list(range(5, 51, 5))
    losses = [entry["loss"][0] for entry in history]
    assert losses[-1] < 0.8 * losses[0]
    assert losses[5] < losses[4], "the second run does not go on from what the first one learned"
    names = {path.name for path in (tmp_path / "checkpoint").iterdir()}
    assert names >= {
        "model.safetensors", "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json",
        "chat_template.jinja", "preprocessor_config.json", "helmsight.json", "README.md",
    }  # fmt: skip


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)
