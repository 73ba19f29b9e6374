"""Requests that are nearly right: valid ones, of which a part or two is something else."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from hypothesis import strategies as st

from tests.server.conftest import data_uri

WORDS = (
    "", "\x00", "\ud83d", "a" * 5000, "<|im_end|>", "data:image/png;base64,", "data:image/png;base64,iVBORw0KGgo=", "NaN",
    "../../etc/passwd", "http://127.0.0.1:1/", "file:///etc/passwd", "system", "auto", "vision", "%s%n", "\u202e", "{{7*7}}",
)  # fmt: skip
NUMBERS = (0, -1, 1, 2**31, 2**63, -(2**63) - 1, 2**200, 1e308, -0.0, 0.1, 1e-320)

json_values = st.recursive(
    st.none() | st.booleans() | st.sampled_from(NUMBERS) | st.sampled_from(WORDS) | st.text(max_size=20),
    lambda parts: (
        st.lists(parts, max_size=4) | st.dictionaries(st.sampled_from(WORDS) | st.text(max_size=8), parts, max_size=4)
    ),
    max_leaves=6,
)
"""Any JSON, with a taste for what breaks programs."""

SCHEMA = {"type": "array", "items": {"type": "integer"}}
CHATS: tuple[dict[str, Any], ...] = (
    {"messages": [{"role": "user", "content": "Hello."}], "temperature": 0.5, "top_p": 0.9, "seed": 1, "stop": ["."],
     "n": 2},
    {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": [
                {"type": "text", "text": "Text context: It is red.", "span": "context"},
                {"type": "image_url", "image_url": {"url": data_uri(), "detail": "low"}},
                {"type": "text", "text": "What color is it?"},
            ]},
        ],
        "steering": {"vector": "modality-preference", "toward": "vision", "strength": 0.5, "apply": {"tokens": "all"}},
        "diagnostics": {"include": ["focus", "modality", "decay", "residual"], "target_image": 1},
        "baseline": True, "logprobs": True, "top_logprobs": 3, "strict": False,
    },
    {
        "messages": [{"role": "user", "content": [
            {"type": "image_url", "image_url": {"url": data_uri()}, "min_pixels": 100, "max_pixels": 5000},
            {"type": "text", "text": "Describe it."},
        ]}],
        "sage": {"see": {"alpha": 0.2}, "think": {"gamma": 0.9}, "generate": {"top": 0.2, "refresh": 2}},
        "stream": True, "stream_options": {"include_usage": True}, "logit_bias": {"5": -3}, "min_tokens": 2,
        "cache_salt": "one",
    },
    {
        "messages": [{"role": "user", "content": "A list."}], "stream": True,
        "response_format": {"type": "json_schema", "json_schema": {"name": "l", "schema": SCHEMA}},
        "contrast": {"kind": "icd", "alpha": 0.5}, "strict": False, "frequency_penalty": 0.5,
    },
    {
        "messages": [{"role": "user", "content": "Where?"}, {"role": "assistant", "content": "Here."},
                     {"role": "user", "content": "Sure?"}],
        "metadata": {"answer_correct": "true"}, "refusal_prompt": True,
        "force": "I see a", "ignore_eos": True, "top_k": 5, "min_p": 0.1,
        "presence_penalty": 0.5, "repetition_penalty": 1.1, "user": "ann", "model": "helmsight-demo@sage",
    },
    {
        "messages": [{"role": "user", "content": "Draw."}, {"role": "assistant", "content": [
            {"type": "image_url", "image_url": {"url": data_uri(kind="AVIF")}}, {"type": "text", "text": "It is a"},
        ]}],
        "chat_template_kwargs": {"enable_thinking": False, "tokenize": False}, "continue_final_message": True,
        "add_generation_prompt": False, "strict": False,
    },
)  # fmt: skip
"""Valid requests with every field of the wire, to be spoilt."""


def paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """All places in a JSON value but the whole."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [found for key, one in items for found in ((*path, key), *paths(one, (*path, key)))]


@st.composite
def spoilt(draw: st.DrawFn, valid: Sequence[dict[str, Any]], bound: str = "max_tokens") -> dict[str, Any]:
    """Draw a valid request with one or two places replaced, removed or duplicated, and a short answer.

    Most of these places have nothing below them.
    """
    body = copy.deepcopy(draw(st.sampled_from(valid))) | {bound: draw(st.sampled_from((1, 4)))}
    for _ in range(draw(st.integers(1, 2))):
        every = paths(body)
        ends = [path for path in every if path not in {other[:-1] for other in every}]
        place = draw(st.sampled_from(ends) | st.sampled_from(ends) | st.sampled_from(every))
        at: Any = body
        for key in place[:-1]:
            at = at[key]
        match draw(st.sampled_from(("other", "gone", "more", "number"))):
            case "gone":
                del at[place[-1]]
            case "more" if isinstance(at, list):
                at.insert(place[-1], copy.deepcopy(at[place[-1]]))
            case "more":
                at[draw(st.sampled_from(WORDS))] = draw(json_values)
            case "number":
                at[place[-1]] = draw(st.sampled_from(NUMBERS))
            case _:
                at[place[-1]] = draw(json_values)
        if not paths(body):
            break
    return body
