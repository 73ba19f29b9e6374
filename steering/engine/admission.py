"""Whether a request fits the model and the engine; whatever can be refused is refused here, in the client's thread."""

from __future__ import annotations

from dataclasses import dataclass

from steering.errors import ContextOverflow, Fault, RequestError, panics_raise
from steering.model.mllm import MLLM
from steering.prompt.bounds import TextBounds, count_ahead, texts_of
from steering.prompt.layout import Prompt, build_prompt
from steering.protocol.asked import Asked
from steering.protocol.request import Request


@dataclass(frozen=True)
class Admitted:
    """What becomes of a request: its prompt and its twin's where that is known before the model runs; how many tokens may be
    generated."""

    prompt: Prompt
    twin_prompt: Prompt | None
    max_tokens: int


def admit(mllm: MLLM, request: Request, max_length: int, max_images: int) -> Admitted:
    """Tokenise and check a request; raises RequestError, ContextOverflow or VectorError when it is wrong, Fault when a
    library panics over it."""
    with panics_raise(lambda panic: Fault(f"The request could not be prepared: {panic}")):
        texts = texts_of(request.messages) + [text for one in request.asked.values() for text in one.texts]
        texts += [] if request.reply is None else [request.reply]
        TextBounds.of(mllm, max_length).check(texts)
        count_ahead(mllm, texts, max_length, request.sampling.max_tokens)
        return _admit(mllm, request, max_length, max_images)


def _admit(mllm: MLLM, request: Request, max_length: int, max_images: int) -> Admitted:
    prompt = build_prompt(mllm, request.messages, request.reply)
    max_tokens = _room(request, prompt, max_length)
    images = len(prompt.layout.images)
    if images > max_images:
        raise RequestError(f"A request may hold at most {max_images} images; got {images}.", param="messages")
    if any(not 0 <= token < mllm.vocab_size for token in request.sampling.logit_bias):
        raise RequestError(f"'logit_bias' tokens must be from 0 to {mllm.vocab_size - 1}.", param="logit_bias")
    if not -prompt.length <= request.state_position <= -1:
        raise RequestError(
            f"'state_position' must be from {-prompt.length} to -1, counted from the prompt's end; got "
            f"{request.state_position}.",
            param="state_position",
        )
    asked = list(request.asked.values())
    contrasts = [one for one in asked if one.twin]
    if len(contrasts) > 1:
        first, second = sorted(".".join(one.path) for one in contrasts)[:2]
        raise RequestError(
            f"'{first}' and '{second}' both contrast an answer with a twin; ask for one of them.", param=first
        )
    for one in asked:
        _check_image(one, images)
        one.check(mllm, prompt)
    if request.diagnose is not None:
        request.diagnose.check(mllm, prompt.layout, max_tokens)
    twin_prompt = None
    for one in contrasts:
        twin_prompt = one.twin_prompt(mllm, request.messages, prompt)
        if twin_prompt is not None:
            max_tokens = min(max_tokens, _room(request, twin_prompt, max_length))
    return Admitted(prompt, twin_prompt, max_tokens)


def _check_image(asked: Asked, images: int) -> None:
    if asked.needs_image and not images:
        param = ".".join(asked.path)
        of_kind = f" of kind {asked.kind}" if asked.kind else ""
        raise RequestError(f"'{param}'{of_kind} needs an image in the request.", param=param)


def _room(request: Request, prompt: Prompt, max_length: int) -> int:
    """How many tokens may be generated after a prompt, that of the request or its twin's."""
    room = max_length - prompt.length
    asked = request.sampling.max_tokens
    if room < 1 or (asked is not None and asked > room):
        raise ContextOverflow(max_length, prompt.length + (asked or 1), prompt.length)
    return room if asked is None else asked
