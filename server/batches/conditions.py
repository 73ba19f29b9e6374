"""Conditions of a batch: the sets of interventions under each of which every request is answered.

A file of conditions is TOML or JSON: a table whose keys are the names of conditions. A value is a table of fields as in a
request (`{}` for none: a baseline), a preset as `"@vision"`, or `"request"` for what each request asks for by itself.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from server.errors import ApiError
from server.requests.preset import AT
from server.wire.chat import ChatRequest, with_interventions
from server.wire.parse import checked

AS_ASKED = "request"
"""The condition that leaves a request's own interventions."""
WHOLE = ("stream", "stream_options")
"""Fields that are left out, since a row holds a whole answer."""
FIXED = ("messages", "model", "metadata", *WHOLE)
"""Fields that no condition may have."""


@dataclass(frozen=True)
class BatchCondition:
    """A set of interventions: a preset and fields of a request; or what each request asks for, if `as_asked`."""

    name: str | None = None
    fields: Mapping[str, Any] = field(default_factory=dict)
    preset: str = ""
    as_asked: bool = False

    def body(self, request_body: Mapping[str, Any], model: str, any_model: bool = False) -> dict[str, Any]:
        """Return the body of a request under this condition, for a server of this model.

        A request's own interventions give way to the condition's. A request for another model stays one, unless `any_model`.
        """
        model_name = request_body.get("model")
        own = not isinstance(model_name, str) or model_name in ("", model) or model_name.startswith(model + AT)
        body = {name: value for name, value in request_body.items() if name not in WHOLE}
        if any_model and not own:
            body["model"], own = model, True
        if self.as_asked:
            return {"model": model, **body}
        interventions = with_interventions(ChatRequest).asking
        body = {name: value for name, value in body.items() if name not in interventions}
        name = model + (AT + self.preset if self.preset else "")
        return {**body, "model": name if own else model_name, **self.fields}


ASKED = [BatchCondition(as_asked=True)]
"""The conditions of a batch without any."""


def read_conditions(path: Path, models: Collection[str], model: str) -> list[BatchCondition]:
    """Return the conditions of a file; raises ValueError naming the first wrong one.

    `models` are the names that the server of `model` has, its presets included; if empty, presets are not checked.
    """
    text = path.read_bytes()
    try:
        definitions = json.loads(text) if path.suffix.lower() == ".json" else tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not valid: {error}") from None
    if not isinstance(definitions, dict) or not definitions:
        raise ValueError(f'{path} must hold conditions by name, such as baseline = {{}} and vision = "@vision"')
    presets = sorted(name.removeprefix(model + AT) for name in models if name.startswith(model + AT))
    return [_condition(path, name, value, presets) for name, value in definitions.items()]


def _condition(path: Path, name: str, value: Any, presets: list[str]) -> BatchCondition:
    place = f"{path}, condition {name!r}"
    if value == AS_ASKED:
        return BatchCondition(name, as_asked=True)
    if isinstance(value, str) and value.startswith(AT):
        preset = value.removeprefix(AT)
        if presets and preset not in presets:
            meant = get_close_matches(preset, presets, n=1)
            more = (
                f"did you mean {AT + meant[0]!r}?"
                if meant
                else f"there are {', '.join(AT + preset for preset in presets)}"
            )
            raise ValueError(f"{place}: the model has no preset {value!r}; {more}")
        return BatchCondition(name, preset=preset)
    if not isinstance(value, dict):
        raise ValueError(f"{place}: must be fields of a request, a preset such as '@vision', or {AS_ASKED!r}")
    if fixed := [key for key in FIXED if key in value]:
        raise ValueError(f"{place}: {fixed[0]!r} belongs to the requests")
    try:
        checked({"messages": [{"role": "user", "content": "?"}], **value}, with_interventions(ChatRequest))
    except ApiError as error:
        raise ValueError(f"{place}: {error}") from None
    return BatchCondition(name, value)
