"""The conditions that any benchmark can be run under: those known by name, chosen by patterns, and a user's own."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from probes.answering.base import Push
from probes.harness.comparison import BASELINE, Way
from probes.harness.named import named
from probes.harness.options import VECTOR
from steering import Generate, Options, RequestError, See, SteeringError, SteeringVector, Think
from steering.protocol.forms import read
from steering.protocol.intervention import REGISTRY
from steering.protocol.intervention_spec import with_vectors
from steering.readiness import lacking

if TYPE_CHECKING:
    from collections.abc import Callable

    from probes.harness.session import Session

Conditions = dict[str, Way]
"""The interventions by the name of their condition."""


def default_conditions() -> Conditions:
    """Return the baseline, SAGE, and every other intervention with its defaults, if it has defaults for all its options."""
    return {BASELINE: (), "SAGE": (See(), Think(), Generate()), **others()}


def others() -> Conditions:
    """Return the interventions without required options that do more than change the chat, except SAGE's stages."""
    conditions: Conditions = {}
    for name, (kind, _) in REGISTRY.items():
        if not issubclass(kind, Options) or kind in (See, Think, Generate) or kind.only_chat:
            continue
        if not any(field.is_required() for field in kind.model_fields.values()):
            conditions[kind.kind.upper() or name] = (kind(),)
    return conditions


def pushes(vector: SteeringVector | str, strength: float = 1.0, automatic: bool = False) -> Conditions:
    """Return the two conditions that steer toward either side, and where that is possible the one that finds its side."""
    sides: dict[str, Literal["vision", "text", "auto"]] = {"toward vision": "vision", "toward text": "text"}
    if automatic:
        sides["toward the found side"] = "auto"
    return {name: (Push(side, vector, strength),) for name, side in sides.items()}


FLAGS = ("--conditions", "--condition")
"""The command line's flags of patterns, and of conditions that are written as NAME=JSON."""


def written(text: str, option: str = "--condition") -> Conditions:
    """Return a user's own condition, written NAME=JSON as in an API request.

    Raises ValueError naming the command line's `option` if it is invalid.
    """
    name, _, fields = text.partition("=")
    try:
        try:
            parsed = json.loads(fields)
        except (ValueError, RecursionError):
            parsed = None
        if not isinstance(parsed, dict):
            raise ValueError(f"""NAME=JSON is needed, such as 'strong={{"sage": true}}'; got {text[:200]!r}""")
        options = read(parsed)
    except (ValueError, RequestError) as error:
        raise ValueError(f"{option} {name}: {error}") from None
    return {name: options}


def chosen(
    conditions: Mapping[str, Way],
    patterns: Sequence[str] | None,
    more: Sequence[str] | None,
    flags: tuple[str, str] = FLAGS,
) -> Conditions:
    """Return the baseline, the conditions that match a pattern (None: all), and those of `more`, written as `NAME=JSON`.

    Raises ValueError for a pattern that matches none, naming the flag that gave it; `flags` are those of both.
    """
    own: Conditions = {}
    for text in more or ():
        own |= written(text, flags[1])
    every, names = {**conditions, **own}, {BASELINE, *own}
    for pattern in ["*"] if patterns is None else patterns:
        if not (matches := fnmatch.filter(every, pattern)):
            raise ValueError(f"{flags[0]}: unknown {pattern!r}; there are {', '.join(map(repr, every))}")
        names.update(matches)
    return {name: way for name, way in every.items() if name in names}


@dataclass(frozen=True)
class Wanted:
    """Conditions as the command line chooses them, with steering if the model has a vector of modality preference.

    patterns: None means all. own: the benchmark's own conditions. automatic: steering may also find
    its side. only_own: there are no others. flags: those that gave patterns and more. Raises ValueError for an unknown
    condition.
    """

    patterns: tuple[str, ...] | None
    more: tuple[str, ...]
    folders: Callable[[], Sequence[Path]]
    vector: str = VECTOR
    own: Mapping[str, Way] = field(default_factory=dict)
    automatic: bool = False
    only_own: bool = False
    flags: tuple[str, str] = FLAGS

    def __post_init__(self) -> None:
        self._chosen(self._pushes(self.vector))

    def _pushes(self, vector: SteeringVector | str) -> Conditions:
        return {} if self.only_own else pushes(vector, automatic=self.automatic)

    @classmethod
    def of(
        cls,
        patterns: Sequence[str] | None,
        more: Sequence[str] | None,
        folders: Callable[[], Sequence[Path]],
        own: Mapping[str, Way] | None = None,
    ) -> Wanted:
        """Return the conditions that the flags `Names` and `Texts` choose."""
        return cls(None if patterns is None else tuple(patterns), tuple(more or ()), folders, own=own or {})

    def conditions(self, session: Session) -> Conditions:
        """Return the conditions that are available.

        Steering needs a vector, and a server that is not Helmsight supports only conditions that change the chat. An
        unavailable condition that was requested by name is an error.
        """
        chosen_conditions = self._chosen(self._pushes(self.vector))
        if any(isinstance(entry, Push) for way in chosen_conditions.values() for entry in way):
            try:
                chosen_conditions = self._chosen(self._pushes(find(self.vector, session, self.folders())))
            except (SteeringError, ValueError, OSError) as error:
                if self.patterns is not None and any(
                    fnmatch.filter(self._pushes(self.vector), pattern) for pattern in self.patterns
                ):
                    raise
                session.lack(f"Steering is left out: {error}")
                chosen_conditions = self._chosen({})
        inside = [
            name
            for name, way in chosen_conditions.items()
            if any(isinstance(entry, Push) or not entry.only_chat for entry in way)
        ]
        if session.endpoint is not None and inside:
            try:
                session.endpoint.check_interventions()
            except ValueError as error:
                if self.patterns is not None or self.more:
                    raise
                session.lack(f"{error} Left out: {', '.join(inside)}.")
                chosen_conditions = {name: way for name, way in chosen_conditions.items() if name not in inside}
        ways = {name: self._with_vectors(name, way, session) for name, way in chosen_conditions.items()}
        available = {name: way for name, way in ways.items() if way is not None}
        for text in _describe_uncalibrated(available, session):
            session.lack(text)
        return available

    def _with_vectors(self, name: str, way: Way, session: Session) -> Way | None:
        """Return a condition with its names replaced by vectors; a server looks names up by itself.

        None where it is left out because a vector is missing, as a condition that nobody asked for may be.
        """
        if session.endpoint is not None:
            return way
        folders = self.folders

        def get(value: SteeringVector | str, key: str) -> SteeringVector:
            return find(value, session, folders()) if isinstance(value, str) else value

        try:
            return tuple(with_vectors(entry, get) if isinstance(entry, Options) else entry for entry in way)
        except (SteeringError, ValueError, OSError) as error:
            if self.patterns is not None or name not in default_conditions():  # somebody has named it
                raise
            session.lack(f"{name} is left out: {error}")
            return None

    def _chosen(self, steered: Conditions) -> Conditions:
        others = {BASELINE: ()} if self.only_own else default_conditions() | steered
        return chosen(others | dict(self.own), self.patterns, self.more, self.flags)


def _describe_uncalibrated(conditions: Conditions, session: Session) -> list[str]:
    """Return in words which conditions use a part of the model's calibration that was not measured."""
    using: dict[str, list[str]] = {}
    for name, way in conditions.items():
        names = {
            entry.name() for entry in way if not isinstance(entry, Push) and getattr(entry, "threshold", None) is None
        }
        for text in lacking(names, session.prepared()) if names else ():
            using.setdefault(text, []).append(name)
    return [f"{', '.join(names)} without calibration: {text}." for text, names in using.items()]


def find(vector: str, session: Session, folders: Sequence[Path]) -> SteeringVector:
    """Return the vector of that name that the server, or the model in this process, has."""
    if session.endpoint is not None:
        return session.endpoint.vector(vector)

    def fingerprint() -> str:
        assert session.engine is not None
        return session.engine.mllm.fingerprint

    return named(vector, session.setup.model.path, folders, fingerprint)
