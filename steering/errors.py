"""Errors that the engine raises; each says what was wrong, in which field, and what is allowed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class SteeringError(Exception):
    """Base of every error raised on purpose in this package."""


class UnsupportedModel(SteeringError):
    """The checkpoint cannot be served exactly by this engine."""


class RequestError(SteeringError):
    """A request asks for something impossible; `param` names the field, `code` is machine-readable."""

    def __init__(self, message: str, *, param: str | None = None, code: str = "invalid_value"):
        super().__init__(message)
        self.param = param
        self.code = code


class OutOfRoom(RequestError):
    """A request is valid, but others use up what it needs; try again in about `retry_after` seconds.

    Unlike `Busy`, it says nothing of requests that do not ask for the same.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str, retry_after: float):
        super().__init__(message, param=param, code=code)
        self.retry_after = retry_after


class Inapplicable(RequestError):
    """The request is valid in itself, but does not fit this model, its vectors or this prompt."""


class ContextOverflow(RequestError):
    """Prompt and answer do not fit into the context length; `at_least` where counting stopped before the prompt's end.

    `lengths` are tokens by field, for a request that has texts in other fields than its messages.
    """

    def __init__(
        self, limit: int, requested: int, prompt: int, at_least: bool = False, lengths: Mapping[str, int] | None = None
    ):
        lengths = lengths or {"messages": prompt}
        fields = too_long(lengths, limit)
        counts = f"{prompt} in the messages, {requested - prompt} in the completion"
        reducible = "the messages or the completion"
        if fields != ["messages"]:
            others = requested - sum(lengths.values())
            listed = [f"{count} in '{field}'" for field, count in lengths.items() if count]
            counts = ", ".join([*listed, *([f"{others} in the completion"] if others > 0 else [])])
            quoted = [f"'{field}'" for field in fields] + (["the completion"] if others > 1 else [])
            reducible = (" and " if lengths[fields[-1]] > limit else " or ").join(quoted)
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{'at least ' if at_least else ''}{requested} tokens ({counts}). Please reduce the length of {reducible}.",
            param=fields[0],
            code="context_length_exceeded",
        )


SMALL = 8
"""The divisor of a request's length below which a field is not named for it."""


def too_long(lengths: Mapping[str, int], limit: int) -> list[str]:
    """Return the fields that exceed a limit alone, longest first; where none does, those that do together."""
    longest = sorted(lengths, key=lambda field: -lengths[field])
    alone = [field for field in longest if lengths[field] > limit]
    return alone or [field for field in longest if lengths[field] * SMALL >= sum(lengths.values())]


class VectorError(Inapplicable):
    """A steering vector is missing, damaged, or made for another model."""


class Busy(SteeringError):
    """The waiting queue is full, or a slot would take more than `longest` seconds.

    `waiting` answers are queued; try again in about `retry_after` seconds.
    """

    def __init__(self, waiting: int, retry_after: float, longest: float | None = None):
        why = f"{waiting} answer{' is' if waiting == 1 else 's are'} already waiting, and no more may"
        if longest is not None:
            why = f"an answer would wait longer than {longest:g} seconds for its turn, and none may"
        elif not waiting:
            why = "as many answers run as may"
        seconds = max(1, math.ceil(retry_after))
        super().__init__(f"The server is at capacity: {why}; try again in about {seconds} second{'s' * (seconds > 1)}.")
        self.retry_after = retry_after


SHUTTING_DOWN = "The server is shutting down."
"""The message to whoever asks, or still waits, while an engine stops."""


class Fault(SteeringError):
    """A sequence ended abnormally (non-finite logits, an exception in its step); other sequences are unaffected."""


class EngineEnded(Fault):
    """The engine's process is gone, which says nothing of its model; whoever started it may start another one."""


@contextmanager
def fitting() -> Iterator[None]:
    """Turn a RequestError within the block into `Inapplicable`: it concerns only this model or this prompt."""
    try:
        yield
    except Inapplicable:
        raise
    except RequestError as error:
        raise Inapplicable(str(error), param=error.param, code=error.code) from error


@contextmanager
def panics_raise(make: Callable[[str], SteeringError]) -> Iterator[None]:
    """Turn a panic of a native library within the block into the error that `make` builds from its text.

    pyo3's PanicException is no Exception and would end a thread or a process.
    """
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as panic:
        raise make(f"{type(panic).__name__}: {panic}"[:200]) from panic
