"""Conflicts between picture and text, answered by `smol` in its own words under instruction, examples and steering.

It never learnt to choose a letter reliably, so an answer counts for the side whose value alone it names.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

import numpy as np
import torch
from PIL import Image

from demo.smol import criteria
from demo.world.conflicts import conflict_samples
from probes.answering.base import Answerer, Chat, Push, Question
from probes.answering.replies import replies
from probes.conflicts.samples import SIDES, WORDINGS, ConflictSample, Side
from probes.conflicts.shares import Outcome, Shares
from probes.harness.bootstrap import paired
from probes.pairs.build import build
from probes.pairs.file import PromptPair
from steering import Engine, SteeringVector

KINDS = ("color", "shape", "background", "count", "position", "at")
SEEDS = {"direction": (11, 0.6), "tuning": (12, 0.4), "test": (13, 1.0)}
"""Held-out conflicts of three seeds: those that give the direction, those that choose how to steer, and those reported.

Each with its seed, and its number as a share of those reported.
"""
DIRECTIONS = ("instructed", "alone")
"""From the two instructions as the paper does (section 5.1), or from the picture alone against the text beside gray."""
TOKENS, CHAIN_TOKENS = 24, 96
CHAIN = "Think step by step about the image and the text, and then answer."
SIGN: Mapping[Side, Literal["plus", "minus"]] = {"vision": "plus", "text": "minus"}
RIVALS = ("instruction", "chain", "shots")


def side_of(answer: str, sample: ConflictSample) -> Outcome:
    """Return the side whose value an answer names, "others" if it names neither or both.

    Of a value within the other one ("top" in "top left") only the longer counts, where that is what it says.
    """
    values = {"vision": sample.answer_vision, "text": sample.answer_text}
    text, spans = answer.lower(), {}
    for side, value in values.items():
        spans[side] = [match.span() for match in re.finditer(rf"\b{re.escape(value.lower())}\b", text)]
    named = [
        side
        for side, other in (("vision", "text"), ("text", "vision"))
        if any(not any(o[0] <= s[0] and s[1] <= o[1] and o != s for o in spans[other]) for s in spans[side])
    ]
    return cast(Outcome, named[0]) if len(named) == 1 else "others"


@dataclass(frozen=True)
class Asked:
    """A way to ask: with the text or not, an instruction, a request to think first, solved examples, a push."""

    context: bool = True
    side: Side | None = None
    instructed: bool = False
    chain: bool = False
    shots: tuple[ConflictSample, ...] = ()
    push: Push | None = None

    def question(self, sample: ConflictSample) -> Question:
        return Question(self.chat(sample), self.push, CHAIN_TOKENS if self.chain else TOKENS, diagnose=None)

    def chat(self, sample: ConflictSample, blank: bool = False) -> Chat:
        """Return the chat; `blank` shows a grey picture in place of the sample's."""
        chat: list[dict[str, Any]] = []
        for shot in self.shots:
            assert self.side is not None
            value = shot.answer_vision if self.side == "vision" else shot.answer_text
            chat += [self._turn(shot), {"role": "assistant", "content": f"{value[0].upper()}{value[1:]}."}]
        return [*chat, self._turn(sample, blank)]

    def _turn(self, sample: ConflictSample, blank: bool = False) -> dict[str, Any]:
        lines = [
            f"Text context: {sample.context}" if self.context else None,
            WORDINGS["paper"][self.side].rstrip() if self.instructed and self.side else None,
            sample.question,
            CHAIN if self.chain else None,
        ]
        picture = sample.picture()
        if blank:  # in a picture of its own: the sample's is shared
            picture = Image.new("RGB", picture.size, (127, 127, 127))
        text = "\n".join(line for line in lines if line is not None)
        return {"role": "user", "content": [{"type": "image", "image": picture}, {"type": "text", "text": text}]}


@dataclass(frozen=True)
class _Prompt:
    """A prompt of a pair, as `probes.pairs.build` reads it."""

    asked: Asked
    sample: ConflictSample
    blank: bool = False

    def chat(self) -> Chat:
        return self.asked.chat(self.sample, self.blank)

    @property
    def digest(self) -> str:
        return f"{self.sample.id} {self.asked.context} {self.asked.side} {self.blank}"


@dataclass(frozen=True)
class _Pair:
    toward: _Prompt
    away: _Prompt

    @property
    def digest(self) -> str:
        return f"{self.toward.digest} {self.away.digest}"


def direction(engine: Engine, samples: Sequence[ConflictSample], kind: str, quiet: bool) -> SteeringVector:
    """Return the vector whose plus leads to the picture."""
    if kind == "instructed":
        ways = [(Asked(side=side, instructed=True), False) for side in SIDES]
    else:
        ways = [(Asked(context=False), False), (Asked(), True)]
    pairs = [_Pair(*(_Prompt(way, sample, blank) for way, blank in ways)) for sample in samples]
    return build(engine, cast(Sequence[PromptPair], pairs), name=f"smol-{kind}", sides=("vision", "text"), quiet=quiet)


def randomly(vector: SteeringVector, seed: int) -> SteeringVector:
    """Return a vector of random directions with the same norm in each layer."""
    drawn = torch.randn(vector.direction.shape, generator=torch.Generator().manual_seed(seed))
    scale = vector.direction.norm(dim=-1, keepdim=True) / drawn.norm(dim=-1, keepdim=True)
    return replace(vector, name=f"random-{seed}", direction=drawn * scale)


def ask(
    answerer: Answerer, samples: Sequence[ConflictSample], ways: Mapping[str, Asked], title: str, quiet: bool
) -> dict[str, list[Outcome]]:
    """Return by way the side of every answer."""
    plan = [(name, sample) for name in ways for sample in samples]

    def questions() -> Iterator[Question]:
        for name, sample in plan:
            yield ways[name].question(sample)

    outcomes: dict[str, list[Outcome]] = {name: [] for name in ways}
    stream = replies(answerer, questions(), [name for name, _ in plan], title=title, quiet=quiet)
    for (name, sample), reply in zip(plan, stream, strict=True):
        outcomes[name].append(side_of(reply.text, sample))
    return outcomes


def learnt(answerer: Answerer, samples: Sequence[ConflictSample], quiet: bool) -> dict[str, float]:
    """Return by task the share that the model answers rightly from the picture alone."""
    alone = ask(answerer, samples, {"alone": Asked(context=False)}, "Without a text", quiet)["alone"]
    tasks = sorted({sample.task for sample in samples})
    return {
        task: float(np.mean([a == "vision" for a, s in zip(alone, samples, strict=True) if s.task == task]))
        for task in tasks
    }


def choose(
    answerer: Answerer, samples: Sequence[ConflictSample], vectors: Mapping[str, SteeringVector], quiet: bool
) -> dict[Side, tuple[str, Push, float]]:
    """Return for each side the direction, the push and its share, of all tried, that is followed most often."""
    chosen: dict[Side, tuple[str, Push, float]] = {}
    for side in SIDES:
        ways, pushes = {}, {}
        for kind, vector in vectors.items():
            depth = len(vector.direction)
            layers = sorted({*vector.layers, *(round(share * depth) for share in criteria.LAYERS)})
            for layer in layers:
                for strength in criteria.STRENGTHS:
                    name = f"{kind} {layer} {strength:g}"
                    pushes[name] = kind, Push(SIGN[side], vector, strength, (layer,))
                    ways[name] = Asked(side=side, push=pushes[name][1])
        outcomes = ask(answerer, samples, ways, f"Steered toward {side}", quiet)
        shares = {name: answers.count(side) / len(samples) for name, answers in outcomes.items()}
        best = max(shares, key=lambda name: (shares[name], -pushes[name][1].strength))
        chosen[side] = (*pushes[best], shares[best])
    return chosen


def measure(answerer: Answerer, engine: Engine, count: int, seed: int = 0, quiet: bool = False) -> dict[str, Any]:
    """Return the shares by condition over held-out conflicts, and the verdicts of `criteria`.

    answerer: the engine's.
    """
    drawn = {
        name: conflict_samples(round(share * count), 100 * seed + own, kinds=KINDS)
        for name, (own, share) in SEEDS.items()
    }
    right = learnt(answerer, drawn["tuning"], quiet)
    usable = {
        name: [sample for sample in samples if right.get(sample.task, 0) >= criteria.LEARNT]
        for name, samples in drawn.items()
    }
    if not all(usable.values()):
        raise ValueError(f"no task is answered rightly from the picture alone, so no conflict says anything: {right}")
    vectors = {kind: direction(engine, usable["direction"], kind, quiet) for kind in DIRECTIONS}
    chosen = choose(answerer, usable["tuning"], vectors, quiet)
    shots = tuple(random.Random(seed).sample(usable["tuning"], min(4, len(usable["tuning"]))))
    ways = {"plain": Asked(), "without a text": Asked(context=False)}
    for side in SIDES:
        push = chosen[side][1]
        ways |= {
            f"instruction {side}": Asked(side=side, instructed=True),
            f"chain {side}": Asked(side=side, instructed=True, chain=True),
            f"shots {side}": Asked(side=side, shots=shots),
            f"steered {side}": Asked(side=side, push=push),
        }
        assert isinstance(push.vector, SteeringVector)
        for number in (1, 2):
            way = replace(push, vector=randomly(push.vector, number))
            ways[f"random {number} {side}"] = Asked(side=side, push=way)
    outcomes = ask(answerer, usable["test"], ways, "Conflicts", quiet)
    return {
        "right by task without a text": right,
        "conditions": {name: Shares.of(answers, intervals=True).to_json() for name, answers in outcomes.items()},
        "plain by task": {
            task: Shares.of(
                [a for a, sample in zip(outcomes["plain"], usable["test"], strict=True) if sample.task == task],
                intervals=True,
            ).to_json()
            for task in sorted({sample.task for sample in usable["test"]})
        },
        "chosen": {
            side: {"direction": kind, "layer": (push.layers or ())[0], "strength": push.strength, "tuning": share}
            for side, (kind, push, share) in chosen.items()
        },
        "verdicts": judge(outcomes),
    }


def judge(outcomes: Mapping[str, Sequence[Outcome]]) -> dict[str, Any]:
    """Return the verdicts on the answers of `measure`."""

    def difference(first: str, second: str, side: Side) -> tuple[float, tuple[float, float]]:
        ours, theirs = (np.array([answer == side for answer in outcomes[name]], float) for name in (first, second))
        return float((ours - theirs).mean()), paired(ours - theirs)

    plain = Shares.of(outcomes["plain"], intervals=True)
    verdicts: dict[str, Any] = {"prefers": criteria.preference(plain.intervals.get("vision_ratio"))}
    over_best, over_random = [], []
    for side in SIDES:
        for name in (*RIVALS, "steered"):
            value, bounds = difference(f"{name} {side}", "plain", side)
            verdicts[f"{name} {side}"] = {"difference": value, "difference_95": bounds, "moves": criteria.moved(bounds)}
        best = max(RIVALS, key=lambda name: outcomes[f"{name} {side}"].count(side))
        value, bounds = difference(f"steered {side}", f"{best} {side}", side)
        verdicts[f"steered over best {side}"] = {"other": best, "difference": value, "difference_95": bounds}
        over_best.append(bounds)
        over_random += [difference(f"steered {side}", f"random {number} {side}", side)[1] for number in (1, 2)]
    return verdicts | {"steering wins": criteria.steering_wins(over_best, over_random)}
