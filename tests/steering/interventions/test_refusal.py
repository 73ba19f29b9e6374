"""The refusal prompt: where it stands in a chat, and that the model reads it there and nowhere else."""

from __future__ import annotations

from typing import Any

import pytest
from PIL import Image

from steering import Icd, RefusalPrompt, Request, RequestError, Sampling
from steering.interventions.refusal import BY_LETTER, REFUSAL_PROMPT
from tests.steering.interventions.settings import check_refused

PICTURE = {"type": "image", "image": Image.new("RGB", (56, 56), "red")}


def user(*content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content[0] if isinstance(content[0], str) else list(content)}


def text(words: str, **more: str) -> dict[str, str]:
    return {"type": "text", "text": words, **more}


def test_the_default_text_is_the_published_prompt() -> None:
    assert REFUSAL_PROMPT == (
        "Answer with the option's letter from the given choices directly. If you don't know the answer, please reply with "
        "'Sorry, I can't help with it'."
    )


@pytest.mark.parametrize(
    ("chat", "options", "expected"),
    [
        ([user("What?")], {}, [user(f"What?\n{REFUSAL_PROMPT}")]),
        ([user(f"What?\n{BY_LETTER}")], {}, [user(f"What?\n{REFUSAL_PROMPT}")]),  # its first sentence stands once
        ([user(f"What?\n{BY_LETTER}")], {"text": "Or pass."}, [user(f"What?\n{BY_LETTER}\nOr pass.")]),
        ([user(f"What?\n{REFUSAL_PROMPT}")], {}, [user(f"What?\n{REFUSAL_PROMPT}")]),
        ([user(PICTURE, text("What?"))], {"text": "Or pass."}, [user(PICTURE, text("What?\nOr pass."))]),
        ([user(text("What?"), PICTURE)], {"text": "Or pass."}, [user(text("What?"), PICTURE, text("Or pass."))]),
        (
            [user(text("What?"), text("It is red.", span="context"))],
            {"text": "Or pass."},
            [user(text("What?"), text("It is red.", span="context"), text("Or pass."))],
        ),
        (
            [user("Hi"), {"role": "assistant", "content": "Hi"}, user("What?")],
            {"text": "Or pass."},
            [user("Hi"), {"role": "assistant", "content": "Hi"}, user("What?\nOr pass.")],
        ),
        (
            [user("What?")],
            {"text": "Or pass.", "place": "system"},
            [{"role": "system", "content": "Or pass."}, user("What?")],
        ),
        (
            [{"role": "system", "content": "Be brief."}, user("What?")],
            {"text": "Or pass.", "place": "system"},
            [{"role": "system", "content": "Be brief.\nOr pass."}, user("What?")],
        ),
    ],
)
def test_the_text_is_put_at_the_end_of_its_message(
    chat: list[Any], options: dict[str, Any], expected: list[Any]
) -> None:
    before = repr(chat)
    assert RefusalPrompt(**options).chat(chat) == expected
    assert repr(chat) == before


@pytest.mark.parametrize("place", ["user", "system"])
def test_the_answer_is_to_the_changed_chat_and_the_baseline_to_the_original(place: Any, make_engine: Any) -> None:
    engine, options = make_engine("qwen2_vl"), RefusalPrompt(place=place)
    chat, sampling = [user(PICTURE, text("What is it?"))], Sampling(max_tokens=5, logprobs=0, ignore_eos=True)
    written, plain, with_both = engine.generate(
        [
            Request(options.chat(chat), sampling),
            Request(chat, sampling),
            Request(chat, sampling, interventions=[options], baseline=True, diagnose=["focus"]),
        ]
    )
    (choice,) = with_both.choices
    assert choice.logprobs == written.choices[0].logprobs != plain.choices[0].logprobs
    assert choice.baseline is not None
    assert choice.baseline.logprobs == plain.choices[0].logprobs
    assert choice.applied == {"refusal_prompt": {"text": REFUSAL_PROMPT, "place": place}}
    assert with_both.prompt_tokens == written.prompt_tokens > plain.prompt_tokens


def test_a_contrast_reads_the_changed_chat(make_engine: Any) -> None:
    engine, sampling = make_engine("qwen2_vl"), Sampling(max_tokens=4, logprobs=0, ignore_eos=True)
    chat = [user(PICTURE, text("What is it?"))]
    together, written = engine.generate(
        [
            Request(chat, sampling, interventions=[Icd(), RefusalPrompt()]),
            Request(RefusalPrompt().chat(chat), sampling, interventions=[Icd()]),
        ]
    )
    first, second = ([(one.token_id, one.logprob) for one in of.choices[0].logprobs] for of in (together, written))
    assert first == [(token, pytest.approx(logprob, abs=1e-4)) for token, logprob in second]


def test_what_is_out_of_range_is_named() -> None:
    check_refused(lambda: RefusalPrompt(text=" "), "refusal_prompt.text")
    check_refused(lambda: RefusalPrompt(text="x" * 1025), "refusal_prompt.text")
    with pytest.raises(RequestError, match=r"refusal_prompt\.place"):
        RefusalPrompt(place="assistant")
