"""A model as the judge, behind any OpenAI-compatible server, asked with the published prompts and read strictly."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, get_args

from probes.answering.base import Answerer, Question, Reply
from probes.answering.replies import replies
from probes.image_pairs.faithfulness import ERRORS, Faithfulness
from probes.image_pairs.metrics import Claim, Label
from probes.spd.judging.prompts import CONSISTENCY, FAITHFULNESS
from probes.spd.judging.rules import Statement
from probes.spd.samples import PicturePair
from probes.spd.scoring import Verdict

SIDE = 1024
"""The longer side of the pictures that the judge is shown, in pixels at most (as published)."""
MAX_TOKENS = 3000
LABELS: tuple[Label, ...] = get_args(Label)
_SUMMARY = dict(
    zip(ERRORS, ("attribute_errors", "type_confusions", "type_category_mismatches", "fabrications"), strict=True)
)
"""The errors by their names in the judge's summary."""


class ModelJudge:
    """A judge of statements that asks a model.

    `counts` holds the questions `asked`, those that `failed` (the server failed, or timed out), and those with an
    `unreadable` answer; each of these leaves a verdict without its half.
    """

    def __init__(self, answerer: Answerer, *, quiet: bool = False) -> None:
        self._answerer = answerer
        self._quiet = quiet
        self.counts: Counter[str] = Counter(asked=0, failed=0, unreadable=0)

    def __call__(self, statements: Sequence[Statement]) -> list[Verdict]:
        """Return one verdict per statement; nothing is asked where an answer is empty, since there is nothing to compare."""
        halves = [(statement, half) for statement in statements for half in _halves(statement)]
        questions = (_question(statement, half) for statement, half in halves)
        answers = replies(self._answerer, questions, ["judge"] * len(halves), title="Judge", quiet=self._quiet)
        replies_by_half = {
            (id(statement), half): reply for (statement, half), reply in zip(halves, answers, strict=True)
        }
        return [self._verdict(statement, replies_by_half) for statement in statements]

    def _verdict(self, statement: Statement, replies_by_half: dict[tuple[int, str], Reply]) -> Verdict:
        labels: Sequence[Label] | None = ()
        faithful: Faithfulness | None = Faithfulness(0, {}, bool(statement.pair.true))
        if reply := replies_by_half.get((id(statement), CONSISTENCY)):
            labels = self._read(reply, consistency(reply.text))
        if reply := replies_by_half.get((id(statement), FAITHFULNESS)):
            faithful = self._read(reply, faithfulness(reply.text, len(statement.pair.true)))
        return Verdict(labels, faithful)

    def _read(self, reply: Reply, read: Any) -> Any:
        self.counts["asked"] += 1
        self.counts["failed"] += reply.error is not None
        self.counts["unreadable"] += reply.error is None and read is None
        return read


def _halves(statement: Statement) -> Iterator[str]:
    if statement.same and statement.different:
        yield CONSISTENCY
    if statement.found:
        yield FAITHFULNESS


def _question(statement: Statement, prompt: str) -> Question:
    text = prompt.format(
        ground_truth=ground_truth(statement.pair.true, colours=prompt is CONSISTENCY),
        response_same=statement.same,
        response_different=statement.different,
        model_response=statement.found,
    )
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in _pictures(statement.pair)]
    return Question(
        [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}], max_tokens=MAX_TOKENS, diagnose=None
    )


def _pictures(pair: PicturePair) -> Iterator[Any]:
    """Yield both pictures, scaled down; none if a statement is judged by its words alone."""
    if pair.first is None and pair.merged is None:
        return
    for image in pair.pictures():
        small = image.copy()
        small.thumbnail((SIDE, SIDE))
        yield small


def ground_truth(true: Sequence[Claim], colours: bool) -> str:
    """Return the differences as the published scripts write them into a prompt.

    With `colours`, an object that changed its colour has the new one.
    """
    if not true:
        return "No differences (images are identical)"
    lines = [f"Total differences: {len(true)}\n"]
    for number, claim in enumerate(true, 1):
        colour = f", Color: {claim.attribute or 'unknown'}" if colours and claim.type == "color" else ""
        lines.append(f"{number}. Type: {claim.type}, Object: {claim.category}{colour}")
    return "\n".join(lines)


def consistency(answer: str) -> list[Label] | None:
    """Return the labels of an answer to `CONSISTENCY`; None if counts are missing, or do not add up to `total_claims`."""
    fields = _json(answer)
    counts = [_count(fields, f"{label}_claims") for label in LABELS]
    if None in counts or sum(filter(None, counts)) != _count(fields, "total_claims"):
        return None
    return [label for label, count in zip(LABELS, counts, strict=True) for _ in range(count or 0)]


def faithfulness(answer: str, true: int) -> Faithfulness | None:
    """Return the findings of an answer to `FAITHFULNESS`, with `true` differences in the truth.

    None if counts are missing, or the errors do not add up to the unfaithful claims.
    """
    fields = _json(answer)
    claims, faithful = (_count(fields, name) for name in ("total_claims", "faithful_claims"))
    summary = fields.get("summary")
    errors = {name: _count(summary, _SUMMARY[name]) for name in ERRORS} if isinstance(summary, dict) else {}
    if claims is None or faithful is None or not errors or None in errors.values():
        return None
    if sum(filter(None, errors.values())) != claims - faithful:
        return None
    return Faithfulness(faithful, {name: count for name, count in errors.items() if count}, claims != true)


def _json(answer: str) -> dict[str, Any]:
    """Return the JSON object of an answer, or of its first fenced block; empty for anything else."""
    fenced = re.search(r"```(?:json)?\s*(\{.*?\})\s*```", answer, re.DOTALL)
    try:
        parsed = json.loads(fenced[1] if fenced else answer)
    except (ValueError, RecursionError):
        return {}
    return parsed if isinstance(parsed, dict) else {}


def _count(fields: dict[str, Any], name: str) -> int | None:
    value = fields.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None
