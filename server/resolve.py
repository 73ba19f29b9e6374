"""From a wire request to the engine's: names become vectors, URLs pictures, absent values the checkpoint's defaults."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from server.errors import BadRequest
from server.images import ImageLoader
from server.runtime import Serving
from server.settings import Settings
from server.wire import Auto as WireAuto
from server.wire import ChatRequest, Diagnostics, Message, NamedVector, Steering, image_urls
from server.wire import Icd as WireIcd
from server.wire import Pai as WirePai
from server.wire import Sage as WireSage
from server.wire import Vcd as WireVcd
from steering import (
    Asked,
    Auto,
    Criterion,
    Diagnose,
    Earlier,
    Generate,
    Icd,
    Pai,
    Request,
    RequestError,
    Sage,
    Sampling,
    See,
    Steer,
    SteeringVector,
    Think,
    Vcd,
    VectorError,
    VectorStore,
    check_steer,
)
from steering import Steering as StackedVectors
from steering.protocol.readout import cheap

SLACK = 1.5
"""What vectors really add may be so many times the limit: magnitudes differ between prompts, and a vector that is what it
says meets the limit on its strength first."""


def resolve(
    chat: ChatRequest, serving: Serving, settings: Settings, images: ImageLoader, earlier: Earlier | None = None
) -> Request:
    """The engine's request; raises RequestError or BadRequest naming the field. `earlier` is the answer that drift is
    measured from. Pictures are loaded last, because all else is cheap."""
    n = 1 if chat.n is None else chat.n
    if not 1 <= n <= settings.max_choices:
        raise BadRequest(f"'n' must be at least 1 and at most {settings.max_choices}; got {n}.", "n")
    pictures = len(list(image_urls(chat))) if chat.messages else None
    sampling = _sampling(chat, serving.mllm.generation_defaults)
    steers = _steering(chat.steering, serving, settings, pictures) if chat.steering else ()
    diagnose = _diagnose(chat.diagnostics, earlier) if chat.diagnostics else None
    messages = [_message(message, f"messages[{i}]", images) for i, message in enumerate(chat.messages)]
    interventions = [
        StackedVectors(steers) if steers else None,
        _sage(chat.sage) if chat.sage else None,
        _contrast(chat.contrast) if chat.contrast else None,
    ]
    return Request(messages, sampling, interventions, diagnose, n=n, baseline=bool(chat.baseline))


def _sampling(chat: ChatRequest, defaults: dict[str, Any]) -> Sampling:
    if chat.top_logprobs is not None and not chat.logprobs:
        raise BadRequest("'top_logprobs' needs 'logprobs' to be true.", "top_logprobs")

    def either(value: float | None, name: str, neutral: float) -> float:
        return float(defaults.get(name, neutral)) if value is None else value

    top_k = int(either(chat.top_k, "top_k", 0))
    return Sampling(
        max_tokens=chat.max_tokens if chat.max_completion_tokens is None else chat.max_completion_tokens,
        temperature=either(chat.temperature, "temperature", 1.0),
        top_p=either(chat.top_p, "top_p", 1.0),
        top_k=0 if top_k == -1 else top_k,  # -1 is how other servers spell "off"
        min_p=chat.min_p or 0.0,
        repetition_penalty=either(chat.repetition_penalty, "repetition_penalty", 1.0),
        frequency_penalty=chat.frequency_penalty or 0.0,
        presence_penalty=chat.presence_penalty or 0.0,
        logit_bias=dict(chat.logit_bias or {}),
        seed=chat.seed,
        stop=tuple(chat.stop or ()),
        logprobs=(chat.top_logprobs or 0) if chat.logprobs else None,
    )


@contextmanager
def entry(i: int) -> Iterator[None]:
    """Have what is wrong with one of `steering.vectors` name it."""
    place = f"steering.vectors[{i}]"
    try:
        yield
    except RequestError as error:
        if error.param is None or not error.param.startswith("steering.") or error.param.startswith("steering.vectors"):
            raise
        key = error.param.removeprefix("steering.")
        param = f"{place}.{'name' if key == 'vector' else key}"
        raise BadRequest(str(error).replace(f"'{error.param}'", f"'{param}'"), param, error.code) from error


def _steering(wire: Steering, serving: Serving, settings: Settings, images: int | None) -> tuple[Steer, ...]:
    if wire.toward == "auto":
        return ()  # see `automatic`
    if wire.vectors is None:
        steer = _short(wire, serving.store).toward(wire.toward)
        _check_strengths((steer,), ("steering.strength",), serving, settings.max_strength)
        return (steer,)
    if len(wire.vectors) > settings.max_vectors:
        raise BadRequest(f"'steering.vectors' may hold at most {settings.max_vectors} vectors.", "steering.vectors")
    steers = tuple(_named(item, i, serving.store) for i, item in enumerate(wire.vectors))
    for i, steer in enumerate(steers):
        with entry(i):
            check_steer(serving.mllm, steer, images)
    params = [f"steering.vectors[{i}].scale" for i in range(len(steers))]
    _check_strengths(steers, params, serving, settings.max_strength)
    return steers


def automatic(wire: Steering | None, serving: Serving, settings: Settings) -> Auto | None:
    """Steering whose way the engine is to find; None where it is stated, or nothing is to be steered."""
    if wire is None or wire.toward != "auto":
        return None
    auto = _short(wire, serving.store)
    _check_strengths((auto.toward("vision"),), ("steering.strength",), serving, settings.max_strength)
    return auto


def _short(wire: Steering, store: VectorStore) -> Auto:
    """The short form, whatever its way."""
    layers = None if wire.layers is None else tuple(wire.layers)
    how = wire.auto or WireAuto()
    return Auto(
        _vector(store, wire.vector, "steering.vector"),
        wire.strength,
        layers,
        wire.apply.tokens,
        Criterion(how.criterion, how.bound, how.one_degraded),
    )


def _named(item: NamedVector, i: int, store: VectorStore) -> Steer:
    vector = _vector(store, item.name, f"steering.vectors[{i}].name")
    with entry(i):
        return Steer(vector, item.scale, None if item.layers is None else tuple(item.layers), item.apply.tokens)


def _vector(store: VectorStore, name: str, param: str) -> SteeringVector:
    try:
        return store.get(name)
    except VectorError as error:
        raise BadRequest(str(error), param, error.code) from error


def _check_strengths(steers: Sequence[Steer], params: Sequence[str], serving: Serving, limit: float) -> None:
    """Hold steering to the limit, which is in published units, whatever a vector says about itself.

    A vector's strength times its `published` (1 where it has none) is bounded first, as a vector and at each layer: naming
    it several times must not get past it. What all vectors really add at a layer, measured in the model's own magnitudes, is
    bounded too, with some slack: neither does scaling a vector up, or telling less of it than it is.
    """
    nominal: defaultdict[tuple[str, int], float] = defaultdict(float)
    added = torch.zeros(serving.mllm.num_layers)
    for steer, param in zip(steers, params, strict=True):
        vector, size = steer.vector, abs(steer.scale)
        unit = vector.published or 1.0
        if size * unit > limit * (1 + 1e-9):
            raise _exceeded(
                f"'{param}' must be at most {limit / unit:g} in size for {vector.name!r}, whose strength 1 is {unit:g} in "
                f"published units (at most {limit:g}); got {size:g}.",
                param,
            )
        check_steer(serving.mllm, steer)
        index = list(steer.touched_layers)
        added[index] += size * vector.sizes(serving.magnitudes)[index]
        for layer in index:
            nominal[vector.name, layer] += size * unit
            if nominal[vector.name, layer] > limit * (1 + 1e-9):
                raise _exceeded(
                    f"'steering.vectors': the scales of {vector.name!r} at layer {layer} must be at most {limit / unit:g} "
                    f"together, which is {limit:g} in published units.",
                    "steering.vectors",
                )
    if float(added.max()) > SLACK * limit:
        layer = int(added.argmax())
        raise _exceeded(
            f"'steering' would add {float(added[layer]):.3g} times the mean magnitude of the model's states at layer "
            f"{layer}; at most {SLACK * limit:g} is allowed, whatever a vector says its strength is.",
            params[0] if len(params) == 1 else "steering.vectors",
        )


def _exceeded(message: str, param: str) -> BadRequest:
    return BadRequest(message, param, "steering_strength_exceeded")


def _sage(wire: WireSage) -> Sage | None:
    see = None if wire.see is None else See(**wire.see.model_dump())
    think = None if wire.think is None else Think(**wire.think.model_dump())
    generate = None if wire.generate is None else Generate(**wire.generate.model_dump())
    return Sage(see, think, generate) if see or think or generate else None


def _contrast(wire: WireVcd | WireIcd | WirePai) -> Asked:
    settings = wire.model_dump(exclude={"kind"})
    return {"vcd": Vcd, "icd": Icd, "pai": Pai}[wire.kind](**settings)


def _diagnose(wire: Diagnostics, earlier: Earlier | None) -> Diagnose:
    include = frozenset(cheap() if wire.include is None else wire.include)
    if wire.compare_to is not None:
        include |= {"drift"}
    layers = tuple(wire.layers) if isinstance(wire.layers, list) else None
    last = wire.layers["last"] if isinstance(wire.layers, dict) else None
    return Diagnose(
        include,
        layers,
        last,
        wire.heatmaps,
        wire.causal,
        wire.discount_sinks,
        wire.target_image,
        wire.spans,
        wire.residual_rows,
        wire.drift_rows,
        earlier,
    )


def _message(message: Message, param: str, images: ImageLoader) -> dict[str, Any]:
    if isinstance(message.content, str):
        return {"role": message.role, "content": message.content}
    parts: list[dict[str, Any]] = []
    for i, part in enumerate(message.content):
        if part.type == "image":
            assert part.image is not None
            where = f"{param}.content[{i}].image_url"
            parts.append({"type": "image", "image": images.load(part.image, where)})
        else:
            span = {"span": part.span} if part.span else {}
            parts.append({"type": "text", "text": part.text, **span})
    return {"role": message.role, "content": parts}
