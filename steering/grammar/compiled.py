"""Grammars compiled for a model's vocabulary, and where in one an answer stands."""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from steering.errors import RequestError
from steering.grammar.grammar import Grammar
from steering.model.mllm import MLLM

T = TypeVar("T")

KEPT = 32
"""Compiled grammars that are kept, those that were used last."""
STATES = 40_000
"""That the automaton of a grammar may grow to while it is followed; each takes about 400 bytes for as long as it is kept."""
SECONDS = 10.0
"""That compiling one may take; the library's own bounds end it within about one."""
STACK = 256 * 2**20
"""Bytes of stack to compile on: references from one definition to the next are followed recursively, and the end of the
stack would be that of the process."""
LIMITS = LLParserLimits(max_lexer_states=STATES, verbose_errors=False)
"""The library's own, but for memory; they bound the time of a step to some tens of milliseconds."""
BESIDE = ("Unimplemented keys", "Unknown format", "oneOf")
"""What a lenient grammar does without, as the library names it."""
SHOWN = 240
"""Characters of what the library says that a message repeats."""


class Matcher:
    """Where one answer stands in its grammar; of one thread at a time."""

    def __init__(self, inner: LLMatcher, param: str):
        self.inner = inner
        self._param = param

    def copy(self) -> Matcher:
        """One that stands where this one does, and goes on alone."""
        return Matcher(self.inner.deep_copy(), self._param)

    def advance(self, token: int) -> None:
        """Go on by a token that was generated; raises RequestError where following the grammar takes too much."""
        self.inner.consume_token(token)
        if self.inner.is_error():
            raise _refusal(self._param, "became too complex while it was followed", self.inner)


class Grammars:
    """Compiles grammars for one model, for any number of threads."""

    def __init__(self, mllm: MLLM):
        self._mllm = mllm
        self._kept: OrderedDict[str, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def start(self, grammar: Grammar) -> Matcher:
        """Where answers of a grammar start; raises RequestError where it cannot be compiled."""
        compiled = self._found(grammar)
        if compiled is None:
            with self._compiling:  # one at a time: of several requests of one grammar, the others find it
                compiled = self._found(grammar) or _aside(lambda: self._compiled(grammar), grammar.param)
                self._keep(grammar, compiled)
        return Matcher(compiled, grammar.param).copy()

    def _found(self, grammar: Grammar) -> LLMatcher | None:
        with self._lock:
            if (found := self._kept.get(grammar.text)) is not None:
                self._kept.move_to_end(grammar.text)
            return found

    def _keep(self, grammar: Grammar, compiled: LLMatcher) -> None:
        with self._lock:
            self._kept[grammar.text] = compiled
            if len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def _compiled(self, grammar: Grammar) -> LLMatcher:
        matcher = LLMatcher(self._tokenizer, grammar.text, log_level=0, limits=LIMITS)
        tried = matcher.deep_copy()
        if not matcher.is_error():
            tried.compute_bitmask()  # that a grammar is too large often shows only here
        if tried.is_error():
            raise _refusal(grammar.param, "cannot be enforced", tried, grammar.strict)
        return matcher

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The model's; of a large vocabulary this takes about a second."""
        mllm = self._mllm
        try:
            return from_tokenizer(mllm.tokenizer, mllm.vocab_size, sorted(mllm.stop_ids) or None)
        except ValueError as error:
            said = f"This model's tokenizer cannot follow a grammar: {_line(str(error))}."
            raise RequestError(said, code="unsupported_value") from error


def _aside(work: Callable[[], T], param: str) -> T:
    """What `work` returns or raises, on a thread with a deep stack; raises RequestError where that takes too long."""
    done: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            done.append(work())
        except BaseException as error:  # also what a native library panics with
            failed.append(error)

    thread = threading.Thread(target=run, name="helmsight-grammar", daemon=True)
    before = threading.stack_size(STACK)
    try:
        thread.start()
    finally:
        threading.stack_size(before)
    thread.join(SECONDS)
    if failed:
        raise failed[0]
    if not done:
        raise RequestError(f"'{param}' takes longer than {SECONDS:g} seconds to compile.", param=param)
    return done[0]


def _refusal(param: str, what: str, matcher: LLMatcher, strict: bool = False) -> RequestError:
    said = _line(_OWN_WORDS.sub("", matcher.get_error().partition("\n<non-verbose/>")[0]))
    aside = ' With "strict": false it is left aside.' if strict and said.startswith(BESIDE) else ""
    return RequestError(f"'{param}' {what}: {said}.{aside}", param=param, code="unsupported_value")


_OWN_WORDS = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?|\n *\d+ \|.*", re.DOTALL)
"""Where in rules that no client wrote a schema is wrong."""


def _line(said: str) -> str:
    """What the library says, in one line."""
    line = " ".join(said.split()).rstrip(".")
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
