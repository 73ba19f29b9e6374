"""Answers that can be compared: without what differs from one time to the next, and how two of them differ."""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from PIL import Image
from safetensors.torch import load

EXACT = 1e-5
"""Largest permitted difference of float32 numbers, relative to the larger one where that is above 1."""
SCALES = {"alarm": 10.0, "logprobs": 3.0}
"""Scales above 1 of numbers that other numbers are computed from by subtraction.

These are log-probabilities of logits, and the alarm's score of numbers that it divides by how little they vary.
Measured at most: 1.3e-5 nats, and 1.9e-5 in the score.
"""
COLOURS = 3
"""Largest permitted difference of heat maps' colours, of 255: one step of their colour map."""
TIE = 0.05
"""Nats between two candidates of the plain path within which half precision may choose either."""
PNG = "data:image/png;base64,"
STATES = ".safetensors"
PASSING = ("id", "created", "prompt_tokens_details")
"""Keys of what differs each time an answer is given: its name, its time, what of its prompt was cached."""


@dataclass(frozen=True)
class Answer:
    """An answer of the server.

    body: JSON; for a stream, its events put together.
    """

    status: int
    body: Any
    identity: str | None = None

    @classmethod
    def of(cls, status: int, text: str, content_type: str) -> Answer:
        """From a response."""
        if content_type.startswith("text/event-stream"):
            events = [json.loads(line[6:]) for line in text.splitlines() if line.startswith("data: {")]
            assert text.rstrip().endswith("data: [DONE]"), text[-300:]
            return cls(status, _lasting(_whole(events)), events[0].get("id"))
        body = json.loads(text)
        return cls(status, _lasting(body), body.get("id"))

    def naming(self, earlier: str) -> Answer:
        """Return the same answer with the id of another one, which differs each time, replaced."""
        return replace(self, body=json.loads(json.dumps(self.body).replace(earlier, "earlier")))


def _whole(events: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the body that a stream's events add up to."""
    whole: dict[str, Any] = {"events": "stream", "choices": []}
    choices: dict[int, dict[str, Any]] = {}
    for event in events:
        if "error" in event:
            return {"error": event["error"]}
        whole["usage"] = event.get("usage") or whole.get("usage")
        for piece in event["choices"]:
            choice = choices.setdefault(piece["index"], {"content": "", "logprobs": [], "calls": {}})
            choice["content"] += piece["delta"].get("content") or ""
            choice["logprobs"] += (piece["logprobs"] or {}).get("content", [])
            for call in piece["delta"].get("tool_calls", ()):
                held = choice["calls"].setdefault(str(call["index"]), {"name": "", "arguments": ""})
                for key, value in call["function"].items():
                    held[key] += value
            rest = {key: value for key, value in piece.items() if key not in ("index", "delta", "logprobs")}
            choice.update({key: value for key, value in rest.items() if value is not None})
    whole["choices"] = [choices[index] for index in sorted(choices)]
    return whole


def _lasting(value: Any) -> Any:
    """Return the same value without the parts that differ each time."""
    if isinstance(value, dict):
        return {key: _lasting(item) for key, item in value.items() if key not in PASSING}
    return [_lasting(item) for item in value] if isinstance(value, list) else value


def differences(one: Any, other: Any, tolerance: float = EXACT, path: str = "", scale: float = 1.0) -> Iterator[str]:
    """Yield the differences of two answers: keys, words, and numbers beyond the tolerance.

    The tolerance is relative to `scale` or to the number itself.
    """
    if isinstance(one, bool) or isinstance(other, bool):
        if one is not other:
            yield f"{path}: {_shown(one)} against {_shown(other)}"
    elif isinstance(one, int | float) and isinstance(other, int | float):
        same = one == other or (math.isnan(one) and math.isnan(other))
        if not same and not abs(one - other) <= tolerance * max(scale, abs(one)):
            yield f"{path}: {one} against {other}"
    elif type(one) is not type(other):
        yield f"{path}: {_shown(one)} against {_shown(other)}"
    elif path.endswith(STATES):
        yield from differences(*map(_tensor, (one, other)), tolerance, f"{path} as numbers", scale)
    elif isinstance(one, dict):
        if one.keys() != other.keys():
            yield f"{path}: keys {sorted(one.keys() ^ other.keys())}"
        for key in one.keys() & other.keys():
            yield from differences(one[key], other[key], tolerance, f"{path}.{key}", SCALES.get(key, scale))
    elif isinstance(one, list):
        if len(one) != len(other):
            yield f"{path}: {len(one)} items against {len(other)}"
        scale = max(scale, _largest_of_maps(one))
        for number, (a, b) in enumerate(zip(one, other, strict=False)):
            yield from differences(a, b, tolerance, f"{path}[{number}]", scale)
    elif _drawn(one) and _drawn(other):
        apart = int(np.abs(_pixels(one) - _pixels(other)).max())
        if apart > COLOURS:
            yield f"{path}: a picture of which a pixel is {apart} off"
    elif one != other:
        yield f"{path}: {_shown(one)} against {_shown(other)}"


def _largest_of_maps(items: list[Any]) -> float:
    """Return the largest number of the maps, which are lists of numbers, in a list; 0 where there are none.

    Each number is a sum of products that are as large as those of the others, so that their roundings are, too.
    """
    maps = [items, *(item for item in items if isinstance(item, list))]
    maps += [value for item in items if isinstance(item, dict) for value in item.values() if isinstance(value, list)]
    return max((abs(value) for values in maps for value in values if isinstance(value, float)), default=0.0)


def _tensor(file: str) -> list[Any]:
    (tensor,) = load(base64.b64decode(file)).values()
    return list(tensor.tolist())


def _pixels(url: str) -> np.ndarray[Any, Any]:
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(url.removeprefix(PNG))))).astype(int)


def _shown(value: Any) -> str:
    return repr(value)[:120]


def without_numbers(value: Any) -> Any:
    """Return the fields and words of an answer, which half precision does not change where its tokens are the same.

    Numbers are rounded, and with them what is drawn of them, and the order of other candidates.
    """
    if isinstance(value, dict):
        return {key: without_numbers(item) for key, item in value.items() if key not in ("top_logprobs", STATES[1:])}
    if isinstance(value, list):
        return [without_numbers(item) for item in value]
    return type(value).__name__ if isinstance(value, bool | int | float) else "a picture" if _drawn(value) else value


def _drawn(value: Any) -> bool:
    return isinstance(value, str) and value.startswith(PNG)


class Parting(NamedTuple):
    """The first difference between two answers.

    nats: how much likelier the plain path has the token that it takes than the other one.
    """

    nats: float
    words: str


def answers_in(body: Any) -> list[list[dict[str, Any]]]:
    """Return the log-probabilities of every token of each answer in a body, including baselines."""
    choices = body.get("choices", []) if isinstance(body, dict) else []
    every = [one for choice in choices for one in (choice, choice.get("baseline")) if one is not None]
    told = [one["logprobs"] or [] for one in every]
    return [one["content"] if isinstance(one, dict) else one for one in told]


def first_parting(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> Parting | None:
    """Return the first difference from the plain path's tokens; None where they are the same."""
    for number, (a, b) in enumerate(zip(one, other, strict=False)):
        if a["bytes"] != b["bytes"]:
            known = [top["logprob"] for top in a["top_logprobs"] if top["bytes"] == b["bytes"]]
            nats = a["logprob"] - known[0] if known else math.inf
            return Parting(nats, f"token {number} is {b['token']!r} and not {a['token']!r}, {nats:.3f} nats likelier")
    if len(one) != len(other):
        return Parting(math.inf, f"{len(other)} tokens and not {len(one)}")
    return None
