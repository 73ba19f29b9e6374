"""The fields of a request that ask for interventions, as the registry says: each stands where its `path` is, in the words of
its options. Only steering has a form of its own here, because its vectors are names that the server looks up.

An intervention that is alone at its path is `true` (all defaults), `false` or an object of options. Several that share a
path are told apart by `kind`. A path of two is a member of a group, which is on by default where the group is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, PlainValidator, WrapValidator

from server.wire.fields import NO_SWITCH, Strict, switch
from server.wire.steering import SteeringForm
from steering import Asked, Options, RequestError, Steering
from steering.protocol.intervention import REGISTRY
from steering.protocol.wording import names, sentence, unknown

Path = tuple[str, ...]

OWN_FORMS: dict[Path, type[Strict]] = {Steering.path: SteeringForm}
"""By path, the forms of interventions that are not written as their options; `server.api.resolve` knows what becomes of
them."""

KIND = "kind"


@dataclass(frozen=True)
class Given:
    """What a request gives for one of these fields. sent: as it was written, True for all defaults. asked: the
    interventions; instead of them form: one of `OWN_FORMS`."""

    sent: Any
    asked: tuple[Asked, ...] = ()
    form: BaseModel | None = None

    @property
    def nothing(self) -> Any:
        """What is reported as applied where nothing was: an empty list of vectors, else None."""
        return None if self.form is None else []


class Form(ABC):
    """How what stands at a path is written."""

    default = True
    """Whether it is on where the group that it is a member of is given."""

    def __init__(self, path: Path):
        self.param = ".".join(path)

    def read(self, value: Any) -> tuple[Asked, ...]:
        """What a JSON value asks for; raises RequestError where it is wrong."""
        return () if value is None or value is False else self._read(value)

    @abstractmethod
    def _read(self, value: Any) -> tuple[Asked, ...]: ...

    def _object(self, value: Any) -> Mapping[str, Any]:
        if value is True:
            return {}
        if not isinstance(value, dict):
            raise RequestError(sentence(self.param, NO_SWITCH, value), param=self.param)
        return value

    def _known(self, given: Mapping[str, Any], known: Sequence[str]) -> None:
        for key in given:
            if key not in known:
                raise unknown(f"{self.param}.{key[:64]}", ", ".join(known))


class Single(Form):
    """One intervention."""

    def __init__(self, path: Path, options: type[Options]):
        super().__init__(path)
        self.options = options

    def _read(self, value: Any) -> tuple[Asked, ...]:
        given = self._object(value)
        self._known(given, names(self.options))  # the options themselves also take names that are not on the wire
        return (self.options(**given),)


class Kinds(Form):
    """One of several interventions."""

    default = False

    def __init__(self, path: Path, kinds: Mapping[str, type[Options]]):
        super().__init__(path)
        self.kinds = kinds

    def _read(self, value: Any) -> tuple[Asked, ...]:
        kind = value.get(KIND) if isinstance(value, dict) else None
        options = self.kinds.get(kind) if isinstance(kind, str) else None
        if options is None:
            *some, last = self.kinds
            words = f"{', '.join(some)} or {last}" if some else last
            raise RequestError(
                sentence(self.param, f"must be an object whose '{KIND}' is {words}", value), param=self.param
            )
        self._known(value, [KIND, *names(options)])
        return (options(**{key: item for key, item in value.items() if key != KIND}),)


class Group(Form):
    """Interventions that belong together; one that is false is off, one that is not named has its defaults."""

    def __init__(self, path: Path, members: Mapping[str, Form]):
        super().__init__(path)
        self.members = members

    def _read(self, value: Any) -> tuple[Asked, ...]:
        given = self._object(value)
        self._known(given, list(self.members))
        asked = (form.read(given.get(name, form.default)) for name, form in self.members.items())
        return tuple(one for some in asked for one in some)


def fields() -> dict[str, Any]:
    """By the name of each field that asks for interventions, the annotation that reads it, into `Given`.

    Raises ValueError where two registered interventions cannot be told apart. One that neither has `Options` nor stands in
    `OWN_FORMS` is for callers of the library alone.
    """
    found: dict[str, Any] = {}
    kinds = [kind for kind, _ in REGISTRY.values()]
    for head in dict.fromkeys(kind.path[0] for kind in kinds):
        if (head,) in OWN_FORMS:
            form = OWN_FORMS[head,]
            found[head] = Annotated[form | None, BeforeValidator(switch), WrapValidator(_form_given)]
        elif options := [kind for kind in kinds if kind.path[0] == head and issubclass(kind, Options)]:
            found[head] = Annotated[Given | None, PlainValidator(partial(_given, _form((head,), options)))]
    return found


def schema(kind: type[Asked]) -> dict[str, Any] | None:
    """The JSON schema of what may be asked of an intervention; None for one that requests have no field for."""
    form: type[BaseModel] | None = OWN_FORMS.get(kind.path)
    if form is None and issubclass(kind, Options):
        form = kind
    return None if form is None else form.model_json_schema(by_alias=True)


def _form(path: Path, kinds: Sequence[type[Options]]) -> Form:
    here = [kind for kind in kinds if kind.path == path]
    below: dict[str, list[type[Options]]] = {}
    for kind in kinds:
        if kind.path != path:
            below.setdefault(kind.path[len(path)], []).append(kind)
    if here and below:
        raise ValueError(f"{'.'.join(path)!r} cannot be both an intervention and a group of them.")
    if below:
        return Group(path, {name: _form((*path, name), some) for name, some in below.items()})
    if len(here) == 1 and not here[0].kind:
        return Single(path, here[0])
    if not all(kind.kind for kind in here):
        raise ValueError(f"Interventions that share the path {'.'.join(path)!r} need a kind each.")
    return Kinds(path, {kind.kind: kind for kind in here})


def _given(form: Form, value: Any) -> Given | None:
    return None if value is None or value is False else Given(value or True, form.read(value))


def _form_given(value: Any, validate: Any) -> Given | None:
    form = validate(value)
    return None if form is None else Given(value or True, form=form)
