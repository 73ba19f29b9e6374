"""Rules for `info`, a steering vector's metadata: the type and range of every key that has a meaning here.

Other keys pass. Lists over HTTP, the playground, reports and evaluations rely on the known ones.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable
from typing import Any

NAME = re.compile(r"[a-z0-9][a-z0-9._-]{0,63}")
"""The pattern of a vector's name."""
GATE_KEYS = ("layer", "threshold", "measure", "bias")
"""The keys of a vector's `info["gate"]` that decide when a condition on it holds."""
FEATURE = re.compile(rf"sae:({NAME.pattern})/(0|[1-9][0-9]{{0,8}})")
"""The pattern of the name of a sparse dictionary's feature, `sae:DICTIONARY/FEATURE`, which no file has."""
MAX_TERMS = 1024
"""The maximum number of vectors that one vector may be composed of."""

Rule = Callable[[Any, str], None]
"""A function of a value and its place that raises ValueError, naming the place, where the value is not allowed."""


def check_layers(layers: object, count: int) -> None:
    """Raise ValueError unless `layers` are layers of a model that has `count`: at least one, each once."""
    rule = _list(_integer(0, count - 1), least=1)
    rule(layers, "layers")
    assert isinstance(layers, list | tuple)
    if len(set(layers)) != len(layers):
        raise ValueError("layers must not name a layer twice")


def check_info(info: object, count: int) -> None:
    """Raise ValueError unless the known keys hold valid values for a model of `count` layers."""
    number, share, layer = _number(), _number(0, 1), _integer(0, count - 1)
    shares = _keys(
        n=_integer(0), s_vision=share, s_text=share, s_others=share, vision_ratio=_or_none(share),
        toward=share, away=share, others=share, vision_ratio_95=_list(share, least=2, most=2),
    )  # fmt: skip
    accuracies = {"image_accuracy": _or_none(share), "context_accuracy": _or_none(share)}
    point = _keys(
        layer=layer, dose=_number(0), strength=_number(0), vision=shares, text=shares, kl=_or_none(number),
        toward=shares, away=shares, cross_fall=_or_none(_number(-1, 1)), repetition=_or_none(share), **accuracies,
    )  # fmt: skip
    calibration = _keys(
        ("range",), range=_range, layer=layer, published_weight=number, factor=_number(0), default_strength=_number(0),
        samples=_integer(1), targets_reached=_yes_no, within_budget=_yes_no, budget=_table(_number(0)),
        baseline=_keys(plain=shares, repetition=share, **accuracies), chosen=point, curve=_list(point),
        others_tried=_list(point),
    )  # fmt: skip
    by_layer = _list(number, least=count, most=count)
    instructed = _keys(
        toward_vision=_or_none(share), toward_text=_or_none(share), difference=_or_none(_number(-1, 1)),
        difference_95=_list(_or_none(_number(-1, 1)), least=2, most=2), n=_integer(0),
    )  # fmt: skip
    rates = _list(_or_none(share), least=3, most=3)
    gate = _keys(
        ("layer", "threshold"), layer=layer, threshold=number, measure=_measure, auroc=_or_none(rates), bias=by_layer,
        open_when=rates, open_not=rates, examples=_list(_integer(0), least=2, most=2),
    )  # fmt: skip
    rule = _keys(
        gate=gate, samples=_integer(1), seed=_integer(), orders=_text, tasks=_list(_text), data_sha256=_text, std=_text,
        published=_number(0),
        recipe=_keys(wording=_text, position=_integer(-math.inf, -1), size=_text, states=_text),
        magnitudes=_keys(states=_table(by_layer), direction=_table(by_layer), l2=_table(by_layer)),
        agreement_across=_keys(own=_text, n=_integer(1), cosines=_table(by_layer)),
        agreement=by_layer, score=by_layer, ranking=_list(layer, most=count), reliable=_yes_no, versions=_table(_text),
        positive=_modality, sides=_list(_text, least=2, most=2),
        instructed=instructed, doubts=_list(_text), warnings=_list(_text), made_from=_list(_text),
        calibration=_or_none(calibration),
        composed_of=_list(_keys(("name", "scale"), name=_name, scale=number), least=1, most=MAX_TERMS),
        imported_from=_keys(format=_text, model_hint=_or_none(_text)),
    )  # fmt: skip
    rule(info, "info")


def _is_number(value: object) -> bool:
    """Return whether a float64 holds the value; True, False, NaN and infinity are no numbers."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def _is(allowed: Callable[[Any], bool], must: str) -> Rule:
    def rule(value: Any, place: str) -> None:
        if not allowed(value):
            raise ValueError(f"{place} must be {must}")

    return rule


def _bounds(least: float, most: float) -> str:
    if most == math.inf:
        return "" if least == -math.inf else f" of at least {least:g}"
    return f" from {least:g} to {most:g}"


def _number(least: float = -math.inf, most: float = math.inf) -> Rule:
    return _is(lambda x: _is_number(x) and least <= x <= most, f"a finite number{_bounds(least, most)}")


def _integer(least: float = -math.inf, most: float = math.inf) -> Rule:
    must = f"a whole number{_bounds(least, most)}"
    return _is(lambda x: _is_number(x) and isinstance(x, int) and least <= x <= most, must)


_text = _is(lambda x: isinstance(x, str), "a string")
_name = _is(lambda x: isinstance(x, str) and NAME.fullmatch(x) is not None, f"a name that matches {NAME.pattern}")
_yes_no = _is(lambda x: isinstance(x, bool), "true or false")
_measure = _is(lambda x: x in ("cosine", "projection", "probe"), "cosine, projection or probe")
_modality = _is(lambda x: x in ("text", "vision"), "text or vision")
_range = _is(
    lambda x: isinstance(x, list | tuple) and len(x) == 2 and all(map(_is_number, x)) and 0 <= x[0] <= x[1],
    "two strengths, the least and the greatest, of at least 0",
)


def _or_none(inner: Rule) -> Rule:
    return lambda value, place: None if value is None else inner(value, place)


def _list(item: Rule, least: int = 0, most: float = math.inf) -> Rule:
    def rule(value: Any, place: str) -> None:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{place} must be a list")
        if not least <= len(value) <= most:
            raise ValueError(f"{place} must have a length{_bounds(least, most)}")
        for i, element in enumerate(value):
            item(element, f"{place}[{i}]")

    return rule


def _keys(needed: tuple[str, ...] = (), /, **rules: Rule) -> Rule:
    """Return the rule of an object whose known keys keep their own rules; only `needed` ones must be there."""

    def rule(value: Any, place: str) -> None:
        if not isinstance(value, dict):
            raise ValueError(f"{place} must be an object")
        for key, inner in rules.items():
            if key in value:
                inner(value[key], f"{place}.{key}")
            elif key in needed:
                raise ValueError(f"{place}.{key} is missing")

    return rule


def _table(inner: Rule) -> Rule:
    """Return the rule of an object whose keys are free."""

    def rule(value: Any, place: str) -> None:
        if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
            raise ValueError(f"{place} must be an object")
        for element in value.values():
            inner(element, f"each value of {place}")

    return rule
