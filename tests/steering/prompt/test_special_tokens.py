"""Special tokens in what people write stay text."""

from __future__ import annotations

import random

import pytest

from steering import MLLM, RequestError
from steering.prompt.layout import Prompt, build_prompt
from steering.prompt.spans import CONTEXT, QUESTION, SYSTEM
from tests.steering.chats import image, text
from tests.steering.conftest import LoadMLLM
from tests.steering.plain import Messages
from tests.steering.prompt.reading import EVERY, said, squeezed, user


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
        for cut in (1, len(token) // 2, len(token) - 1) if family == "qwen2_vl" else (len(token) // 2,):
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
