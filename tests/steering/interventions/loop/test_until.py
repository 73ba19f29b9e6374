"""A strength that follows a readout: its whole course recomputed with plain transformers, alone and in any batch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import steering
from steering import Inapplicable, Request, RequestError, Sampling, Steer, Until, Vcd
from steering.interventions.loop.until import POINTS, followed
from steering.prompt.layout import build_prompt
from steering.prompt.spans import CONTEXT, FIRST_IMAGE
from tests import families
from tests.steering.conftest import LoadPlain, MakeEngine
from tests.steering.interventions.pushes import make_vector
from tests.steering.plain import Force, Messages, Plain

KINDS = ("qwen2_vl", "llava", "gemma3")
"""M-RoPE, single positions, windows."""
TOKENS = 12
SAMPLING = Sampling(max_tokens=TOKENS, ignore_eos=True)
RANGE = (0.0, 3.0)


def told(family: str, question: str = "What is it?", context: str = "A red circle is here.") -> Messages:
    (message,) = families.example_messages(family, 1, text=question)
    images = [part for part in message["content"] if part["type"] == "image"]
    parts = [*images, {"type": "text", "text": f"{context}\n", "span": "context"}, {"type": "text", "text": question}]
    return [{"role": "user", "content": parts}]


@dataclass
class Course:
    """The controller and the measurement by hand: plain floats, and attention weights as eager attention returns them."""

    until: Until
    toward: str
    strength: float
    spans: torch.Tensor  # (prompt tokens,)
    level: float | None = None
    points: list[tuple[float, float]] = field(default_factory=list)
    rows: list[torch.Tensor] = field(default_factory=list)  # by layer (columns,), of the latest token

    def measured(self) -> float:
        images, contexts = (self.spans >= FIRST_IMAGE).nonzero()[:, 0], (self.spans == CONTEXT).nonzero()[:, 0]
        prompt = len(self.spans)
        seen = [(row[:prompt][images].sum().item(), row[:prompt][contexts].sum().item()) for row in self.rows]
        image, context = (sum(part) for part in zip(*seen, strict=True))
        if self.until.number == "image_share":
            return image / len(self.rows)
        image, context = image / len(images), context / len(contexts)
        return image / (image + context) if image + context else math.nan

    def step(self) -> None:
        number = self.measured()
        self.points.append((self.strength, number))
        self.rows = []
        if math.isnan(number):
            return
        before = number if self.level is None else self.level
        self.level = before + self.until.smoothing * (number - before)
        error = self.until.target - self.level
        if abs(error) <= self.until.band:
            return
        low, high = self.until.range or RANGE
        sign = 1 if self.toward == "vision" else -1
        self.strength = min(max(self.strength + sign * self.until.gain * (high - low) * error, low), high)


@contextmanager
def looped(plain: Plain, course: Course, unit: torch.Tensor, total: int) -> Iterator[None]:
    """Add the unit at the course's present strength behind each layer, and note each layer's last row of weights."""

    def weights_of(module: Any, args: Any, output: Any) -> None:
        row = output[1][0, :, -1].mean(0).float()
        # A window's cache drops its first columns.
        course.rows.append(torch.cat([row.new_zeros(max(0, course_length(course) - len(row))), row]))

    def course_length(own: Course) -> int:
        return total + len(own.points)

    def push(layer: int) -> Any:
        def after(module: Any, args: Any, output: torch.Tensor) -> torch.Tensor:
            return output + (course.strength * unit[layer]).to(output.dtype)

        return after

    with ExitStack() as stack:
        for number, layer in enumerate(plain.layers):
            stack.enter_context(layer.self_attn.register_forward_hook(weights_of))
            stack.enter_context(layer.register_forward_hook(push(number)))
        yield


class Stepping(LogitsProcessor):
    """Lets the controller act between two tokens."""

    def __init__(self, course: Course):
        self.course = course

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.course.step()
        return scores


@torch.inference_mode()
def by_hand(
    plain: Plain, chat: Messages, course: Course, unit: torch.Tensor, forced: Sequence[int] | None = None
) -> list[int]:
    """Generate greedily, or along `forced` tokens, under the loop; returns the tokens, and leaves the course."""
    inputs = plain.inputs([
        {**message, "content": [{k: v for k, v in part.items() if k != "span"} for part in message["content"]]}
        for message in chat
    ])  # fmt: skip
    length = inputs["input_ids"].shape[1]
    assert length == len(course.spans)
    processors = [Stepping(course), *([] if forced is None else [Force(length, forced)])]
    with looped(plain, course, unit, length):
        out = plain.model.generate(
            **inputs, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, output_attentions=True,
            return_dict_in_generate=True, logits_processor=LogitsProcessorList(processors),
        )  # fmt: skip
    return [int(token) for token in out.sequences[0, length:]]


def spans_of(engine: steering.Engine, chat: Messages) -> torch.Tensor:
    return build_prompt(engine.mllm, chat).layout.spans


def asked(chat: Messages, steer: Steer, **fields: Any) -> Request:
    return Request(chat, fields.pop("sampling", SAMPLING), interventions=(steer,), **fields)


def reported(choice: steering.Choice) -> dict[str, Any]:
    assert choice.applied is not None
    (entry,) = choice.applied["steering"]
    until: dict[str, Any] = entry["until"]
    return until


def assert_course(choice: steering.Choice, course: Course, number: str, tolerance: float = 1e-4) -> None:
    until = reported(choice)
    strengths, numbers = zip(*course.points[: len(until["course"]["strength"])], strict=True)
    assert until["course"]["strength"] == pytest.approx(list(strengths), abs=tolerance * 30)
    read = [math.nan if value is None else value for value in until["course"][number]]
    assert read == pytest.approx(list(numbers), abs=tolerance, nan_ok=True)


def middle(plain: Plain, chat: Messages, number: str, spans: torch.Tensor) -> float:
    """Return a number a little above the plain answer's mean, so that the loop has something to do."""
    course = Course(Until(number, 0.0, gain=0.0, range=RANGE), "vision", 0.0, spans)
    by_hand(plain, chat, course, torch.zeros(len(plain.layers), 1))
    known = [value for _, value in course.points if not math.isnan(value)]
    return min(0.95, 1.05 * sum(known) / len(known))


@pytest.mark.parametrize("family", KINDS)
@pytest.mark.parametrize("number", ["attention_ratio", "image_share"])
def test_the_whole_course_is_that_of_plain_transformers_in_one_mixed_batch(
    family: str, number: str, make_engine: MakeEngine, load_plain: LoadPlain
) -> None:
    engine, plain = make_engine(family, slots=6), load_plain(family)
    chats = [told(family), told(family, "Is it red or blue?", "The picture shows a blue square, and a star.")]
    vector, requests, expected = make_vector(engine.mllm), [], []
    for toward, chat, start in (("vision", chats[0], 0.0), ("text", chats[0], 1.0), ("vision", chats[1], 0.5)):
        spans = spans_of(engine, chat)
        target = middle(plain, chat, number, spans)
        until = Until(number, target, gain=2.0, smoothing=0.4, band=0.002, range=RANGE)
        steer = Steer.to(vector, toward, start, until=until)
        requests.append(asked(chat, steer))
        course = Course(until, toward, start, spans)
        sign = 1.0 if toward == vector.positive else -1.0
        expected.append((by_hand(plain, chat, course, vector.delta(sign)), course))
        assert len({strength for strength, _ in course.points}) > 2, "the strength moves"
    constant = Steer.to(vector, "text", 1.5)
    neighbours = [asked(chats[0], constant), Request(chats[1], SAMPLING)]
    alone = [engine.generate([request])[0].choices[0] for request in (*requests, *neighbours)]
    together = [result.choices[0] for result in engine.generate([*requests, *neighbours])]
    for one, other in zip(alone, together, strict=True):
        assert list(one.token_ids) == list(other.token_ids)
    for choice, other, (tokens, course) in zip(together, alone, expected, strict=False):
        assert list(choice.token_ids) == tokens
        assert_course(choice, course, number)
        assert reported(choice)["course"]["strength"] == pytest.approx(reported(other)["course"]["strength"], abs=1e-4)
        assert len(course.points) == TOKENS, "the prompt's last token, and every generated one that was fed"
    assert "until" not in together[3].applied["steering"][0]  # type: ignore[index]


def test_in_bfloat16_it_is_that_of_plain_transformers_in_bfloat16(root: Path) -> None:
    folder = families.checkpoint("llava", root)
    mllm = steering.load(folder, device="cpu", dtype="bfloat16")
    engine = steering.Engine(mllm, slots=4, max_length=512, self_check=False)
    plain, chat, vector = Plain(folder), told("llava"), make_vector(mllm)
    plain.model.to(torch.bfloat16)
    spans = spans_of(engine, chat)
    until = Until("attention_ratio", 0.9, gain=0.5, smoothing=0.4, band=0.0, range=RANGE)
    course = Course(until, "vision", 0.5, spans)
    sign = 1.0 if vector.positive == "vision" else -1.0
    (result,) = engine.generate([asked(chat, Steer.to(vector, "vision", 0.5, until=until))])
    (choice,) = result.choices
    by_hand(plain, chat, course, vector.delta(sign), choice.token_ids)  # rounding may choose other tokens
    assert_course(choice, course, "attention_ratio", tolerance=5e-3)
    assert reported(choice)["strength"]["last"] > 0.5


def test_the_rule_by_hand() -> None:
    until = Until("attention_ratio", 0.5, gain=1.0, smoothing=0.5, band=0.05, range=(0.0, 2.0))
    loop = torch.stack([until.loop(1.0, "vision", (0.0, 2.0)), until.loop(1.0, "text", (0.0, 2.0))])
    strengths = []
    for measured in (0.3, 0.5, math.nan, 0.9, 1.0, 1.0, 1.0):
        loop = followed(loop, torch.tensor([measured, measured]))
        strengths.append(loop[:, 7].tolist())
    # The level: .3, .4, .4, .65, .825, .9125, .95625. Toward vision: + 2 (.5 - level), held to 0 at last.
    assert [one for one, _ in strengths] == pytest.approx([1.4, 1.6, 1.6, 1.3, 0.65, 0.0, 0.0])
    assert [other for _, other in strengths] == pytest.approx([0.6, 0.4, 0.4, 0.7, 1.35, 2.0, 2.0])
    quiet = followed(until.loop(1.0, "vision", (0.0, 2.0))[None], torch.tensor([0.46]))
    assert quiet[0, 7].item() == 1.0, "within the band nothing moves"


def test_answers_of_one_prompt_follow_their_own_courses(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl", slots=6)
    chat, vector = told("qwen2_vl"), make_vector(engine.mllm)
    steer = Steer.to(vector, "vision", 1.0, until=Until("attention_ratio", 0.9, gain=0.2, band=0.0, range=RANGE))
    drawn = Sampling(max_tokens=8, ignore_eos=True, temperature=1.5, seed=5)
    (several,) = engine.generate([asked(chat, steer, sampling=drawn, n=3)])
    assert len({choice.token_ids for choice in several.choices}) == 3
    for index, choice in enumerate(several.choices):
        seed = steering.answer_seed(5, index)
        (alone,) = engine.generate([asked(chat, steer, sampling=Sampling(
            max_tokens=8, ignore_eos=True, temperature=1.5, seed=seed
        ))])  # fmt: skip
        assert alone.choices[0].token_ids == choice.token_ids
        one, other = reported(choice)["course"], reported(alone.choices[0])["course"]
        for key in ("strength", "attention_ratio"):
            assert one[key] == pytest.approx(other[key], abs=1e-5)
    assert len({tuple(reported(choice)["course"]["strength"]) for choice in several.choices}) == 3


def test_cached_prompts_chunks_streams_and_a_baseline_change_nothing(make_engine: MakeEngine) -> None:
    chat = told("qwen2_vl", "What is it? " * 12)
    plain = make_engine("qwen2_vl", slots=6)
    vector = make_vector(plain.mllm)
    steer = Steer.to(vector, "vision", 1.0, until=Until("attention_ratio", 0.9, band=0.0, range=RANGE))
    request = asked(chat, steer)
    expected = plain.generate([request])[0].choices[0]
    untouched = plain.generate([Request(chat, SAMPLING)])[0].choices[0]
    cached = make_engine("qwen2_vl", slots=6, prefix_cache_bytes=2**26, prefill_budget=24)
    for _ in range(2):
        result = cached.generate([request])[0]
        assert result.choices[0].token_ids == expected.token_ids
        assert reported(result.choices[0])["course"] == {
            key: pytest.approx(value, abs=1e-4) for key, value in reported(expected)["course"].items()
        }
    assert result.cached_tokens > 0
    other = Steer.to(vector, "vision", 1.0, until=Until("attention_ratio", 0.0, band=0.0, range=RANGE))
    moved = cached.generate([asked(chat, other)])[0]  # the prompt is that of the same strength
    assert moved.cached_tokens > 0
    assert reported(moved.choices[0])["course"]["strength"][0] == 1.0
    assert reported(moved.choices[0])["strength"]["last"] < 1.0 < reported(expected)["strength"]["last"]
    (beside,) = plain.generate([asked(chat, steer, baseline=True)])
    assert beside.choices[0].token_ids == expected.token_ids
    assert beside.choices[0].baseline is not None
    assert beside.choices[0].baseline.token_ids == untouched.token_ids
    assert beside.choices[0].baseline.applied is None
    plain.start()
    *_, last = plain.submit(request)
    assert last.choice is not None
    assert reported(last.choice)["course"]["strength"] == pytest.approx(
        reported(expected)["course"]["strength"], abs=1e-4
    )
    plain.stop()


def test_a_report_is_bounded(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    until = Until("attention_ratio", 0.9, band=0.0, range=RANGE)
    steer = Steer.to(make_vector(engine.mllm), "vision", 0.0, until=until)
    sampling = Sampling(max_tokens=300, ignore_eos=True)
    (result,) = engine.generate([asked(told("qwen2_vl"), steer, sampling=sampling)])
    report = reported(result.choices[0])
    assert report["course"]["every"] == 3
    assert len(report["course"]["strength"]) == len(report["course"]["attention_ratio"]) == 100 <= POINTS
    assert report["strength"]["first"] == 0.0
    assert (
        RANGE[0] <= report["strength"]["least"] <= report["strength"]["mean"] <= report["strength"]["most"] <= RANGE[1]
    )
    brief = steering.Steering((steer,)).brief(result.choices[0].applied["steering"])  # type: ignore[index]
    assert "course" not in brief[0]["until"]
    assert brief[0]["until"]["strength"] == report["strength"]


def test_what_cannot_be_followed_is_refused_by_name(make_engine: MakeEngine) -> None:
    engine = make_engine("qwen2_vl")
    vector, chat = make_vector(engine.mllm), told("qwen2_vl")
    until = Until("attention_ratio", 0.5, range=RANGE)
    wrongs: list[tuple[Any, str]] = [
        (lambda: Until("unheard", 0.5), "steering.until"),
        (lambda: Until("attention_ratio", 1.5), "steering.until.attention_ratio"),
        (lambda: Until("attention_ratio", 0.5, gain=-1.0), "steering.control.gain"),
        (lambda: Until("attention_ratio", 0.5, smoothing=0.0), "steering.control.smoothing"),
        (lambda: Until("attention_ratio", 0.5, band=2.0), "steering.control.band"),
        (lambda: Until("attention_ratio", 0.5, range=(1.0, 0.5)), "steering.control.range"),
        (lambda: Steer.to(vector, "vision", 1.0, until=Until("attention_ratio", 0.5)), "steering.control.range"),
        (lambda: Steer.to(vector, "vision", 4.0, until=until), "steering.strength"),
        (lambda: Steer.to(vector, "vision", 1.0, until=until, tokens="prompt"), "steering.apply.tokens"),
        (lambda: Steer(vector, 1.0, until=until), "steering.until"),
    ]
    for make, param in wrongs:
        with pytest.raises(RequestError) as error:
            make()
        assert error.value.param == param
    steer = Steer.to(vector, "vision", 1.0, until=until)
    with pytest.raises(RequestError, match="contrasts the answer with a twin") as error:
        engine.generate([Request(chat, SAMPLING, interventions=(steer, Vcd()))])
    assert error.value.param == "steering.until"
    with pytest.raises(RequestError, match="a single vector"):
        engine.generate([Request(chat, SAMPLING, interventions=(steer, Steer(vector, 1.0)))])
    alone = families.example_messages("qwen2_vl", 1)
    with pytest.raises(Inapplicable, match="needs a text context") as lacking:
        engine.generate([asked(alone, steer)])
    assert lacking.value.param == "steering.until.attention_ratio"
    engine.generate([asked(alone, Steer.to(vector, "vision", 1.0, until=Until("image_share", 0.5, range=RANGE)))])
