"""Resolving steering: names become vectors, and their strengths are held to the limit."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch

from server.engine.runtime import Serving
from server.errors import BadRequest
from server.settings import Settings
from server.vectors.names import lookup
from server.wire.steering import AutoForm, GateForm, GatesForm, GroupsForm, NamedVector, SteeringForm
from steering import (
    Auto,
    Criterion,
    Gate,
    Gated,
    GateTerm,
    Inapplicable,
    InterventionSpec,
    RequestError,
    Steer,
    Steering,
    VectorStore,
)
from steering.vectors.sparse import feature_of

SLACK = 1.5
"""Largest allowed ratio of what vectors actually add to the limit.

Magnitudes differ between prompts, and a vector with a truthful description reaches the limit on its strength first.
"""


@contextmanager
def named(place: str, other: str) -> Iterator[None]:
    """Rewrite errors in the block that name a field of `other` to name that of a place."""
    try:
        yield
    except RequestError as error:
        param = error.param or ""
        if place == other or not param.startswith(f"{other}."):
            raise
        renamed = param.replace(other, place, 1)
        raise type(error)(str(error).replace(f"'{param}'", f"'{renamed}'"), param=renamed, code=error.code) from error


@contextmanager
def entry(i: int) -> Iterator[None]:
    """Rewrite errors in the block to name entry `i` of `steering.vectors`."""
    place = f"steering.vectors[{i}]"
    try:
        yield
    except RequestError as error:
        if error.param is None or not error.param.startswith("steering.") or error.param.startswith("steering.vectors"):
            raise
        key = error.param.removeprefix("steering.")
        param = f"{place}.{'name' if key == 'vector' else key}"
        raise type(error)(str(error).replace(f"'{error.param}'", f"'{param}'"), param=param, code=error.code) from error


def steering_of(
    wire: SteeringForm, serving: Serving, settings: Settings, images: int | None, lenient: bool = False
) -> InterventionSpec | None:
    """Return the steering of a request behind its gate, None if nothing is steered; see `ungated`."""
    steering = ungated(wire, serving, settings, images, lenient)
    if wire.when is None or not isinstance(steering, Steering | Auto):
        return steering
    term = _condition(wire.when, "steering.when", serving.store)
    return Gated(steering, term if isinstance(term, Gate) else Gate((term,)))


def _condition(form: GateForm | GatesForm | GroupsForm, place: str, store: VectorStore) -> GateTerm | Gate:
    """Return a condition, or a group of them, which stands at a place of the request."""
    if isinstance(form, GateForm):
        with named(place, "steering.when"):
            return _term(form, "steering.when", store)
    word = "any" if form.all is None else "all"
    terms = [_condition(inner, f"{place}.{word}[{number}]", store) for number, inner in enumerate(form.terms)]
    return Gate(tuple(terms), word == "all")


def _term(form: GateForm, place: str, store: VectorStore) -> GateTerm:
    """Return a condition; what it leaves open comes from the calibration of its vector as a condition."""
    vector = lookup(form.vector, f"{place}.vector", store)
    feature = feature_of(vector.name)
    dictionary = None if feature is None else store.dictionary(feature[0])
    measured = {"measure": "cosine"} if dictionary is None else {"measure": "feature", "threshold": 0.0}
    defaults = {"layer": vector.layers[0], **measured, **vector.info.get("gate", {})}
    layer = defaults["layer"] if form.layer is None else form.layer
    measure = form.measure or defaults["measure"]
    bound = form.below if form.below is not None else form.above
    if bound is None:
        if "threshold" not in defaults:
            raise Inapplicable(
                f"'{place}.above' is required: {vector.name!r} was not calibrated as a condition. `helmsight vectors build "
                "--gate` builds one that is.",
                param=f"{place}.above",
            )
        if (layer, measure) != (defaults["layer"], defaults["measure"]):
            raise Inapplicable(
                f"'{place}.above' is required: {vector.name!r} was calibrated as a condition at layer {defaults['layer']} "
                f"by {defaults['measure']}.",
                param=f"{place}.above",
            )
        bound = defaults["threshold"]
    return GateTerm(vector, layer, bound, measure, form.below is not None, dictionary)


def ungated(
    wire: SteeringForm, serving: Serving, settings: Settings, images: int | None, lenient: bool = False
) -> InterventionSpec | None:
    """Return the steering of a request, None if nothing is steered.

    `images` is the number of images, None if unknown. With `lenient`, as for a preset's steering, a preference
    between modalities requires an image.
    """
    if wire.toward == "auto":
        auto = _short(wire, serving.store)
        _check_strengths((auto.stated("vision"),), ("steering.strength",), serving, settings.max_strength)
        return auto
    if wire.vectors is None:
        steer = _short(wire, serving.store).stated(wire.toward, until=wire.following)
        if steer.until is not None:  # the greatest strength that it may reach counts
            most = replace(steer, scale=math.copysign(steer.span[1], steer.unit_scale), until=None)
            param = "steering.strength" if steer.until.range is None else "steering.control.range"
            _check_strengths((most,), (param,), serving, settings.max_strength)
        _check_strengths((steer,), ("steering.strength",), serving, settings.max_strength)
        if lenient and images == 0 and steer.vector.positive is not None:
            raise Inapplicable(
                f"'steering.toward': '{wire.toward}' prefers one modality, but the request holds no image.",
                param="steering.toward",
            )
        return Steering((steer,))
    if len(wire.vectors) > settings.max_vectors:
        raise BadRequest(f"'steering.vectors' may hold at most {settings.max_vectors} vectors.", "steering.vectors")
    steers = tuple(_named(item, i, serving.store) for i, item in enumerate(wire.vectors))
    for i, steer in enumerate(steers):
        with entry(i):
            serving.engine.check_steer(steer, images)
    params = [f"steering.vectors[{i}].scale" for i in range(len(steers))]
    _check_strengths(steers, params, serving, settings.max_strength)
    return Steering(steers) if steers else None


def _short(wire: SteeringForm, store: VectorStore) -> Auto:
    """Return the short form of steering as an `Auto`, in whichever direction it points."""
    layers = None if wire.layers is None else tuple(wire.layers)
    how = wire.auto or AutoForm()
    return Auto(
        lookup(wire.vector, "steering.vector", store),
        wire.strength,
        layers,
        wire.apply.tokens,
        Criterion(how.criterion, how.bound, how.one_degraded),
    )


def _named(item: NamedVector, i: int, store: VectorStore) -> Steer:
    vector = lookup(item.name, f"steering.vectors[{i}].name", store)
    with entry(i):
        return Steer(vector, item.scale, None if item.layers is None else tuple(item.layers), item.apply.tokens)


def _check_strengths(steers: Sequence[Steer], params: Sequence[str], serving: Serving, limit: float) -> None:
    """Hold steering to the limit, which is in published units, whatever a vector says about itself.

    A vector's strength times its `published` (1 if it has none) is bounded first, for each vector and in total at each
    layer, so that naming a vector several times does not bypass the limit. The sum that all vectors actually add at a layer,
    measured in the model's own magnitudes, is bounded too, with some slack, so that scaling a vector up or understating it
    does not bypass the limit either.
    """
    nominal: defaultdict[tuple[str, int], float] = defaultdict(float)
    added = torch.zeros(serving.capabilities.layers)
    for steer, param in zip(steers, params, strict=True):
        vector, size = steer.vector, abs(steer.scale)
        unit = vector.published or 1.0
        if size * unit > limit * (1 + 1e-9):
            raise _exceeded(
                f"'{param}' must be at most {limit / unit:g} in size for {vector.name!r}, whose strength 1 is {unit:g} in "
                f"published units (at most {limit:g}); got {size:g}.",
                param,
            )
        serving.engine.check_steer(steer)
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
