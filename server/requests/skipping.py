"""What of a request is left out where it does not apply, so that the rest is answered: of a preset always, of what a request
says itself where `"strict": false` allows it. What is wrong in itself is refused all the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from steering import Asked, Inapplicable, Request

T = TypeVar("T")

DIAGNOSTICS = "diagnostics"


@dataclass
class Skipping:
    """What may be left out, and what was. preset: the name of the one that the request asked for. weak: the fields that it
    gave. strict: whether all others must apply. skipped: by the place in a request of what was left out, why. ignored: the
    paths of fields that nothing reads."""

    preset: str = ""
    weak: frozenset[str] = frozenset()
    strict: bool = True
    skipped: dict[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    def may(self, place: str) -> bool:
        """Whether what stands at a place of a request, such as "sage.see", may be left out."""
        return not self.strict or _head(place) in self.weak

    def skips(self, place: str) -> bool:
        """Whether it was."""
        return place in self.skipped

    @property
    def notes(self) -> dict[str, Any]:
        """What the answer says of the preset and of what was left out; nothing where neither could be."""
        if not self.preset and self.strict:
            return {}
        skipped = [{"field": place, "why": why} for place, why in self.skipped.items()]
        return {**self._named, "skipped": skipped}

    @property
    def brief(self) -> dict[str, Any]:
        """What the journal keeps of it."""
        return {**self._named, **({"skipped": [*self.skipped]} if self.skipped else {})}

    @property
    def _named(self) -> dict[str, str]:
        return {"preset": self.preset} if self.preset else {}

    @contextmanager
    def of(self, place: str) -> Iterator[None]:
        """Within, what does not apply of a place is left out; raises it where it may not be."""
        try:
            yield
        except Inapplicable as error:
            if not self.may(place):
                raise
            self.skipped[place] = str(error)

    def one_contrast(self, asked: Sequence[Asked]) -> list[Asked]:
        """The interventions without those of a preset that would need a twin, where the request itself asks for one."""
        own = [one for one in asked if one.twin and _head(_place(one)) not in self.weak]
        weaker = [one for one in asked if own and one.twin and one not in own]
        for one in weaker:
            self.skipped[_place(one)] = (
                f"'{_place(one)}' and '{_place(own[0])}' both contrast an answer with a twin; the request's own goes first."
            )
        return [one for one in asked if one not in weaker]

    def until_it_applies(self, request: Request, submit: Callable[[Request], T]) -> tuple[Request, T]:
        """What becomes of a request once all of it that does not apply is left out, and what `submit` makes of that; raises
        what may not be left out."""
        while True:
            try:
                return request, submit(request)
            except Inapplicable as error:
                request = self._without(request, error)

    def _without(self, request: Request, error: Inapplicable) -> Request:
        param = error.param or ""
        for one in request.asked.values():
            place = _place(one)
            if f"{param}.".startswith(f"{place}.") and self.may(place):
                self.skipped[place] = str(error)
                return replace(request, interventions=[other for other in request.asked.values() if other is not one])
        if _head(param) != DIAGNOSTICS or request.readouts is None or not self.may(DIAGNOSTICS):
            raise error
        option = param.removeprefix(f"{DIAGNOSTICS}.")
        if option in request.readouts.given:
            self.skipped[param] = str(error)
            return replace(request, diagnose=request.readouts.without(option))
        self.skipped[DIAGNOSTICS] = str(error)
        return replace(request, diagnose=None)


def _place(asked: Asked) -> str:
    return ".".join(asked.path)


def _head(place: str) -> str:
    return place.partition(".")[0]
