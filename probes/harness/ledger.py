"""Answers kept in a file, so that a run that was killed continues where it stopped."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, replace
from functools import lru_cache
from pathlib import Path
from typing import IO, Any

from PIL import Image

from probes.answering.base import MODALITY, Answerer, Chat, Push, Question, Reply, Unanswered
from probes.answering.wire import diagnostics
from steering import Options, SteeringVector
from steering.protocol.intervention_spec import vector_fields

SAMPLES = "samples.jsonl"
"""The file beside the answers that tells the sample and condition of each of them."""

_log = logging.getLogger(__name__)


class Remembering:
    """An answerer that passes on only questions whose answers are not in the file, and appends every new answer to it.

    An answer is found by a hash of all that it depends on (see `key`), so that a run with other options, another model or
    another vector never takes an answer that is not its own; a failed answer is not kept. Only one process at a time may
    write a file.
    """

    def __init__(self, answerer: Answerer, path: str | Path) -> None:
        self._answerer = answerer
        self.path = Path(path)
        self._replies = _read(self.path)
        self._has_samples = False

    @property
    def identity(self) -> str:
        return self._answerer.identity

    def answers(self, questions: Iterable[Question]) -> Iterator[Reply]:
        """Yield the replies in order, known ones from the file; known ones at the start come before anything is asked."""
        waiting: deque[tuple[str, Reply | None]] = deque()

        identity = self.identity  # the same for the whole run
        remaining = iter(questions)

        def unknown() -> Iterator[Question]:
            for question in remaining:
                name = key(identity, question)
                waiting.append((name, self._replies.get(name)))
                if waiting[-1][1] is None:
                    yield question

        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            _lock(file, self.path)
            new_questions = unknown()
            for question in remaining:
                name = key(identity, question)
                if (kept_reply := self._replies.get(name)) is None:
                    waiting.append((name, None))
                    new_questions = itertools.chain([question], new_questions)
                    break
                yield kept_reply
            for reply in self._add_advice(self._answerer.answers(new_questions)):
                while (kept_reply := waiting[0][1]) is not None:
                    waiting.popleft()
                    yield kept_reply
                name, _ = waiting.popleft()
                if reply.error is None:
                    file.write(json.dumps({"key": name} | _to_json(reply)) + "\n")
                    file.flush()
                    self._replies[name] = replace(reply, kept=True)
                yield reply
        for _, kept_reply in waiting:
            assert kept_reply is not None
            yield kept_reply

    def _add_advice(self, replies: Iterator[Reply]) -> Iterator[Reply]:
        """Yield the replies; if a server fails, add to the error that earlier answers are kept."""
        try:
            yield from replies
        except Unanswered as error:
            if not self._replies:
                raise
            advice = f"{len(self._replies)} answers are kept in {self.path}: run the same command again to continue."
            raise Unanswered(f"{str(error).rstrip('.')}. {advice}") from error

    def tell(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Write a line per row into `SAMPLES`.

        The first rows of a run replace those of the previous run, whose answers are requested, and written, again.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.with_name(SAMPLES).open("a" if self._has_samples else "w", encoding="utf-8") as file:
            self._has_samples = True
            file.writelines(json.dumps(row) + "\n" for row in rows)


def tell(answerer: Answerer, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write the rows that describe the answers, if the answers are kept."""
    if isinstance(answerer, Remembering):
        answerer.tell(rows)


def asked_text(chat: Chat) -> str:
    """Return the text of a chat's last message, which asks the question."""
    content = chat[-1]["content"]
    if isinstance(content, str):
        return content
    return "\n".join(part["text"] for part in content if part.get("type") == "text")


def key(identity: str, question: Question) -> str:
    """Return a hash of the model, the chat with its pictures, the interventions, the answer's length and the readouts."""
    hasher = hashlib.sha256(identity.encode())
    content: dict[str, Any] = {
        "chat": [_message(message["role"], message["content"], hasher) for message in question.chat],
        "push": None if question.push is None else _push(question.push),
        "max_tokens": question.max_tokens,
    }
    if question.interventions:
        content["interventions"] = [[options.name(), options.model_dump()] for options in question.interventions]
    if vectors := [vector for options in question.interventions for vector in _vectors(options)]:
        content["vectors"] = vectors
    if question.diagnose != MODALITY:  # a reply without a readout must not be taken for one with it
        content["diagnose"] = None if question.diagnose is None else diagnostics(question.diagnose)
    if question.logprobs:
        content["logprobs"] = True
    if question.odds:
        content["odds"] = True
    if question.force is not None:
        content["force"] = question.force
    if question.temperature:
        content["sampled"] = [question.temperature, question.seed]
    hasher.update(json.dumps(content, sort_keys=True).encode())
    return hasher.hexdigest()


def _to_json(reply: Reply) -> dict[str, Any]:
    fields = asdict(reply)
    del fields["kept"], fields["error"]
    if reply.odds is None:
        del fields["odds"]
    return fields


def _message(role: str, content: Any, hasher: hashlib._Hash) -> list[Any]:
    if isinstance(content, str):
        return [role, content]
    parts = []
    for part in content:
        if isinstance(picture := part.get("image"), Image.Image):
            hasher.update(picture.tobytes() + bytes(picture.getpalette() or ()))
            parts.append({"image": [picture.mode, *picture.size]})
        else:
            parts.append(dict(part))
    return [role, parts]


def _push(push: Push) -> list[Any]:
    vector = push.vector if isinstance(push.vector, str) else _digest(push.vector)
    return [
        vector,
        push.toward,
        push.strength,
        push.layers,
        *([asdict(push.criterion)] if push.toward == "auto" else []),
    ]


def _vectors(options: Options) -> list[str]:
    """Return the digests of the vectors among options, of which the options themselves dump names alone."""
    values = (getattr(options, name) for name in vector_fields(type(options)))
    return [_digest(vector) for vector in values if isinstance(vector, SteeringVector)]


@lru_cache(maxsize=256)
def _digest(vector: SteeringVector) -> str:
    """Hash what is added at strength 1 at every layer, and the layers that are steered by default."""
    added = vector.delta(1.0, range(len(vector.direction)))
    return hashlib.sha256(added.numpy().tobytes() + json.dumps(vector.layers).encode()).hexdigest()


def _lock(file: IO, path: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise ValueError(f"{path} is being written by another process") from error


def _read(path: Path) -> dict[str, Reply]:
    """Return the replies by key.

    A damaged line is skipped on its own. If the last line was cut off by a kill it is removed, so that the next answer
    starts a new line.
    """
    replies: dict[str, Reply] = {}
    if not path.exists():
        return replies
    complete_bytes = 0
    with path.open("r+b") as file:
        _lock(file, path)  # a line that another process is writing is not damaged
        for number, line in enumerate(file):
            try:
                if not line.endswith(b"\n"):
                    raise ValueError("cut off")
                row = json.loads(line)
                name = row.pop("key")
                if "attention_ratio" not in row:  # earlier versions wrote other keys
                    replies[name] = Reply(**row, kept=True)
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                _log.warning("%s: line %d is damaged; its question is asked again: %s", path, number + 1, error)
            complete_bytes += len(line) if line.endswith(b"\n") else 0
        file.truncate(complete_bytes)
    return replies
