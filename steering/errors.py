"""Errors that the engine raises; each says what was wrong, in which field, and what is allowed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
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


class Inapplicable(RequestError):
    """What is asked for is right in itself, but this model, its vectors or this prompt have no place for it."""


class ContextOverflow(RequestError):
    """Prompt and answer do not fit into the context length; `at_least` where counting stopped before the prompt's end."""

    def __init__(self, limit: int, asked: int, prompt: int, at_least: bool = False):
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, you requested "
            f"{'at least ' if at_least else ''}{asked} tokens "
            f"({prompt} in the messages, {asked - prompt} in the completion). Please reduce the length of the messages "
            "or the completion.",
            param="messages",
            code="context_length_exceeded",
        )


class VectorError(Inapplicable):
    """A steering vector is missing, damaged, or made for another model."""


class Busy(SteeringError):
    """The waiting queue is full: so many answers are `waiting`; try again in about `retry_after` seconds. Or it would take
    more than `longest` seconds to get a slot."""

    def __init__(self, waiting: int, retry_after: float, longest: float | None = None):
        why = f"{waiting} answers are already waiting."
        if longest is not None:
            why = f"an answer would wait longer than {longest:g} seconds for its turn."
        super().__init__(f"The server is at capacity: {why}")
        self.retry_after = retry_after


class Fault(SteeringError):
    """A sequence ended abnormally (non-finite logits, an exception in its step); other sequences are unaffected."""


@contextmanager
def fitting() -> Iterator[None]:
    """Within, what is found wrong is wrong for this model or this prompt alone: a RequestError becomes `Inapplicable`."""
    try:
        yield
    except Inapplicable:
        raise
    except RequestError as error:
        raise Inapplicable(str(error), param=error.param, code=error.code) from error


@contextmanager
def panics_raise(make: Callable[[str], SteeringError]) -> Iterator[None]:
    """Within, a panic of a native library (pyo3's PanicException, which is no Exception and would end a thread or a process)
    becomes the error that `make` makes of its text."""
    try:
        yield
    except (Exception, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as panic:
        raise make(f"{type(panic).__name__}: {panic}"[:200]) from panic
