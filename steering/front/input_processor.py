"""The input processor: turns a request into a message for the core, and refuses what can be refused before it is queued."""

from __future__ import annotations

import json
import secrets
from dataclasses import dataclass, replace
from functools import partial

import torch

from steering.errors import ContextOverflow, Fault, RequestError, fitting, panics_raise
from steering.front.output_processor import OutputProcessor
from steering.messages.messages import Add
from steering.model.mllm import MLLM
from steering.prompt.bounds import TextBounds, count_ahead, texts_of
from steering.prompt.chat import pictures_of
from steering.prompt.fitting import BESIDE, resized_chat, room_for_prompt
from steering.prompt.forced import forced_tokens
from steering.prompt.layout import Layout, Prompt, build_prompt
from steering.prompt.rendering import TemplateOptions
from steering.prompt.tiles import tiling_of
from steering.protocol.intervention import Prelude
from steering.protocol.intervention_spec import InterventionSpec
from steering.protocol.readout import ReadoutContext
from steering.protocol.request import Request
from steering.protocol.sequence import Spec
from steering.protocol.text import texts_of as token_texts
from steering.protocol.wording import must
from steering.tools.calls import CallStream
from steering.tools.formats import format_of, special_tags, with_short_ids

TEXT_BEFORE = 8
"""Prompt tokens that precede an answer's text in decoding, because the text of a token may depend on those before it."""


@dataclass(frozen=True)
class Limits:
    """Limits of a core: tokens of a prompt and its answer, images of a request, answers at once; N of the focus metrics."""

    length: int
    images: int
    focus_layers: int
    slots: int = 1


@dataclass(frozen=True)
class Admitted:
    """The prompts and the length of a checked request.

    twin_prompt: the prompt of a contrast, None where that depends on generated tokens or there is none. max_tokens: maximum
    length of an answer, all prompts considered. forced: tokens that are generated whatever the model predicts.
    """

    prompt: Prompt
    baseline_prompt: Prompt
    twin_prompt: Prompt | None
    max_tokens: int
    forced: tuple[int, ...]


def admit(mllm: MLLM, request: Request, limits: Limits) -> Admitted:
    """Tokenise and check a request.

    Raises RequestError, ContextOverflow or VectorError where it is wrong, Fault where a library panics over it.
    """
    prompt = read_prompt(mllm, request, limits.length)
    with panics_raise(_unprepared):
        return _admit(mllm, _with_short_ids(mllm, request), limits, prompt)


def read_prompt(mllm: MLLM, request: Request, length: int) -> Prompt:
    """Build the prompt of a request, for a context of `length` tokens; raises as `admit`."""
    with panics_raise(_unprepared):
        calls, told = told_of_tools(mllm, request)
        texts = {"messages": [*texts_of(request.messages), *calls], "tools": told}
        texts |= {".".join(intervention.path): [*intervention.texts] for intervention in request.asked.values()}
        given = (("reply", request.reply), ("force", request.forced))
        texts |= {field: [text] for field, text in given if isinstance(text, str)}
        if request.chat_template_kwargs:
            texts["chat_template_kwargs"] = [json.dumps(request.chat_template_kwargs, ensure_ascii=False)]
        TextBounds.of(mllm, length).check(texts)
        inserted = _inserted_tokens(mllm, request, length)
        count_ahead(mllm, texts, length, None if request.clamp else request.sampling.max_tokens)
        room = _room_for_prompt(request, length, inserted)
        return build_prompt(mllm, _with_short_ids(mllm, request).chat, request.reply, options_of(request), room)


def _inserted_tokens(mllm: MLLM, request: Request, length: int) -> int:
    """Return how many tokens the interventions' own texts have; raise RequestError for one that alone fills the context."""
    total = 0
    for intervention in request.asked.values():
        if not intervention.texts:
            continue
        tokens = sum(len(ids) for ids in mllm.tokenizer(list(intervention.texts)).input_ids)
        total += tokens
        if tokens >= length:
            fields = (name for name, value in vars(intervention).items() if value in intervention.texts)
            param = ".".join((*intervention.path, *list(fields)[:1]))
            raise RequestError(
                f"'{param}' inserts a text of {tokens} tokens, and this model's maximum context length is {length} tokens.",
                param=param,
                code="context_length_exceeded",
            )
    return total


def _room_for_prompt(request: Request, length: int, inserted: int) -> int:
    """Return how many tokens the prompt may have, so that answer, baseline prompt and twin prompt fit as well.

    inserted: the tokens of the interventions' own texts.
    """
    others = request.baseline or any(intervention.twin for intervention in request.asked.values())
    beside = BESIDE + inserted if others else 0
    return room_for_prompt(length, request.sampling.max_tokens, request.clamp) - beside


def _unprepared(panic: str) -> Fault:
    return Fault(f"The request could not be prepared: {panic}")


def _with_short_ids(mllm: MLLM, request: Request) -> Request:
    """Return the request, with the ids of tool calls shortened where the model's chat template needs that."""
    form = format_of(mllm)
    if form is not None and form.short_ids:
        return replace(request, messages=with_short_ids(request.messages))
    return request


def options_of(request: Request) -> TemplateOptions:
    """Return the arguments of the chat template besides the messages."""
    functions = [] if request.tools is None else request.tools.told
    return TemplateOptions(functions, request.chat_template_kwargs, request.continue_final_message)


def told_of_tools(mllm: MLLM, request: Request) -> tuple[list[str], list[str]]:
    """Return the texts that calls and tools add to the prompt; raise RequestError where the model supports none."""
    calls = [message["tool_calls"] for message in request.messages if message.get("tool_calls")]
    tool = "tools" if request.tools is not None else "messages"
    uses_tools = request.tools is not None or calls or any(message["role"] == "tool" for message in request.messages)
    if uses_tools and format_of(mllm) is None:
        raise RequestError(
            f"'{tool}': this model's chat template knows no tools, or none of a known format.",
            param=tool,
            code="unsupported_value",
        )
    return (
        [json.dumps(calls, ensure_ascii=False, default=str)] if uses_tools else [],
        [] if request.tools is None else [json.dumps(request.tools.told)],
    )


def _admit(mllm: MLLM, request: Request, limits: Limits, prompt: Prompt) -> Admitted:
    baseline_prompt, chat = prompt, resized_chat(request.chat, prompt.shrunk)
    if request.baseline and request.chat is not request.messages:
        messages = resized_chat(request.messages, prompt.shrunk)
        baseline_prompt = build_prompt(mllm, messages, request.reply, options_of(request))
    forced = _forced(mllm, request)
    longest = request.sampling.max_tokens
    if longest is None and isinstance(request.forced, str):
        longest = len(forced)
    least = min(longest, max(1, len(forced))) if request.clamp and longest is not None else longest
    room = partial(_room, mllm, request, len(forced), longest, least, limits.length)
    max_tokens = min(map(room, (prompt, baseline_prompt)))
    images = len(prompt.layout.images)
    if images > limits.images:
        raise RequestError(f"A request may hold at most {limits.images} images; got {images}.", param="messages")
    if any(not 0 <= token < mllm.vocab_size for token in request.sampling.logit_bias):
        raise RequestError(f"'logit_bias' tokens must be from 0 to {mllm.vocab_size - 1}.", param="logit_bias")
    shortest = min(prompt.length, baseline_prompt.length)
    if not -shortest <= request.state_position <= -1:
        raise RequestError(
            f"'state_position' must be from {-shortest} to -1, counted from the prompt's end; got "
            f"{request.state_position}.",
            param="state_position",
        )
    interventions = list(request.asked.values())
    contrasts = [contrast for contrast in interventions if contrast.twin]
    if len(contrasts) > 1:
        first, second = sorted(".".join(contrast.path) for contrast in contrasts)[:2]
        raise RequestError(
            f"'{first}' and '{second}' both contrast an answer with a twin; ask for one of them.", param=first
        )
    refusing = [intervention.refuses_twin for intervention in interventions if intervention.refuses_twin]
    if contrasts and refusing:
        first = ".".join(contrasts[0].path)
        raise RequestError(
            f"'{refusing[0]}' cannot be combined with '{first}', which contrasts the answer with a twin.",
            param=refusing[0],
        )
    with fitting():
        if request.divergence:
            mllm.need_updates("divergence")
        for intervention in interventions:
            _check_decided(intervention)
            _check_image(intervention, images)
            intervention.check(mllm, prompt)
        if request.readouts is not None:
            request.readouts.check(mllm, prompt.layout, max_tokens)
    twin_prompt = None
    for contrast in contrasts:
        with fitting():
            twin_prompt = contrast.twin_prompt(mllm, chat, prompt)
        if twin_prompt is not None:
            max_tokens = min(max_tokens, room(twin_prompt))
    if request.sampling.min_tokens > max_tokens:
        raise RequestError(
            f"'min_tokens' must be at most {max_tokens}, the tokens that an answer may have here; got "
            f"{request.sampling.min_tokens}.",
            param="min_tokens",
        )
    return Admitted(prompt, baseline_prompt, twin_prompt, max_tokens, forced)


def _forced(mllm: MLLM, request: Request) -> tuple[int, ...]:
    """Return the forced tokens; raise RequestError for a number that is no token."""
    if isinstance(request.forced, str):
        return forced_tokens(mllm, request.forced, ends=not request.sampling.ignore_eos)
    if any(not 0 <= token < mllm.vocab_size for token in request.forced):
        raise RequestError(f"'force' tokens must be from 0 to {mllm.vocab_size - 1}.", param="force")
    return request.forced


def _check_decided(intervention: InterventionSpec) -> None:
    if isinstance(intervention, Prelude):
        param = ".".join(intervention.path)
        raise RequestError(
            f"'{param}' follows from other requests, which steering.decide runs before this one.", param=param
        )


def _check_image(intervention: InterventionSpec, images: int) -> None:
    if intervention.needs_image and not images:
        param = ".".join(intervention.path)
        of_kind = f" of kind {intervention.kind}" if intervention.kind else ""
        raise RequestError(f"'{param}'{of_kind} needs an image in the request.", param=param)


def _room(
    mllm: MLLM, request: Request, forced: int, requested: int | None, least: int | None, max_length: int, prompt: Prompt
) -> int:
    """Return how many tokens may be generated after a prompt (the request's or its twin's), at most `requested`.

    Raises ContextOverflow where that is less than `least`; `forced` of these tokens are given.
    """
    room, least = max_length - prompt.length, least or 1
    if room < least:
        _, told = told_of_tools(mllm, request)
        lengths = {"tools": sum(map(len, mllm.tokenizer(told).input_ids)) if told else 0}
        lengths = {"messages": max(0, prompt.length - lengths["tools"]), **lengths, "force": min(forced, least)}
        raise ContextOverflow(max_length, prompt.length + least, prompt.length, lengths=lengths)
    return room if requested is None else min(requested, room)


class InputProcessor:
    """Prepares requests for a core, in any thread; it needs the model's processor and configuration, but no weights."""

    def __init__(self, mllm: MLLM, limits: Limits):
        self.mllm = mllm
        self.limits = limits
        self._token_text = token_texts(mllm.tokenizer)

    def prepare(self, request: Request, number: int, mllm: MLLM | None = None) -> tuple[Add, OutputProcessor]:
        """Return the message that adds a request to a core, and the processor of its outputs; raises as `admit`.

        `mllm` is the model under the calibration that the answer is computed with, by default the latest one.
        """
        mllm, tools = mllm or self.mllm, request.tools
        admitted = admit(mllm, request, self.limits)
        form, grammar = format_of(mllm), request.grammar
        special, calls = dict[str, int](), None
        if form is not None and tools is not None:
            special, formatted = special_tags(mllm, form), grammar is not None
            if tools.required or formatted:
                grammar = form.grammar(tools, special, grammar)
            reasoning = None if grammar is not None else mllm.chat.reasoning
            calls = partial(CallStream, form, tools.names, tools.texts, bool(tools.required), formatted, reasoning)
        prompt, baseline = admitted.prompt, admitted.baseline_prompt
        spec = Spec(
            prompt,
            sampling=request.sampling,
            max_tokens=admitted.max_tokens,
            seed=secrets.randbits(63) if request.sampling.seed is None else request.sampling.seed,
            asked=request.asked,
            diagnose=request.readouts,
            captured=request.signals,
            state_position=request.state_position,
            forced=admitted.forced,
            salt=request.cache_salt,
            settled={
                name: settled
                for name, intervention in request.asked.items()
                if (settled := intervention.settled(mllm)) is not None
            },
        )
        add = Add(
            number,
            spec,
            n=request.n,
            baseline=request.baseline,
            baseline_prompt=None if baseline is prompt else baseline,
            twin_prompt=admitted.twin_prompt,
            grammar=grammar,
            kept={token: tag for tag, token in special.items()},
            before=tuple(prompt.ids[-TEXT_BEFORE:].tolist()) if request.continue_final_message else (),
        )
        context = self._readout_context(mllm, request, prompt.layout)
        return add, OutputProcessor(mllm, add, context, self._token_text, calls)

    def _readout_context(self, mllm: MLLM, request: Request, layout: Layout) -> ReadoutContext:
        readouts = () if request.readouts is None else request.readouts.readouts
        pictures = [] if request.readouts is None else pictures_of(request.messages)
        tilings = [tiling_of(mllm, *placed) for placed in zip(pictures, layout.images, strict=bool(pictures))]
        discounts = request.readouts is not None and request.readouts.given.get("discount_sinks", False)
        calibration = mllm.calibration
        sinks = calibration.sinks if discounts and calibration is not None else None
        return ReadoutContext(
            self.limits.focus_layers,
            mllm.attention_layers,
            lambda token: self._token_text(token)[0],
            tilings,
            pictures if any(readout.needs_pictures for readout in readouts) else (),
            None if sinks is None else torch.tensor(sinks),
            None if calibration is None else calibration.flags,
            None if calibration is None else calibration.alarm,
            None if calibration is None else calibration.digest,
        )


def check_slots(request: Request, slots: int) -> None:
    """Raise RequestError where a request needs no slot, or more than `slots`, for its answers, baselines and twins."""
    if request.n < 1:
        raise RequestError(f"'n' must be at least 1; got {request.n}.", param="n")
    answers = request.n * (1 + request.baseline + any(intervention.twin for intervention in request.asked.values()))
    if answers <= slots:
        return
    if request.n > 1 and (each := answers // request.n) <= slots:
        beside = "" if each == 1 else f", and each of yours needs {each} (baselines and twins count)"
        raise RequestError(
            f"'n' must be at most {slots // each}: this server runs {slots} answers at once{beside}.", param="n"
        )
    names = [".".join(intervention.path) for intervention in request.asked.values() if intervention.twin]
    names += ["baseline"] * request.baseline
    listed = " and ".join(f"'{name}'" for name in names)
    raise RequestError(
        f"{listed} {'needs' if len(names) == 1 else 'need'} {answers} slots, one for each answer and twin; this server has "
        f"{slots}.",
        param=names[0],
    )


def check_request(request: object) -> None:
    """Raise RequestError unless this is a `Request`."""
    if not isinstance(request, Request):
        raise must("requests", "be steering.Request objects", request)
