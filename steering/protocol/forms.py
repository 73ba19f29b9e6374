"""The JSON forms of interventions, derived from the registry: each stands at its `path`, with its options' names as keys.

An intervention that is alone at its path is `true` (all defaults), `false` or an object of options. Several that share a
path are told apart by `kind`. A path of two is a member of a group, which is on by default where the group is given.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, create_model

from steering.errors import RequestError
from steering.protocol.intervention import REGISTRY
from steering.protocol.intervention_spec import Options
from steering.protocol.wording import MAX_SHOWN, names, sentence, unknown

Path = tuple[str, ...]

KIND = "kind"
NO_SWITCH = "must be true, false or an object"


class Form(ABC):
    """The form of the value at a path."""

    default = True
    """The member's state, on or off, where its group is given without it."""

    def __init__(self, path: Path):
        self.param = ".".join(path)

    @property
    @abstractmethod
    def written(self) -> Any:
        """The type of the value, from which pydantic makes a schema; only `read` reports errors."""

    @property
    @abstractmethod
    def example(self) -> Any:
        """An example value with every default spelt out."""

    def read(self, value: Any) -> tuple[Options, ...]:
        """Return the interventions that a JSON value asks for; raise RequestError where it is wrong."""
        return () if value is None or value is False else self._read(value)

    @abstractmethod
    def _read(self, value: Any) -> tuple[Options, ...]: ...

    def _object(self, value: Any) -> Mapping[str, Any]:
        if value is True:
            return {}
        if not isinstance(value, dict):
            raise RequestError(sentence(self.param, NO_SWITCH, value), param=self.param)
        return value

    def _check_names(self, value: Mapping[str, Any], allowed: Sequence[str]) -> None:
        for key in value:
            if key not in allowed:
                raise unknown(f"{self.param}.{key[:64]}", ", ".join(allowed))


class Single(Form):
    """A single intervention that is alone at its path."""

    def __init__(self, path: Path, options: type[Options]):
        super().__init__(path)
        self.options = options

    @property
    def written(self) -> Any:
        return bool | self.options

    @property
    def example(self) -> Any:
        return example(self.options)

    def _read(self, value: Any) -> tuple[Options, ...]:
        fields = self._object(value)
        # The options themselves also accept names that are not on the wire.
        self._check_names(fields, names(self.options))
        return (self.options(**fields),)


class Kinds(Form):
    """A choice of one intervention among several, by its kind."""

    default = False

    def __init__(self, path: Path, kinds: Mapping[str, type[Options]]):
        super().__init__(path)
        self.kinds = kinds

    @property
    def written(self) -> Any:
        each = [_with_kind(kind, options) for kind, options in self.kinds.items()]
        union = each[0]
        for other in each[1:]:
            union = union | other  # type: ignore[assignment]
        off = Literal[False] | None
        return Annotated[union, Field(discriminator=KIND)] | off if len(each) > 1 else union | off

    @property
    def example(self) -> Any:
        kind, options = next(iter(self.kinds.items()))
        return {KIND: kind, **example(options)}

    def _read(self, value: Any) -> tuple[Options, ...]:
        kind = value.get(KIND) if isinstance(value, dict) else None
        options = self.kinds.get(kind) if isinstance(kind, str) else None
        if options is None:
            raise self._unknown(kind, value)
        self._check_names(value, [KIND, *names(options)])
        return (options(**{key: item for key, item in value.items() if key != KIND}),)

    def _unknown(self, kind: Any, value: Any) -> RequestError:
        """Return the error for a value that is no object, or whose kind is none of these."""
        if not isinstance(value, dict):
            *some, last = self.kinds
            words = f"{', '.join(some)} or {last}" if some else last
            return RequestError(
                sentence(self.param, f"must be an object whose '{KIND}' is {words}", value), param=self.param
            )
        param = f"{self.param}.{KIND}"
        message = sentence(param, f"must be one of {', '.join(self.kinds)}", kind)
        close = get_close_matches(kind[:MAX_SHOWN].lower(), self.kinds, n=1) if isinstance(kind, str) else []
        return RequestError(f"{message[:-1]}; did you mean {close[0]!r}?" if close else message, param=param)


class Group(Form):
    """A group of interventions: a member that is false is off, and a member that is absent has its defaults."""

    def __init__(self, path: Path, members: Mapping[str, Form]):
        super().__init__(path)
        self.members = members

    @property
    def written(self) -> Any:
        fields: dict[str, Any] = {name: (form.written | None, form.default) for name, form in self.members.items()}
        about = "One that is false is off, one that is not named has its defaults."
        name = self.param.title().replace(".", "")
        return bool | create_model(name, __doc__=about, __config__=ConfigDict(extra="forbid"), **fields)

    @property
    def example(self) -> Any:
        return {name: form.example for name, form in self.members.items()}

    def _read(self, value: Any) -> tuple[Options, ...]:
        fields = self._object(value)
        self._check_names(fields, list(self.members))
        groups = (form.read(fields.get(name, form.default)) for name, form in self.members.items())
        return tuple(intervention for some in groups for intervention in some)


def forms() -> dict[str, Form]:
    """Return the form of each request field that asks for registered `Options`, by field name."""
    kinds = [kind for kind, _ in REGISTRY.values() if issubclass(kind, Options)]
    heads = dict.fromkeys(kind.path[0] for kind in kinds)
    return {head: _form((head,), [kind for kind in kinds if kind.path[0] == head]) for head in heads}


def read(fields: Mapping[str, Any]) -> tuple[Options, ...]:
    """Return the interventions that some fields ask for; raise RequestError where a field is wrong or unknown."""
    all_forms = forms()
    for name in fields:
        if name not in all_forms:
            raise unknown(name[:64], ", ".join(all_forms))
    return tuple(intervention for name, value in fields.items() for intervention in all_forms[name].read(value))


def _form(path: Path, kinds: Sequence[type[Options]]) -> Form:
    here = [kind for kind in kinds if kind.path == path]
    below: dict[str, list[type[Options]]] = {}
    for kind in kinds:
        if kind.path != path:
            below.setdefault(kind.path[len(path)], []).append(kind)
    if below:
        return Group(path, {name: _form((*path, name), some) for name, some in below.items()})
    if len(here) == 1 and not here[0].kind:
        return Single(path, here[0])
    return Kinds(path, {kind.kind: kind for kind in here})


def _with_kind(kind: str, options: type[Options]) -> type[BaseModel]:
    """Return a model of an intervention's options as they are written, with its kind."""
    fields: dict[str, Any] = {name: (field.annotation, field) for name, field in options.model_fields.items()}
    fields = {KIND: (Literal[kind], ...), **fields}
    return create_model(options.__name__, __doc__=options.__doc__, __config__=ConfigDict(extra="forbid"), **fields)


def example(options: type[Options]) -> dict[str, Any]:
    """Return the options' defaults, with the least allowed value for each required option."""
    schema = options.model_json_schema()
    least = {"integer": 0, "number": 0.0, "boolean": False, "string": "text", "array": []}
    shown = {}
    for name, field in schema.get("properties", {}).items():
        if field.get("default") is not None:
            shown[name] = field["default"]
        elif name in schema.get("required", ()):
            shown[name] = field["enum"][0] if "enum" in field else field.get("minimum", least.get(field.get("type")))
    return shown
