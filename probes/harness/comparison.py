"""Conditions that answer the same samples, each compared with the first condition, sample by sample."""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, TypeVar

import numpy as np

from probes.answering.base import Answerer, Chat, Push, Question, Reply
from probes.answering.progress import Tracker
from probes.answering.replies import counted
from probes.harness.bootstrap import Scores, Share, Tallies, estimates, ranked
from probes.harness.ledger import asked_text, tell
from steering import Diagnose, Options, RequestError

log = logging.getLogger(__name__)

BASELINE = "baseline"
"""The condition that the others are compared with."""

Way = tuple[Options | Push, ...]
"""The interventions of one condition, at most one of them a push."""

S = TypeVar("S")


@dataclass(frozen=True)
class PromptChange:
    """A change of the prompt alone: solved examples before a question, and a line behind its text (a context is none of it).

    shots: questions with their answers. read: what is scored of an answer, as what follows a chain of thought. max_tokens:
    in place of the benchmark's, which is too short for a chain of thought.
    """

    text: str = ""
    shots: tuple[tuple[Chat, str], ...] = ()
    read: Callable[[str], str] = str
    max_tokens: int | None = None

    def chat(self, chat: Chat) -> Chat:
        """Return the changed chat."""
        *before, last = chat
        if self.text:
            content = last["content"]
            parts = [{"type": "text", "text": content}] if isinstance(content, str) else list(content)
            index = max(i for i, part in enumerate(parts) if part["type"] == "text" and part.get("span") != "context")
            words = parts[index]["text"]
            end = "\n" if words.endswith("\n") else ""
            parts[index] = {**parts[index], "text": f"{words.rstrip()}\n{self.text}{end}"}
            last = {**last, "content": parts}
        solved = [turn for turns, answer in self.shots for turn in (*turns, {"role": "assistant", "content": answer})]
        return [*solved, *before, last]

    def scored(self, replies: Sequence[Reply]) -> list[Reply]:
        """Return the replies with the part of their text that is scored."""
        return [replace(reply, text=self.read(reply.text)) for reply in replies]


def told_apart(way: Way) -> tuple[Push | None, tuple[Options, ...]]:
    """Return the push, and the other interventions, as a question takes them."""
    push = next((entry for entry in way if isinstance(entry, Push)), None)
    return push, tuple(entry for entry in way if isinstance(entry, Options))


@dataclass(frozen=True)
class SampleSet(Generic[S]):
    """Samples of one kind, with how each is asked and how its answers are scored.

    chats: the questions about a sample, `each` of them, one chat each. tally: what the replies to them add to the sums from
    which `scores` computes metrics; `shares` gives the denominators of those that are shares. setting: the group, besides
    "all", in which a sample is scored. cluster: samples of one cluster are drawn together (questions about one picture).
    diagnose: the readouts beside every answer, where the answerer has any. truths: of yes/no questions, whether each of a
    sample's is to be answered yes; they are then also ranked by their log-odds of yes.
    """

    name: str
    samples: Sequence[S]
    chats: Callable[[S], Sequence[Chat]]
    tally: Callable[[S, Sequence[Reply]], Mapping[str, float]]
    scores: Scores
    shares: Mapping[str, Share]
    setting: Callable[[S], str]
    cluster: Callable[[S], Hashable] = id
    each: int = 1
    diagnose: Diagnose | None = None
    truths: Callable[[S], Sequence[bool]] | None = None


@dataclass(frozen=True)
class PartAnswered(Generic[S]):
    """A part under one condition: the replies about each sample, in the samples' order, and what they add to the sums."""

    part: SampleSet[S]
    replies: Sequence[Sequence[Reply]]
    tallies: Sequence[Mapping[str, float]]

    @property
    def answers(self) -> list[list[str]]:
        """The texts of the replies, grouped by sample."""
        return [[reply.text for reply in about] for about in self.replies]

    def rows(self, condition: str, questions: Sequence[Sequence[str]]) -> Iterator[dict[str, Any]]:
        """Yield a row for each sample.

        A row holds its part, condition, number, name if it has one, setting, `questions` in words, `expected` answer if
        known, answers, and what they add to the sums. If attention to pictures was read it also holds `sigma`, and with an
        anchor `anchor_sigma`, of each answer, (layers, pictures).
        """
        part = self.part
        for number, (sample, asked_of_sample, answers, tally) in enumerate(
            zip(part.samples, questions, self.answers, self.tallies, strict=True)
        ):
            yield {
                "part": part.name, "condition": condition, "sample": number, "id": getattr(sample, "id", None),
                "setting": part.setting(sample), "questions": list(asked_of_sample),
                "expected": getattr(sample, "expected", None), "answers": answers, "tally": dict(tally),
            } | _looks(self.replies[number])  # fmt: skip

    def measured(self, plain: PartAnswered | None = None) -> dict[str, Any]:
        """Return each metric, of all samples and by setting, compared with the plain answers if given."""
        part = self.part
        settings = [part.setting(sample) for sample in part.samples]
        changed = [now != before for now, before in zip(self.answers, plain.answers, strict=True)] if plain else []
        out: dict[str, Any] = {}
        for setting in ("all", *dict.fromkeys(settings)):
            chosen = [i for i, setting_of_sample in enumerate(settings) if setting in ("all", setting_of_sample)]
            estimated = estimates(
                self._tallies_of(chosen), part.scores, None if plain is None else plain._tallies_of(chosen),
                shares=part.shares, clusters=[part.cluster(part.samples[i]) for i in chosen],
            )  # fmt: skip
            out[setting] = {"samples": len(chosen)} | {name: estimate.to_json() for name, estimate in estimated.items()}
            if part.truths is not None:
                out[setting] |= self._ranked(chosen, plain)
            if plain is not None:
                out[setting]["answers_changed"] = sum(changed[i] for i in chosen) / len(chosen)
        return out

    def _ranked(self, chosen: Sequence[int], plain: PartAnswered | None) -> dict[str, Any]:
        assert self.part.truths is not None
        truths = [truth for i in chosen for truth in self.part.truths(self.part.samples[i])]
        clusters = [self.part.cluster(self.part.samples[i]) for i in chosen for _ in range(self.part.each)]
        return ranked(self._odds_of(chosen), truths, clusters, None if plain is None else plain._odds_of(chosen))

    def _odds_of(self, chosen: Sequence[int]) -> list[float | None]:
        return [reply.odds for i in chosen for reply in self.replies[i]]

    def _tallies_of(self, chosen: Sequence[int]) -> Tallies:
        return {name: np.array([self.tallies[i][name] for i in chosen]) for name in self.tallies[0]}


def _looks(replies: Sequence[Reply]) -> dict[str, Any]:
    """Return the attention factors of the replies under the keys of a sample's row; empty if none were read."""
    series = {
        "sigma": [((reply.diagnostics or {}).get("focus") or {}).get("sigma") for reply in replies],
        "anchor_sigma": [((reply.diagnostics or {}).get("anchor") or {}).get("sigma") for reply in replies],
    }
    return {name: values for name, values in series.items() if any(values)}


def compare(
    answerer: Answerer,
    conditions: Mapping[str, Way],
    parts: Sequence[SampleSet],
    *,
    max_tokens: int,
    changes: Mapping[str, PromptChange] | None = None,
    quiet: bool = False,
) -> dict[str, Any]:
    """Ask all parts under all conditions and return the metrics by condition, part and setting ("all" is all together).

    Each metric is the JSON of an `Estimate` compared with the answers of `BASELINE`, with the number of `samples` and
    `answers_changed`, the share of samples whose answers have another text. Parts without samples, and conditions that the
    model or its pictures refuse, are left out. `changes` are those of some conditions' prompts.

    Raises ValueError if `BASELINE` is not the first condition.
    """
    return measured(ask_all(answerer, conditions, parts, max_tokens=max_tokens, changes=changes, quiet=quiet))


def measured(answers: Mapping[str, Sequence[PartAnswered]]) -> dict[str, Any]:
    """Return the metrics, as `compare` does, of the answers that `ask_all` returned."""
    plain = answers[BASELINE]
    return {
        name: {
            answered.part.name: answered.measured(None if name == BASELINE else beside)
            for answered, beside in zip(now, plain, strict=True)
        }
        for name, now in answers.items()
    }


def ask_all(
    answerer: Answerer,
    conditions: Mapping[str, Way],
    parts: Sequence[SampleSet],
    *,
    max_tokens: int,
    changes: Mapping[str, PromptChange] | None = None,
    quiet: bool = False,
) -> dict[str, list[PartAnswered]]:
    """Return the answers to every part that has samples, by condition; `changes` are those of some conditions' prompts.

    Conditions that the model or its pictures refuse are left out. Raises ValueError if `BASELINE` is not the first
    condition.
    """
    if next(iter(conditions), None) != BASELINE:
        raise ValueError(f"The first condition must be {BASELINE!r}, with which the others are compared.")
    parts = [part for part in parts if part.samples]
    answers: dict[str, list[PartAnswered]] = {}
    total = sum(part.each * len(part.samples) for part in parts)
    with Tracker("Conditions", dict.fromkeys(conditions, total), quiet=quiet) as progress:
        for name, way in conditions.items():
            try:
                answers[name] = _ask_parts(answerer, parts, way, max_tokens, name, progress, (changes or {}).get(name))
            except RequestError as error:
                if name == BASELINE:
                    raise
                log.warning("%s is left out: %s", name, error)
                progress.leave_out(name)
    return answers


def _ask_parts(
    answerer: Answerer,
    parts: Sequence[SampleSet],
    way: Way,
    max_tokens: int,
    name: str,
    progress: Tracker,
    change: PromptChange | None = None,
) -> list[PartAnswered]:
    """Ask all parts in one stream of questions and return their answers."""
    push, interventions = told_apart(way)
    change = change or PromptChange()
    texts: list[str] = []

    def questions() -> Iterator[Question]:
        for part in parts:
            for sample in part.samples:
                for chat in map(change.chat, part.chats(sample)):
                    texts.append(asked_text(chat))
                    odds = part.truths is not None and change.max_tokens is None  # the answer comes first
                    length = change.max_tokens or max_tokens
                    yield Question(chat, push, length, interventions, part.diagnose, odds=odds)

    total = sum(part.each * len(part.samples) for part in parts)
    replies = iter(list(counted(answerer, questions(), [name] * total, progress)))
    answered, words = [], iter(texts)
    for part in parts:
        part_replies = [[next(replies) for _ in range(part.each)] for _ in part.samples]
        answered.append(
            PartAnswered(
                part,
                part_replies,
                [
                    part.tally(sample, change.scored(replies_to_it))
                    for sample, replies_to_it in zip(part.samples, part_replies, strict=True)
                ],
            )
        )
        tell(answerer, answered[-1].rows(name, [[next(words) for _ in about] for about in part_replies]))
    return answered
