"""The parts of a chat that tokens belong to, by hand and against the plain processors, and refusals."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import steering
from steering import RequestError
from steering.prompt.layout import _grid, build_prompt
from steering.prompt.spans import CONTEXT, FIRST_IMAGE, OTHER, QUESTION, SYSTEM, USER
from tests import families
from tests.families import IMAGE_ONLY
from tests.steering.chats import image, text
from tests.steering.conftest import LoadMLLM, LoadPlain
from tests.steering.plain import Messages
from tests.steering.prompt.reading import EVERY, said, squeezed, user

# --- ids and inputs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("images", [0, 1, 3])
@pytest.mark.parametrize("family", EVERY)
def test_inputs_are_those_of_the_processor(
    family: str, images: int, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    if images == 0 and family in IMAGE_ONLY:
        pytest.skip("takes no chat without an image")
    messages = families.example_messages(family, images, system="Answer with one word.")
    prompt = build_prompt(load_mllm(family), messages)
    expected = load_plain(family).inputs(messages)
    assert prompt.inputs.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(prompt.inputs[name], value), name
    assert torch.equal(prompt.ids, expected["input_ids"][0])


@pytest.mark.parametrize("family", EVERY)
def test_a_string_is_the_same_as_one_text_part(family: str, load_mllm: LoadMLLM) -> None:
    parts = [
        *user(image(0), text("Is it red?")),
        {"role": "assistant", "content": [text("Yes.")]},
        *user(text("Are you sure?")),
    ]
    strings = [parts[0], {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Are you sure?"}]
    one, other = (build_prompt(load_mllm(family), chat) for chat in (parts, strings))
    assert torch.equal(one.ids, other.ids)
    assert torch.equal(one.layout.spans, other.layout.spans)


# --- texts -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", EVERY)
def test_system_image_context_and_question(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    chat = [
        {"role": "system", "content": [text("You are a helpful assistant.")]},
        *user(image(0), text("Text context: the shop is closed on Monday.\nWhat colour is the small ball?")),
    ]
    prompt = build_prompt(mllm, chat)
    assert said(mllm, prompt, SYSTEM) == "You are a helpful assistant."
    assert said(mllm, prompt, CONTEXT) == "Text context: the shop is closed on Monday."
    assert said(mllm, prompt, QUESTION) == "What colour is the small ball?"
    assert prompt.layout.count(USER) == 0
    left = said(mllm, prompt, OTHER)
    assert not any(word in left for word in ("helpful", "context", "shop", "colour", "ball"))
    image_tokens = (prompt.ids == mllm.image_token_id).nonzero()[:, 0]
    assert torch.equal(prompt.layout.columns(FIRST_IMAGE), image_tokens)
    assert torch.equal(prompt.layout.images[0].columns, image_tokens)


@pytest.mark.parametrize("family", EVERY)
def test_texts_before_between_and_after_images(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    chat = user(text("Look at this."), image(0), text("And at this."), image(1), image(2), text("Which is larger?"))
    prompt = build_prompt(mllm, chat)
    assert said(mllm, prompt, QUESTION) == "Which is larger?"
    assert squeezed(said(mllm, prompt, USER)) == "Lookatthis.Andatthis."
    assert [prompt.layout.count(FIRST_IMAGE + i) > 0 for i in range(4)] == [True, True, True, False]


@pytest.mark.parametrize("family", EVERY)
def test_all_text_is_the_question_where_none_follows_the_image(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    for parts in (
        [text("What is this?"), image(0)],
        [text("What is this?"), image(0), text("Text context: a cube.")],
        [text("What is this?"), image(0), text("a cube", span="context")],
    ):
        prompt = build_prompt(mllm, user(*parts))
        assert said(mllm, prompt, QUESTION) == "What is this?"
        assert prompt.layout.count(USER) == 0


@pytest.mark.parametrize("family", EVERY)
def test_a_part_marked_as_context_is_context_as_a_whole(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    marked = text("The sign says closed.\nIt is on the door.", span="context")
    prompt = build_prompt(mllm, user(image(0), marked, text("Is it open?")))
    assert squeezed(said(mllm, prompt, CONTEXT)) == "Thesignsaysclosed.Itisonthedoor."
    assert said(mllm, prompt, QUESTION) == "Is it open?"


def test_a_context_line_may_stand_anywhere_but_must_begin_its_line(load_mllm: LoadMLLM) -> None:
    mllm = load_mllm("qwen2_vl")
    content = "First.\nText context: second.\nThe Text context: third."
    prompt = build_prompt(mllm, user(text(content)))
    assert said(mllm, prompt, CONTEXT) == "Text context: second."
    # The line break belongs to neither side.
    assert mllm.tokenizer.decode(prompt.ids[prompt.layout.columns(CONTEXT)]) == "Text context: second."
    assert squeezed(said(mllm, prompt, QUESTION)) == "First.TheTextcontext:third."


@pytest.mark.parametrize("family", EVERY)
def test_earlier_turns_are_not_the_question(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    chat = [
        *user(image(0), text("What is next to the table?")),
        {"role": "assistant", "content": [text("The small cat.")]},
        *user(text("How many people are there?")),
    ]
    prompt = build_prompt(mllm, chat)
    assert said(mllm, prompt, QUESTION) == "How many people are there?"
    assert said(mllm, prompt, USER) == "What is next to the table?"
    assert "The small cat." in said(mllm, prompt, OTHER)


@pytest.mark.parametrize("family", EVERY)
def test_texts_that_look_like_the_template_or_are_odd(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    for content in ("user", "assistant", "User:", "system", "model\n", "\n\nWhy?\n", "a", "Größe, 日本, 🙂?"):
        chat = [{"role": "system", "content": [text(content)]}, *user(image(0), text(content))]
        prompt = build_prompt(mllm, chat)
        assert said(mllm, prompt, SYSTEM) == content.strip()
        assert said(mllm, prompt, QUESTION) == content.strip()


@pytest.mark.parametrize("family", EVERY)
def test_a_message_without_text_has_no_question(family: str, load_mllm: LoadMLLM) -> None:
    for parts in ([image(0)], [image(0), text("")], [image(0), text("  ")]):
        assert build_prompt(load_mllm(family), user(*parts)).layout.count(QUESTION) <= 1


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "messages", [[], [{"role": "system", "content": "Hi."}], [{"role": "assistant", "content": "x"}]]
)
def test_a_chat_without_a_user_is_refused(messages: Messages, load_mllm: LoadMLLM) -> None:
    with pytest.raises(RequestError, match="user") as refused:
        build_prompt(load_mllm("qwen2_vl"), messages)
    assert refused.value.param == "messages"


def test_what_the_template_refuses_is_refused_in_its_words(load_mllm: LoadMLLM) -> None:
    with pytest.raises(RequestError, match="roles must alternate") as refused:
        build_prompt(load_mllm("gemma3"), [*user(text("a")), *user(text("b"))])
    assert refused.value.param == "messages"


@pytest.mark.parametrize("family", IMAGE_ONLY)
def test_what_the_processor_refuses_is_refused_in_its_words(family: str, load_mllm: LoadMLLM) -> None:
    with pytest.raises(RequestError, match="images"):
        build_prompt(load_mllm(family), user(text("a")))


@pytest.mark.parametrize("family", EVERY)
def test_which_models_need_images_is_known(family: str, load_mllm: LoadMLLM) -> None:
    assert load_mllm(family).needs_images == (family in IMAGE_ONLY)


def test_a_template_that_leaves_out_a_text_is_refused(load_mllm: LoadMLLM) -> None:
    with pytest.raises(RequestError, match=r"leaves out the text 'two'"):
        build_prompt(
            load_mllm("gemma3"),
            [{"role": "system", "content": [text("one"), text("two")]}, *user(text("Why?"))],
        )


def test_a_template_that_changes_texts_is_refused(load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    mllm = load_mllm("qwen2_vl")
    shouting = (
        "{% for m in messages %}{{ (m.content if m.content is string else m.content[0].text) | upper }}{% endfor %}"
    )
    monkeypatch.setattr(mllm.processor, "chat_template", shouting)
    with pytest.raises(RequestError, match="changes the text"):
        build_prompt(mllm, user(text("Why?")))


@pytest.mark.parametrize(
    ("pixels", "sizes", "grid"),
    [
        ((1, 3, 28, 28), None, (2, 2)),
        ((1, 3, 14, 56), None, (1, 4)),
        ((1, 3, 56, 56), [[14, 56]], (1, 4)),  # padded to the size of another one
        ((1, 3, 28, 56), None, None),
        ((3, 4, 588), None, None),  # patches
    ],
)
def test_the_grid_of_an_image_has_its_proportions(
    pixels: tuple[int, ...], sizes: list[list[int]] | None, grid: tuple[int, int] | None, load_mllm: LoadMLLM
) -> None:
    inputs = {"pixel_values": torch.zeros(pixels)} | ({} if sizes is None else {"image_sizes": torch.tensor(sizes)})
    assert _grid(load_mllm("llava"), inputs, 0, 1, torch.arange(4)) == grid


def test_a_token_that_ends_a_line_belongs_to_that_line() -> None:
    """The embedded model's tokenizer has a token for a full stop with the line break behind it."""
    mllm = steering.load(Path(__file__).parents[3] / "demo" / "checkpoint", device="cpu")
    context, question = "Text context: The green object is a heart.", "What is the green object?"
    prompt = build_prompt(mllm, [{"role": "user", "content": f"{context}\n{question}"}])
    assert said(mllm, prompt, CONTEXT) == context
    assert said(mllm, prompt, QUESTION) == question
