"""Grammars compiled for a model's vocabulary, and the state of an answer within one."""

from __future__ import annotations

import ctypes
import os
import re
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import cached_property
from typing import TypeVar
from weakref import WeakSet

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer

from steering.errors import OutOfRoom, RequestError
from steering.grammar.grammar import Grammar, unforced
from steering.model.mllm import MLLM

T = TypeVar("T")

KEPT = 16
"""The number of compiled grammars in the cache, the most recently used ones."""
FOLLOWED = 10_000
"""Tokens, of all answers that follow a compiled grammar, after which it leaves the cache.

Its automaton, which they share, grows with each new one, and is freed with the last of them. Compiling takes some
milliseconds.
"""
STATES = 20_000
"""The number of states to which an automaton may grow while it is followed, about 60 MB in the worst known case."""
FUEL, MOST_FUEL = 100_000, 400_000
"""The cost that a grammar may have before its first token, in the library's units of up to about 85 bytes.

The first is enough for nearly all; a schema of 65,536 characters with a thousand properties takes 375,000.
"""
LARGE = 8
"""The maximum number of compiled grammars of more than `FUEL` in memory at once, cached or followed."""
SECONDS = 10.0
"""The time limit for compiling a grammar; the library's own bounds end it within about one second."""
STACK = 256 * 2**20
"""Bytes of stack to compile on; the library follows references recursively, and an overflow would end the process."""
BESIDE = ("Unimplemented keys", "Unknown format", "oneOf")
"""Features that a lenient grammar leaves out, as the library names them."""
SHOWN = 240
"""The number of characters of the library's message that ours repeats."""


def limits(fuel: int) -> LLParserLimits:
    """Return the library's own limits, except for memory; they bound the time of a step to some tens of milliseconds."""
    return LLParserLimits(initial_lexer_fuel=fuel, max_lexer_states=STATES, verbose_errors=False)


class Compiled:
    """A grammar at the start of an answer, and the automaton that all answers share."""

    def __init__(self, start: LLMatcher):
        self.start = start
        self.followed = 0
        self.spoilt = False

    @property
    def worn(self) -> bool:
        """True if it must leave the cache."""
        return self.spoilt or self.followed >= FOLLOWED


class Matcher:
    """The state of one answer in its grammar; not thread-safe."""

    def __init__(self, compiled: Compiled, inner: LLMatcher, grammar: Grammar):
        self.inner = inner
        self._compiled = compiled
        self._grammar = grammar

    def copy(self) -> Matcher:
        """Return an independent matcher in the same state."""
        return Matcher(self._compiled, self.inner.deep_copy(), self._grammar)

    def advance(self, token: int) -> None:
        """Advance by a generated token; raise RequestError where following the grammar becomes too costly."""
        self._compiled.followed += 1
        self.inner.consume_token(token)
        if self.inner.is_error():
            self._compiled.spoilt = True
            # Of two that it may follow, nothing tells which one an answer is in; both share the automaton, too.
            other = self._grammar.other
            problem = "became too complex while it was followed"
            if other is not None:
                problem = f"or '{other.param}' {problem}"
            raise _refusal(self._grammar.param, problem, self.inner)


class Grammars:
    """Compiles grammars for one model; thread-safe."""

    def __init__(self, mllm: MLLM):
        self._mllm = mllm
        self._cache: OrderedDict[str, Compiled] = OrderedDict()
        self._large: WeakSet[Compiled] = WeakSet()
        self._lock = threading.Lock()
        self._compiling = threading.Lock()

    def start(self, grammar: Grammar) -> Matcher:
        """Return a matcher at the start of a grammar's answers; raise RequestError where it cannot be compiled."""
        compiled = self._cached(grammar)
        if compiled is None:
            with self._compiling:  # one at a time: other requests with this grammar then find it cached
                compiled = self._cached(grammar) or self._make(grammar)
        return Matcher(compiled, compiled.start.deep_copy(), grammar)

    def _cached(self, grammar: Grammar) -> Compiled | None:
        """Return the cached entry of a grammar, after removing worn ones."""
        with self._lock:
            for text in [text for text, compiled in self._cache.items() if compiled.worn]:
                del self._cache[text]
            if (compiled := self._cache.get(grammar.text)) is not None:
                self._cache.move_to_end(grammar.text)
            return compiled

    def _make(self, grammar: Grammar) -> Compiled:
        try:
            compiled = _run_aside(lambda: self._compile(grammar), grammar.param)
        except RequestError:
            _give_back()
            raise
        with self._lock:
            self._cache[grammar.text] = compiled
            if len(self._cache) > KEPT:
                self._cache.popitem(last=False)
        return compiled

    def _compile(self, grammar: Grammar) -> Compiled:
        start, tried = self._try_matchers(grammar, FUEL)
        large = _OUT_OF_FUEL.search(tried.get_error()) is not None
        if large:
            self._make_room(grammar.param)
            start, tried = self._try_matchers(grammar, MOST_FUEL)
        if tried.is_error():
            if grammar.other is not None:
                self._compile(grammar.other)  # it raises where the fault is its own, under its own name
            refusal = _refusal(grammar.param, "cannot be enforced", tried, grammar.aside)
            del start, tried  # the traceback would keep them alive
            raise refusal
        compiled = Compiled(start)
        if large:
            self._large.add(compiled)
        return compiled

    def _try_matchers(self, grammar: Grammar, fuel: int) -> tuple[LLMatcher, LLMatcher]:
        """Return a matcher, and one whose first possible tokens were computed.

        A grammar often proves too large only then, and, where the first token is certain, only the second time.
        """
        # Without backslashes: those of JSON, and of expressions.
        looks_special = self._mllm.special_pattern.search(grammar.text.replace("\\", ""))
        text = unforced(grammar.text) if looks_special else grammar.text
        start = LLMatcher(self._tokenizer, text, log_level=0, limits=limits(fuel))
        tried = start.deep_copy()
        for _ in range(2):
            if not tried.is_error():
                tried.compute_bitmask()
        return start, tried

    def _make_room(self, param: str) -> None:
        """Remove large grammars that nobody follows from the cache; raise OutOfRoom where too many are followed."""
        with self._lock:
            for text in [text for text, compiled in self._cache.items() if compiled in self._large]:
                if len(self._large) < LARGE:
                    return
                del self._cache[text]
            if len(self._large) >= LARGE:
                message = (
                    f"'{param}' is a large grammar, and {LARGE} such are in use; try again when an answer has ended."
                )
                raise OutOfRoom(message, param=param, code="grammars_in_use", retry_after=1.0)

    @cached_property
    def _tokenizer(self) -> LLTokenizer:
        """The model's tokenizer; a large vocabulary takes about a second."""
        mllm = self._mllm
        try:
            return from_tokenizer(mllm.tokenizer, mllm.vocab_size, sorted(mllm.stop_ids) or None)
        except ValueError as error:
            message = f"This model's tokenizer cannot follow a grammar: {_line(str(error))}."
            raise RequestError(message, code="unsupported_value") from error


def _run_aside(work: Callable[[], T], param: str) -> T:
    """Run `work` on a thread with a deep stack and return its result or raise its error.

    Raises RequestError where it takes too long.
    """
    results: list[T] = []
    failed: list[BaseException] = []

    def run() -> None:
        try:
            results.append(work())
        except BaseException as error:  # a native library's panic is one
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
    if not results:
        raise RequestError(f"'{param}' takes longer than {SECONDS:g} seconds to compile; make it smaller.", param=param)
    return results[0]


def _refusal(param: str, problem: str, matcher: LLMatcher, aside: str = "") -> RequestError:
    reason = _line(_OWN_WORDS.sub("", matcher.get_error().partition("\n<non-verbose/>")[0]))
    for start, plain in _PLAIN:
        reason = plain if reason.startswith(start) else reason
    advice = aside if reason.startswith(BESIDE) else ""
    return RequestError(f"'{param}' {problem}: {reason}.{advice}", param=param, code="unsupported_value")


def _give_back() -> None:
    """Make GNU's C library return the memory of a refused grammar, up to 300 MB, to the system."""
    library = ctypes.CDLL(None) if os.name == "posix" else None
    if library is not None and hasattr(library, "malloc_trim"):
        library.malloc_trim(0)


_OUT_OF_FUEL = re.compile("too many expressions constructed|fuel|limit for this grammar")
"""The library's messages for a grammar that costs too much before its first token."""
_TOO_LARGE = "it is too large; have fewer properties, alternatives or repetitions, or smaller bounds of numbers"
_PLAIN = (
    ("NoExtensionBias", "nothing matches it, or it refers to itself alone"),
    ("oneOf constraints", "oneOf of schemas that may hold together is not supported; anyOf is"),
    ("lexer error: too many expressions", _TOO_LARGE),
    ("initial lexer configuration", _TOO_LARGE),
    ("schema too large", _TOO_LARGE),
    ("Failed to generate regex for", "the bound of a number is too large; leave it out, or have one up to 1e15"),
    ("invalid multiple of", "multipleOf must be above 0"),
    ("recursion limit exceeded", "it is nested too deeply; 100 levels are well"),
    ("lookarounds not supported", "in a pattern, ^ and $ may stand at its ends alone, and \\b and look-around nowhere"),
    (
        "Parser Error: Current row has",
        'too much may come next in one place; have fewer optional properties in one object (400 are well; "required" ones, '
        "which come one by one, do not count) or fewer alternatives, or put some into an object of their own",
    ),
)
"""The library's messages that no client understands, by their beginning, and their replacements."""
_OWN_WORDS = re.compile(r"^at \d+\(\d+\): (?:failed to compile JSON schema: )?|\n *\d+ \|.*", re.DOTALL)
"""The library's positions of an error in rules that no client wrote."""


def _line(text: str) -> str:
    """Return the library's message on one line."""
    line = " ".join(text.split()).rstrip(".")
    return line if len(line) <= SHOWN else f"{line[:SHOWN]}..."
