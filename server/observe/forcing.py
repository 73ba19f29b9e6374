"""The request that has a served answer read: the same prompt, the answer forced, and the readouts asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from server.batches.file import BatchResponse
from server.journal.scalars import scalars
from server.observe.served import ServedAnswer
from server.observe.tokens import TokenMatch, match
from server.requests.preset import AT
from server.wire.storing.metadata import MAX_METADATA, MAX_METADATA_KEY, MAX_METADATA_VALUE, TRUTHS

SAMPLING = frozenset(
    {
        "allowed_token_ids", "audio", "bad_words", "baseline", "best_of", "diagnostics", "early_stopping", "echo",
        "force", "frequency_penalty", "guard", "guard_stream", "guided_choice", "guided_decoding_backend",
        "guided_grammar", "guided_json", "guided_regex", "guided_whitespace_pattern", "ignore_eos", "include_reasoning",
        "include_stop_str_in_output", "kv_transfer_params", "length_penalty", "logit_bias", "logits_processors",
        "logprobs", "max_completion_tokens", "max_tokens", "metadata", "min_p", "min_tokens", "modalities", "n",
        "parallel_tool_calls", "prediction", "presence_penalty", "priority", "prompt_cache_key", "prompt_logprobs",
        "reasoning_effort", "repetition_detection", "repetition_penalty", "request_id", "response_format",
        "return_prompt_text", "return_token_ids", "return_tokens_as_token_ids", "safety_identifier", "seed",
        "service_tier", "skip_special_tokens", "spaces_between_special_tokens", "stop", "stop_token_ids", "store",
        "stream", "stream_options", "strict", "structural_tag", "structured_outputs", "temperature", "top_k",
        "top_logprobs", "top_p", "use_beam_search", "user", "verbosity", "vllm_xargs",
    }
)  # fmt: skip
"""Fields that chose the answer, not the prompt: the answer is known, so that they have no effect."""


def body_of(served: ServedAnswer, model: str, readouts: Sequence[str] | None) -> dict[str, Any]:
    """Return the body of the request; `readouts` None are the cheap ones.

    Fields that shape the prompt stay as they are, so that the server refuses those that it does not know how to follow.
    """
    request = served.request
    body = {name: value for name, value in request.items() if name not in SAMPLING and name != "model"}
    name = request.get("model")
    if isinstance(body.get("tool_choice"), dict) or body.get("tool_choice") == "required":
        body["tool_choice"] = "auto"  # the call is in the answer
    body["model"] = name if isinstance(name, str) and name.startswith(model + AT) else model
    body |= {"temperature": 0, "logprobs": True, "metadata": _metadata(served)}
    body["diagnostics"] = True if readouts is None else {"include": list(readouts)}
    if served.token_ids is not None:
        return body | {"force": list(served.token_ids), "max_tokens": len(served.token_ids)}
    if served.finish_reason == "length" or served.stop is not None:
        body["ignore_eos"] = True
    if served.stop is not None:  # its tokens were generated, too, and are cut off here as they were there
        body["stop"] = [served.stop]
    return body | {"force": (served.text or "") + (served.stop or "")}


def _metadata(served: ServedAnswer) -> dict[str, str]:
    """Return the request's own metadata, with the ids of request and answer as far as there is room."""
    metadata = served.request.get("metadata")
    own = (
        {name: value for name, value in metadata.items() if isinstance(value, str)}
        if isinstance(metadata, Mapping)
        else {}
    )
    own = {name: value for name, value in own.items() if name not in TRUTHS or value in ("true", "false")}
    ids = {"observed": served.name, "observed_answer": served.answer_id or "", "observed_choice": str(served.choice)}
    both = {
        **dict(list(own.items())[: MAX_METADATA - len(ids)]),
        **{name: value for name, value in ids.items() if value},
    }
    return {name[:MAX_METADATA_KEY]: value[:MAX_METADATA_VALUE] for name, value in both.items()}


def reading(served: ServedAnswer, answered: BatchResponse) -> dict[str, Any]:
    """Return what is known of a served answer after it was forced: a row without its ids.

    `outcome` is "read"; "unmatched" if tokens or text are not the served ones; "refused" if the server did not take it.
    """
    body = answered.body
    if not answered.ok or not isinstance(body, Mapping):
        return {"outcome": "refused", "reason": answered.reason}
    (choice,), usage = body["choices"], body["usage"]
    content = (choice.get("logprobs") or {}).get("content") or []
    tokens = [(bytes(token["bytes"]), token["logprob"]) for token in content]
    text = choice["message"]["content"] or ""
    compared = match(served, text, tokens, usage["completion_tokens"])
    prompt = {"served": served.prompt_tokens, "here": usage["prompt_tokens"]}
    return {
        "outcome": "read" if compared.ok else "unmatched",
        "reason": None if compared.ok else _difference(compared),
        "model": body["model"],
        "tokens": compared.json(),
        "prompt_tokens": prompt,
        "same_prompt": None if served.prompt_tokens is None else served.prompt_tokens == usage["prompt_tokens"],
        "ignored": body.get("ignored", []),
        "numbers": scalars(choice.get("applied"), choice.get("diagnostics")),
        "applied": choice.get("applied"),
        "diagnostics": choice.get("diagnostics"),
    }


def _difference(compared: TokenMatch) -> str:
    """Return the difference of an answer's tokens in words."""
    if not compared.text:
        return "The forced tokens are not the served text."
    if compared.named:
        index, token = compared.named[0]
        return f"{compared.unmatched} of {compared.served} tokens differ, the first one {token!r} at {index}."
    return f"{compared.served} tokens were served, and {compared.forced} forced."
