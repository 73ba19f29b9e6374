"""The modality that a task's answers rest on, right or wrong: `helmsight probe reliability`."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from probes.answering.base import Push, Question
from probes.answering.endpoint import Endpoint
from probes.answering.progress import Tracker
from probes.conflicts.options import Data
from probes.conflicts.samples import ConflictSample, Side, messages
from probes.harness.options import VECTOR, ModelOptions, check_file
from probes.reporting.tables import Summary
from steering import Engine, measure
from steering.files import write_atomically

Report = tuple[str | None, Mapping[str, Any]]
"""The modality that an answer rests on, None for neither, and the measurements."""


def vote(votes: Mapping[str, int]) -> Side | None:
    """Return the majority of the decided votes; vision on a tie, as for one request, None without votes."""
    vision, text = votes.get("vision", 0), votes.get("text", 0)
    if not vision + text:
        return None
    return "vision" if vision >= text else "text"


@dataclass(frozen=True)
class TaskReliability:
    """The modality that a task's answers rest on, right or wrong.

    It holds the votes of single questions ("none" if the answer depends on neither), and the mean drops of the answer's
    probability without the images and without the text context.
    """

    votes: Mapping[str, int]
    drop_vision: float
    drop_text: float

    @property
    def rests_on(self) -> Side | None:
        return vote(self.votes)

    def to_json(self) -> dict[str, Any]:
        return {
            "rests_on": self.rests_on,
            "votes": dict(self.votes),
            "drop_vision": self.drop_vision,
            "drop_text": self.drop_text,
        }


def task_reliability(
    engine: Engine, samples: Sequence[ConflictSample], *, batch: int = 64, quiet: bool = False
) -> dict[str, TaskReliability]:
    """Return the vote of every task, and under "all" that of the whole set; each sample is asked in both orders."""

    def measured() -> Iterator[Report]:
        for begin in range(0, len(samples), batch):
            chats = [chat for sample in samples[begin : begin + batch] for chat in _chats(sample)]
            yield from ((answer.toward, answer.report()) for answer in measure(engine, chats))

    return _by_task(samples, measured(), quiet)


def task_reliability_of(
    endpoint: Endpoint, samples: Sequence[ConflictSample], *, quiet: bool = False
) -> dict[str, TaskReliability]:
    """Return the same of a Helmsight server's model, which reports what it measures to steer `auto`.

    Raises ValueError if the server cannot be steered, or has no vector to steer with.
    """
    endpoint.check_interventions()
    push = Push("auto", VECTOR, 0.01)  # the direction is measured without steering, whatever the strength
    questions = (Question(chat, push, max_tokens=1, diagnose=None) for sample in samples for chat in _chats(sample))

    def measured() -> Iterator[Report]:
        for reply in endpoint.answers(questions):
            assert reply.auto is not None
            yield None if reply.auto["abstained"] else reply.auto["toward"], reply.auto

    return _by_task(samples, measured(), quiet)


def _chats(sample: ConflictSample) -> list[list[dict[str, Any]]]:
    return [messages(sample, "plain", swapped) for swapped in (False, True)]


def _by_task(samples: Sequence[ConflictSample], measured: Iterable[Report], quiet: bool) -> dict[str, TaskReliability]:
    votes: dict[str, Counter[str]] = {}
    drops: dict[str, list[tuple[float, float]]] = {}
    twice = [sample for sample in samples for _ in range(2)]
    with Tracker("Reliability", {"": len(twice)}, unit="prompts", quiet=quiet) as bar:
        for sample, (toward, numbers) in zip(twice, measured, strict=True):
            for task in (sample.task, "all"):
                votes.setdefault(task, Counter()).update([toward or "none"])
                drops.setdefault(task, []).append((numbers["drop_vision"], numbers["drop_text"]))
            bar.advance()
    means = {task: np.array(pairs).mean(0).tolist() for task, pairs in drops.items()}
    return {task: TaskReliability(votes[task], *means[task]) for task in sorted(votes, key=lambda t: (t == "all", t))}


def run(
    model: ModelOptions, data: Data, samples: int, json_file: Path | None, quiet: bool, base_url: str | None = None
) -> None:
    """Ask `samples` samples, print the table, and write it to the file if one is given; `base_url` is a server to ask."""
    if base_url is None:
        model.check()
    if json_file is not None:
        check_file(json_file)
    drawn = data.draw(samples, data.seed)
    if base_url is None:
        reliability = task_reliability(model.engine(quiet), drawn, quiet=quiet)
    else:
        endpoint = Endpoint(base_url, model=None if model.default else model.path, source="probe")
        reliability = task_reliability_of(endpoint, drawn, quiet=quiet)
    if json_file is not None:
        written = {task: result.to_json() for task, result in reliability.items()}
        write_atomically(json_file, (json.dumps(written, indent=2) + "\n").encode())
    rows = [
        (
            task,
            *(result.votes.get(side, 0) for side in ("vision", "text", "none")),
            result.drop_vision,
            result.drop_text,
            result.rests_on,
        )
        for task, result in reliability.items()
    ]
    columns = ("task", "votes for vision", "for text", "none", "drop without images", "without context", "rests on")
    Summary(f"Which modality answers rest on: {len(drawn)} samples, both orders", columns, [rows]).show()
