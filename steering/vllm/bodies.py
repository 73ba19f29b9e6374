"""The bodies of answers for vLLM servers: a prompt as token ids and pictures, sampling, and what is to be done inside."""

from __future__ import annotations

import base64
import hashlib
import io
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from threading import local
from typing import Any

from PIL import Image

from steering.errors import Inapplicable, RequestError
from steering.front.input_processor import InputProcessor, Limits
from steering.front.output_processor import OutputProcessor
from steering.grammar.grammar import Grammar
from steering.messages.messages import Add
from steering.model.mllm import MLLM
from steering.prompt.chat import image_parts
from steering.prompt.fitting import resized, sized
from steering.prompt.layout import Prompt
from steering.protocol.request import Request
from steering.protocol.sequence import Sequence, Spec
from steering.protocol.signals import Signal
from steering.recorders.attention import SIGNALS as OF_ATTENTION
from steering.vllm.attention import SpanLabels, ranges_of
from steering.vllm.forms import FORMS, Taken, steered_classes
from steering.vllm.measurements import measured

PATH = "/v1/helmsight/answer"
HOME = 64
"""Tokens at a prompt's beginning that, with its first picture, tell which server's cache may know it."""
FIELDS: Mapping[str, str] = {
    "prompt": "messages",
    "images": "messages",
    "size": "messages",
    "attention": "diagnostics",
    "residual": "diagnostics",
    "salt": "cache_salt",
    "state_position": "state_position",
}
"""The fields of a request that those of a body are made from, beside those of interventions."""


@dataclass(frozen=True)
class Body:
    """The body of answers that differ in their seeds alone.

    fields: all of it but the seed and whether it is streamed, as JSON without its closing brace. home: what a server's cache
    would know of it. taken: returns an answer's measurements, from the server's and the number of generated tokens that went
    through the model. fields_of: the request's field that each of the body's is made from. reason: why the answer ended,
    where its forced tokens are all of it.
    """

    fields: bytes
    home: bytes
    taken: Callable[[Taken, int], dict[str, Any]]
    fields_of: Mapping[str, str]
    reason: str | None = None

    def named(self, error: RequestError) -> RequestError:
        """Return a server's refusal with the request's field in place of the body's."""
        head = (error.param or "").partition(".")[0].partition("[")[0]
        return RequestError(str(error), param=self.fields_of.get(head), code=error.code)

    def written(self, sequence: Sequence) -> bytes:
        """Return the body of one answer."""
        own = {"seed": sequence.spec.seed, "stream": sequence.output.in_pieces}
        return self.fields + b"," + json.dumps(own).encode()[1:]


class Bodies(InputProcessor):
    """Prepares requests, and holds the pictures of the latest one until `of` writes them, in the same thread."""

    path = PATH

    def __init__(self, mllm: MLLM, limits: Limits):
        super().__init__(mllm, limits)
        self._latest = local()

    def prepare(self, request: Request, number: int, mllm: MLLM | None = None) -> tuple[Add, OutputProcessor]:
        add, outputs = super().prepare(request, number, mllm)
        add = until_end(mllm or self.mllm, add)
        parts = resized(image_parts(request.chat), add.spec.prompt.shrunk)
        self._latest.pictures = sized(self.mllm, parts)
        return add, outputs

    def of(self, request: Add) -> list[Body]:
        """Return the bodies of a request's answers, and of its baselines if it has any."""
        pictures, size = self._latest.pictures
        images = {"images": [_png(picture) for picture in pictures]}
        if size is not None:
            images["size"] = size
        specs = [(request.spec, request.twin_prompt)]
        if request.baseline:
            plain = replace(request.spec, prompt=request.baseline_prompt or request.spec.prompt, asked={}, settled={})
            specs.append((plain, None))
        reason = None
        if is_whole(request.spec):
            reason = "length" if end_of(self.mllm, request) is None else "stop"
        return [self._body(spec, twin, request.grammar, images, reason) for spec, twin in specs]

    def _body(
        self, spec: Spec, twin: Prompt | None, grammar: Grammar | None, images: Mapping[str, Any], reason: str | None
    ) -> Body:
        labels = _labels(spec)
        fields: dict[str, Any] = {
            "prompt": self._prompt(spec, spec.prompt, spec.forced),
            **images,
            "sampling": sampling_of(spec, grammar),
            "salt": spec.salt,
        }
        if reason is not None:  # a server generates one token more, of which nothing counts
            fields["fed"] = len(spec.forced) - 1
        if labels is not None:
            rows = {name: ranges_of(columns) for name, columns in _attended(spec).items()}
            fields["attention"] = {"labels": labels.runs, "rows": rows, "steps": Signal.DECAY in spec.signals}
        if Signal.PROMPT_STATE in spec.signals:
            fields["state_position"] = spec.state_position
        if spec.diagnose is not None and not spec.signals.isdisjoint({Signal.UPDATES, Signal.STREAM}):
            fields["residual"] = {"rows": spec.diagnose.residual_rows, "updates": Signal.UPDATES in spec.signals}
        named = dict(FIELDS) | ({} if grammar is None else {"sampling": grammar.param})
        for name, intervention in spec.asked.items():
            own = FORMS[name].write(spec, self.mllm) if name in FORMS else {}
            named |= dict.fromkeys(own, ".".join(intervention.path))
            fields |= own
        if twin is not None and "noise" not in fields.get("twin", {}):
            fields["twin"]["prompt"] = self._prompt(spec, twin)
        written = json.dumps(fields, separators=(",", ":")).encode()
        return Body(written[:-1], _home(spec.prompt), partial(measured, spec, labels), named, reason)

    def _prompt(self, spec: Spec, prompt: Prompt, forced: tuple[int, ...] = ()) -> dict[str, Any]:
        """Return a prompt's ids with each picture as the text that stands for it, and a hash of the ids with its tokens."""
        ids = [*prompt.ids.tolist(), *forced]
        digest = hashlib.sha256(prompt.ids.numpy().astype("<i4").tobytes()).hexdigest()
        for start, end, text in reversed(prompt.placeholders):
            ids[start:end] = self.mllm.tokenizer(text, add_special_tokens=False).input_ids
        return {"ids": ids, "length": prompt.length, "sha256": digest, "classes": steered_classes(spec, prompt)}


def sampling_of(spec: Spec, grammar: Grammar | None) -> dict[str, Any]:
    """Return the sampling of a body: the names and meanings are those of vLLM's `SamplingParams`."""
    sampling = spec.sampling
    wants_scores = sampling.logprobs is not None or Signal.LOGPROBS in spec.signals
    scores_prompt = bool(spec.forced) or not spec.signals.isdisjoint({Signal.REPLY, Signal.PROMPT_LOGPROBS})
    tops = (sampling.prompt_logprobs or 0, (sampling.logprobs or 0) if spec.forced else 0)
    return {
        "max_tokens": max(1, spec.max_tokens - len(spec.forced)),
        "min_tokens": 0 if is_whole(spec) else max(0, sampling.min_tokens - len(spec.forced)),
        "temperature": 0.0 if sampling.greedy else sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "repetition_penalty": sampling.repetition_penalty,
        "frequency_penalty": sampling.frequency_penalty,
        "presence_penalty": sampling.presence_penalty,
        "logit_bias": {str(token): bias for token, bias in sampling.logit_bias.items()},
        "stop": [] if spec.forced else list(sampling.stop),
        "ignore_eos": sampling.ignore_eos,
        "logprobs": (sampling.logprobs or 0) if wants_scores else None,
        "prompt_logprobs": max(tops) if scores_prompt else None,
        "grammar": None if grammar is None else grammar.text,
    }


def _labels(spec: Spec) -> SpanLabels | None:
    """Return the labels by which attention is summed; None where it is not."""
    if spec.diagnose is None or spec.signals.isdisjoint(OF_ATTENTION):
        return None
    return SpanLabels.of(spec.prompt.layout, spec.diagnose.spans == "content")


def _attended(spec: Spec) -> dict[str, Any]:
    """Return the columns of the prompt's rows whose attention is summed, by group."""
    layout, groups = spec.prompt.layout, dict[str, Any]()
    if Signal.SPANS in spec.signals:
        groups |= {"question": layout.question_rows, "modality": layout.modality_rows}
    if Signal.ANCHOR in spec.signals and layout.images:
        groups["anchor"] = layout.images[-1].columns
    return groups


def _home(prompt: Prompt) -> bytes:
    pictures = b"".join(picture.key for picture in prompt.pictures[:1])
    return pictures + prompt.ids[:HOME].numpy().tobytes()


def _png(picture: Image.Image) -> str:
    out = io.BytesIO()
    # Speed matters more than size on the way to a server.
    picture.save(out, "PNG", compress_level=1)
    return base64.b64encode(out.getvalue()).decode()


# -- forced tokens, which a server reads behind the prompt: they have to end where the answer ends -----------------------


def is_whole(spec: Spec) -> bool:
    """Return True if the forced tokens are all of an answer."""
    return bool(spec.forced) and len(spec.forced) >= spec.max_tokens


def until_end(mllm: MLLM, add: Add) -> Add:
    """Return the request with its forced tokens cut where one of them ends the answer, which then is all of it.

    Raises Inapplicable for settings by which generated tokens depend on the text of forced ones.
    """
    spec = replace(add.spec, forced=add.spec.forced[: add.spec.max_tokens])
    add = replace(add, spec=spec)
    end = end_of(mllm, add)
    if end is not None:
        return replace(add, spec=replace(spec, forced=spec.forced[:end], max_tokens=end))
    if spec.forced and not is_whole(spec):
        for param in _depending(spec):
            raise Inapplicable(
                f"'{param}' is not supported by this server's engine, vLLM, where tokens are generated after forced ones.",
                param=param,
                code="unsupported_value",
            )
    return add


def end_of(mllm: MLLM, add: Add) -> int | None:
    """Return how many forced tokens there are up to the one that ends the answer; None where none does."""
    sampling, text = add.spec.sampling, add.text_stream(mllm.tokenizer)
    for count, token in enumerate(add.spec.forced, 1):
        if token in mllm.stop_ids and not sampling.ignore_eos:
            return count
        text.feed(token)
        if text.stopped:
            return count
    return None


def _depending(spec: Spec) -> Iterator[str]:
    """Yield the fields by which a server, for which forced tokens are a part of the prompt, would generate others."""
    sampling = spec.sampling
    if sampling.stop:
        yield "stop"
    if sampling.frequency_penalty:
        yield "frequency_penalty"
    if sampling.presence_penalty:
        yield "presence_penalty"
