"""A tiny random model behind an engine, and made-up samples."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import pytest
from PIL import Image

import steering
from probes.answering.base import Question, Reply
from probes.answering.engine import InProcess
from probes.conflicts import asking
from probes.conflicts.samples import ConflictSample
from probes.harness import bootstrap
from probes.mmsap import evaluate as mmsap
from probes.reporting import report
from probes.sage import evaluate as sage
from probes.vector import neutral
from probes.vector.build import build
from tests import families


@pytest.fixture(scope="session")
def tiny(root: Path) -> steering.Engine:
    folder = families.checkpoint("qwen2_vl", root)
    return steering.Engine(steering.load(folder, device="cpu"), slots=4, max_length=512)


@pytest.fixture(scope="session")
def vector(tiny: steering.Engine) -> steering.SteeringVector:
    """Build a vector of the tiny model."""
    return build(tiny, make_samples(8), layers=[1], quiet=True)


@pytest.fixture(scope="session")
def model(root: Path) -> str:
    return str(families.checkpoint("qwen2_vl", root))


@pytest.fixture
def questions(monkeypatch: pytest.MonkeyPatch) -> list[Question]:
    """Every question that the model itself is asked."""
    asked: list[Question] = []
    answers = InProcess.answers

    def kept(self: InProcess, given: Iterable[Question]) -> Iterator[Reply]:
        def passed() -> Iterator[Question]:
            for question in given:
                asked.append(question)
                yield question

        return answers(self, passed())

    monkeypatch.setattr(InProcess, "answers", kept)
    return asked


def shorten(patch: pytest.MonkeyPatch) -> None:
    """Let answers have few tokens."""
    patch.setattr(asking, "MAX_TOKENS", 3)
    patch.setattr(asking, "CHAIN_TOKENS", 4)
    patch.setattr(neutral, "MAX_TOKENS", 6)
    for one in (mmsap, sage):
        patch.setattr(one, "MAX_TOKENS", 3)


@pytest.fixture
def short_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shorten answers: a random model never ends one by itself, and says nothing worth the time."""
    shorten(monkeypatch)


_load = steering.load


@functools.cache
def _loaded(path: str, device: str, calibrations: Path, kept: tuple[bytes, ...]) -> steering.MLLM:
    return _load(path, device=device, calibrations=calibrations)


@pytest.fixture
def loaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load a model only once for commands that run repeatedly.

    It is loaded again if its calibration has changed. It is not self-checked; other tests do that.
    """

    def load(path: str, *, device: str, calibrations: Path, **unset: object) -> steering.MLLM:
        unset = {name: value for name, value in unset.items() if value not in (None, "auto")}
        assert unset in ({}, {"local_files_only": True})
        files = [Path(path) / "calibration.json", *sorted(calibrations.glob("*.json"))]
        return _loaded(path, device, calibrations, tuple(file.read_bytes() for file in files if file.exists()))

    monkeypatch.setattr(steering, "load", load)
    monkeypatch.setattr(steering, "Engine", functools.partial(steering.Engine, self_check=False))


@pytest.fixture
def undrawn(monkeypatch: pytest.MonkeyPatch) -> None:
    """For what is told in words, tables and files: plots are made, but not drawn, which takes longer than all else."""
    monkeypatch.setattr(report, "_svg", lambda figure: b'<svg xmlns="http://www.w3.org/2000/svg"/>')


@pytest.fixture
def few_resamples(monkeypatch: pytest.MonkeyPatch) -> None:
    """Enough to see where an interval lies."""
    monkeypatch.setattr(bootstrap, "RESAMPLES", 100)


@pytest.fixture
def no_model(loaded_once: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """No checkpoint may be loaded: what is wrong must be told before."""

    def refuse(*_: object, **__: object) -> NoReturn:
        raise AssertionError("the model was loaded")

    monkeypatch.setattr(steering, "load", refuse)


def make_samples(count: int, question: str = "What color is the ball?", shade: int = 0) -> list[ConflictSample]:
    """Return samples with pictures of one colour each and alternating tasks."""
    return [
        ConflictSample(
            id=str(i),
            task=("color", "shape")[i % 2],
            image=Image.new("RGB", (56, 56), (40 * i % 256, shade, 90)),
            question=question,
            answer_vision="red",
            answer_text="blue",
            context=f"The ball number {i} is blue.",
        )
        for i in range(count)
    ]


class Scripted:
    """An answerer that calls a function of the question.

    Answers come in order but, as with an engine, `ahead` more questions are taken; `asked` holds all of them.
    """

    def __init__(
        self, answer: Callable[[Question], str | Reply], *, identity: str = "scripted", ahead: int = 0
    ) -> None:
        self.identity = identity
        self.asked: list[Question] = []
        self._answer, self._ahead = answer, ahead

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        waiting: deque[Question] = deque()
        for question in questions:
            self.asked.append(question)
            waiting.append(question)
            if len(waiting) > self._ahead:
                yield self._reply(waiting.popleft())
        while waiting:
            yield self._reply(waiting.popleft())

    def _reply(self, question: Question) -> Reply:
        said = self._answer(question)
        return said if isinstance(said, Reply) else Reply(said)


def seen(ratio: float | None) -> dict[str, Any]:
    """Diagnostics with that attention ratio."""
    return {"modality": {"attention_ratio": ratio}}


def text_of(question: Question) -> str:
    """Return the text of the last message."""
    content = question.chat[-1]["content"]
    return content if isinstance(content, str) else next(part["text"] for part in content if part["type"] == "text")
