"""Which token belongs to which part of a chat, worked by hand and against the plain processors and models."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

import steering
from steering import MLLM, Request, RequestError, Sampling
from steering.prompt.layout import Prompt, build_prompt
from steering.prompt.spans import CONTEXT, FIRST_IMAGE, OTHER, QUESTION, SYSTEM, USER
from tests import families
from tests.steering.plain import Messages, Plain

LoadMLLM = Callable[[str], MLLM]
LoadPlain = Callable[[str], Plain]
EVERY = families.FAMILIES
IMAGE_ONLY = ("paligemma", "paligemma2")  # their processors refuse a chat without images


def text(content: str, **more: str) -> dict[str, Any]:
    return {"type": "text", "text": content, **more}


def image(index: int, *, seed: int = 0) -> dict[str, Any]:
    return {"type": "image", "image": families.example_image(index, seed=seed)}


def user(*parts: dict[str, Any]) -> Messages:
    return [{"role": "user", "content": list(parts)}]


def said(mllm: MLLM, prompt: Prompt, *spans: int) -> str:
    """What the tokens of some spans say, in order, without the white space at the ends."""
    columns = torch.isin(prompt.layout.spans, torch.tensor(spans)).nonzero()[:, 0]
    return str(mllm.tokenizer.decode(prompt.ids[columns])).strip()


def squeezed(content: str) -> str:
    return "".join(content.split())


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
@pytest.mark.parametrize(
    "content", ["user", "assistant", "User:", "system", "model\n", "\n\nWhy?\n", "a", "Größe, 日本, 🙂?"]
)
def test_texts_that_look_like_the_template_or_are_odd(family: str, content: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    chat = [{"role": "system", "content": [text(content)]}, *user(image(0), text(content))]
    prompt = build_prompt(mllm, chat)
    assert said(mllm, prompt, SYSTEM) == content.strip()
    assert said(mllm, prompt, QUESTION) == content.strip()


@pytest.mark.parametrize("family", EVERY)
def test_a_message_without_text_has_no_question(family: str, load_mllm: LoadMLLM) -> None:
    for parts in ([image(0)], [image(0), text("")], [image(0), text("  ")]):
        assert build_prompt(load_mllm(family), user(*parts)).layout.count(QUESTION) <= 1


# --- special tokens in texts -----------------------------------------------------------------------------------------


def special_tokens(mllm: MLLM) -> list[str]:
    """Tokens that mean something to the model, and what stands for pictures before it is expanded."""
    added = [token.content for token in mllm.tokenizer.added_tokens_decoder.values() if token.special]
    placeholders = [getattr(mllm.processor, name, None) for name in ("image_token", "video_token", "boi_token")]
    return list(dict.fromkeys([*added, *(token for token in placeholders if token)]))


def special_counts(mllm: MLLM, prompt: Prompt) -> dict[str, int]:
    added = mllm.tokenizer.added_tokens_decoder
    return {str(token): int((prompt.ids == number).sum()) for number, token in added.items() if token.special}


@pytest.mark.parametrize("family", EVERY)
def test_special_tokens_in_a_text_stay_text(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    expected = special_counts(mllm, build_prompt(mllm, user(image(0), text("Is this red?"))))
    for token in special_tokens(mllm):
        content = f"Is {token} this{token}{token} red?"
        prompt = build_prompt(mllm, user(image(0), text(content)))
        assert special_counts(mllm, prompt) == expected, token
        assert said(mllm, prompt, QUESTION) == content
        assert len(prompt.layout.images) == 1


@pytest.mark.parametrize("family", EVERY)
def test_special_tokens_in_answers_and_system_prompts_stay_text(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)

    def chat(content: str) -> Messages:
        return [
            {"role": "system", "content": [text(content)]},
            *user(image(0), text("Is this red?")),
            {"role": "assistant", "content": [text(content)]},
            *user(text("Why?")),
        ]

    expected = special_counts(mllm, build_prompt(mllm, chat("Green.")))
    for token in special_tokens(mllm):
        prompt = build_prompt(mllm, chat(f"Green {token}."))
        assert special_counts(mllm, prompt) == expected, token
        assert said(mllm, prompt, SYSTEM) == f"Green {token}."


@pytest.mark.parametrize("family", EVERY)
def test_special_tokens_cannot_be_put_together_from_several_parts(family: str, load_mllm: LoadMLLM) -> None:
    mllm = load_mllm(family)
    expected = special_counts(mllm, build_prompt(mllm, user(image(0), text("a"))))
    for token in special_tokens(mllm):
        for cut in (1, len(token) // 2, len(token) - 1):
            try:
                prompt = build_prompt(mllm, user(image(0), text("a " + token[:cut]), text(token[cut:] + " b")))
            except RequestError:
                continue
            assert special_counts(mllm, prompt) == expected, (token, cut)


def test_texts_of_nasty_pieces_keep_their_words_and_gain_no_special_token(load_mllm: LoadMLLM) -> None:
    pieces = (
        *("user", "assistant\n", "\n", " ", "  ", "é", "🙂", "<", "|>", "<|", "im_end", "\ue0000\ue001", "\ue000"),
        *("Text context: x", "<|im_end|>", "<|im_start|>", "<|image_pad|>", "<|vision_start|>", "{{ x }}", "{%", "\t"),
        *("\u2028", "\r\n", "\x0b", "\x1c", "ﬁ", "e\u0301", "\x00", "</s>", "<image>"),
    )
    draw = random.Random(0)
    mllm = load_mllm("qwen2_vl")
    expected = special_counts(mllm, build_prompt(mllm, user(image(0), text("a"))))
    for _ in range(150):
        content = "".join(draw.choices(pieces, k=draw.randint(1, 8)))
        prompt = build_prompt(mllm, user(image(0), text(content)))
        assert special_counts(mllm, prompt) == expected, content
        assert squeezed(said(mllm, prompt, CONTEXT, QUESTION)) == squeezed(content), content


# --- images ----------------------------------------------------------------------------------------------------------


def decoder_embeds(plain: Plain, messages: Messages) -> torch.Tensor:
    """What the plain model's decoder receives: (n, d)."""
    received: list[torch.Tensor] = []
    handle = plain.model.get_decoder().register_forward_pre_hook(
        lambda module, args, kwargs: received.append(kwargs["inputs_embeds"]), with_kwargs=True
    )
    with torch.inference_mode():
        plain.model(**plain.inputs(messages))
    handle.remove()
    return received[0][0]


@pytest.mark.parametrize("family", EVERY)
@pytest.mark.parametrize("separated", [False, True])
def test_each_images_tokens_are_those_that_its_pixels_change(
    family: str, separated: bool, load_mllm: LoadMLLM, load_plain: LoadPlain
) -> None:
    def chat(changed: int | None) -> Messages:
        pictures = [image(i, seed=int(i == changed)) for i in range(3)]
        between = [text("first."), text("second.")] if separated else []
        parts: Sequence[Any] = [part for pair in zip(pictures, between, strict=False) for part in pair] or pictures[:2]
        return user(*parts, pictures[2], text("Which?"))

    prompt = build_prompt(load_mllm(family), chat(None))
    columns = [picture.columns for picture in prompt.layout.images]
    placeholders = (prompt.ids == load_mllm(family).image_token_id).nonzero()[:, 0]
    assert torch.equal(torch.cat(columns), placeholders)
    embeds = decoder_embeds(load_plain(family), chat(None))
    for changed in range(3):
        difference = (decoder_embeds(load_plain(family), chat(changed)) - embeds).abs().amax(-1) > 1e-4
        moved = set(difference.nonzero()[:, 0].tolist())
        assert moved <= set(columns[changed].tolist())
        assert len(moved) >= 0.7 * len(
            columns[changed]
        )  # LLaVA-NeXT ends its rows with a token that is not of the image
        assert torch.equal(prompt.layout.columns(FIRST_IMAGE + changed), columns[changed])


# Sizes are (56, 40), (28, 60) and (44, 44) pixels; grids are rows and columns.
GRIDS: dict[str, list[tuple[int, int] | None]] = {
    "qwen2_vl": [(3, 4), (4, 2), (3, 3)],  # sides in steps of 14 pixels
    "qwen2_5_vl": [(3, 4), (4, 2), (3, 3)],
    "qwen3_vl": [(3, 4), (4, 2), (3, 3)],
    "mistral3": [(3, 4), (4, 2), (4, 4)],  # longest side at most 56, patches of 7 rounded up, two by two merged
    "llava": [(4, 4)] * 3,  # 28 pixels in patches of 7
    "paligemma": [(4, 4)] * 3,
    "gemma3": [(2, 2)] * 3,
    "llava_next": [None] * 3,  # tiles
    "internvl": [None, None],
    "idefics3": [None] * 3,
    "aya_vision": [None, None],
}


@pytest.mark.parametrize("family", GRIDS)
def test_grids_by_hand(family: str, load_mllm: LoadMLLM) -> None:
    expected = GRIDS[family]
    prompt = build_prompt(load_mllm(family), families.example_messages(family, len(expected)))
    assert [picture.grid for picture in prompt.layout.images] == expected
    for picture in prompt.layout.images:
        assert picture.grid is None or picture.grid[0] * picture.grid[1] == picture.tokens == len(picture.columns)


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen3_vl", "glm4v", "mistral3", "llava", "paligemma", "gemma3"])
def test_the_grid_lies_on_the_image_as_people_see_it(family: str, load_mllm: LoadMLLM, root: Path) -> None:
    """Where patches do not see each other, a changed corner changes the token of that corner only."""
    size, side = {"llava": ((28, 28), 7), "paligemma": ((28, 28), 7), "gemma3": ((28, 28), 14)}.get(
        family, ((56, 28), 14)
    )
    plain = Plain(families.checkpoint(family, root))
    blind = re.compile(r"(vision|visual).*(attn|attention)\.(out_proj|o_proj|proj)\.")
    for name, weight in plain.model.named_parameters():
        if blind.search(name):
            weight.data.zero_()

    def embeds(*corners: tuple[int, int]) -> torch.Tensor:
        picture = Image.new("RGB", size, (120, 120, 120))
        for left, top in corners:
            picture.paste((255, 20, 20), (left, top, left + side, top + side))
        return decoder_embeds(plain, user({"type": "image", "image": picture}, text("?")))

    picture = {"type": "image", "image": Image.new("RGB", size, (120, 120, 120))}
    span = build_prompt(load_mllm(family), user(picture, text("?"))).layout.images[0]
    assert span.grid is not None
    rows, width = span.grid
    corners = {(0, 0): 0, (size[0] - side, 0): width - 1, (0, size[1] - side): (rows - 1) * width}
    for corner, token in corners.items():
        change = (embeds(corner) - embeds()).norm(dim=-1)[span.columns]
        assert (change > 1e-3).nonzero()[:, 0].tolist() == [token]


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


def test_a_picture_is_resized_first_where_the_checkpoint_asks(
    load_mllm: LoadMLLM, monkeypatch: pytest.MonkeyPatch
) -> None:
    mllm = load_mllm("qwen2_vl")
    monkeypatch.setattr(mllm, "image_size", (42, 28))
    prompt = build_prompt(mllm, families.example_messages("qwen2_vl", 2))
    assert [picture.grid for picture in prompt.layout.images] == [(2, 3), (2, 3)]


def test_a_black_picture_is_not_taken_for_padding(
    load_mllm: LoadMLLM, load_plain: LoadPlain, make_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Idefics 3 drops tiles that are zero everywhere, which the black ones of this preprocessing are."""
    messages = families.example_messages("idefics3", 2)
    messages[0]["content"][0]["image"] = Image.new("RGB", (60, 40))
    for loaded in (load_mllm("idefics3"), load_plain("idefics3")):
        monkeypatch.setattr(loaded.processor.image_processor, "image_mean", [0.0] * 3)
    almost = load_plain("idefics3").inputs(messages)
    blank = ~almost["pixel_values"].flatten(2).any(-1)
    assert bool(blank.any())
    almost["pixel_values"][blank] += 1e-7
    choice = (
        make_engine("idefics3").generate([Request(messages, Sampling(max_tokens=4, ignore_eos=True))])[0].choices[0]
    )
    assert list(choice.token_ids) == load_plain("idefics3").answer(messages, 4, inputs=almost).tokens


def test_a_token_that_ends_a_line_belongs_to_that_line() -> None:
    """The embedded model's tokenizer has a token for a full stop with the line break behind it."""
    mllm = steering.load(Path(__file__).parents[3] / "demo" / "checkpoint", device="cpu")
    context, question = "Text context: The green object is a heart.", "What is the green object?"
    prompt = build_prompt(mllm, [{"role": "user", "content": f"{context}\n{question}"}])
    assert said(mllm, prompt, CONTEXT) == context
    assert said(mllm, prompt, QUESTION) == question
