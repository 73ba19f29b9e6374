"""`steering.applied` on a model that transformers loaded: the numbers of a server, and a model that stays as it was."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load as load_tensors
from transformers import AutoModelForImageTextToText, AutoProcessor

import steering
from steering.interventions.published.opera import Opera
from tests import families
from tests.steering.conftest import MakeEngine
from tests.steering.interventions.published.twins import nearly
from tests.steering.interventions.pushes import make_vector
from tests.steering.plain import Messages

TOKENS = 6
SAMPLING = steering.Sampling(max_tokens=TOKENS, ignore_eos=True)


def load(family: str, root: Path, attention: str = "sdpa") -> tuple[Any, Any]:
    """Return a model and a processor as a notebook has them."""
    folder = families.checkpoint(family, root)
    model = AutoModelForImageTextToText.from_pretrained(folder, attn_implementation=attention).eval()
    model.generation_config.eos_token_id = None
    return model, steering.load(folder, device="cpu").processor


def rendered(processor: Any, messages: Messages | list[Messages]) -> Mapping[str, torch.Tensor]:
    options = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(messages, **options)
    return {name: value for name, value in inputs.items() if isinstance(value, torch.Tensor)}


def served(engine: steering.Engine, messages: Messages, *asked: Any, **more: Any) -> steering.Choice:
    request = steering.Request(messages, more.pop("sampling", SAMPLING), asked, **more)
    return engine.generate([steering.decide(engine, request)])[0].choices[0]


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "gemma3", "gemma4", "ernie4_5_vl_moe"])
@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({}, ()),
        ({"contrast": "vcd"}, (steering.Vcd(),)),
        ({"contrast": {"kind": "icd", "place": "question", "alpha": 2}}, (steering.Icd(place="question", alpha=2.0),)),
        ({"contrast": "pai", "sage": {"see": {"alpha": 0.4}, "think": False, "generate": False}},
         (steering.Pai(), steering.See(alpha=0.4))),
        ({"sage": {"think": {"threshold": 0.01}}},
         (steering.See(), steering.Think(threshold=0.01), steering.Generate())),
        ({"opera": {"candidates": 2, "scale": 100}}, (Opera(candidates=2, scale=100.0),)),
    ],
)  # fmt: skip
def test_a_notebooks_answers_are_those_of_a_server(
    family: str, options: dict[str, Any], asked: tuple[Any, ...], root: Path, make_engine: MakeEngine
) -> None:
    if family != "qwen2_vl" and ("opera" in options or (family not in ("llava", "gemma3") and options)):
        pytest.skip("one family shows it")
    (model, processor), messages = load(family, root), families.example_messages(family, 1)
    expected = served(make_engine(family), messages, *asked, diagnose=["focus"], states=True)
    with steering.applied(model, processor, {**options, "diagnostics": ["focus"], "states": True}) as run:
        inputs = rendered(processor, messages)
        ids = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    prompt = inputs["input_ids"].shape[1]
    assert ids[0, :prompt].tolist() == inputs["input_ids"][0].tolist()
    assert tuple(ids[0, prompt:].tolist()) == expected.token_ids
    (choice,) = run.choices
    assert nearly(choice.applied) == nearly(expected.applied)
    assert nearly(run.diagnostics[0]) == nearly(expected.diagnostics)
    assert choice.states is not None
    assert expected.states is not None
    torch.testing.assert_close(choice.states, expected.states, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(choice.next_logprobs, expected.next_logprobs, rtol=1e-5, atol=1e-5)


def test_steering_is_given_as_a_field_or_as_it_is(root: Path, make_engine: MakeEngine) -> None:
    (model, processor), messages = load("qwen2_vl", root), families.example_messages("qwen2_vl", 1)
    engine = make_engine("qwen2_vl")
    vector = make_vector(engine.mllm)
    steer = steering.Steer.to(vector, "text", 3.0)
    expected = served(engine, messages, steer).token_ids
    assert expected != served(engine, messages).token_ids
    for options in ({"steering": {"vector": vector, "toward": "text", "strength": 3.0}}, {"steering": steer}, steer):
        with steering.applied(model, processor, options):
            ids = model.generate(**rendered(processor, messages), max_new_tokens=TOKENS)
        assert tuple(ids[0, -TOKENS:].tolist()) == expected


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_the_model_stays_as_it_was_and_shares_its_weights(attention: str, root: Path) -> None:
    (model, processor), messages = load("qwen2_vl", root, attention), families.example_messages("qwen2_vl", 1)
    inputs = rendered(processor, messages)
    before = model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    kinds = {name: (type(module), dict(vars(module))) for name, module in model.named_modules()}
    kind = type(processor), type(processor.image_processor)
    with steering.applied(model, processor, {"contrast": "vcd"}) as run:
        own = {value.data_ptr() for value in model.state_dict().values()}
        assert {value.data_ptr() for value in run.engine.mllm.model.state_dict().values()} <= own
        model.generate(**rendered(processor, messages), max_new_tokens=TOKENS)
    assert "generate" not in vars(model)
    assert (type(processor), type(processor.image_processor)) == kind
    assert model.config._attn_implementation == attention
    for name, module in model.named_modules():
        assert type(module) is kinds[name][0]
        assert vars(module).keys() == kinds[name][1].keys()
    for name, value in model.state_dict().items():
        assert torch.equal(value, weights[name])
    assert torch.equal(model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False), before)


def test_a_block_sees_weights_that_were_changed_before_it(root: Path) -> None:
    (model, processor), messages = load("qwen2_vl", root), families.example_messages("qwen2_vl", 1)
    answers = []
    for factor in (1.0, 3.0, 1 / 3):
        model.get_output_embeddings().weight.data *= factor
        model.get_decoder().layers[1].mlp.down_proj.weight.data *= factor
        with steering.applied(model, processor, {"states": True}) as run:
            inputs = rendered(processor, messages)
            ids = model.generate(**inputs, max_new_tokens=TOKENS)
        answers.append(run.choices[0].next_logprobs)
        assert torch.equal(ids, model.generate(**inputs, max_new_tokens=TOKENS, do_sample=False))
    first, second, third = answers
    assert first is not None
    assert not torch.allclose(first, second, atol=1e-2)
    torch.testing.assert_close(first, third, rtol=0, atol=1e-4)


def test_pictures_may_come_beside_a_rendered_text_and_rows_in_a_batch(root: Path, make_engine: MakeEngine) -> None:
    (model, processor), engine = load("qwen2_vl", root), make_engine("qwen2_vl")
    chats = [families.example_messages("qwen2_vl", images, text="How many?" * (1 + images)) for images in (2, 1)]
    expected = [served(engine, chat, steering.Vcd()).token_ids for chat in chats]
    processor.tokenizer.padding_side = "left"
    processor.tokenizer.pad_token = processor.tokenizer.pad_token or processor.tokenizer.eos_token
    bare = [
        [{**message, "content": [{"type": "image"} if part["type"] == "image" else part for part in message["content"]]}
         for message in chat]
        for chat in chats
    ]  # fmt: skip
    pictures = [families.images_of(chat) for chat in chats]
    with steering.applied(model, processor, {"contrast": "vcd"}) as run:
        texts = processor.apply_chat_template(bare, tokenize=False, add_generation_prompt=True)
        inputs = processor(text=texts, images=pictures, padding=True, return_tensors="pt")
        ids = model.generate(**inputs, max_new_tokens=TOKENS)
    assert [tuple(row[-TOKENS:].tolist()) for row in ids] == expected
    assert [choice.token_ids for choice in run.choices] == expected


def test_hidden_states_are_kept(root: Path, make_engine: MakeEngine) -> None:
    (model, processor), messages = load("qwen2_vl", root), families.example_messages("qwen2_vl", 1)
    chosen = {"layers": [0, 2], "positions": "generated"}
    diagnose = steering.Diagnose(["states"], states=chosen)
    expected = served(make_engine("qwen2_vl"), messages, steering.See(alpha=0.3), diagnose=diagnose)
    options = {"sage": {"see": {"alpha": 0.3}, "think": False, "generate": False}}
    with steering.applied(
        model, processor, {**options, "diagnostics": {"include": ["states"], "states": chosen}}
    ) as run:
        model.generate(**rendered(processor, messages), max_new_tokens=TOKENS)
    (ours,), (theirs,) = (
        load_tensors(base64.b64decode(report["states"]["safetensors"])).values()
        for report in (run.diagnostics[0], expected.diagnostics)
        if report is not None
    )
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-5)


def test_prompts_that_differ_in_their_pictures_alone_are_told_apart(root: Path, make_engine: MakeEngine) -> None:
    (model, processor), engine = load("qwen2_vl", root), make_engine("qwen2_vl")
    chats = [families.example_messages("qwen2_vl", 1, seed=seed) for seed in range(3)]
    expected = [served(engine, chat, steering.Vcd()).applied for chat in chats]
    with steering.applied(model, processor, {"contrast": "vcd", "states": True}) as run:
        inputs = [rendered(processor, chat) for chat in chats]
        assert len({tuple(given["input_ids"][0].tolist()) for given in inputs}) == 1
        states = []
        for given in inputs:
            model.generate(**given, max_new_tokens=TOKENS)
            states.append(run.choices[0].states)
            assert nearly(run.applied[0]) == nearly(expected[len(states) - 1])
    for state, chat in zip(states, chats, strict=True):
        torch.testing.assert_close(state, served(engine, chat, states=True).states, rtol=0, atol=1e-5)


def test_sampling_repeats_by_torchs_seed(root: Path) -> None:
    (model, processor), messages = load("qwen2_vl", root), families.example_messages("qwen2_vl", 1)
    with steering.applied(model, processor, {"sage": True}):
        inputs = rendered(processor, messages)
        drawn = []
        for seed in (1, 1, 2):
            torch.manual_seed(seed)
            out = model.generate(
                **inputs, max_new_tokens=TOKENS, do_sample=True, temperature=2.0, num_return_sequences=3,
                return_dict_in_generate=True,
            )  # fmt: skip
            drawn.append(out.sequences)
    assert drawn[0].shape[0] == 3
    assert len({tuple(row.tolist()) for row in drawn[0]}) > 1
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


@pytest.mark.parametrize(
    ("options", "param"),
    [
        ({"contrast": "nothing"}, "contrast"),
        ({"contrast": {"kind": "vcd", "alpha": -1}}, "contrast.alpha"),
        ({"unknown": True}, "unknown"),
        ({"steering": {"vector": "name"}}, "steering"),
        ({"steering": {"direction": "vision"}}, "steering.direction"),
        ({"diagnostics": ["nothing"]}, "diagnostics.include"),
    ],
)
def test_wrong_options_are_named_before_anything_is_made(options: dict[str, Any], param: str, root: Path) -> None:
    model, processor = load("qwen2_vl", root)
    with pytest.raises(steering.RequestError) as refused, steering.applied(model, processor, options):
        pass
    assert str(refused.value.param).startswith(param)
    assert "generate" not in vars(model)


@pytest.mark.parametrize(
    ("more", "param"),
    [
        ({"num_beams": 2}, "num_beams"),
        ({"no_repeat_ngram_size": 2}, "no_repeat_ngram_size"),
        ({"output_scores": True}, "output_scores"),
        ({"logits_processor": [lambda ids, scores: scores]}, "logits_processor"),
        ({"eos_token_id": 5}, "eos_token_id"),
        ({"temperature": 1e9, "do_sample": True}, "temperature"),
        ({"pixel_values": torch.zeros(4, 4)}, "pixel_values"),
        ({"image_masks": torch.zeros(4, 4)}, "image_masks"),
        ({"input_ids": torch.tensor([[5, 6, 7]])}, "input_ids"),
    ],
)
def test_what_generate_cannot_do_here_is_refused(more: dict[str, Any], param: str, root: Path) -> None:
    (model, processor), messages = load("qwen2_vl", root), families.example_messages("qwen2_vl", 1)
    with steering.applied(model, processor, {"contrast": "vcd"}):
        inputs = {**rendered(processor, messages), "max_new_tokens": 2, **more}
        if param == "input_ids":
            inputs.pop("attention_mask")
        with pytest.raises(steering.RequestError) as refused:
            model.generate(**inputs)
    assert refused.value.param == param


def test_models_that_cannot_be_shared_are_refused(root: Path) -> None:
    model, processor = load("qwen2_vl", root)
    with pytest.raises(steering.UnsupportedModel), steering.applied(torch.nn.Linear(2, 2), processor, {}):
        pass
    processor.chat_template = processor.tokenizer.chat_template = None
    with pytest.raises(steering.UnsupportedModel, match="chat template"), steering.applied(model, processor, {}):
        pass


def test_the_processor_of_transformers_is_watched_alone(root: Path) -> None:
    """One that was loaded by AutoProcessor, as far as its parts are installed."""
    folder, messages = families.checkpoint("llava", root), families.example_messages("llava", 1)
    model, _ = load("llava", root)
    processor = AutoProcessor.from_pretrained(folder)
    other = AutoProcessor.from_pretrained(folder)
    with steering.applied(model, processor, {}):
        inputs = rendered(other, messages)
        with pytest.raises(steering.RequestError, match="within the block"):
            model.generate(**inputs, max_new_tokens=2)
        model.generate(**rendered(processor, messages), max_new_tokens=2)
