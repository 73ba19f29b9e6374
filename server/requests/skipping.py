"""Skipping of those parts of a request that do not apply, so that the rest is answered.

Parts of a preset are always skipped, parts of the request itself if it has `"strict": false`. Invalid parts are refused in
either case.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from steering import Inapplicable, InterventionSpec, Request

T = TypeVar("T")

DIAGNOSTICS = "diagnostics"


@dataclass
class Skipping:
    """The parts of a request that may be skipped, and those that were.

    `preset` is the requested preset's name and `weak` the fields that it supplied. `strict` means that all other fields must
    apply. `skipped` maps the places of skipped parts to the reasons. `ignored` holds the paths of fields that nothing reads.
    """

    preset: str = ""
    weak: frozenset[str] = frozenset()
    strict: bool = True
    skipped: dict[str, str] = field(default_factory=dict)
    ignored: Sequence[str] = ()

    def may(self, place: str) -> bool:
        """Return whether the part at a place of a request, such as "sage.see", may be skipped."""
        return not self.strict or _head(place) in self.weak

    def skips(self, place: str) -> bool:
        """Return whether the part at a place was skipped."""
        return place in self.skipped

    @property
    def notes(self) -> dict[str, Any]:
        """The answer's notes on the preset and the skipped parts; empty if nothing could be skipped."""
        if not self.preset and self.strict:
            return {}
        skipped = [{"field": place, "why": why} for place, why in self.skipped.items()]
        return {**self._named, "skipped": skipped}

    @property
    def brief(self) -> dict[str, Any]:
        """The notes that the journal keeps."""
        return {**self._named, **({"skipped": [*self.skipped]} if self.skipped else {})}

    @property
    def _named(self) -> dict[str, str]:
        return {"preset": self.preset} if self.preset else {}

    @contextmanager
    def of(self, place: str) -> Iterator[None]:
        """Skip a place whose part raises Inapplicable within the block; reraise if it may not be skipped."""
        try:
            yield
        except Inapplicable as error:
            if not self.may(place):
                raise
            self.skipped[place] = str(error)

    def one_contrast(self, interventions: Sequence[InterventionSpec]) -> list[InterventionSpec]:
        """Return the interventions without a preset's contrastive ones if the request itself has a contrastive one."""
        own = [spec for spec in interventions if spec.twin and _head(_place(spec)) not in self.weak]
        weaker = [spec for spec in interventions if own and spec.twin and spec not in own]
        for spec in weaker:
            self.skipped[_place(spec)] = (
                f"'{_place(spec)}' and '{_place(own[0])}' both need the contrast branch; the request's own is used."
            )
        return [spec for spec in interventions if spec not in weaker]

    def until_it_applies(self, request: Request, submit: Callable[[Request], T]) -> tuple[Request, T]:
        """Call `submit` until every inapplicable part is skipped; return the final request and the result.

        Raises Inapplicable for a part that may not be skipped.
        """
        while True:
            try:
                return request, submit(request)
            except Inapplicable as error:
                request = self._without(request, error)

    def _without(self, request: Request, error: Inapplicable) -> Request:
        param = error.param or ""
        for spec in request.asked.values():
            place = _place(spec)
            if f"{param}.".startswith(f"{place}.") and self.may(place):
                self.skipped[place] = str(error)
                return replace(request, interventions=[other for other in request.asked.values() if other is not spec])
        if _head(param) != DIAGNOSTICS or request.readouts is None or not self.may(DIAGNOSTICS):
            raise error
        option = param.removeprefix(f"{DIAGNOSTICS}.")
        if option in request.readouts.given:
            self.skipped[param] = str(error)
            return replace(request, diagnose=request.readouts.without(option))
        self.skipped[DIAGNOSTICS] = str(error)
        return replace(request, diagnose=None)


def _place(spec: InterventionSpec) -> str:
    return ".".join(spec.path)


def _head(place: str) -> str:
    return place.partition(".")[0]
