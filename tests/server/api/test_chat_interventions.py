"""Chats whose answers are intervened on: what is reported as applied, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from flask.testing import FlaskClient

import steering
from tests.server.api.choices import QUESTION, choice_of, refused
from tests.server.conftest import ask, data_uri, user


def test_steering_is_reported_as_applied(client: FlaskClient) -> None:
    choice = choice_of(ask(client, data_uri(), QUESTION, steering={"toward": "text", "strength": 0.5}))
    (applied,) = choice["applied"]["steering"]
    assert applied["name"] == "modality-preference"
    assert (applied["toward"], applied["scale"], applied["layers"]) == ("text", 0.5, [1, 2])


def test_strength_zero_is_exactly_off_and_still_reported(client: FlaskClient) -> None:
    plain = choice_of(ask(client, data_uri(), QUESTION))
    off = choice_of(ask(client, data_uri(), QUESTION, steering={"strength": 0}))
    assert off["message"] == plain["message"]
    assert off["applied"]["steering"][0]["scale"] == 0


def test_an_empty_list_of_vectors_is_reported_as_such(client: FlaskClient) -> None:
    assert choice_of(ask(client, QUESTION, steering={"vectors": []}))["applied"] == {"steering": []}


def test_steering_false_is_no_steering(client: FlaskClient) -> None:
    assert "applied" not in choice_of(ask(client, QUESTION, steering=False))


def test_sage_is_reported_stage_by_stage(client: FlaskClient) -> None:
    sage = {"see": {"alpha": 0.2}, "think": {"threshold": 0.1, "gamma": 0.8}, "generate": {"lambda": 1.0}}
    applied = choice_of(ask(client, data_uri(), QUESTION, sage=sage))["applied"]
    assert set(applied) == {"sage"}
    see, think, generate = (applied["sage"][stage] for stage in ("see", "think", "generate"))
    assert see["share_after"] > see["share_before"] > 0
    assert see["alpha_max"] == [0.2] * len(see["alpha"])  # to the digit that of the shallow layers
    assert len(think["suppressed"]) == 8
    assert all(
        (share > 0) >= (mean > 0.1) for share, mean in zip(think["suppressed"], think["divergence"], strict=True)
    )
    assert generate["masking"] == "pixels"
    assert 1 <= len(generate["masked"][0]) <= 2  # a fifth of nine patches
    alone = choice_of(ask(client, data_uri(), QUESTION, sage={"think": False, "generate": False}, steering=True))
    assert (alone["applied"]["sage"]["think"], alone["applied"]["sage"]["generate"]) == (None, None)
    assert alone["applied"]["steering"]


def test_automatic_steering_follows_the_modality_that_carries_the_answer(client: FlaskClient) -> None:
    context = "Text context: The circle is green."
    choice = choice_of(ask(client, data_uri(), f"{context}\n{QUESTION}", steering={"toward": "auto"}))
    (applied,) = choice["applied"]["steering"]
    numbers = applied["auto"]
    assert applied["toward"] == ("vision" if numbers["drop_vision"] >= numbers["drop_text"] else "text")
    assert numbers["drop_text"] == pytest.approx(numbers["answer"] - numbers["without_context"])
    assert 0 < numbers["answer"] <= 1
    stated = {"toward": applied["toward"]}
    assert choice["message"] == choice_of(ask(client, data_uri(), f"{context}\n{QUESTION}", steering=stated))["message"]


DAMAGED = "Text context: crilce qoe gxrae."


def surprised(client: FlaskClient, context: str, **fields: Any) -> dict[str, Any]:
    auto = {"criterion": "surprise", **fields.pop("auto", {})}
    steering = {"toward": "auto", "auto": auto}
    return choice_of(ask(client, data_uri(), f"{context}\n{QUESTION}", steering=steering, **fields))


def test_a_surprising_text_is_steered_away_from(client: FlaskClient, engine: steering.Engine) -> None:
    calibrated = engine.mllm.calibration
    assert calibrated is not None
    choice = surprised(client, DAMAGED)
    (applied,) = choice["applied"]["steering"]
    assert (applied["toward"], applied["strength"]) == ("vision", 1.0)
    found = applied["auto"]
    assert set(found) == {"criterion", "surprise", "bound", "contexts", "one_degraded", "abstained", "calibration"}
    assert found["calibration"] == calibrated.digest
    assert (found["criterion"], found["bound"], found["abstained"]) == ("surprise", calibrated.surprise, None)
    assert found["surprise"] > found["bound"]
    stated = ask(client, data_uri(), f"{DAMAGED}\n{QUESTION}", steering={"toward": "vision"})
    assert choice["message"] == choice_of(stated)["message"]


def test_within_the_bound_nothing_is_steered_unless_one_modality_is_degraded(client: FlaskClient) -> None:
    plain = choice_of(ask(client, data_uri(), f"{DAMAGED}\n{QUESTION}"))
    abstaining = surprised(client, DAMAGED, auto={"bound": 1000})
    (applied,) = abstaining["applied"]["steering"]
    assert (applied["toward"], applied["strength"]) == (None, 0.0)
    assert "is within the bound of 1000" in applied["auto"]["abstained"]
    assert abstaining["message"] == plain["message"]
    (applied,) = surprised(client, DAMAGED, auto={"bound": 1000, "one_degraded": True})["applied"]["steering"]
    assert (applied["toward"], applied["auto"]["abstained"]) == ("text", None)


def test_surprise_of_several_contexts_and_answers_with_their_baselines(client: FlaskClient) -> None:
    text = f"{DAMAGED}\nText context: The circle is red.\n{QUESTION}"
    steered = {"toward": "auto", "auto": {"criterion": "surprise"}}
    response = ask(client, data_uri(), text, steering=steered, n=2, baseline=True)
    assert len(response.json["choices"]) == 2
    for choice in response.json["choices"]:
        (applied,) = choice["applied"]["steering"]
        assert (applied["toward"], applied["auto"]["contexts"]) == ("vision", 2)
        assert choice["baseline"]["message"] == choice_of(ask(client, data_uri(), text))["message"]


def test_surprise_of_a_stream_in_a_chat_of_several_turns(client: FlaskClient) -> None:
    context = {"type": "text", "text": DAMAGED, "span": "context"}
    first = {"role": "user", "content": [*user(data_uri())["content"], context]}
    chat = [first, {"role": "assistant", "content": "I see."}, user(QUESTION)]
    fields = {"messages": chat, "steering": {"toward": "auto", "auto": {"criterion": "surprise"}}}
    whole = choice_of(ask(client, **fields))
    (applied,) = whole["applied"]["steering"]
    assert (applied["toward"], applied["auto"]["contexts"]) == ("vision", 1)
    lines = ask(client, **fields, stream=True).text.splitlines()
    pieces = [json.loads(line[6:])["choices"][0] for line in lines if line.startswith("data: {")]
    assert "".join(piece["delta"].get("content", "") for piece in pieces) == whole["message"]["content"]
    assert pieces[-1]["applied"] == whole["applied"]


def test_a_model_that_was_not_calibrated_is_told_the_command(
    client: FlaskClient, engine: steering.Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.mllm, "calibration", None)
    asked = {"toward": "auto", "auto": {"criterion": "surprise"}}
    error = refused(ask(client, data_uri(), f"{DAMAGED}\n{QUESTION}", steering=asked))
    assert error["param"] == "steering.auto.bound"
    assert "'helmsight probe --calibrate-surprise'" in error["message"]
    assert surprised(client, DAMAGED, auto={"bound": 1})["applied"]["steering"][0]["auto"]["bound"] == 1


@pytest.mark.parametrize("kind", ["vcd", "icd", "pai"])
def test_a_contrast_is_reported(client: FlaskClient, kind: str) -> None:
    applied = choice_of(ask(client, data_uri(), QUESTION, contrast={"kind": kind, "alpha": 0.5}, logprobs=True))
    assert set(applied["applied"]) == {"contrast"}
    report = applied["applied"]["contrast"]
    assert (report["kind"], report["alpha"], report["beta"]) == (kind, 0.5, 0.1)
    assert 0 <= report["changed"] <= len(applied["logprobs"]["content"])


@pytest.mark.parametrize("contrast", [{"kind": "vcd"}, {"kind": "pai"}])
def test_a_contrast_that_needs_an_image_is_refused_without(client: FlaskClient, contrast: dict[str, Any]) -> None:
    response = ask(client, QUESTION, contrast=contrast)
    assert (response.status_code, response.json["error"]["param"]) == (400, "contrast")


@pytest.mark.parametrize(
    ("sage", "param"),
    [
        ({"see": {"alpha": 9}}, "sage.see.alpha"),
        ({"see": {"reading": "aloud"}}, "sage.see.reading"),
        ({"see": {"spans": "none"}}, "sage.see.spans"),
        ({"see": {"from": "images"}}, "sage.see.from"),
        ({"generate": {"lambda": -1}}, "sage.generate.lambda"),
        ({"generate": {"refresh": -1}}, "sage.generate.refresh"),
    ],
)
def test_a_stage_that_is_out_of_range_is_named(client: FlaskClient, sage: dict[str, Any], param: str) -> None:
    response = ask(client, data_uri(), QUESTION, sage=sage)
    assert (response.status_code, response.json["error"]["param"]) == (400, param)


def test_sage_without_an_image_is_refused(client: FlaskClient) -> None:
    response = ask(client, QUESTION, sage={"think": False})
    assert (response.status_code, response.json["error"]["param"]) == (400, "sage.see")


def test_the_long_form_takes_layers_and_tokens(client: FlaskClient) -> None:
    vector = {"name": "modality-preference", "coefficient": -1.0, "layers": [3], "apply": {"tokens": "image"}}
    (applied,) = choice_of(ask(client, data_uri(), QUESTION, steering={"vectors": [vector]}))["applied"]["steering"]
    assert (applied["scale"], applied["layers"]) == (-1.0, [3])


def test_baseline_is_the_unsteered_answer(client: FlaskClient) -> None:
    plain = choice_of(ask(client, data_uri(), QUESTION))
    steered = choice_of(ask(client, data_uri(), QUESTION, steering={"strength": 4}, baseline=True))
    assert steered["baseline"]["message"] == plain["message"]


# --- an answer that is given ----------------------------------------------------------------------------------------------


def test_an_answer_that_is_given_is_said_and_read(client: FlaskClient) -> None:
    asked = {"logprobs": True, "diagnostics": {"include": ["focus", "modality", "residual"]}}
    own = choice_of(ask(client, data_uri(), QUESTION, **asked))
    again = choice_of(ask(client, data_uri(), QUESTION, force=own["message"]["content"], **asked))
    assert again == own
    other = choice_of(ask(client, data_uri(), QUESTION, force="Never mind.", **asked))
    assert (other["message"]["content"], other["finish_reason"]) == ("Never mind.", "stop")
    assert sum(one["logprob"] for one in other["logprobs"]["content"]) < sum(
        one["logprob"] for one in own["logprobs"]["content"]
    )
    assert other["diagnostics"]["residual"] != own["diagnostics"]["residual"]


def test_tokens_that_are_given_are_read_as_they_are(client: FlaskClient, engine: steering.Engine) -> None:
    """Two splits of one text into tokens are two answers; the text alone means the tokenizer's own."""
    encode = engine.mllm.tokenizer.encode
    asked = {"logprobs": True, "diagnostics": {"include": ["residual"]}}
    text = choice_of(ask(client, data_uri(), QUESTION, force="red ball", **asked))
    own = [*encode("red ball", add_special_tokens=False), engine.mllm.end_id]
    whole = choice_of(ask(client, data_uri(), QUESTION, force=own, **asked))
    assert whole == text
    split = [token for letter in "red ball" for token in encode(letter, add_special_tokens=False)]
    assert len(split) > len(own)
    letters = choice_of(ask(client, data_uri(), QUESTION, force=split, max_tokens=None, **asked))
    assert letters["message"]["content"] == "red ball"
    assert (len(letters["logprobs"]["content"]), letters["finish_reason"]) == (len(split), "length")


def test_an_answer_that_was_cut_has_no_end(client: FlaskClient) -> None:
    """A text is read as the whole answer was up to there, so that its last state is that of its last token."""
    asked = {"logprobs": True, "diagnostics": {"include": ["residual", "modality"]}}
    cut = choice_of(ask(client, data_uri(), QUESTION, max_tokens=3, **asked))
    assert cut["finish_reason"] == "length"
    again = choice_of(
        ask(client, data_uri(), QUESTION, force=cut["message"]["content"], max_tokens=None, ignore_eos=True, **asked)
    )
    assert again == cut


@pytest.mark.parametrize(
    ("given", "param", "message"),
    [
        (3, "force", "'force' must be"),
        ([3, "a"], "force", "'force' must be a text, or a list of token numbers"),
        ([], "force", "'force' must be a text, or a list of token numbers"),
        ([2**30], "force", "'force' tokens must be from 0 to"),
        ("<|im_end|>", "force", "must not hold special tokens"),
        ("red " * 5000, "force", "maximum context length"),
    ],
)
def test_what_is_no_answer_is_refused(client: FlaskClient, given: Any, param: str, message: str) -> None:
    error = refused(ask(client, QUESTION, force=given), 400)
    assert error["param"] == param
    assert message in error["message"]


def test_force_is_nearly_forse(client: FlaskClient) -> None:
    assert "did you mean 'force'" in refused(ask(client, QUESTION, forse="x"), 400)["message"]


def test_a_refusal_prompt_is_reported_and_kept_and_the_baseline_has_none(client: FlaskClient) -> None:
    answer = ask(client, data_uri(), QUESTION, refusal_prompt={"text": "Or say pass."}, baseline=True)
    written = choice_of(ask(client, data_uri(), f"{QUESTION}\nOr say pass."))
    plain = choice_of(ask(client, data_uri(), QUESTION))
    choice = choice_of(answer)
    assert choice["applied"] == {"refusal_prompt": {"text": "Or say pass.", "place": "user"}}
    assert choice["message"] == written["message"]
    assert choice["baseline"]["message"] == plain["message"]
