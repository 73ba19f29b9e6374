"""A ledger keeps, finds and refuses answers: none is lost, and none is taken that belongs to another question."""

from __future__ import annotations

import contextlib
import json
import logging
import resource
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from probes.answering.base import Push, Question, Reply
from probes.harness.ledger import Remembering, key
from steering import Criterion, Diagnose, Icd, See, SteeringVector, Think, Vcd
from tests.forked import forked
from tests.probes.conftest import Scripted, seen, text_of
from tests.waiting import wait_for


def question(number: int) -> Question:
    return Question([{"role": "user", "content": f"What is {number}?"}])


def questions(*numbers: int) -> list[Question]:
    return [question(number) for number in numbers]


def echo(question: Question) -> Reply:
    """Return a reply with every field set, different for every question."""
    text = text_of(question)
    return Reply(f"Re: {text} ä\n", seen(len(text) / 7), {"toward": "text", "abstained": None, "drop_text": 1e-17})


def run(
    path: Path, asked_questions: list[Question], ahead: int = 0, identity: str = "scripted"
) -> tuple[list[Reply], list[str]]:
    """Return the replies of a new run, and the questions that it had to ask."""
    answerer = Scripted(echo, ahead=ahead, identity=identity)
    replies = list(Remembering(answerer, path).answers(asked_questions))
    return replies, [text_of(question) for question in answerer.asked]


def texts(*numbers: int) -> list[str]:
    return [f"What is {number}?" for number in numbers]


# ------------------------------------------------------------------------------------------------------ a second run


def test_a_second_run_asks_nothing_and_returns_the_same_answers(tmp_path: Path) -> None:
    asked_questions = questions(*range(7))
    first, new = run(tmp_path / "a" / "answers.jsonl", asked_questions)
    assert first == [echo(question) for question in asked_questions]
    assert new == texts(*range(7))
    again, new = run(tmp_path / "a" / "answers.jsonl", asked_questions)
    assert again == first
    assert new == []


def test_equal_questions_of_a_run_are_asked_once(tmp_path: Path) -> None:
    answerer = Scripted(echo)
    ledger = Remembering(answerer, tmp_path / "answers.jsonl")
    assert list(ledger.answers(questions(1, 2, 1))) == [echo(question) for question in questions(1, 2, 1)]
    assert list(ledger.answers(questions(2, 3))) == [echo(question) for question in questions(2, 3)]
    assert len(answerer.asked) == 3


@pytest.mark.parametrize("ahead", [0, 2, 100])
@pytest.mark.parametrize("known", [[], [0], [5], [0, 1, 2], [3, 4, 5], [1, 3, 5], [0, 2, 3, 4], [0, 1, 2, 3, 4, 5]])
def test_known_and_unknown_answers_come_in_the_order_of_the_questions(
    tmp_path: Path, known: list[int], ahead: int
) -> None:
    path = tmp_path / "answers.jsonl"
    run(path, questions(*reversed(known)))
    replies, new = run(path, questions(*range(6)), ahead)
    assert replies == [echo(question) for question in questions(*range(6))]
    assert new == texts(*sorted(set(range(6)) - set(known)))


def test_without_questions_there_are_no_answers(tmp_path: Path) -> None:
    assert run(tmp_path / "answers.jsonl", []) == ([], [])


def test_the_answers_of_another_model_are_not_taken(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    run(path, questions(1), identity="one")
    assert run(path, questions(1), identity="other")[1] == texts(1)
    assert run(path, questions(1), identity="one")[1] == []


def test_the_ledger_passes_on_whose_answers_it_keeps(tmp_path: Path) -> None:
    assert Remembering(Scripted(echo, identity="mine"), tmp_path / "answers.jsonl").identity == "mine"


# ------------------------------------------------------------------------------------------------------ broken files


def _mended(path: Path) -> None:
    lines = path.read_bytes().split(b"\n")
    assert lines.pop() == b""
    for line in lines:
        assert set(json.loads(line)) == {"key", "text", "diagnostics", "auto", "logprobs"}


@pytest.mark.parametrize("cut", [1, 40, -2, -1])
def test_a_line_that_was_cut_off_is_asked_again_and_removed(
    tmp_path: Path, cut: int, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "answers.jsonl"
    run(path, questions(1, 2, 3))
    content = path.read_bytes()
    *before, last = content.splitlines(keepends=True)
    path.write_bytes(b"".join(before) + last[:cut])
    replies, new = run(path, questions(1, 2, 3))
    assert replies == [echo(question) for question in questions(1, 2, 3)]
    assert new == texts(3)
    assert path.read_bytes() == content
    assert "line 3" in caplog.text
    assert run(path, questions(1, 2, 3))[1] == []


@pytest.mark.parametrize(
    "line",
    [
        b"", b"nonsense", b"\x00\x00\x00", b"\xff\xfe", b"[1]", b"7", b"null", b"{}", b'{"key": "a"}',
        b'{"text": "a"}', b'{"key": [1], "text": "a"}', b'{"key": "a", "text": "b", "colour": "red"}',
        b'{"key": "a", "te',
    ],
)  # fmt: skip
def test_a_damaged_line_alone_is_asked_again(tmp_path: Path, line: bytes, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "answers.jsonl"
    run(path, questions(1, 2, 3, 4))
    lines = path.read_bytes().splitlines()
    lines[2] = line
    path.write_bytes(b"\n".join(lines) + b"\n")
    with caplog.at_level(logging.WARNING):
        replies, new = run(path, questions(1, 2, 3, 4))
    assert replies == [echo(question) for question in questions(1, 2, 3, 4)]
    assert new == texts(3)
    assert f"{path}: line 3 is damaged; its question is asked again" in caplog.text
    assert run(path, questions(1, 2, 3, 4))[1] == []


def test_an_empty_file_is_an_empty_ledger(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "answers.jsonl"
    path.touch()
    assert run(path, questions(1))[1] == texts(1)
    assert not caplog.records


@contextlib.contextmanager
def _disk_with(size: int) -> Iterator[None]:
    """No file may grow beyond that many bytes: a write past it puts down what fits, then fails, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("spare", [0, 1, 60])
def test_a_full_disk_raises_and_earlier_answers_stay(tmp_path: Path, spare: int) -> None:
    path = tmp_path / "answers.jsonl"
    run(path, questions(1, 2, 3))
    answerer = Scripted(echo)
    ledger = Remembering(answerer, path)
    received = []
    with _disk_with(path.stat().st_size + spare), pytest.raises(OSError, match="File too large"):
        received.extend(ledger.answers(questions(1, 4, 2, 3, 5)))
    assert path.read_bytes().count(b"\n") == 3
    replies, new = run(path, questions(1, 2, 3, 4, 5))
    assert replies == [echo(question) for question in questions(1, 2, 3, 4, 5)]
    assert new == texts(4, 5)
    _mended(path)


def test_an_error_of_the_answerer_is_raised_and_earlier_answers_stay(tmp_path: Path) -> None:
    def failing(question: Question) -> Reply:
        if text_of(question) == "What is 3?":
            raise RuntimeError("out of memory")
        return echo(question)

    path = tmp_path / "answers.jsonl"
    with pytest.raises(RuntimeError, match="out of memory"):
        list(Remembering(Scripted(failing), path).answers(questions(1, 2, 3, 4)))
    assert run(path, questions(1, 2, 3, 4))[1] == texts(3, 4)


# ------------------------------------------------------------------------------------------------- several processes


def test_a_file_that_is_being_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    late = Remembering(Scripted(echo), path)
    writing = Remembering(Scripted(echo), path).answers(questions(1, 2))
    next(writing)
    with pytest.raises(ValueError, match=r"answers\.jsonl is being written by another process"):
        list(late.answers(questions(3)))
    assert len(list(writing)) == 1
    assert len(list(late.answers(questions(3)))) == 1


def test_a_line_that_another_process_is_writing_is_not_taken_for_a_damaged_one(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    writing = Remembering(Scripted(echo), path).answers(questions(1, 2))
    next(writing)
    with path.open("ab") as file:
        file.write(b'{"key": "half')
    with pytest.raises(ValueError, match="is being written by another process"):
        run(path, questions(1))
    assert path.read_bytes().endswith(b'{"key": "half')
    writing.close()
    assert run(path, questions(1))[1] == []


def test_a_run_that_is_killed_loses_no_answer_and_nobody_else_writes_while_it_runs(tmp_path: Path) -> None:
    path, log = tmp_path / "answers.jsonl", tmp_path / "said"

    def slow(question: Question) -> Reply:
        time.sleep(0.005)
        return echo(question)

    def long() -> None:
        ledger = Remembering(Scripted(slow, ahead=3), path)
        for number, _ in enumerate(ledger.answers(questions(*range(10_000)))):
            print(number, flush=True)

    with forked(long, log) as process:
        wait_for(lambda: log.exists() and log.read_bytes().count(b"\n") >= 30, 60, process)
        with pytest.raises(ValueError, match="is being written by another process"):
            run(path, questions(1))
        process.kill()
        process.join()
    assert process.exitcode == -signal.SIGKILL
    received = log.read_text().splitlines(keepends=True)
    finished = len(received)
    assert received[-1] == f"{finished - 1}\n"
    replies, new = run(path, questions(*range(finished + 10)))
    assert replies == [echo(question) for question in questions(*range(finished + 10))]
    # One more may have been written that was not yet handed over.
    assert new in (texts(*range(finished, finished + 10)), texts(*range(finished + 1, finished + 10)))


# --------------------------------------------------------------------------------------------------------------- key


def picture(mode: str = "RGB", size: tuple[int, int] = (4, 3), colour: Any = (9, 80, 7)) -> Image.Image:
    return Image.new(mode, size, colour)


def small_vector(**changes: Any) -> SteeringVector:
    direction = torch.arange(6, dtype=torch.float32).reshape(2, 3) + 1
    weights = torch.ones(2)
    vector = SteeringVector("v", direction, weights, weights.clone(), weights.clone(), (1,), "model")
    return replace(vector, **changes)


VECTOR = small_vector()


def chat(*pictures: Image.Image, text: str = "What is it?", role: str = "user") -> list[dict[str, Any]]:
    return [
        {
            "role": role,
            "content": [*({"type": "image", "image": picture} for picture in pictures), {"type": "text", "text": text}],
        }
    ]


BASE = Question(chat(picture()), Push("text", VECTOR, 0.5, (0,)), 24)


def _pushed(**changes: Any) -> Question:
    assert BASE.push is not None
    return replace(BASE, push=replace(BASE.push, **changes))


def _palette(colour: tuple[int, int, int]) -> Image.Image:
    image = Image.new("P", (4, 3), 0)
    image.putpalette(list(colour))
    return image


OTHERS = {
    "text": replace(BASE, chat=chat(picture(), text="What is it")),
    "role": replace(BASE, chat=chat(picture(), role="system")),
    "another message": replace(BASE, chat=[{"role": "system", "content": "Be brief."}, *chat(picture())]),
    "text marked as context": replace(
        BASE,
        chat=[
            {
                "role": "user",
                "content": [
                    {"type": "image", "image": picture()},
                    {"type": "text", "text": "What is it?", "span": "context"},
                ],
            }
        ],
    ),
    "text before the picture": replace(
        BASE, chat=[{"role": "user", "content": [*reversed(chat(picture())[0]["content"])]}]
    ),
    "content as a string": replace(BASE, chat=[{"role": "user", "content": "What is it?"}]),
    "one pixel": replace(BASE, chat=chat(picture(colour=(9, 80, 8)))),
    "size": replace(BASE, chat=chat(picture(size=(3, 4)))),
    "mode": replace(BASE, chat=chat(picture("YCbCr"))),
    "no picture": replace(BASE, chat=chat()),
    "two pictures": replace(BASE, chat=chat(picture(), picture())),
    "two pictures, other order": replace(BASE, chat=chat(picture(), picture(size=(2, 2)))),
    "two pictures, order": replace(BASE, chat=chat(picture(size=(2, 2)), picture())),
    "palette": replace(BASE, chat=chat(_palette((1, 2, 3)))),
    "another palette": replace(BASE, chat=chat(_palette((1, 2, 4)))),
    "no push": replace(BASE, push=None),
    "toward vision": _pushed(toward="vision"),
    "toward auto": _pushed(toward="auto"),
    "by surprise": _pushed(toward="auto", criterion=Criterion("surprise")),
    "by surprise, with a bound": _pushed(toward="auto", criterion=Criterion("surprise", 3.0)),
    "by surprise, one degraded": _pushed(toward="auto", criterion=Criterion("surprise", one_degraded=True)),
    "strength": _pushed(strength=0.51),
    "another layer": _pushed(layers=(1,)),
    "layers in addition": _pushed(layers=(0, 1)),
    "the vector's layers": _pushed(layers=None),
    "other layers of the vector": _pushed(vector=small_vector(layers=(0,)), layers=None),
    "direction": _pushed(vector=small_vector(direction=VECTOR.direction + torch.eye(2, 3) * 1e-5)),
    "weight": _pushed(vector=2 * VECTOR),
    "a vector by name": _pushed(vector="v"),
    "another vector by name": _pushed(vector="w"),
    "max_tokens": replace(BASE, max_tokens=25),
    "without the attention ratio": replace(BASE, diagnose=None),
    "another readout": replace(BASE, diagnose=Diagnose({"focus"})),
    "an option of it": replace(BASE, diagnose=Diagnose({"modality"}, spans="content")),
    "with logprobs": replace(BASE, logprobs=True),
    "forced": replace(BASE, force="A"),
    "another answer forced": replace(BASE, force=""),
    "see": replace(BASE, interventions=(See(),)),
    "see, other alpha": replace(BASE, interventions=(See(alpha=0.2),)),
    "think": replace(BASE, interventions=(Think(),)),
    "see and think": replace(BASE, interventions=(See(), Think())),
    "vcd": replace(BASE, interventions=(Vcd(),)),
    "icd": replace(BASE, interventions=(Icd(),)),
}


def test_everything_that_changes_an_answer_changes_the_key() -> None:
    keys = {"base": key("model", BASE), "identity": key("model2", BASE)}
    keys |= {name: key("model", question) for name, question in OTHERS.items()}
    by_key: dict[str, list[str]] = {}
    for name, value in keys.items():
        by_key.setdefault(value, []).append(name)
    assert [names for names in by_key.values() if len(names) > 1] == []


def test_irrelevant_differences_keep_the_key(tmp_path: Path) -> None:
    expected = key("model", BASE)
    assert key("model", replace(BASE, chat=chat(picture()))) == expected
    path = VECTOR.save(tmp_path / "v.safetensors")
    assert key("model", _pushed(vector=SteeringVector.load(path))) == expected
    assert key("model", _pushed(vector=VECTOR.named("other"))) == expected
    assert key("model", _pushed(vector=replace(VECTOR, info={"samples": 3}))) == expected


def test_a_picture_of_a_file_is_known_by_its_pixels(tmp_path: Path) -> None:
    picture().save(tmp_path / "a.png")
    picture().save(tmp_path / "b.png", compress_level=0)
    opened = [Image.open(tmp_path / name) for name in ("a.png", "b.png")]
    assert {key("model", replace(BASE, chat=chat(image))) for image in opened} == {key("model", BASE)}
    for image in opened:
        image.close()
