"""Inputs of vLLM that are made of a body: prompts with their pictures, salts, plans and sampling."""

from __future__ import annotations

import base64
import binascii
import hashlib
import io
import json
from typing import Any, NamedTuple

from PIL import Image
from vllm.sampling_params import RequestOutputKind, StructuredOutputsParams

from helmsight_vllm.body import AnswerBody, PromptBody, SamplingBody
from vllm import SamplingParams

READ = ("attention", "state_position", "residual")
"""Fields of a body that only read."""


class Refused(Exception):
    """A body that cannot be answered; `param` is the path of the field."""

    def __init__(self, message: str, param: str | None, code: str = "invalid_value"):
        super().__init__(message)
        self.param, self.code = param, code

    def json(self) -> dict[str, Any]:
        return {"error": {"message": str(self), "param": self.param, "code": self.code}}


class Side(NamedTuple):
    """An answer as vLLM generates it."""

    inputs: Any
    params: SamplingParams
    number: str


class Prepared(NamedTuple):
    """An answer, its twin in a contrast unless that waits for masks, its pictures, and the number of its forced tokens."""

    leader: Side
    twin: Side | None
    images: list[Image.Image]
    forced: int


def salt_of(body: AnswerBody) -> str | None:
    """Return the salt of a body's cached keys, which differ with all that is done to tokens; None where nothing is done."""
    done = body.model_dump(include={"salt", "steering", "think"}, exclude_none=True, exclude_defaults=True)
    if not done:
        return None
    classes = body.prompt.classes if body.steering is not None else []
    return hashlib.sha256(json.dumps([done, classes], sort_keys=True).encode()).hexdigest()


def plan_of(body: AnswerBody, prompt: PromptBody, number: str) -> dict[str, Any]:
    """Return the plan of an answer to a prompt, as `Plan.of` reads it."""
    about = {"number": number, "length": prompt.length, "classes": prompt.classes}
    return {**about, **body.model_dump(include={*READ, "steering", "think"}, exclude_none=True)}


def sampling_of(body: SamplingBody, seed: int | None, stream: bool) -> SamplingParams:
    """Return vLLM's parameters."""
    grammar = None if body.grammar is None else StructuredOutputsParams(grammar=lark_of(body.grammar))
    kind = RequestOutputKind.DELTA if stream else RequestOutputKind.FINAL_ONLY
    fields = body.model_dump(exclude={"grammar", "logit_bias"})
    try:
        return SamplingParams(
            **fields, logit_bias=body.logit_bias or None, seed=seed, structured_outputs=grammar, output_kind=kind,
            skip_special_tokens=True,
        )  # fmt: skip
    except ValueError as error:
        raise Refused(str(error), "sampling") from None


def lark_of(grammar: str) -> str:
    """Return a grammar of llguidance in its dialect of Lark, which is what vLLM passes on; raise Refused for others."""
    if not grammar.lstrip().startswith("{"):
        return grammar
    try:
        (only,) = json.loads(grammar)["grammars"]
        if only.get("lark_grammar") is not None:
            return str(only["lark_grammar"])
        return f"start: %json {json.dumps(only['json_schema'])}"
    except (KeyError, TypeError, ValueError) as error:
        raise Refused(f"This is no grammar of llguidance: {error!r}.", "sampling.grammar") from None


def image_of(data: str, place: int) -> Image.Image:
    """Return a picture of a body; raise Refused where that is none."""
    try:
        return Image.open(io.BytesIO(base64.b64decode(data, validate=True))).convert("RGB")
    except (binascii.Error, OSError, ValueError) as error:
        raise Refused(f"This is no image: {error}", f"images[{place}]") from None
