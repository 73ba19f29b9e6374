"""What SAGE's stages do to faithfulness: existence questions in POPE's format, and spot-the-difference.

Existence (POPE, Li et al. 2023): as many objects that are there as that are not, the absent ones drawn at random, by
frequency (popular) or by how often they come with what is there (adversarial). Differences: the metrics of
`differences` on what `claims` reads off the answers. Every condition answers the same samples, so each is compared with the
plain answers sample by sample.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from PIL import Image
from tqdm import tqdm

from probes.harness.bootstrap import Scores, Tallies, estimates
from probes.sage.claims import claims, yes
from probes.sage.differences import SHARES, Claim, Pair, compare, ratio, scores, tally
from steering import Contrast, Engine, Generate, Icd, Pai, Request, Sage, Sampling, See, Think, Vcd
from steering.interventions.see import READINGS

Setting = Literal["random", "popular", "adversarial"]
WHAT = "What is the difference between the two pictures?"
SAME, DIFFERENT = "Are the two pictures the same?", "Are the two pictures different?"
QUESTIONS = (WHAT, SAME, DIFFERENT, f"Find the difference. {SAME}", f"Find the difference. {DIFFERENT}")
"""What is asked about a pair. A model that answers the symmetric questions with a bare yes or no claims nothing that could
be consistent, so each is asked again with the request to explain; `cr` is read off those."""

PLAIN = "baseline"
"""The condition that the others are compared with."""


@dataclass(frozen=True)
class Existence:
    """Whether an object is in an image (or its file); `setting` says how an absent one was drawn."""

    image: Image.Image | Path
    question: str
    present: bool
    setting: Setting


@dataclass(frozen=True)
class Difference:
    """Two pictures, and how they differ: any number of differences, or none."""

    first: Image.Image
    second: Image.Image
    true: tuple[Claim, ...]

    @property
    def setting(self) -> str:
        return ("none", "single")[len(self.true)] if len(self.true) < 2 else "several"


class Condition(NamedTuple):
    """How questions are answered."""

    sage: Sage | None = None
    contrast: Contrast | None = None


def existence_tally(sample: Existence, answer: str) -> dict[str, float]:
    """What one answer adds to the sums that `existence_scores` takes; neither yes nor no is wrong, and no."""
    said = yes(answer)
    return {
        "questions": 1.0,
        "right": float(said is sample.present),
        "yes": float(said is True),
        "present": float(sample.present),
        "hits": float(said is True and sample.present),
    }


def existence_scores(sums: Tallies) -> dict[str, np.ndarray]:
    """Accuracy, precision, recall and F1 of "yes", and the share of "yes"."""
    return {
        "accuracy": ratio(sums["right"], sums["questions"]),
        "precision": ratio(sums["hits"], sums["yes"]),
        "recall": ratio(sums["hits"], sums["present"]),
        "f1": ratio(2 * sums["hits"], sums["yes"] + sums["present"]),
        "yes": ratio(sums["yes"], sums["questions"]),
    }


def pair_of(sample: Difference, answers: Sequence[str], categories: Sequence[str]) -> Pair:
    """A sample with its answers to `QUESTIONS` as the metrics take it."""
    what, same, different, *explained = answers
    specific = [claims(answer, categories) for answer in explained]
    return Pair(
        true=sample.true,
        claimed=claims(what, categories),
        same=yes(same),
        different=yes(different),
        labels=compare(*specific),
    )


def evaluate(
    engine: Engine,
    conditions: Mapping[str, Condition],
    existence: Sequence[Existence],
    differences: Sequence[Difference],
    categories: Sequence[str],
    quiet: bool = False,
) -> dict[str, Any]:
    """By condition: the metrics of `existence` and `differences`, by setting and together ("all"), each an `Estimate` of
    `bootstrap` beside the answers of `PLAIN`, and `answers_changed`, the share of samples whose answers are other texts than
    its.

    Raises ValueError where `PLAIN` is not the first of the conditions.
    """
    if next(iter(conditions), None) != PLAIN:
        raise ValueError(f"The first condition must be {PLAIN!r}, with which the others are compared.")
    questions: list[tuple[Sequence[Image.Image | Path], str]] = [([s.image], s.question) for s in existence]
    questions += [([s.first, s.second], text) for s in differences for text in QUESTIONS]
    report: dict[str, Any] = {}
    parts: list[_Part] = []
    for name, condition in conditions.items():
        answers = _answers(engine, questions, condition, f"{name:<20}", quiet)
        rest = answers[len(existence) :]
        groups = [rest[i : i + len(QUESTIONS)] for i in range(0, len(rest), len(QUESTIONS))]
        now = [
            _Part(
                "existence", existence, answers[: len(existence)],
                [existence_tally(*one) for one in zip(existence, answers, strict=False)],
                existence_scores, {"accuracy": "right", "yes": "yes"},
                [sample.image if isinstance(sample.image, Path) else id(sample.image) for sample in existence],
            ),
            _Part(
                "differences", differences, groups,
                [tally(pair_of(*one, categories)) for one in zip(differences, groups, strict=True)],
                scores, SHARES, list(range(len(differences))),
            ),
        ]  # fmt: skip
        report[name] = {
            part.name: part.measured(parts[i] if parts else None) for i, part in enumerate(now) if part.samples
        }
        parts = parts or now
    return report


@dataclass(frozen=True)
class _Part:
    """Samples of one kind with the answers of one condition."""

    name: str
    samples: Sequence[Any]
    answers: Sequence[Any]
    tallies: Sequence[Mapping[str, float]]
    scores: Scores
    shares: Mapping[str, str]
    clusters: Sequence[Any]

    def measured(self, plain: _Part | None) -> dict[str, Any]:
        """Each metric, of all samples and by setting where there are several; beside the plain answers where given."""
        settings = list(dict.fromkeys(sample.setting for sample in self.samples))
        out: dict[str, Any] = {}
        for setting in ("all", *settings):
            chosen = [i for i, sample in enumerate(self.samples) if setting in ("all", sample.setting)]
            found = estimates(
                self._of(chosen), self.scores, None if plain is None else plain._of(chosen), shares=self.shares,
                clusters=[self.clusters[i] for i in chosen],
            )  # fmt: skip
            out[setting] = {"samples": len(chosen)} | {name: one.to_json() for name, one in found.items()}
            if plain is not None:
                out[setting]["answers_changed"] = sum(self.answers[i] != plain.answers[i] for i in chosen) / len(chosen)
        return out

    def _of(self, chosen: Sequence[int]) -> Tallies:
        return {name: np.array([self.tallies[i][name] for i in chosen]) for name in self.tallies[0]}


def _chat(images: Sequence[Image.Image | Path], text: str) -> list[dict[str, Any]]:
    pictures = (Image.open(image).convert("RGB") if isinstance(image, Path) else image for image in images)
    parts: list[dict[str, Any]] = [{"type": "image", "image": picture} for picture in pictures]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def _answers(
    engine: Engine,
    questions: Sequence[tuple[Sequence[Image.Image | Path], str]],
    condition: Condition,
    title: str,
    quiet: bool,
) -> list[str]:
    sampling = Sampling(max_tokens=40)
    requests = (
        Request(_chat(images, text), sampling, sage=condition.sage, contrast=condition.contrast)
        for images, text in tqdm(questions, desc=title, disable=quiet or None)
    )
    return [result.choices[0].text for result in engine.generate(requests)]


def stages(sweep: bool = False) -> dict[str, Condition]:
    """The paper's ablation (its Table 14), stage by stage; SAGE with a mask that is rebuilt, and See in the reading that is
    not the default, both of which the paper leaves open; the methods that it compares with. With `sweep` its Tables 11 to
    13, one stage at a time."""
    whole = Sage(See(), Think(), Generate())
    (other,) = set(READINGS) - {See().reading}
    sages = {
        "+ See": Sage(See()),
        "+ Think": Sage(See(), Think()),
        "+ Generate": whole,
        "SAGE, refresh 1": replace(whole, generate=Generate(refresh=1)),
        "SAGE, refresh 4": replace(whole, generate=Generate(refresh=4)),
        f"See as {other}": Sage(See(reading=other)),
        f"SAGE, See as {other}": replace(whole, see=See(reading=other)),
    }
    if sweep:
        sages |= {
            f"See as {reading}, alpha {alpha:g}": Sage(See(alpha=alpha, reading=reading))
            for reading in (See().reading, other)
            for alpha in (0.05, 0.1, 0.15, 0.2)
        }
        sages |= {f"Think, gamma {gamma:g}": Sage(think=Think(gamma=gamma)) for gamma in (0.6, 0.7, 0.8, 0.9)}
        sages |= {
            f"Generate, lambda {weight:g}": Sage(generate=Generate(weight=weight)) for weight in (0.25, 0.5, 0.75, 1.0)
        }
    contrasts = {"VCD": Condition(contrast=Vcd()), "ICD": Condition(contrast=Icd()), "PAI": Condition(contrast=Pai())}
    return {PLAIN: Condition()} | {name: Condition(sage) for name, sage in sages.items()} | contrasts
