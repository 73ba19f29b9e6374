"""Forced tokens for a vLLM server, which reads them behind the prompt: they have to end where the answer ends."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from steering.errors import Inapplicable
from steering.messages.messages import Add
from steering.model.mllm import MLLM
from steering.protocol.sequence import Spec


def is_whole(spec: Spec) -> bool:
    """Return True if the forced tokens are all of an answer."""
    return bool(spec.forced) and len(spec.forced) >= spec.max_tokens


def until_end(mllm: MLLM, add: Add) -> Add:
    """Return the request with its forced tokens cut where one of them ends the answer, which then is all of it.

    Raises Inapplicable for settings by which generated tokens depend on the text of forced ones.
    """
    spec = replace(add.spec, forced=add.spec.forced[: add.spec.max_tokens])
    add = replace(add, spec=spec)
    end = end_of(mllm, add)
    if end is not None:
        return replace(add, spec=replace(spec, forced=spec.forced[:end], max_tokens=end))
    if spec.forced and not is_whole(spec):
        for param in _depending(spec):
            raise Inapplicable(
                f"'{param}' is not supported by this server's engine, vLLM, where tokens are generated after forced ones.",
                param=param,
                code="unsupported_value",
            )
    return add


def end_of(mllm: MLLM, add: Add) -> int | None:
    """Return how many forced tokens there are up to the one that ends the answer; None where none does."""
    sampling, text = add.spec.sampling, add.text_stream(mllm.tokenizer)
    for count, token in enumerate(add.spec.forced, 1):
        if token in mllm.stop_ids and not sampling.ignore_eos:
            return count
        text.feed(token)
        if text.stopped:
            return count
    return None


def _depending(spec: Spec) -> Iterator[str]:
    """Yield the fields by which a server, for which forced tokens are a part of the prompt, would generate others."""
    sampling = spec.sampling
    if sampling.stop:
        yield "stop"
    if sampling.frequency_penalty:
        yield "frequency_penalty"
    if sampling.presence_penalty:
        yield "presence_penalty"
