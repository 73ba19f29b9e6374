"""Conditions, checks and controls with a scripted model, so that every number of the report is known by hand."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
import pytest
import torch
from PIL import Image

import steering
from probes.answering.base import Push, Question, Reply
from probes.conflicts import samples as mc2
from probes.conflicts.asking import Answers, Condition, ask
from probes.conflicts.samples import ConflictSample, Side
from probes.conflicts.shares import Shares
from probes.mc2.evaluate import KINDS, Candidate, Evaluation, Preference, evaluate, random_like, spread
from probes.vector.build import build
from steering import SteeringVector
from tests.probes.conftest import make_samples

FIELDS = {"s_vision", "s_text", "s_others", "vision_ratio", "n"}


# ------------------------------------------------------------------------------------------------ a scripted model


@dataclass(frozen=True)
class Asked:
    """A question about one of `balls`, read back from its chat: which ball, the order, what is shown."""

    ball: int
    swapped: bool
    setting: str
    push: Push | None
    question: Question

    @property
    def image(self) -> Image.Image | None:
        parts = self.question.chat[-1]["content"]
        return parts[0]["image"] if len(parts) == 2 else None

    @property
    def text(self) -> str:
        return str(self.question.chat[-1]["content"][-1]["text"])

    @classmethod
    def of(cls, question: Question) -> Asked:
        *shots, last = question.chat
        text = last["content"][-1]["text"]
        found = re.search(r"ball (\d+)\?", text)
        assert found is not None
        sides = [side for side in mc2.SIDES if mc2.WORDINGS["paper"][side] in text]
        setting: str = sides[0] if sides else "plain"
        if mc2.CHAIN_REQUEST in text:
            setting = f"chain_{setting}"
        elif shots:
            setting = "shots_vision" if shots[1]["content"] == "A" else "shots_text"
        elif len(last["content"]) == 1:
            setting = "context_only"
        elif not text.startswith("Text context: "):
            setting = "image_only"
        return cls(int(found[1]), "A. blue" in text, setting, question.push, question)


@dataclass
class Scripted:
    """Answers by a rule and keeps what it was asked."""

    rule: Callable[[Asked], Reply]
    asked: list[Asked] = field(default_factory=list)
    ended: bool = True
    identity: str = "scripted"

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        self.ended = False
        for question in questions:
            self.asked.append(Asked.of(question))
            yield self.rule(self.asked[-1])
        self.ended = True


def balls(count: int) -> list[ConflictSample]:
    """Samples that `Asked` tells apart; the tasks alternate."""
    return [
        ConflictSample(
            id=f"ball-{i}",
            task=("color", "shape")[i % 2],
            image=Image.new("RGB", (8, 8), (10 * i, 0, 0)),
            question=f"What color is ball {i}?",
            answer_vision="red",
            answer_text="blue",
            context=f"Ball number {i} is blue.",
        )
        for i in range(count)
    ]


def said(code: str, swapped: bool) -> str:
    """An answer: v the image's, t the text's, a and b that letter in either order, n no letter."""
    if code in "vt":
        return "AB"[(code == "t") != swapped]
    return {"a": "A", "b": "B", "n": "Sorry."}[code]


def simple_vector(name: str = "preference", layers: tuple[int, ...] = (1,)) -> SteeringVector:
    """Three layers of four dimensions."""
    direction = torch.tensor([[1.0, 0, 0, 0], [0, 3, 4, 0], [0, 0, 0, 2]])
    return SteeringVector(
        name, direction, torch.tensor([1.0, 2.0, 0.5]), torch.ones(3), torch.ones(3), layers, "0" * 64
    )


# ------------------------------------------------------------------------------------------------------ conditions

SCRIPT = {
    "plain": "vvtan",
    "vision": "vvvvt",
    "text": "ttttt",
    "instruct_vision": "vvnnv",
    "instruct_text": "tttvv",
    "chain_vision": "vvtta",
    "chain_text": "ttttv",
    "shots_vision": "vnnnn",
    "shots_text": "tttna",
    "plain image_only": "vvvaa",
    "plain context_only": "tttvn",
    "vision image_only": "vvvvv",
    "vision context_only": "ttvvv",
    "text image_only": "vvttt",
    "text context_only": "ttttb",
}
VECTOR = simple_vector()
STEERING = Candidate(VECTOR, 1.5, (0, 2))
SHOTS = make_samples(4)


def script_name(one: Asked) -> str:
    """The key of SCRIPT."""
    steered = "plain" if one.push is None else one.push.toward
    if one.setting.endswith("_only"):
        return f"{steered} {one.setting}"
    if one.setting in ("vision", "text"):
        return f"instruct_{one.setting}"
    return steered if one.setting == "plain" else one.setting


def ratio(one: Asked) -> float | None:
    """.0 to .4 for the balls plainly asked, the swapped ones .1 more; unknown for ball 3; .5 where anything is done."""
    if script_name(one) != "plain":
        return 0.5
    return None if one.ball == 3 else (one.ball + one.swapped) / 10


def by_script(one: Asked) -> Reply:
    return Reply(said(SCRIPT[script_name(one)][one.ball], one.swapped), ratio(one))


@pytest.fixture(scope="module")
def scripted() -> Scripted:
    return Scripted(by_script)


@pytest.fixture(scope="module")
def evaluation(scripted: Scripted) -> Evaluation:
    return evaluate(scripted, balls(5), steering=STEERING, shots=SHOTS, quiet=True)


def test_shares_of_every_condition_by_hand(evaluation: Evaluation) -> None:
    shares = {name: one.shares for name, one in evaluation.conditions.items()}
    assert {
        name: (round(5 * s.s_vision), round(5 * s.s_text), round(5 * s.s_others)) for name, s in shares.items()
    } == {
        "plain": (2, 1, 2),
        "instruct_vision": (3, 0, 2),
        "instruct_text": (2, 3, 0),
        "chain_vision": (2, 2, 1),
        "chain_text": (1, 4, 0),
        "shots_vision": (1, 0, 4),
        "shots_text": (0, 3, 2),
        "vision": (4, 1, 0),
        "text": (0, 5, 0),
    }
    assert all(one.n == 5 for one in shares.values())
    assert shares["plain"].vision_ratio == pytest.approx(2 / 3)
    assert shares["text"].vision_ratio == 0


def test_kinds_and_sides_of_the_conditions(evaluation: Evaluation) -> None:
    found = {name: (one.kind, one.side) for name, one in evaluation.conditions.items()}
    assert found["plain"] == ("plain", None)
    assert found["vision"] == ("steer", "vision")
    assert found["text"] == ("steer", "text")
    for kind in ("instruct", "chain", "shots"):
        for side in mc2.SIDES:
            assert found[f"{kind}_{side}"] == (kind, side)


def test_shares_by_task_by_hand(evaluation: Evaluation) -> None:
    by_task = evaluation.conditions["plain"].by_task  # balls 0, 2, 4: v t n; balls 1, 3: v a
    assert list(by_task) == ["color", "shape"]
    color, shape = by_task["color"], by_task["shape"]
    assert (color.s_vision, color.s_text, color.s_others, color.vision_ratio, color.n) == (1 / 3, 1 / 3, 1 / 3, 0.5, 3)
    assert (shape.s_vision, shape.s_text, shape.s_others, shape.vision_ratio, shape.n) == (0.5, 0, 0.5, 1, 2)


def test_consistent_and_unanswered_by_hand(evaluation: Evaluation) -> None:
    report = evaluation.to_json()
    assert report["plain"]["consistent"] == pytest.approx(3 / 5)
    assert report["plain"]["unanswered"] == pytest.approx(2 / 10)
    assert report["shots_vision"]["unanswered"] == pytest.approx(8 / 10)
    assert report["text"]["unanswered"] == 0


def test_one_modality_alone_is_asked_where_nothing_instructs(evaluation: Evaluation) -> None:
    found = {name: (one.image_only, one.context_only) for name, one in evaluation.conditions.items()}
    # Right answers of both orders; "a" and "b" are right in one of them.
    assert found.pop("plain") == pytest.approx((8 / 10, 6 / 10))
    assert found.pop("vision") == pytest.approx((10 / 10, 4 / 10))
    assert found.pop("text") == pytest.approx((4 / 10, 9 / 10))
    assert set(found.values()) == {(None, None)}
    report = evaluation.to_json()
    assert (report["plain"]["no_conflict_accuracy"], report["plain"]["context_only_accuracy"]) == pytest.approx(
        (0.8, 0.6)
    )
    assert "no_conflict_accuracy" not in report["chain_text"]


def test_the_attention_ratio_is_the_mean_of_what_was_measured(evaluation: Evaluation) -> None:
    # Balls 0, 1, 2, 4: .0 .1, .1 .2, .2 .3, .4 .5
    assert evaluation.conditions["plain"].attention_ratio == pytest.approx(1.8 / 8)
    assert evaluation.conditions["instruct_text"].attention_ratio == pytest.approx(0.5)


def test_an_attention_ratio_that_nobody_measured_is_left_out() -> None:
    found = evaluate(Scripted(lambda one: Reply("A")), balls(1), kinds=["plain"], quiet=True)
    assert found.conditions["plain"].attention_ratio is None
    assert "attention_ratio" not in found.to_json()["plain"]


def test_every_question_is_asked_once_as_its_condition_wants(scripted: Scripted, evaluation: Evaluation) -> None:
    assert len(scripted.asked) == len(SCRIPT) * 5 * 2
    assert len({(script_name(one), one.ball, one.swapped) for one in scripted.asked}) == len(scripted.asked)
    for one in scripted.asked:
        assert one.question.max_tokens == (512 if one.setting.startswith("chain") else 24)
        if one.push is not None:
            assert (one.push.vector, one.push.strength, one.push.layers) == (VECTOR, 1.5, (0, 2))
        shown = [part["image"] for turn in one.question.chat[:-1:2] for part in turn["content"] if "image" in part]
        assert shown == ([shot.image for shot in SHOTS] if one.setting.startswith("shots") else [])
    assert scripted.ended


def exact_interval(differences: list[float]) -> tuple[float, float]:
    """The 95 % interval of the mean from all possible resamples."""
    means = [sum(drawn) / len(drawn) for drawn in itertools.product(differences, repeat=len(differences))]
    low, high = np.quantile(means, (0.025, 0.975))
    return float(low), float(high)


def test_advantages_are_paired_differences_from_the_best_other_condition(evaluation: Evaluation) -> None:
    vision, text = evaluation.advantages()
    # vvvvt less vvnnv, ttttt less ttttv
    assert (vision.side, vision.other, text.side, text.other) == ("vision", "instruct_vision", "text", "chain_text")
    assert vision.difference == pytest.approx((0 + 0 + 1 + 1 - 1) / 5)
    assert vision.interval == pytest.approx(exact_interval([0, 0, 1, 1, -1]))
    assert text.difference == pytest.approx(1 / 5)
    assert text.interval == pytest.approx(exact_interval([0, 0, 0, 0, 1]))
    assert evaluation.to_json()["advantages"]["vision"] == {
        "other": "instruct_vision", "difference": pytest.approx(0.2), "difference_95": list(vision.interval),
    }  # fmt: skip


def test_a_steering_that_is_worse_has_a_negative_advantage() -> None:
    codes = {"vision": "ttvv", "text": "vvvv", "instruct_vision": "vvvv", "instruct_text": "tttt"}
    answerer = Scripted(lambda one: Reply(said(codes.get(script_name(one), "vvvv")[one.ball], one.swapped)))
    found = evaluate(answerer, balls(4), steering=STEERING, kinds=["instruct", "steer"], quiet=True)
    assert [one.difference for one in found.advantages()] == [-0.5, -1.0]
    assert found.advantages()[1].interval == (-1.0, -1.0)


@pytest.mark.parametrize("kinds", [["plain", "steer"], ["plain", "instruct", "chain"]])
def test_no_advantage_without_something_to_compare(kinds: list[str]) -> None:
    found = evaluate(Scripted(lambda one: Reply("A")), balls(1), steering=STEERING, kinds=kinds, quiet=True)
    assert found.advantages() == []
    assert "advantages" not in found.to_json()


# ---------------------------------------------------------------------------------------------------------- report


def test_the_report_has_the_agreed_fields(evaluation: Evaluation) -> None:
    report = evaluation.to_json()
    sided = {f"{kind}_{side}" for kind in ("instruct", "chain", "shots") for side in mc2.SIDES}
    assert set(report) == {"plain", "vision", "text", "advantages", *sided}
    for name, condition in report.items():
        if name != "advantages":
            assert set(condition) >= FIELDS
            assert condition["n"] == 5
            assert condition["s_vision"] + condition["s_text"] + condition["s_others"] == pytest.approx(1)
            assert set(condition["by_task"]) == {"color", "shape"}
            low, high = condition["s_text_95"]
            assert low <= condition["s_text"] <= high
    assert json.loads(json.dumps(report, allow_nan=False)) == report


def test_null_where_no_ratio_exists() -> None:
    found = evaluate(Scripted(lambda one: Reply("Sorry.")), balls(2), kinds=["plain"], quiet=True)
    plain = json.loads(json.dumps(found.to_json(), allow_nan=False))["plain"]
    assert {name: plain[name] for name in FIELDS} == {
        "s_vision": 0.0, "s_text": 0.0, "s_others": 1.0, "vision_ratio": None, "n": 2,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("kinds", "names"),
    [
        (("plain",), {"plain"}),
        (("shots", "plain", "plain"), {"plain", "shots_vision", "shots_text"}),
        (("steer",), {"vision", "text"}),
        (KINDS[:3], {"plain", "instruct_vision", "instruct_text", "chain_vision", "chain_text"}),
    ],
)
def test_only_what_is_wanted_is_asked(kinds: tuple[str, ...], names: set[str]) -> None:
    answerer = Scripted(by_script)
    found = evaluate(answerer, balls(2), steering=STEERING, kinds=kinds, shots=SHOTS, quiet=True)
    assert set(found.to_json()) == names
    assert {script_name(one).split()[0] for one in answerer.asked} == names


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"kinds": ["plain", "guess"]}, "Unknown conditions: guess; there are plain, instruct, chain, shots, steer"),
        ({"kinds": ["plain", "steer"]}, "The condition 'steer' needs a vector"),
        ({"kinds": ["shots"]}, "The condition 'shots' needs solved examples"),
        ({"kinds": ["plain"], "random_directions": 1}, "Random directions need the vector whose size they have"),
    ],
)
def test_what_is_lacking_is_named(more: Mapping[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        evaluate(Scripted(lambda one: Reply("A")), balls(1), quiet=True, **more)  # type: ignore[arg-type]


# -------------------------------------------------------------------------------------------------------- controls


def test_random_directions_are_pushed_toward_text_and_counted_each() -> None:
    codes = {"random-7": "ttva", "random-8": "vvvt", "random-9": "nnna"}

    def rule(one: Asked) -> Reply:
        if one.push is None:
            return Reply("A")
        assert isinstance(one.push.vector, SteeringVector)
        return Reply(said(codes.get(one.push.vector.name, "nnnn")[one.ball], one.swapped))

    answerer = Scripted(rule)
    found = evaluate(answerer, balls(4), steering=STEERING, kinds=["plain"], random_directions=3, seed=7, quiet=True)
    assert [(one.s_vision, one.s_text, one.s_others) for one in found.random] == [
        (0.25, 0.5, 0.25), (0.75, 0.25, 0), (0, 0, 1),
    ]  # fmt: skip
    pushes = [one.push for one in answerer.asked if one.push is not None]
    assert {(push.toward, push.strength, push.layers) for push in pushes} == {("text", 1.5, (0, 2))}
    report = found.to_json()["random"]
    assert report["directions"] == 3
    assert report["vision_ratio"] == {"min": pytest.approx(1 / 3), "mean": pytest.approx(13 / 24), "max": 0.75}
    assert report["s_others"] == {"min": 0, "mean": pytest.approx(1.25 / 3), "max": 1}
    assert [one["s_text"] for one in report["each"]] == [0.5, 0.25, 0]


def test_random_directions_are_the_same_dose(tiny: steering.Engine) -> None:
    vector = build(tiny, make_samples(2), layers=[1], quiet=True)
    first, again, other = random_like(vector, 1), random_like(vector, 1), random_like(vector, 2)
    everywhere = range(len(vector.direction))
    torch.testing.assert_close(first.delta(0.7, everywhere).norm(dim=-1), vector.delta(0.7, everywhere).norm(dim=-1))
    torch.testing.assert_close(first.direction, again.direction)
    cosine = torch.nn.functional.cosine_similarity(first.direction, other.direction, dim=-1)
    assert cosine.abs().max() < 0.6
    assert first.layers == vector.layers


def test_ratios_that_do_not_exist_are_left_out_of_the_spread() -> None:
    assert spread([0.2, None, 0.6]) == {"min": 0.2, "mean": pytest.approx(0.4), "max": 0.6}
    assert spread([None]) == {"min": None, "mean": None, "max": None}


# ---------------------------------------------------------------------------------------------------------- asking


def test_accuracy_counts_questions_not_samples() -> None:
    answers = Answers([("A", "B"), ("A", "A"), (None, "B"), ("B", "A")])
    assert answers.accuracy() == 4 / 8
    assert answers.accuracy("text") == 3 / 8
    assert answers.right("vision") == [1, 0.5, 0.5, 0]
    assert answers.outcomes == ["vision", "others", "others", "text"]


def test_both_orders_of_a_sample_follow_each_other_under_every_condition() -> None:
    answerer = Scripted(by_script)
    plain, pushed = ask(answerer, balls(2), [Condition(), Condition("plain", STEERING.toward("text"))], quiet=True)
    assert [(one.ball, script_name(one), one.swapped) for one in answerer.asked] == [
        (ball, name, swapped) for ball in (0, 1) for name in ("plain", "text") for swapped in (False, True)
    ]
    assert (plain.outcomes, pushed.outcomes) == (["vision", "vision"], ["text", "text"])
    assert plain.letters == [("A", "B"), ("A", "B")]
    assert [[reply.text for reply in pair] for pair in pushed.replies] == [["B", "A"], ["B", "A"]]


def measured(kind: str = "plain", side: Side | None = None, codes: str = "v") -> Preference:
    """A condition in which nothing but the outcomes is known."""
    answers = Answers([("A", "B") if code == "v" else ("B", "A") if code == "t" else ("A", "A") for code in codes])
    return Preference.of(kind, side, balls(len(codes)), answers, seed=0)


def test_a_condition_is_named_by_kind_and_side() -> None:
    assert measured().name == "plain"
    assert measured("steer", "text").name == "text"
    assert measured("chain", "vision").name == "chain_vision"
    assert replace(measured("steer", "vision", "vto"), image_only=0.0).to_json()["no_conflict_accuracy"] == 0
    assert measured(codes="vto").shares == Shares.of(["vision", "text", "others"], 1000, 0)
