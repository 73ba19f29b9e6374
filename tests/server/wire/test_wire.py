"""The wire schema: what is accepted, what is refused, and how clearly."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from openai.types.chat.completion_create_params import CompletionCreateParamsBase, CompletionCreateParamsStreaming

from server.errors import BadRequest
from server.wire.chat import ChatRequest, with_interventions
from server.wire.parse import parse as parse_body
from server.wire.steering import SteeringForm
from server.wire.strangers import ELSEWHERE
from steering import Generate, RequestError, Sampling, See, Think
from steering.protocol.request import RANGES
from tests.waiting import computing_within

CHAT = with_interventions(ChatRequest)


def parse(**fields: Any) -> ChatRequest:
    return parse_body(json.dumps({"messages": [{"role": "user", "content": "hi"}], **fields}).encode(), CHAT)


def content(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


WRONG: list[tuple[dict[str, Any], str, str]] = [
    ({"temperature": "hot"}, "temperature", "invalid_value"),
    ({"temperature": True}, "temperature", "invalid_value"),
    ({"seed": 1.5}, "seed", "invalid_value"),
    ({"seed": 10**400}, "seed", "invalid_value"),
    ({"n": "2"}, "n", "invalid_value"),
    ({"stream": 1}, "stream", "invalid_value"),
    ({"stop": 5}, "stop", "invalid_value"),
    ({"stop": [1]}, "stop[0]", "invalid_value"),
    ({"stop": ["a"] * 17}, "stop", "invalid_value"),
    ({"logit_bias": {"x": 1}}, "logit_bias.x", "invalid_value"),
    ({"logit_bias": {"5": "a"}}, "logit_bias.5", "invalid_value"),
    ({"logit_bias": {"1_0": 1}}, "logit_bias.1_0", "invalid_value"),
    ({"logit_bias": {" 1": 1}}, "logit_bias. 1", "invalid_value"),
    ({"logit_bias": {"-1": 1}}, "logit_bias.-1", "invalid_value"),
    ({"logit_bias": {"01": 1}}, "logit_bias.01", "invalid_value"),
    ({"logit_bias": {"\u0661": 1}}, "logit_bias.\u0661", "invalid_value"),
    ({"logit_bias": {"9999999999": 1}}, "logit_bias.9999999999", "invalid_value"),
    ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    ({"tools": [{"type": "function"}]}, "tools[0].function", "missing_required_parameter"),
    ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name", "invalid_value"),
    ({"functions": [{}]}, "functions", "unsupported_value"),
    ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    ({"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []}, "tool_choice", "invalid_value"),
    ({"tool_choice": False}, "tool_choice", "invalid_value"),
    ({"function_call": {"name": "f"}}, "function_call", "unsupported_value"),
    ({"modalities": ["audio"]}, "modalities", "unsupported_value"),
    ({"messages": []}, "messages", "invalid_value"),
    ({"messages": "hi"}, "messages", "invalid_value"),
    ({"messages": [1]}, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0]", "invalid_value"),
    ({"messages": [{"role": "function", "content": "x"}]}, "messages[0]", "unsupported_value"),
    (
        {"messages": [{"role": "assistant", "tool_calls": [{}]}]},
        "messages[0].tool_calls[0].function",
        "missing_required_parameter",
    ),
    ({"messages": [{"role": "user"}]}, "messages[0]", "invalid_value"),
    (content(), "messages[0]", "invalid_value"),
    (content(1), "messages[0].content[0]", "invalid_value"),
    (content({"type": "text", "text": "a"}, {"type": "file"}), "messages[0].content[1]", "unsupported_value"),
    (content({"type": "text"}), "messages[0].content[0]", "invalid_value"),
    (content({"type": "image_url", "image_url": {}}), "messages[0].content[0]", "invalid_value"),
    (content({"type": "text", "text": "a", "span": "story"}), "messages[0].content[0].span", "invalid_value"),
    ({"steering": 1}, "steering", "invalid_value"),
    ({"steering": {"towards": "text"}}, "steering.towards", "unknown_parameter"),
    ({"steering": {"toward": "left"}}, "steering.toward", "invalid_value"),
    ({"steering": {"strength": "1"}}, "steering.strength", "invalid_value"),
    ({"steering": {"vectors": [{}]}}, "steering.vectors[0].name", "missing_required_parameter"),
    ({"steering": {"vectors": [{"name": "a", "size": 1}]}}, "steering.vectors[0].size", "unknown_parameter"),
    ({"steering": {"vectors": [{"name": "a", "scale": 1, "strength": 1}]}}, "steering.vectors[0]", "invalid_value"),
    ({"steering": {"apply": {"token": "all"}}}, "steering.apply.token", "unknown_parameter"),
    ({"steering": {"vectors": [], "toward": "text"}}, "steering.toward", "invalid_value"),
    ({"steering": {"vectors": [], "auto": {}}}, "steering.auto", "invalid_value"),
    ({"steering": {"auto": {"criterion": "drop"}}}, "steering.auto", "invalid_value"),
    ({"steering": {"toward": "text", "auto": {}}}, "steering.auto", "invalid_value"),
    ({"steering": {"toward": "auto", "auto": "surprise"}}, "steering.auto", "invalid_value"),
    ({"steering": {"toward": "auto", "auto": {"criterion": "kl"}}}, "steering.auto.criterion", "invalid_value"),
    ({"steering": {"toward": "auto", "auto": {"quantile": 0.9}}}, "steering.auto.quantile", "unknown_parameter"),
    ({"steering": {"toward": "auto", "auto": {"bound": "5"}}}, "steering.auto.bound", "invalid_value"),
    ({"steering": {"toward": "auto", "auto": {"one_degraded": 1}}}, "steering.auto.one_degraded", "invalid_value"),
    ({"sage": 1}, "sage", "invalid_value"),
    ({"sage": {"sea": True}}, "sage.sea", "unknown_parameter"),
    ({"sage": {"see": {"alfa": 1}}}, "sage.see.alfa", "unknown_parameter"),
    ({"sage": {"see": {"reading": 1}}}, "sage.see.reading", "invalid_value"),
    ({"diagnostics": {"spans": ["whole"]}}, "diagnostics.spans", "invalid_value"),
    ({"sage": {"think": {"gamma": "0.9"}}}, "sage.think.gamma", "invalid_value"),
    ({"sage": {"generate": {"weight": 1}}}, "sage.generate.weight", "unknown_parameter"),
    ({"sage": {"generate": {"refresh": 1.5}}}, "sage.generate.refresh", "invalid_value"),
    ({"contrast": True}, "contrast", "invalid_value"),
    ({"contrast": {"alpha": 1}}, "contrast.kind", "invalid_value"),
    ({"contrast": {"kind": "dola"}}, "contrast.kind", "invalid_value"),
    ({"contrast": {"kind": "vcd", "instruction": "x"}}, "contrast.instruction", "unknown_parameter"),
    ({"contrast": {"kind": "icd", "beta": "1"}}, "contrast.beta", "invalid_value"),
    ({"diagnostics": {"included": []}}, "diagnostics.included", "unknown_parameter"),
    ({"diagnostics": {"include": "focus"}}, "diagnostics.include", "invalid_value"),
    ({"diagnostics": {"layers": "some"}}, "diagnostics.layers", "invalid_value"),
    ({"diagnostics": {"layers": {"last": "2"}}}, "diagnostics.layers", "invalid_value"),
    ({"diagnostics": {"layers": {"first": 2}}}, "diagnostics.layers", "invalid_value"),
    ({"baseline": {}}, "baseline", "invalid_value"),
    ({"continue_final_message": True, "add_generation_prompt": True}, "add_generation_prompt", "invalid_value"),
    ({"add_generation_prompt": False}, "add_generation_prompt", "invalid_value"),
    ({"chat_template_kwargs": {str(i): i for i in range(65)}}, "chat_template_kwargs", "invalid_value"),
]


@pytest.mark.parametrize(("fields", "param", "code"), WRONG)
def test_a_wrong_field_is_named(fields: dict[str, Any], param: str, code: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert (caught.value.status, caught.value.param, caught.value.code) == (400, param, code)
    assert param in caught.value.message


BETWEEN_FIELDS = (
    {"continue_final_message": True, "add_generation_prompt": True},
    {"add_generation_prompt": False},
    {"logit_bias": {"9999999999": 1}},
    {"max_tokens": 1, "max_completion_tokens": 2},
    {"messages": [{"role": "user"}]},
    {"tool_choice": "required"},
    {"tool_choice": {"type": "function", "function": {"name": "f"}}, "tools": []},
    {"steering": {"vectors": [], "toward": "text"}},
    {"steering": {"vectors": [], "auto": {}}},
    {"steering": {"auto": {"criterion": "drop"}}},
    {"steering": {"toward": "text", "auto": {}}},
)
"""Fields that are wrong because of another field, or because of a name, which a schema does not express."""


def test_the_schema_refuses_what_the_server_refuses() -> None:
    schema = Draft202012Validator(CHAT.model_json_schema())
    for fields, _, _ in WRONG:
        assert schema.is_valid({"messages": [{"role": "user", "content": "hi"}], **fields}) == (
            fields in BETWEEN_FIELDS
        ), fields


@pytest.mark.parametrize(
    "fields",
    [
        {
            "user": "me",
            "store": True,
            "tools": [],
            "metadata": {"a": "b"},
            "stream_options": {"include_usage": True, "x": 1},
        },
        dict.fromkeys(
            ("temperature", "n", "stop", "seed", "stream", "logit_bias", "tools", "steering", "sage", "metadata")
        ),
        {"tool_choice": "auto", "function_call": "none", "modalities": ["text"], "response_format": {"type": "text"}},
        {"stop": "END", "top_k": -1, "logit_bias": {"0": 1, "2147483648": -2.5}},
        {"messages": [{"role": "developer", "content": "x"}, {"role": "assistant", "content": None, "name": "a"}]},
        content({"type": "text", "text": "a", "span": "context"}, {"type": "input_text", "text": "b"}),
        content({"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}}),
        content({"type": "input_image", "image_url": "data:x", "detail": "original"}),
        {"min_pixels": 1, "max_pixels": None, "mm_processor_kwargs": {"max_pixels": 2}},
        {"max_pixels": 784, "mm_processor_kwargs": {"max_pixels": 784}},
        {"steering": True, "diagnostics": {}, "sage": {"see": False, "generate": {"lambda": 0.2}}, "baseline": True},
        {"steering": {"vectors": [{"name": "a", "coefficient": -2, "layers": [1], "apply": {"tokens": "image:2"}}]}},
        {"steering": {"toward": "auto", "auto": {"criterion": "surprise", "bound": 3}}, "contrast": {"kind": "pai"}},
        {"sage": {"think": None}, "contrast": False, "diagnostics": {"include": ["focus"], "layers": {"last": 2}}},
    ],
)
def test_the_schema_takes_what_the_server_takes(fields: dict[str, Any]) -> None:
    parse(**fields)
    Draft202012Validator(CHAT.model_json_schema()).validate({"messages": [{"role": "user", "content": "hi"}], **fields})


@pytest.mark.parametrize("name", [*RANGES])
def test_the_ranges_of_the_schema_are_those_of_the_engine(name: str) -> None:
    schema = CHAT.model_json_schema()["properties"][name]
    schema = schema["anyOf"][0]["additionalProperties"] if name == "logit_bias" else schema
    least = schema["minimum"]
    key = {"top_logprobs": "logprobs"}.get(name, name)

    def sampled(value: float) -> Sampling:
        return Sampling(**{key: {1: value} if name == "logit_bias" else value})  # type: ignore[arg-type]

    sampled(schema["maximum"])
    for beyond in (
        schema["maximum"] + (1 if isinstance(least, int) else 1e-6),
        least - (1 if isinstance(least, int) else 1e-6),
    ):
        with pytest.raises(RequestError, match=f"'{name}' must be"):
            sampled(beyond)


def test_messages_say_what_is_allowed() -> None:
    for fields, expected in (
        ({"steering": {"toward": "left"}}, "'steering.toward' must be 'vision', 'text' or 'auto'; got 'left'."),
        (
            {"diagnostics": {"x": 1}},
            "'diagnostics.x' is unknown; allowed: include, compare_to, target_image, spans, residual_rows, layers, "
            "discount_sinks, causal, heatmaps, drift_rows, states, features.",
        ),
        ({"temperature": "hot"}, "'temperature' must be a number; got 'hot'."),
        ({"messages": []}, "'messages' must have at least 1 item."),
        ({"stop": ["a"] * 17}, "'stop' must have at most 16 items."),
    ):
        with pytest.raises(BadRequest) as caught:
            parse(**fields)
        assert caught.value.message == expected


@pytest.mark.parametrize(
    "body", [b"", b"[]", b"null", b"{", b"\xff\xfe", b'{"messages": NaN}', b"[" * 60_000, b'{"x": "\\ud800"}']
)
def test_a_body_that_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(BadRequest) as caught:
        parse_body(body, CHAT)
    assert caught.value.code == "invalid_json"
    assert "end of hex" not in caught.value.message


@pytest.mark.parametrize(
    ("name", "meant"),
    [
        ("steer", "steering"), ("steerings", "steering"), ("Steering", "steering"), ("diagnostic", "diagnostics"),
        ("Sage", "sage"), ("sages", "sage"), ("baselines", "baseline"), ("base_line", "baseline"), ("contrasts", "contrast"),
    ],
)  # fmt: skip
def test_a_field_nearly_called_as_one_of_our_own_is_refused(name: str, meant: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**{name: True})
    assert str(caught.value) == f"'{name}' is unknown; did you mean '{meant}'?"
    assert (caught.value.param, caught.value.code) == (name, "unknown_parameter")
    assert parse(**{name: None}) == parse()


def test_what_clients_send_beside_is_ignored() -> None:
    fields = {*CompletionCreateParamsBase.__annotations__, *CompletionCreateParamsStreaming.__annotations__}
    assert {"store", "service_tier", "safety_identifier"} <= fields
    others = {"priority", "request_id", "cache_salt", "return_tokens_as_token_ids", "metrics", "usage", "mode"}
    for name in (fields | others) - {*CHAT.model_fields, *ELSEWHERE}:
        assert parse(**{name: "x"}) == parse(), name


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"max_token": 5}, "max_token", "unknown; did you mean 'max_tokens'?"),
        ({"seeds": 1}, "seeds", "unknown; did you mean 'seed'?"),
        ({"logprob": True}, "logprob", "unknown; did you mean 'logprobs'?"),
        ({"stream_options": {"includes": True}}, "stream_options.includes", "unknown; did you mean 'include_usage'?"),
        (
            content({"type": "text", "text": "a", "spans": "context"}),
            "messages[0].content[0].spans",
            "unknown; did you mean 'span'?",
        ),
        ({"guided_json": {"type": "object"}}, "guided_json", "not supported by this server."),
        ({"best_of": 2}, "best_of", "not supported by this server."),
    ],
)  # fmt: skip
def test_what_would_silently_do_nothing_is_refused(fields: dict[str, Any], param: str, said: str) -> None:
    with pytest.raises(BadRequest) as caught:
        parse(**fields)
    assert (caught.value.param, str(caught.value)) == (param, f"'{param}' is {said}")


def test_what_other_servers_have_may_be_there_when_it_asks_for_nothing() -> None:
    nothing = {"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "stop_token_ids": [], "guided_json": None}
    assert parse(**nothing, skip_special_tokens=True) == parse()


def test_countless_unknown_fields_take_no_time() -> None:
    with computing_within(1):
        parse(**{f"unknown {i}": 1 for i in range(30_000)})


@pytest.mark.parametrize("field", ["tool_choice", "function_call"])
@pytest.mark.parametrize("value", ["none", "auto", None])
def test_who_leaves_it_to_the_model_to_call_a_tool_gets_an_answer(field: str, value: str | None) -> None:
    assert parse(**{field: value}).messages[0].content == "hi"


def test_tokens_are_decimal_numbers() -> None:
    assert parse(logit_bias={"0": 1, "2147483648": -2.5}).logit_bias == {0: 1.0, 2**31: -2.5}


def test_nulls_mean_absent() -> None:
    names = ("temperature", "n", "stop", "seed", "stream", "logit_bias", "tools", "steering", "sage", "diagnostics")
    assert parse(**dict.fromkeys(names)) == parse()


def test_a_single_stop_string_is_a_list_of_one() -> None:
    assert parse(stop="END").stop == ["END"]


def test_developer_is_system_and_an_empty_assistant_turn_is_text() -> None:
    chat = parse(messages=[{"role": "developer", "content": "x"}, {"role": "assistant", "content": None}])
    assert [(m.role, m.content) for m in chat.messages] == [("system", "x"), ("assistant", "")]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": {"url": "data:x", "detail": "low"}},
        {"type": "image_url", "image_url": "data:x"},
        {"type": "input_image", "image_url": "data:x"},
    ],
)
def test_all_spellings_of_an_image_part_are_one(part: dict[str, Any]) -> None:
    (message,) = parse(**content(part)).messages
    assert isinstance(message.content, list)
    assert (message.content[0].type, message.content[0].image) == ("image", "data:x")


def test_images_belong_to_no_system() -> None:
    part = {"type": "image_url", "image_url": "data:x"}
    with pytest.raises(BadRequest, match="not allowed in system messages"):
        parse(messages=[{"role": "system", "content": [part]}])
    for role in ("user", "assistant", "tool"):
        parse(messages=[{"role": role, "content": [part]}])


@pytest.mark.parametrize("field", ["steering", "diagnostics"])
def test_true_means_defaults_and_false_means_off(field: str) -> None:
    assert getattr(parse(**{field: True}), field) == getattr(parse(**{field: {}}), field) is not None
    assert getattr(parse(**{field: False}), field) is None


@pytest.mark.parametrize("alias", ["scale", "strength", "coefficient"])
def test_scale_has_aliases(alias: str) -> None:
    chat = parse(steering={"vectors": [{"name": "a", alias: -2}]})
    form = chat.interventions["steering"].form
    assert isinstance(form, SteeringForm)
    assert form.vectors is not None
    assert form.vectors[0].scale == -2.0


def test_stages_of_sage_are_on_unless_false() -> None:
    assert parse(sage=False).interventions == {}
    everything = parse(sage=True).interventions["sage"]
    assert everything == parse(sage={}).interventions["sage"]
    assert everything.asked == (See(alpha=0.1), Think(gamma=0.9), Generate(weight=0.5))
    chosen = parse(sage={"see": False, "generate": {"lambda": 0.2}}).interventions["sage"]
    assert chosen.asked == (Think(), Generate(weight=0.2))
    assert parse(sage=dict.fromkeys(("see", "think", "generate"), False)).interventions["sage"].asked == ()


def test_every_optional_field_of_openais_may_be_null() -> None:
    fields = set(CompletionCreateParamsStreaming.__annotations__) | set(CompletionCreateParamsBase.__annotations__)
    nothing: dict[str, Any] = dict.fromkeys(fields - {"messages", "model"})
    message = {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None, "tool_calls": None}
    chat = parse_body(json.dumps({**nothing, "model": None, "messages": [message]}).encode(), CHAT)
    assert chat.stream is None
    options = {"include_usage": None, "include_obfuscation": None}
    body = {"messages": [message], "stream": True, "stream_options": options}
    chat = parse_body(json.dumps(body).encode(), CHAT)
    assert chat.stream_options is not None
    assert not chat.stream_options.include_usage


@pytest.mark.parametrize(
    "extra",
    [
        b"[" + b"[]," * 100_000 + b"1]",
        b"[" + b'"a",' * 400_000 + b"1]",
        b"[" + rb'"\",",' * 200_000 + b"1]",
        b"{" + b'"a":1,' * 100_000 + b'"b":1}',
        b'[{"a":' * 50_000,
    ],
)
def test_bodies_of_countless_values_are_refused_before_they_are_read(extra: bytes) -> None:
    with computing_within(2), pytest.raises(BadRequest) as caught:
        parse_body(b'{"messages": [], "x": ' + extra + b"}", CHAT)
    assert caught.value.code == "too_many_values"


def test_commas_in_texts_are_no_values() -> None:
    text = json.dumps({"messages": [{"role": "user", "content": 'a,"b\\",[{' * 200_000}]})
    assert len(parse_body(text.encode(), CHAT).messages) == 1


def test_parts_are_counted_before_they_are_looked_at() -> None:
    parts = [{"type": "wrong"}] * 101
    with pytest.raises(BadRequest) as caught:
        parse_body(json.dumps({"messages": [{"role": "user", "content": parts}]}).encode(), CHAT, parts=100)
    assert caught.value.code == "too_many_parts"
