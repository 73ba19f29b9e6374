"""Every kind of request that a server takes, built from the registries: what is registered later joins by itself."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from server.wire.chat import ChatRequest
from server.wire.steering import SteeringForm
from steering import TOKENS, Options, Steering
from steering.protocol.forms import KIND, example
from steering.protocol.forms import forms as intervention_forms
from steering.protocol.intervention import REGISTRY as INTERVENTIONS
from steering.protocol.intervention_spec import LAYERS
from steering.protocol.readout import REGISTRY as READOUTS
from steering.protocol.readout import readout_options

Body = dict[str, Any]
TOKENS_ASKED = 8
MEASURED = [name for name in READOUTS if name != "states"]
"""The readouts that compiled steps take, too."""
CONTEXT = "Text context: the sign on the door says that the shop is closed on Monday and on Tuesday."
QUESTION = "What colour is the small ball in front of the large cube, and how many people stand next to the table?"
SCHEMA = {
    "type": "object",
    "properties": {"seen": {"enum": ["ball", "cube"]}, "sure": {"type": "boolean"}},
    "required": ["seen", "sure"],
    "additionalProperties": False,
}
TOOLS = [
    {"type": "function", "function": {"name": "look", "parameters": SCHEMA, "strict": True}},
    {"type": "function", "function": {"name": "count"}},
]
NAMED = {"type": "function", "function": {"name": "look"}}


@dataclass(frozen=True)
class Pictures:
    """data: URIs. old: shown in every phase of a test. new: shown in this one for the first time."""

    old: tuple[str, str]
    new: tuple[str, str]


@dataclass(frozen=True)
class Kind:
    """A kind of request.

    body: made of the pictures that it shows. before: a request that is answered first, whose answer's id becomes
    `diagnostics.compare_to`. made: no value was written for its field, so that it may be refused.
    """

    name: str
    body: Callable[[Pictures], Body]
    before: Callable[[Pictures], Body] | None = None
    made: bool = False


def image(url: str) -> Body:
    return {"type": "image_url", "image_url": {"url": url}}


def words(text: str, **more: str) -> Body:
    return {"type": "text", "text": text, **more}


def talk(*parts: Body) -> list[Body]:
    """Return a chat of one turn with these parts, behind a text context."""
    return [{"role": "user", "content": [*parts, words(CONTEXT, span="context"), words(QUESTION)]}]


def asking(messages: list[Body], **fields: Any) -> Body:
    return {"messages": messages, "max_tokens": TOKENS_ASKED, "temperature": 0, **fields}


def seen(pictures: Pictures, **fields: Any) -> Body:
    """Return a request that shows a known picture and a new one."""
    return asking(**{"messages": talk(image(pictures.old[0]), image(pictures.new[0])), **fields})


def kinds(chats: type[ChatRequest], layers: int, presets: list[str]) -> list[Kind]:
    """All kinds of requests to a model of so many layers with these presets, whose chats are read as `chats`."""
    made = [
        *_chats(),
        *(_kind(name, fields) for name, fields in _interventions(layers)),
        *(_kind(name, {"diagnostics": options}) for name, options in _readouts(layers)),
        *_together(layers),
        *_fields(chats),
        *(_kind(f"preset {name}", {"model": name}) for name in presets),
    ]
    names = [kind.name for kind in made]
    assert len(set(names)) == len(names), names
    return made


def _kind(name: str, fields: Mapping[str, Any], made: bool = False) -> Kind:
    return Kind(name, lambda pictures: seen(pictures, **fields), made=made)


# -- chats -----------------------------------------------------------------------------------------------------------------


def _chats() -> Iterator[Kind]:
    """Yield kinds of chats that differ in their texts, pictures and turns, nearly all without other fields."""
    question = [{"role": "user", "content": f"{CONTEXT} {QUESTION}"}]
    yield Kind("text", lambda pictures: asking(question))
    yield Kind("a few words", lambda pictures: asking([{"role": "user", "content": "What is it?"}]))
    yield Kind("an old picture", lambda pictures: asking(talk(image(pictures.old[0]))))
    yield Kind("a new picture", lambda pictures: asking(talk(image(pictures.new[1]))))
    yield Kind("two new pictures", lambda pictures: asking(talk(*map(image, pictures.new))))
    yield Kind("two old pictures", lambda pictures: asking(talk(*map(image, pictures.old))))
    yield Kind("all pictures", lambda pictures: asking(talk(*map(image, (*pictures.new, *pictures.old)))))
    yield Kind("a chat that goes on", lambda pictures: asking(_turns(pictures)))
    yield Kind("a long text", lambda pictures: asking([{"role": "user", "content": f"{CONTEXT} " * 30 + QUESTION}]))
    yield Kind("a long text behind a picture", lambda pictures: asking(_long(pictures)))
    looked = {"sage": True, "diagnostics": {"include": MEASURED, "causal": True}}
    yield Kind("a long text, looked at", lambda pictures: asking(_long(pictures), **looked))
    yield Kind("a system prompt", lambda pictures: asking([{"role": "system", "content": CONTEXT}, *question]))


def _long(pictures: Pictures) -> list[Body]:
    """Return a prompt that is prefilled in chunks and is longer than compiled steps take."""
    return talk(image(pictures.old[1]), image(pictures.new[1]), words(f"{QUESTION} " * 40))


def _turns(pictures: Pictures) -> list[Body]:
    """Return a chat about an old picture that goes on with a new one."""
    return [
        *talk(image(pictures.old[0])),
        {"role": "assistant", "content": "The ball is red."},
        {"role": "user", "content": [image(pictures.new[0]), words("And in this picture?")]},
    ]


# -- interventions ---------------------------------------------------------------------------------------------------------


def _interventions(layers: int) -> Iterator[tuple[str, Body]]:
    """Every intervention, and every group of them whole; steering in each of its words."""
    for name, (kind, _) in INTERVENTIONS.items():
        head, *rest = kind.path
        if issubclass(kind, Options):
            asked = ({KIND: kind.kind} if kind.kind else {}) | _example(kind, layers)
            if kind.kind == "pai":
                asked["beta"] = 0.12  # at 0.1 a token of one answer lies 5e-7 nats from the bound
            others = {other.path[1]: False for other, _ in INTERVENTIONS.values() if rest and other.path[0] == head}
            yield name, {head: {**others, rest[0]: asked} if rest else asked}
        else:
            assert kind is Steering, f"{name} has a form of its own: write here how it is asked for"
            yield from _steering()
    for head, form in intervention_forms().items():
        if any(len(kind.path) > 1 for kind, _ in INTERVENTIONS.values() if kind.path[0] == head):
            yield f"all of {head}", {head: True}
            yield f"all of {head}, made anew", {head: _renewed(form.example, layers)}


def _renewed(options: Body, layers: int) -> Body:
    """Return a group's options with each that counts tokens, such as `refresh`, set to be met within an answer."""
    members = {
        kind.path[1]: _example(kind, layers)
        for kind, _ in INTERVENTIONS.values()
        if len(kind.path) > 1 and kind.path[1] in options and issubclass(kind, Options)
    }
    return {name: {**own, **({"refresh": 3} if "refresh" in own else {})} for name, own in members.items()}


def _example(options: type[Options], layers: int) -> Body:
    """Return the defaults of options, with layers within those of the model."""
    asked = example(options)
    for name, field in options.model_fields.items():
        extra = field.json_schema_extra
        wire = field.alias or name
        if isinstance(extra, dict) and LAYERS in extra and isinstance(asked.get(wire), int):
            asked[wire] = min(asked[wire], layers + int(str(extra[LAYERS])))
    return asked


def _steering() -> Iterator[tuple[str, Body]]:
    name = Steering.name()
    yield name, {name: True}
    for toward in get_args(SteeringForm.model_fields["toward"].annotation):
        yield f"{name} toward {toward}", {name: {"toward": toward, "strength": 0.5}}
    yield f"{name} by surprise", {name: {"toward": "auto", "auto": {"criterion": "surprise", "one_degraded": True}}}
    for tokens in (*TOKENS, "image:2"):
        apply = {"name": "modality-preference", "scale": -0.5, "layers": [0], "apply": {"tokens": tokens}}
        yield f"{name} of {tokens} tokens", {name: {"vectors": [apply]}}


# -- readouts --------------------------------------------------------------------------------------------------------------


def _readouts(layers: int) -> Iterator[tuple[str, Body]]:
    """Every readout, and each way to read them."""
    yield "the cheap readouts", {}
    for name in READOUTS:
        yield f"readout {name}", {"include": [name]}
    every = MEASURED
    yield "every state", {"include": ["states"], "states": {"positions": [0, 2000]}}
    yield "heat maps", {"include": ["patches"], "heatmaps": True}
    yield "causal maps", {"include": every, "causal": True}
    yield "sinks discounted", {"include": every, "discount_sinks": True, "target_image": 2}
    yield "some layers", {"include": every, "layers": {"last": 1}}
    for name, option in readout_options().items():
        for value in option.schema.get("enum", ()):
            yield f"{name} {value}", {"include": every, name: value}


def _together(layers: int) -> Iterator[Kind]:
    """Every intervention under all readouts, beside the plain answer; and what takes two requests."""
    every = {"include": MEASURED}
    for name, fields in _interventions(layers):
        yield _kind(f"{name}, looked at", {**fields, "diagnostics": every, "baseline": True})
    drift = {"include": ["drift"]}
    yield Kind(
        "drift from an earlier answer",
        lambda pictures: seen(pictures, steering=True, diagnostics=drift),
        before=lambda pictures: seen(pictures, diagnostics=drift),
    )


# -- fields ----------------------------------------------------------------------------------------------------------------

ASKED = [{"role": "user", "content": QUESTION}]
BEGUN = [{"role": "assistant", "content": "The small ball is"}]
SAMPLED = {"temperature": 0.8, "seed": 7}
FIELDS: dict[str, list[Body]] = {
    "model": [{"model": "served"}],
    "n": [{"n": 3, **SAMPLED}, {"n": 2, "sage": True, "diagnostics": True, **SAMPLED}],
    "stream": [{"stream": True}, {"stream": True, "sage": True, "diagnostics": True, "logprobs": True}],
    "stream_options": [{"stream": True, "stream_options": {"include_usage": True}}],
    "max_tokens": [{"max_tokens": 3}],
    "max_completion_tokens": [{"max_tokens": None, "max_completion_tokens": 4}],
    "temperature": [{"temperature": 1.3, "seed": 2}],
    "top_p": [{"top_p": 0.8, **SAMPLED}],
    "top_k": [{"top_k": 5, **SAMPLED}],
    "min_p": [{"min_p": 0.1, **SAMPLED}],
    "repetition_penalty": [{"repetition_penalty": 1.3}],
    "frequency_penalty": [{"frequency_penalty": 0.7}],
    "presence_penalty": [{"presence_penalty": 0.7}],
    "logit_bias": [{"logit_bias": {"70": 4, "80": -100}}],
    "min_tokens": [{"min_tokens": 5}],
    "ignore_eos": [{"ignore_eos": True}],
    "seed": [{"seed": 11, "temperature": 1.0}],
    "stop": [{"stop": ["e", "a"], **SAMPLED}],
    "logprobs": [{"logprobs": True}],
    "top_logprobs": [{"logprobs": True, "top_logprobs": 5}],
    "response_format": [
        {"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": SCHEMA}}, "max_tokens": 40},
        {"response_format": {"type": "json_object"}, "max_tokens": 30, **SAMPLED},
    ],
    "structured_outputs": [
        {"structured_outputs": {"choice": ["a red ball", "a blue cube"]}},
        {"structured_outputs": {"regex": "[a-c]{4}"}, "sage": True},
    ],
    "tools": [{"tools": TOOLS}],
    "tool_choice": [{"tools": TOOLS, "tool_choice": "required", "max_tokens": 60, **SAMPLED}],
    "parallel_tool_calls": [{"tools": TOOLS, "tool_choice": NAMED, "parallel_tool_calls": False, "max_tokens": 60}],
    "functions": [{"functions": []}],
    "function_call": [{"function_call": "none"}],
    "metadata": [{"metadata": {"answer_correct": "true"}}],
    "modalities": [{"modalities": ["text"]}],
    "audio": [{"audio": None}],
    "min_pixels": [{"min_pixels": 1600}, {"min_pixels": 60_000, "max_pixels": 80_000}],
    "max_pixels": [{"max_pixels": 1200}],
    "mm_processor_kwargs": [{"mm_processor_kwargs": {"max_pixels": 1600}}],
    "diagnostics": [{"diagnostics": True}],
    "baseline": [{"baseline": True, "steering": True}, {"baseline": True, "contrast": {"kind": "vcd"}}],
    "force": [
        {"force": "The small ball is red.", "logprobs": True, "diagnostics": True},
        {"force": "The cube is blue.", "sage": True, "logprobs": True},
        {"force": [5, 6, 7], "logprobs": True, "diagnostics": True},
    ],
    "cache_salt": [{"cache_salt": "mine"}],
    "continue_final_message": [
        {"continue_final_message": True, "add_generation_prompt": False, "messages": [*ASKED, *BEGUN]},
    ],
    "add_generation_prompt": [{"add_generation_prompt": True}],
    "chat_template_kwargs": [{"chat_template_kwargs": {"enable_thinking": False}}],
    "strict": [{"strict": False, "sage": True, "messages": ASKED}],
}
"""Values for fields of a request; those of interventions and `messages` have kinds of their own."""


def _fields(chats: type[ChatRequest]) -> Iterator[Kind]:
    """Every field of a request."""
    for name, field in chats.model_fields.items():
        if name == "messages" or name in chats.asking:
            continue
        samples = FIELDS.get(name)
        if samples is None:
            yield _kind(f"field {name}", {name: _value(field.annotation)}, made=True)
        for number, fields in enumerate(samples or ()):
            yield _kind(f"field {name} {number}", fields)


def _value(annotation: Any) -> Any:
    """Something that a field of this type may hold."""
    origin = get_origin(annotation)
    if origin is Annotated:
        return _value(get_args(annotation)[0])
    if origin in (Union, types.UnionType):
        return _value(next(one for one in get_args(annotation) if one is not type(None)))
    made = {bool: True, int: 1, float: 0.5, str: "text", list: [], tuple: [], dict: {}}
    return made.get(origin or annotation, {})
