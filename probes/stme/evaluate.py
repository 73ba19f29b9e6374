"""The benchmark's questions: every sample under every condition, and control questions without interventions.

The controls show the pictures in other orders, ask for the target directly, leave the pictures out, or hide one picture.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from probes.answering.base import Answerer, Chat, Reply
from probes.harness.bootstrap import Share, Tallies, ratio
from probes.harness.comparison import BASELINE, PartAnswered, SampleSet, Way, ask_all
from probes.stme.answers import Scoring, names_target, right
from probes.stme.attention import Look
from probes.stme.samples import TargetSample
from steering import Diagnose
from steering.readouts.focus import METRICS

SAMPLES, SHUFFLED, WHICH, BLIND, HIDDEN, PATCHES = "samples", "shuffled", "which", "blind", "hidden", "patches"
"""The parts of a run; all but the first are asked without interventions only."""

MAPPED = 40
"""The most right answers on the target whose maps of patches are read."""

SHARES = {
    "answers": Share("right", "samples"),
    "answers_published": Share("published", "samples"),
    "answers_robust": Share("robust", "samples"),
    "attention": Share("right_m_lnd", "right_looks", fixed=False),
    "attention_lnd": Share("right_lnd", "right_looks", fixed=False),
    "attention_mc_lnd": Share("right_mc_lnd", "right_looks", fixed=False),
    "attention_wrong": Share("wrong_m_lnd", "wrong_looks", fixed=False),
    "ivm": Share("ivm", "looks"),
}
"""The metrics of the answers, and of the focused picture over the model's own N last layers.

`attention` is M-LND's on right answers, `attention_wrong` on wrong ones; `ivm` is the share, of all, of right answers that
look elsewhere.
"""

Answered = PartAnswered[TargetSample]


@dataclass(frozen=True)
class Hidden:
    """A sample, its answer's focused picture and another one (from 1), the answer, and its quadrant."""

    sample: TargetSample
    focused: int
    other: int
    answer: str
    quadrant: str

    def chats(self) -> list[Chat]:
        """Return the question without either picture."""
        return [self.sample.without(self.focused), self.sample.without(self.other)]

    def tally(self, replies: Sequence[Reply]) -> dict[str, float]:
        """Return which of the answers changed."""
        focused, unfocused = (float(reply.text.strip() != self.answer.strip()) for reply in replies)
        return {"n": 1.0, "focused": focused, "other": unfocused}


@dataclass(frozen=True)
class Asking:
    """The options of all questions: `shuffles` other orders, drawn with `seed`, and the `scoring` of answers."""

    samples: Sequence[TargetSample]
    shuffles: int
    seed: int
    scoring: Scoring
    max_tokens: int
    quiet: bool

    def right(self, sample: TargetSample, reply: Reply) -> bool:
        """Return whether the answer is right."""
        return right(sample, reply.text, self.scoring)

    def look(self, sample: TargetSample, reply: Reply) -> Look | None:
        """Return the look of an answer."""
        return Look.of(sample, reply, self.right(sample, reply))

    def shuffled(self, sample: TargetSample) -> list[TargetSample]:
        """Return the sample in other orders; a sample that is not movable stays in its own."""
        rng = random.Random(f"{self.seed} {sample.id}")
        places = list(range(sample.candidates))
        orders = [rng.sample(places, len(places)) for _ in range(self.shuffles)]
        return [sample.in_order(order) if sample.movable else sample for order in orders]

    def ask(self, answerer: Answerer, conditions: Mapping[str, Way]) -> dict[str, Answered]:
        """Return by condition the answers to the samples as they are."""
        part = SampleSet(
            SAMPLES, self.samples, lambda sample: [sample.chat()], self.tally, scores, SHARES, _difficulty,
            diagnose=self.readouts,
        )  # fmt: skip
        results = ask_all(answerer, conditions, [part], max_tokens=self.max_tokens, quiet=self.quiet)
        return {name: parts[0] for name, parts in results.items()}

    def ask_controls(self, answerer: Answerer, plain: Answered) -> dict[str, PartAnswered[Any]]:
        """Return by part the answers to the controls; `plain` are the baseline's answers to the samples as they are."""
        mapped = self.mapped(plain)
        placed = any(sample.spot is not None for sample in mapped)  # otherwise a map has no reference
        parts: list[SampleSet[Any]] = [
            self._single(WHICH, TargetSample.which, lambda sample, reply: names_target(sample, reply.text, self.scoring)),
            self._single(BLIND, TargetSample.blind, self.right),
            SampleSet(
                HIDDEN, self.hidden(plain), Hidden.chats, Hidden.tally, _hidden_scores,
                {name: Share(name, "n") for name in ("focused", "other")}, lambda hidden: hidden.quadrant, each=2,
            ),
            SampleSet(
                PATCHES, mapped, lambda sample: [sample.chat()], lambda sample, replies: {"n": 1.0}, dict, {},
                _difficulty, diagnose=Diagnose(frozenset({"patches", "tam"} if placed else {"patches"})),
            ),
        ]  # fmt: skip
        if self.shuffles:
            parts.append(
                SampleSet(
                    SHUFFLED, self.samples, lambda sample: [order.chat() for order in self.shuffled(sample)],
                    lambda sample, replies: {"n": 1.0}, dict, {}, _difficulty, each=self.shuffles,
                    diagnose=self.readouts,
                )
            )  # fmt: skip
        results = ask_all(answerer, {BASELINE: ()}, parts, max_tokens=self.max_tokens, quiet=self.quiet)
        return {answered.part.name: answered for answered in results[BASELINE]}

    @property
    def readouts(self) -> Diagnose:
        """The readouts beside an answer."""
        return Diagnose(frozenset({"focus", "anchor"} if any(sample.anchor for sample in self.samples) else {"focus"}))

    def tally(self, sample: TargetSample, replies: Sequence[Reply]) -> dict[str, float]:
        """Return the answer's contribution to the sums of `SHARES`."""
        (reply,) = replies
        answered, look = self.right(sample, reply), self.look(sample, reply)
        sums = {
            "samples": 1.0, "right": float(answered),
            "published": float(right(sample, reply.text, "published")),
            "robust": float(right(sample, reply.text, "robust")),
            "looks": float(look is not None), "ivm": float(look is not None and answered and look.image != look.target),
        }  # fmt: skip
        for side, counts in (("right", answered), ("wrong", not answered)):
            sums[f"{side}_looks"] = float(look is not None and counts)
            for metric in METRICS:
                sums[f"{side}_{metric}"] = float(look is not None and counts and look.hits(metric, look.n))
        return sums

    def hidden(self, plain: Answered) -> list[Hidden]:
        """Return every answer that looked at a picture, with that picture and another one.

        The other one is the target or, if the answer looked at that, a random one.
        """
        rng, hidden_pictures = random.Random(f"hidden {self.seed}"), []
        for sample, (reply,) in zip(plain.part.samples, plain.replies, strict=True):
            look = self.look(sample, reply)
            if look is not None and look.image is not None:
                hit = look.image == look.target
                unfocused = [number for number in range(1, sample.candidates + 1) if number != look.image]
                unfocused_image = rng.choice(unfocused) if hit else look.target
                quadrant = f"{'right' if look.right else 'wrong'}, {'on the target' if hit else 'elsewhere'}"
                hidden_pictures.append(Hidden(sample, look.image, unfocused_image, reply.text, quadrant))
        return hidden_pictures

    def mapped(self, plain: Answered) -> list[TargetSample]:
        """Return the first right answers on the target with a known place of the answer in it.

        If there is none, return the first right answer on the target.
        """
        mapped = [
            sample
            for sample, (reply,) in zip(plain.part.samples, plain.replies, strict=True)
            if (look := self.look(sample, reply)) is not None and look.right and look.image == look.target
        ]
        return [sample for sample in mapped if sample.spot is not None][:MAPPED] or mapped[:1]

    def _single(
        self, name: str, chat: Callable[[TargetSample], Chat], counts: Callable[[TargetSample, Reply], bool]
    ) -> SampleSet[TargetSample]:
        """Return a part with one question per sample, and the share of answers that `counts` accepts."""

        def tally(sample: TargetSample, replies: Sequence[Reply]) -> dict[str, float]:
            return {"n": 1.0, "counted": float(counts(sample, replies[0]))}

        return SampleSet(
            name, self.samples, lambda sample: [chat(sample)], tally,
            lambda sums: {"share": ratio(sums["counted"], sums["n"])}, {"share": Share("counted", "n")}, _difficulty,
        )  # fmt: skip


def _difficulty(sample: TargetSample) -> str:
    return sample.difficulty


def _hidden_scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return the shares of answers that change, and how many more change when the focused picture is hidden."""
    focused, unfocused = (ratio(sums[name], sums["n"]) for name in ("focused", "other"))
    return {"focused": focused, "other": unfocused, "more": focused - unfocused}


def scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Return the metrics of `SHARES` from the sums."""
    return {name: ratio(sums[share.counted], sums[share.of]) for name, share in SHARES.items()}


def by_task(answered: Answered) -> dict[str, Any]:
    """Return the metrics of an answered part by task."""
    return replace(answered, part=replace(answered.part, setting=lambda sample: sample.task)).measured()
