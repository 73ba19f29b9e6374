"""From a wire request to the engine's: names become vectors, URLs pictures, absent values the checkpoint's defaults."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from server.errors import BadRequest
from server.images import ImageLoader
from server.settings import Settings
from server.wire import Auto as WireAuto
from server.wire import ChatRequest, Diagnostics, Message, NamedVector, Steering
from server.wire import Icd as WireIcd
from server.wire import Pai as WirePai
from server.wire import Sage as WireSage
from server.wire import Vcd as WireVcd
from steering import (
    CHEAP,
    MLLM,
    Auto,
    Contrast,
    Criterion,
    Diagnose,
    Generate,
    Icd,
    Pai,
    Request,
    Sage,
    Sampling,
    See,
    Steer,
    SteeringVector,
    Think,
    Vcd,
    VectorError,
    VectorStore,
)


def resolve(chat: ChatRequest, mllm: MLLM, store: VectorStore, settings: Settings, images: ImageLoader) -> Request:
    """The engine's request; raises RequestError or BadRequest naming the field. Pictures are loaded last, because all
    else is cheap."""
    n = 1 if chat.n is None else chat.n
    if not 1 <= n <= settings.max_choices:
        raise BadRequest(f"'n' must be at least 1 and at most {settings.max_choices}; got {n}.", "n")
    sampling = _sampling(chat, mllm.generation_defaults)
    steers = _steering(chat.steering, store, settings) if chat.steering else ()
    diagnose = _diagnose(chat.diagnostics) if chat.diagnostics else None
    messages = [_message(message, f"messages[{i}]", images) for i, message in enumerate(chat.messages)]
    sage = _sage(chat.sage) if chat.sage else None
    contrast = _contrast(chat.contrast) if chat.contrast else None
    return Request(messages, sampling, steers, sage, contrast, diagnose, n=n, baseline=bool(chat.baseline))


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


def _steering(wire: Steering, store: VectorStore, settings: Settings) -> tuple[Steer, ...]:
    if wire.toward == "auto":
        return ()  # see `automatic`
    if wire.vectors is None:
        layers = None if wire.layers is None else tuple(wire.layers)
        _check_strength(wire.strength, settings.max_strength, "steering.strength")
        vector = _vector(store, wire.vector, "steering.vector")
        return (Steer.to(vector, wire.toward, wire.strength, layers=layers, tokens=wire.apply.tokens),)
    if len(wire.vectors) > settings.max_vectors:
        raise BadRequest(f"'steering.vectors' may hold at most {settings.max_vectors} vectors.", "steering.vectors")
    steers = tuple(_named(item, f"steering.vectors[{i}]", store, settings) for i, item in enumerate(wire.vectors))
    _check_sums(steers, settings.max_strength)
    return steers


def automatic(wire: Steering | None, store: VectorStore, settings: Settings) -> Auto | None:
    """Steering whose way the engine is to find; None where it is stated, or nothing is to be steered."""
    if wire is None or wire.toward != "auto":
        return None
    _check_strength(wire.strength, settings.max_strength, "steering.strength")
    layers = None if wire.layers is None else tuple(wire.layers)
    how = wire.auto or WireAuto()
    return Auto(
        _vector(store, wire.vector, "steering.vector"),
        wire.strength,
        layers,
        wire.apply.tokens,
        Criterion(how.criterion, how.bound, how.one_degraded),
    )


def _named(item: NamedVector, param: str, store: VectorStore, settings: Settings) -> Steer:
    _check_strength(item.scale, settings.max_strength, f"{param}.scale")
    vector = _vector(store, item.name, f"{param}.name")
    return Steer(vector, item.scale, None if item.layers is None else tuple(item.layers), item.apply.tokens)


def _vector(store: VectorStore, name: str, param: str) -> SteeringVector:
    try:
        return store.get(name)
    except VectorError as error:
        raise BadRequest(str(error), param, error.code) from error


def _check_strength(scale: float, limit: float, param: str) -> None:
    if abs(scale) > limit:
        raise BadRequest(
            f"'{param}' must be at most {limit:g} in size; got {scale:g}.", param, "steering_strength_exceeded"
        )


def _check_sums(steers: tuple[Steer, ...], limit: float) -> None:
    """The limit holds per vector and layer: naming a vector several times must not get past it."""
    total: defaultdict[tuple[str, int], float] = defaultdict(float)
    for steer in steers:
        for layer in set(steer.vector.layers if steer.layers is None else steer.layers):
            total[steer.vector.name, layer] += abs(steer.scale)
            if total[steer.vector.name, layer] > limit:
                raise BadRequest(
                    f"'steering.vectors': the scales of {steer.vector.name!r} at layer {layer} must be at most "
                    f"{limit:g} together.",
                    "steering.vectors",
                    "steering_strength_exceeded",
                )


def _sage(wire: WireSage) -> Sage | None:
    see = None if wire.see is None else See(**wire.see.model_dump())
    think = None if wire.think is None else Think(**wire.think.model_dump())
    generate = None if wire.generate is None else Generate(**wire.generate.model_dump())
    return Sage(see, think, generate) if see or think or generate else None


def _contrast(wire: WireVcd | WireIcd | WirePai) -> Contrast:
    settings = wire.model_dump(exclude={"kind"})
    return {"vcd": Vcd, "icd": Icd, "pai": Pai}[wire.kind](**settings)


def _diagnose(wire: Diagnostics) -> Diagnose:
    include = frozenset(CHEAP if wire.include is None else wire.include)
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
