"""Names that this server does not know: one that is nearly a known one is a slip of the pen, one that would change the
answer of another server is refused, and whatever else clients send is ignored (`server.wire.ignored`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from difflib import get_close_matches
from typing import Any

from pydantic_core import PydanticCustomError

LIKE = 0.7
"""The ratio of difflib from which a name is taken for a misspelt one."""
MAX_LIKENED = 64
"""Unknown names that are compared with known ones: each takes a moment."""
UNUSED = frozenset({"prompt_cache_key", "prompt_cache_retention", "safety_identifier", "service_tier", "store", "user"})
"""Fields of OpenAI's that say who asks, or what becomes of an answer elsewhere: frameworks send them by themselves, and they
ask nothing of an answer."""
BESIDE = frozenset({"mode", "models", "store", "truncation", "usage"})
"""Fields that clients send, which do not change an answer, and which are no slips although they look like it."""
ELSEWHERE: dict[str, Any] = {
    "allowed_token_ids": None,
    "bad_words": None,
    "best_of": 1,
    "chat_template": None,
    "documents": None,
    "early_stopping": None,
    "echo": None,
    "extra_body": None,
    "grammar": None,
    "guided_choice": None,
    "guided_decoding_backend": None,
    "guided_grammar": None,
    "guided_json": None,
    "guided_regex": None,
    "guided_whitespace_pattern": None,
    "include_stop_str_in_output": None,
    "length_penalty": 1,
    "logits_processors": None,
    "max_input_tokens": None,
    "max_length": None,
    "min_length": 0,
    "mirostat": 0,
    "options": None,
    "prompt_logprobs": None,
    "random_seed": None,
    "safe_prompt": None,
    "skip_special_tokens": True,
    "spaces_between_special_tokens": True,
    "stop_regex": None,
    "stop_sequences": None,
    "stop_token_ids": None,
    "structural_tag": None,
    "suffix": None,
    "system": None,
    "template": None,
    "top_a": 0,
    "truncate_prompt_tokens": None,
    "typical_p": 1,
    "use_beam_search": None,
    "web_search_options": None,
}
"""Fields by which OpenAI, vLLM or other servers of this protocol answer differently, and which this one does not have, with
the value that asks for nothing; null, false and what is empty do neither."""


def check_names(given: Mapping[str, Any], known: Collection[str], elsewhere: Mapping[str, Any] | None = None) -> None:
    """Raise PydanticCustomError for the first name that is not `known` but nearly is, or that stands in `elsewhere` and asks
    for something; null asks for nothing."""
    elsewhere = elsewhere or {}
    longest = 2 * max(map(len, known))
    unknown = [key for key, value in given.items() if key not in known and value is not None]
    for key in unknown:
        if key in elsewhere and not _nothing(given[key], elsewhere[key]):
            raise PydanticCustomError("elsewhere", "not supported", {"key": key})
    beside = BESIDE.union(elsewhere)
    for key in [key for key in unknown if key not in beside and len(key) <= longest][:MAX_LIKENED]:
        if meant := get_close_matches(key.lower(), known, n=1, cutoff=LIKE):
            raise PydanticCustomError("nearly", "unknown", {"key": key, "meant": meant[0]})


def _nothing(value: Any, neutral: Any) -> bool:
    return value is False or value in ("", [], {}) or (neutral is not None and value == neutral)
