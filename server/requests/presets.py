"""The presets of an application: those of its settings and those that follow from the model's capabilities."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from server.engine.runtime import Serving
from server.errors import ApiError, BadRequest
from server.images.load import ImageLoader
from server.requests.guarding import GuardPlan, given_again, skipped_of_then, within_then
from server.requests.preset import AT, PLAIN, Preset, built_in
from server.requests.readiness import readouts_available
from server.requests.resolve import diagnose_of, ignored_variables, resolve, sampling_of
from server.requests.skipping import Skipping
from server.settings import Settings, SettingsError
from server.wire.chat import Chat, ChatRequest
from server.wire.guard import Guard
from server.wire.parse import checked
from server.wire.steering import SteeringForm
from server.wire.strangers import LIKE, ignored_fields
from steering import NAME, PinError, RequestError
from steering.protocol.readout import REGISTRY as READOUTS
from steering.protocol.request import RANGES

log = logging.getLogger("helmsight")

BESIDE = (
    "diagnostics", "baseline", "max_completion_tokens", "stop", "logprobs", "min_pixels", "max_pixels", "guard",
    "guard_stream",
)  # fmt: skip
"""Fields that a preset may have besides interventions and the sampling values that have a range."""
LONGEST = 256
"""Longest model name in characters for which a similar one is searched."""


@dataclass(frozen=True)
class Presets:
    """The presets of the settings by name, which take precedence over built-in ones; `chats` reads requests."""

    chats: type[ChatRequest]
    own: Mapping[str, Preset] = field(default_factory=dict)

    @classmethod
    def of(cls, settings: Settings, chats: type[ChatRequest]) -> Presets:
        """Return the presets of the settings; raises SettingsError naming the first wrong field and its source."""
        own = {name: Preset(name, table.fields, table.source) for name, table in settings.presets.items()}
        for preset in own.values():
            with _named(preset):
                _check(preset, chats)
        return cls(chats, own)

    def at(self, serving: Serving) -> dict[str, Preset]:
        """Return all presets of a model as of now, since vectors come and go."""
        return {**built_in(serving.capabilities, serving.store), **self.own}

    def read(
        self,
        body: dict[str, Any],
        kind: type[Chat],
        serving: Serving,
        parts: int | None = None,
        unread: Sequence[str] = (),
    ) -> tuple[Chat, Skipping]:
        """Return the request in a body, completed by its preset, with the fields that may be skipped or are ignored.

        `unread` names ignored fields that the body does not show. Raises as `find` and `server.wire.parse` do, and for
        ignored fields if the body has `"strict": true`.
        """
        preset = self.find(serving, body.get("model"))
        weak = preset.weak(body)
        chat = checked({**body, **weak}, kind, parts)
        ignored = [*unread, *ignored_fields(body, kind), *ignored_variables(chat, serving.capabilities)]
        if chat.guard is None and body.get("guard_stream") is not None:
            ignored.append("guard_stream")
        if ignored and chat.strict:
            raise BadRequest(f"'{ignored[0]}' is unknown, and 'strict' is true.", ignored[0], "unknown_parameter")
        return chat, Skipping(preset.name, frozenset(weak), chat.strict is not False, ignored=ignored)

    def read_again(
        self, body: dict[str, Any], guard: Guard, kind: type[Chat], serving: Serving, parts: int | None = None
    ) -> tuple[Chat, Skipping]:
        """Return the request that a guard gives again, as `read` returns the one in the body.

        The fields of `then` are the preset's if the guard is.
        """
        preset = self.find(serving, body.get("model"))
        weak = preset.weak(body)
        chat = checked(given_again({**body, **weak}, guard, kind), kind, parts)
        weaker = weak.keys() | guard.then.keys() if "guard" in weak else weak.keys() - guard.then.keys()
        return chat, Skipping(preset.name, frozenset(weaker), chat.strict is not False)

    def find(self, serving: Serving, model: Any) -> Preset:
        """Return the preset that a request's `model` names, `PLAIN` for the bare model name.

        Raises OpenAI's 404 for an unknown name.
        """
        if not isinstance(model, str) or model in ("", serving.name):
            return PLAIN
        presets, base = self.at(serving), serving.name + AT
        name = model.removeprefix(base)
        if name != model and name in presets:
            return presets[name]
        meant = _meant(model, serving.name, presets)
        raise ApiError(
            404,
            f"The model {model[:128]!r} does not exist; {f'did you mean {meant!r}? This' if meant else 'this'} server has "
            f"{serving.name!r}, alone or followed by a preset: {', '.join(AT + other for other in presets)}.",
            code="model_not_found",
            param="model",
        )

    def vectors(self, preset: Preset) -> list[str]:
        """Return the names of the steering vectors that a preset uses."""
        fields = _chat(preset, self.chats).interventions.values()
        own = [name for field in fields for options in field.asked for name in options.vectors]
        forms = [field.form for field in fields if isinstance(field.form, SteeringForm)]
        return own + [name for form in forms for name in form.names]

    def interventions(self, preset: Preset) -> set[str]:
        """Return the names of the interventions that a preset asks for."""
        fields = _chat(preset, self.chats).interventions
        forms = {name for name, field in fields.items() if field.form is not None}
        return forms | {options.name() for field in fields.values() for options in field.asked}

    def check(self, serving: Serving, settings: Settings) -> None:
        """Check the presets of the settings against a model; raises SettingsError for values that no request could use.

        Fields that do not apply, such as a missing vector, are logged, since requests will skip them; so is a vector that is
        not the pinned one, since requests will be refused.
        """
        for preset in self.own.values():
            chat = _chat(preset, self.chats)
            with _named(preset):
                try:
                    skipped = _skipped(preset, chat, serving, settings)
                    if chat.guard is not None:
                        again = _chat_again(preset, chat.guard, self.chats)
                        skipped |= _skipped(preset, again, serving, settings, chat.guard)
                except PinError as error:  # the other presets can be used
                    log.warning("preset %r (%s) is refused: %s", preset.name, preset.source, error)
                    continue
            for place, why in skipped.items():
                log.warning("preset %r (%s) is used without '%s': %s", preset.name, preset.source, place, why)
            try:
                if chat.guard is not None:
                    GuardPlan.of(chat.guard, readouts_available(serving))
            except BadRequest as error:  # it may be calibrated while the server runs
                log.warning("preset %r (%s) is refused: %s", preset.name, preset.source, error)


def _chat(preset: Preset, chats: type[ChatRequest]) -> ChatRequest:
    """Return a request with the fields of a preset."""
    return checked({"messages": [{"role": "user", "content": "?"}], **preset.fields}, chats)


def _chat_again(preset: Preset, guard: Guard, chats: type[ChatRequest]) -> ChatRequest:
    """Return the request that a preset's guard gives again."""
    body = {"messages": [{"role": "user", "content": "?"}], **preset.fields}
    try:
        chat = checked(given_again(body, guard, chats), chats)
        sampling_of(chat, {})
    except (ApiError, RequestError) as error:
        raise within_then(error, guard) from error
    return chat


def _skipped(
    preset: Preset, chat: ChatRequest, serving: Serving, settings: Settings, guard: Guard | None = None
) -> dict[str, str]:
    """Return the parts of a preset's request that do not apply to a model; raises the errors of the others.

    guard: the request is the one that this guard gives again, and only parts that are due to it are returned.
    """
    skipping = Skipping(preset.name, frozenset(preset.fields).union(() if guard is None else guard.then))
    chat = chat.model_copy(update={"messages": []})
    try:
        request = resolve(chat, serving, settings, ImageLoader(settings), skipping=skipping)
        twins = [".".join(intervention.path) for intervention in request.asked.values() if intervention.twin]
        if len(twins) > 1:
            message = f"'{twins[0]}' and '{twins[1]}' both need the contrast branch; keep one."
            raise RequestError(message, param=twins[0])
    except PinError:
        raise
    except (ApiError, RequestError) as error:
        raise error if guard is None else within_then(error, guard) from error
    return skipping.skipped if guard is None else skipped_of_then(skipping, guard)


def _check(preset: Preset, chats: type[ChatRequest]) -> None:
    """Raise the errors of a preset that do not depend on the model."""
    if not NAME.fullmatch(preset.name):
        raise RequestError(f"its name must match {NAME.pattern}.")
    allowed = (*chats.asking, *BESIDE, *RANGES)
    for name in preset.fields:
        if name not in allowed:
            close = get_close_matches(name, allowed, n=1, cutoff=LIKE)
            meant = f"did you mean '{close[0]}'?" if close else f"allowed: {', '.join(allowed)}."
            raise RequestError(f"'{name}' cannot be part of a preset; {meant}")
    chat = _chat(preset, chats)
    sampling_of(chat, {})
    diagnose_of(chat.diagnostics, frozenset(READOUTS))
    if chat.guard is not None:
        GuardPlan.of(chat.guard, dict.fromkeys(READOUTS, True))
        _chat_again(preset, chat.guard, chats)


@contextmanager
def _named(preset: Preset) -> Iterator[None]:
    """Prefix errors with the preset's name and source."""
    try:
        yield
    except (ApiError, RequestError) as error:
        raise SettingsError(f"preset {preset.name!r} ({preset.source}): {error}") from error


def _meant(model: str, name: str, presets: Iterable[str]) -> str | None:
    """Return the known name most similar to `model`, None if none is.

    After the model's own name only presets are compared, since the rest is the same.
    """
    if len(model) > LONGEST:
        return None  # the time of comparing grows with the length
    base, preset = name + AT, model.removeprefix(name + AT)
    if preset != model:
        close = [base + other for other in get_close_matches(preset, presets, n=1)]
    else:
        close = get_close_matches(model, [name, *(base + other for other in presets)], n=1, cutoff=LIKE)
    return close[0] if close else None
