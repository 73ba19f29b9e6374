"""What SAGE's stages do to faithfulness: existence questions in POPE's format, and spot-the-difference.

Existence (POPE, Li et al. 2023): as many objects that are there as that are not, the absent ones drawn at random, by
frequency (popular) or by how often they come with what is there (adversarial). Differences (SPD-Faith Bench, section 3.2):
how many the answer claims, of which types and categories, and whether "same?" and "different?" are answered alike. Claims
are read off by rules, so the answers must name what changed as the judge's `PATTERNS` do.
"""

from __future__ import annotations

import functools
import random
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from PIL import Image
from tqdm import tqdm

from probes.bootstrap import RESAMPLES
from steering import Contrast, Engine, Generate, Icd, Pai, Request, Sage, Sampling, See, Think, Vcd

Setting = Literal["random", "popular", "adversarial"]
WHAT = "What is the difference between the two pictures?"
SAME, DIFFERENT = "Are the two pictures the same?", "Are the two pictures different?"
PATTERNS = {
    "color": r"changed from",
    "position": r"moved from",
    "remove": r"(was|is) removed|is missing",
    "add": r"(was|is) added",
}


@dataclass(frozen=True)
class Existence:
    """Whether an object is in an image (or its file); `setting` says how an absent one was drawn."""

    image: Image.Image | Path
    question: str
    present: bool
    setting: Setting


@dataclass(frozen=True)
class Difference:
    """A pair that differs in one object of `category` by `type` (a key of PATTERNS), or not at all (both None)."""

    first: Image.Image
    second: Image.Image
    type: str | None
    category: str | None


class Condition(NamedTuple):
    """How questions are answered."""

    sage: Sage | None = None
    contrast: Contrast | None = None


@dataclass(frozen=True)
class Claim:
    """One difference that an answer claims."""

    type: str
    category: str | None


def claims(answer: str, categories: Sequence[str]) -> list[Claim]:
    """The differences that an answer claims, sentence by sentence."""
    found = []
    for sentence in re.split(r"(?<=[.!?])\s+", answer.lower()):
        kind = next((name for name, pattern in PATTERNS.items() if re.search(pattern, sentence)), None)
        if kind is not None:
            named = [word for word in categories if re.search(rf"\b{re.escape(word)}\b", sentence)]
            found.append(Claim(kind, named[0] if named else None))
    return found


def yes(answer: str) -> bool | None:
    """True for yes, False for no, None for neither."""
    word = re.match(r"\W*(yes|no)\b", answer.lower())
    return None if word is None else word[1] == "yes"


def existence_scores(samples: Sequence[Existence], answers: Sequence[str]) -> dict[str, float]:
    """Accuracy, precision, recall and F1 of "yes", and the share of "yes"; an answer that is neither is wrong and no."""
    said = [bool(yes(answer)) for answer in answers]
    decided = [yes(answer) is not None for answer in answers]
    right = [d and s == sample.present for d, s, sample in zip(decided, said, samples, strict=True)]
    hits = sum(s and sample.present for s, sample in zip(said, samples, strict=True))
    precision = hits / max(sum(said), 1)
    recall = hits / max(sum(sample.present for sample in samples), 1)
    return {
        "accuracy": sum(right) / len(right),
        "precision": precision,
        "recall": recall,
        "f1": _f1(precision, recall),
        "yes": sum(said) / len(said),
    }


def difference_scores(
    samples: Sequence[Difference], answers: Sequence[tuple[str, str, str]], categories: Sequence[str]
) -> dict[str, float]:
    """answers: to WHAT, SAME and DIFFERENT. Formulas as in SPD-Faith Bench, appendix B.2; `wrong` is the plain error rate.

    dqr: share of right numbers of differences; ds: 1 - |claimed - true| / true, at least 0, over the pairs that differ;
    tf1, cf1: micro F1 over types and categories; cr: +1 for a consistent pair of answers, -1 for a contradiction, 0.5 for
    an ambiguous one; contradictions: share of pairs answered "yes" twice.
    """
    claimed = [claims(what, categories) for what, _, _ in answers]
    true = [0 if sample.type is None else 1 for sample in samples]
    differing = [max(0.0, 1 - abs(len(c) - 1)) for c, t in zip(claimed, true, strict=True) if t]
    pairs = [(yes(same), yes(different)) for _, same, different in answers]
    consistency = [0.5 if None in pair else 1.0 if pair[0] != pair[1] else -1.0 for pair in pairs]
    return {
        "dqr": _mean(len(c) == t for c, t in zip(claimed, true, strict=True)),
        "ds": _mean(differing),
        "tf1": _micro_f1([[c.type for c in found] for found in claimed], [s.type for s in samples]),
        "cf1": _micro_f1(
            [[c.category for c in found if c.category] for found in claimed], [s.category for s in samples]
        ),
        "cr": _mean(consistency),
        "contradictions": _mean(pair == (True, True) for pair in pairs),
    }


def _micro_f1(claimed: Sequence[Sequence[str]], true: Sequence[str | None]) -> float:
    hits = sum(t in found for found, t in zip(claimed, true, strict=True) if t is not None)
    precision = hits / max(sum(len(found) for found in claimed), 1)
    return _f1(precision, hits / max(sum(t is not None for t in true), 1))


def _f1(precision: float, recall: float) -> float:
    return 2 * precision * recall / (precision + recall) if precision + recall else 0.0


def _mean(values: Iterable[float]) -> float:
    values = list(values)
    return sum(values) / len(values) if values else 0.0


def evaluate(
    engine: Engine,
    conditions: Mapping[str, Condition],
    existence: Sequence[Existence],
    differences: Sequence[Difference],
    categories: Sequence[str],
    quiet: bool = False,
) -> dict[str, Any]:
    """Scores of every condition, each with its 95 % interval as [value, low, high]; existence by setting and together."""
    report: dict[str, Any] = {}
    questions: list[tuple[Sequence[Image.Image | Path], str]] = [([s.image], s.question) for s in existence]
    questions += [([s.first, s.second], text) for s in differences for text in (WHAT, SAME, DIFFERENT)]
    for name, condition in conditions.items():
        answers = _answers(engine, questions, condition, f"{name:<20}", quiet)
        report[name] = {"existence": {}, "differences": {}}
        for setting in ("all", "random", "popular", "adversarial"):
            chosen = [i for i, sample in enumerate(existence) if setting in ("all", sample.setting)]
            if chosen:
                report[name]["existence"][setting] = _scored(
                    [existence[i] for i in chosen], [answers[i] for i in chosen], existence_scores
                )
        rest = answers[len(existence) :]
        triples = [(rest[i], rest[i + 1], rest[i + 2]) for i in range(0, len(rest), 3)]
        if triples:
            scores = functools.partial(difference_scores, categories=categories)
            report[name]["differences"] = _scored(differences, triples, scores)
    return report


def _scored(samples: Sequence[Any], answers: Sequence[Any], scores: Callable[..., dict[str, float]]) -> dict[str, Any]:
    """Each score with the 95 % interval of its bootstrap over samples."""
    rng = random.Random(0)
    resampled = []
    for _ in range(RESAMPLES):
        numbers = rng.choices(range(len(samples)), k=len(samples))
        resampled.append(scores([samples[i] for i in numbers], [answers[i] for i in numbers]))
    out = {}
    for name, value in scores(samples, answers).items():
        values = sorted(one[name] for one in resampled)
        out[name] = [value, values[int(0.025 * RESAMPLES)], values[int(0.975 * RESAMPLES)]]
    return out


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
    """The paper's ablation (its Table 14), stage by stage, beside the methods that it compares with; with `sweep` its
    Tables 11 to 13, one stage at a time, and a mask that is rebuilt."""
    conditions = {
        "baseline": Condition(),
        "+ See": Condition(Sage(See())),
        "+ Think": Condition(Sage(See(), Think())),
        "+ Generate": Condition(Sage(See(), Think(), Generate())),
        "VCD": Condition(contrast=Vcd()),
        "ICD": Condition(contrast=Icd()),
        "PAI": Condition(contrast=Pai()),
    }
    if sweep:
        sages = {f"See, alpha {alpha:g}": Sage(See(alpha=alpha)) for alpha in (0.05, 0.1, 0.15, 0.2)}
        sages |= {f"Think, gamma {gamma:g}": Sage(think=Think(gamma=gamma)) for gamma in (0.6, 0.7, 0.8, 0.9)}
        sages |= {
            f"Generate, lambda {weight:g}": Sage(generate=Generate(weight=weight)) for weight in (0.25, 0.5, 0.75, 1.0)
        }
        sages["Generate, refresh 4"] = Sage(generate=Generate(refresh=4))
        conditions |= {name: Condition(sage) for name, sage in sages.items()}
    return conditions


def as_markdown(report: Mapping[str, Any], title: str) -> str:
    """The report as two tables; every score with its 95 % interval."""
    lines = [f"# {title}", ""]
    for part, heading, columns in (
        ("existence", "Existence (POPE)", ("accuracy", "precision", "recall", "f1", "yes")),
        ("differences", "Spot the difference", ("dqr", "ds", "tf1", "cf1", "cr", "contradictions")),
    ):
        head = ["condition", *(["setting"] if part == "existence" else []), *columns]
        lines += [f"## {heading}", "", f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}"]
        for name, scores in report.items():
            rows = scores[part].items() if part == "existence" else [("", scores[part])] if scores[part] else []
            for setting, row in rows:
                cells = [f"{row[c][0]:.3f} ({row[c][1]:.3f} to {row[c][2]:.3f})" for c in columns]
                lines.append(f"| {' | '.join([name, *([setting] if setting else []), *cells])} |")
        lines.append("")
    return "\n".join(lines)
