"""Resolving a wire request to the engine's: names become vectors, URLs images, absent values the checkpoint's defaults."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from server.engine.runtime import Serving
from server.engine.served import Capabilities
from server.errors import BadRequest
from server.images.load import ImageLoader
from server.requests import steers
from server.requests.pixels import Bounds, bounds_of
from server.requests.skipping import Skipping
from server.settings import Settings
from server.vectors import names
from server.wire.chat import ChatRequest
from server.wire.diagnostics import Diagnostics
from server.wire.messages import Message, MessagePart, image_urls
from server.wire.steering import SteeringForm
from server.wire.structured import tools_of
from steering import (
    RESERVED_VARIABLES,
    Diagnose,
    Earlier,
    Inapplicable,
    InterventionSpec,
    Request,
    Sampling,
    Tools,
    VectorStore,
)
from steering.protocol.forms import KIND
from steering.protocol.readout import REGISTRY, cheap, readout_options

MESSAGE_FIELDS = {"role", "tool_calls", "tool_call_id"}
"""Fields of a message, besides its content, that the engine is always given."""
REASONING = "reasoning_content"


def resolve(
    chat: ChatRequest,
    serving: Serving,
    settings: Settings,
    images: ImageLoader,
    earlier: Earlier | None = None,
    skipping: Skipping | None = None,
) -> Request:
    """Return the engine's request; raises RequestError or BadRequest naming a field that `skipping` may not skip.

    `earlier` is the answer that drift is measured from. Images are loaded last, because everything else is cheap.
    """
    skipping = skipping or Skipping()
    n = 1 if chat.n is None else chat.n
    if not 1 <= n <= settings.max_choices:
        raise BadRequest(f"'n' must be at least 1 and at most {settings.max_choices}; got {n}.", "n")
    sampling = sampling_of(chat, serving.capabilities.generation_defaults)
    grammar = chat.grammar
    if grammar is not None and not serving.capabilities.grammars:
        place = grammar.param.partition(".")[0]
        raise BadRequest(f"'{place}' is not supported by this server's engine.", place, "unsupported_value")
    tools: Tools | None = None
    with skipping.of("tools"):
        tools = _tools(chat, serving)
    if tools is not None and tools.required:
        grammar = None  # such an answer holds no text that could follow it
    _check_calls(chat, serving)
    interventions = _interventions(chat, serving, settings, skipping)
    diagnose: Diagnose | None = None
    with skipping.of("diagnostics"):
        diagnose = diagnose_of(chat.diagnostics, serving.capabilities.readouts, earlier, serving.store)
    bounds = bounds_of(chat, serving, settings, skipping)
    variables = template_variables(chat, serving.capabilities)
    head = MESSAGE_FIELDS | ({REASONING} if serving.capabilities.takes_reasoning else set())
    messages = [_message(message, f"messages[{i}]", images, bounds, head) for i, message in enumerate(chat.messages)]
    forced = chat.force if isinstance(chat.force, str) else tuple(chat.force or ())
    if forced and sampling.max_tokens is None and not isinstance(forced, str):
        sampling = replace(sampling, max_tokens=len(forced))
    return Request(
        messages,
        sampling,
        interventions,
        diagnose,
        n=n,
        baseline=bool(chat.baseline),
        forced=forced,
        clamp=True,
        grammar=grammar,
        tools=tools,
        cache_salt=chat.cache_salt or "",
        chat_template_kwargs=variables,
        continue_final_message=bool(chat.continue_final_message),
    )


def template_variables(chat: ChatRequest, capabilities: Capabilities) -> dict[str, Any]:
    """Return the chat template's variables that it reads; raises BadRequest for those that the server sets."""
    variables = chat.chat_template_kwargs or {}
    continues = bool(chat.continue_final_message)
    own = {"add_generation_prompt": not continues, "continue_final_message": continues, "tokenize": False}
    for name, value in variables.items():
        if name in RESERVED_VARIABLES and not (name in own and value is own[name]):
            at = f"chat_template_kwargs.{name}"
            raise BadRequest(f"'{at}' is set by the server only.", at, "unsupported_value")
    return {name: value for name, value in variables.items() if name in capabilities.template_variables}


def ignored_variables(chat: ChatRequest, capabilities: Capabilities) -> list[str]:
    """Return the paths of the chat template's variables that it does not read."""
    recognised = capabilities.template_variables | RESERVED_VARIABLES
    return [f"chat_template_kwargs.{name[:64]}" for name in chat.chat_template_kwargs or {} if name not in recognised]


def ignored_reasoning(chat: ChatRequest, capabilities: Capabilities) -> list[str]:
    """Return the paths of the reasoning of earlier answers if the chat template has no place for it."""
    if capabilities.takes_reasoning:
        return []
    return [f"messages[{i}].{REASONING}" for i, message in enumerate(chat.messages) if message.reasoning_content]


def _tools(chat: ChatRequest, serving: Serving) -> Tools | None:
    tools = tools_of(chat.tools or [], chat.tool_choice, chat.parallel_tool_calls is not False)
    if tools is not None and not serving.capabilities.tools:
        raise Inapplicable(_without_tools("tools"), param="tools", code="unsupported_value")
    return tools


def _check_calls(chat: ChatRequest, serving: Serving) -> None:
    """Raise a 400 for earlier tool calls and their results if the model's chat template cannot show them.

    They are never skipped, since that would change the prompt.
    """
    if not serving.capabilities.tools:
        for i, message in enumerate(chat.messages):
            if message.role == "tool" or message.tool_calls:
                raise BadRequest(_without_tools(f"messages[{i}]"), f"messages[{i}]", "unsupported_value")


def _without_tools(place: str) -> str:
    return f"'{place}' cannot be used: this model's chat template supports no tools, or none in a known format."


def _interventions(
    chat: ChatRequest, serving: Serving, settings: Settings, skipping: Skipping
) -> list[InterventionSpec]:
    pictures = len(list(image_urls(chat.messages))) if chat.messages else None
    resolved: list[InterventionSpec] = []
    for name, field in chat.interventions.items():
        for spec in field.asked:
            with skipping.of(place := ".".join(spec.path)):
                _supported(place, spec.kind, spec.name(), serving)
                resolved.append(names.resolved(spec, place, serving.store))
        if field.form is not None:
            with skipping.of(name):
                _supported(name, "", name, serving)
                if isinstance(field.form, SteeringForm):
                    steering = steers.steering_of(field.form, serving, settings, pictures, name in skipping.weak)
                    resolved += [] if steering is None else [steering]
    return skipping.one_contrast(resolved)


def _supported(param: str, kind: str, name: str, serving: Serving) -> None:
    if name not in serving.capabilities.interventions:
        of_kind, at = (f" of kind {kind}", f"{param}.{KIND}") if kind else ("", param)
        if name in serving.disabled:
            message = f"'{param}'{of_kind} is disabled on this server."
            raise Inapplicable(message, param=at, code="unsupported_value")
        raise Inapplicable(
            f"'{param}'{of_kind} is not supported by this server's engine.", param=at, code="unsupported_value"
        )


def sampling_of(chat: ChatRequest, defaults: Mapping[str, Any]) -> Sampling:
    """Return the sampling options, with the checkpoint's `defaults` for absent ones; raises RequestError."""
    if chat.top_logprobs is not None and not chat.logprobs:
        raise BadRequest("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")
    if chat.prompt_logprobs is not None and chat.stream:
        raise BadRequest("'prompt_logprobs' cannot be streamed.", "prompt_logprobs")

    def either(value: float | None, name: str, neutral: float) -> float:
        return float(defaults.get(name, neutral)) if value is None else value

    if chat.max_completion_tokens is not None and chat.max_completion_tokens < 1:
        raise BadRequest(
            f"'max_completion_tokens' must be at least 1; got {chat.max_completion_tokens}.", "max_completion_tokens"
        )
    return Sampling(
        max_tokens=chat.longest,
        temperature=either(chat.temperature, "temperature", 1.0),
        top_p=either(chat.top_p, "top_p", 1.0),
        top_k=int(either(chat.top_k, "top_k", 0)),
        min_p=chat.min_p or 0.0,
        repetition_penalty=either(chat.repetition_penalty, "repetition_penalty", 1.0),
        frequency_penalty=chat.frequency_penalty or 0.0,
        presence_penalty=chat.presence_penalty or 0.0,
        logit_bias=dict(chat.logit_bias or {}),
        seed=chat.seed,
        stop=tuple(chat.stop or ()),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
        prompt_logprobs=chat.prompt_logprobs,
        min_tokens=chat.min_tokens or 0,
        ignore_eos=bool(chat.ignore_eos),
    )


def diagnose_of(
    wire: Diagnostics | None,
    readouts: frozenset[str],
    earlier: Earlier | None = None,
    store: VectorStore | None = None,
) -> Diagnose | None:
    """Return the readouts of a request, None if it asks for none; raises RequestError for those that the engine lacks.

    What their options name is looked up in `store`, where there is one.
    """
    if wire is None:
        return None
    include = frozenset(cheap() & readouts if wire.include is None else wire.include)
    if wire.compare_to is not None:
        include |= {"drift"}
    options: dict[str, Any] = {}
    for name, option in readout_options().items():
        if option.written:
            options |= option.keywords(getattr(wire, name))
    diagnose = Diagnose(include, earlier=earlier, **options)
    requested = {readout.name for readout in diagnose.readouts}
    if optioned := [name for name in diagnose.given if name in REGISTRY and name not in requested]:
        if wire.include is not None:
            raise Inapplicable(
                f"'diagnostics.{optioned[0]}' goes with {optioned[0]!r} in 'diagnostics.include'.",
                param=f"diagnostics.{optioned[0]}",
            )
        diagnose = Diagnose(include.union(optioned), earlier=earlier, **options)  # an option asks for its readout
    for readout in diagnose.readouts:
        if readout.name not in readouts:
            beside = readout.name not in include and readout.name in type(wire).model_fields
            param = f"diagnostics.{readout.name if beside else 'include'}"
            raise Inapplicable(
                f"'{param}': the readout {readout.name!r} is not supported by this server's engine.",
                param=param,
                code="unsupported_value",
            )
    return diagnose if store is None else names.looked_up(diagnose, store)


def _message(
    message: Message, param: str, images: ImageLoader, bounds: Callable[[MessagePart], Bounds], fields: set[str]
) -> dict[str, Any]:
    head = message.model_dump(include=fields, exclude_none=True)
    if isinstance(message.content, str):
        return {**head, "content": message.content}
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(message.content):
        if part.type == "image":
            assert part.image is not None
            where = f"{param}.content[{i}].image_url"
            parts.append({"type": "image", "image": images.load(part.image, where), **bounds(part)})
        else:
            span = {"span": part.span} if part.span else {}
            parts.append({"type": "text", "text": part.text, **span})
    return {**head, "content": parts}
