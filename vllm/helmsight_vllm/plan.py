"""The plan of an answer: what is done and read inside the model. It travels to every worker in `extra_args`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from helmsight_vllm.vectors import load_vector

KEY = "helmsight"
"""The plan's key in `SamplingParams.extra_args`.

Its value is a mapping, which `vllm_xargs` cannot be: clients of vLLM's own routes for chats and completions cannot write a
plan, whose keys in the prefix cache would lack their salt.
"""
NONE = -1
"""The label of tokens whose attention is in no sum."""
Ints = npt.NDArray[np.int64]


def expanded(runs: Sequence[Sequence[int]]) -> Ints:
    """Return the values of runs [value, count]."""
    values = np.array([run[0] for run in runs], np.int64)
    return np.repeat(values, [run[1] for run in runs])


def plan_in(extra: Mapping[str, Any] | None) -> Mapping[str, Any] | None:
    """Return the plan in a request's `extra_args` as it travels; None where there is none."""
    data = (extra or {}).get(KEY)
    return data if isinstance(data, Mapping) else None


def plan_of(request: Any) -> Mapping[str, Any] | None:
    """Return the plan of a request, as vLLM's scheduler or runner holds it; None without one."""
    params = request.sampling_params
    return None if params is None else plan_in(params.extra_args)


def name_of(request: Any) -> str | None:
    """Return the name by which the answer to a request fails, that of its pair if it has one; None without a plan."""
    plan = plan_of(request)
    return None if plan is None else str(plan.get("pair") or plan.get("number"))


@dataclass(frozen=True)
class Attention:
    """The attention that is summed: the label of each prompt token, groups of its rows, and every generated row alone.

    rows: by group, ranges [from, to) of the prompt's columns.
    """

    labels: Ints
    rows: Mapping[str, Sequence[Sequence[int]]]
    steps: bool

    @property
    def count(self) -> int:
        return int(self.labels.max(initial=NONE)) + 1


@dataclass(frozen=True)
class Plan:
    """The plan of one answer.

    number: identifies it among the workers. length: tokens of its prompt, image tokens included; forced ones follow.
    classes: (length,), the steering class of each. additions: by class, and last for generated tokens, the vectors that are
    added, as JSON; "" for none. steered: the number of classes, None without steering. think: Think's gamma and thresholds.
    pair, leads: the two answers of a contrast share `pair`; the one that leads is contrasted by `rule`. mask: Generate's
    settings. offset: tokens of the answer that are in a twin's prompt.
    """

    number: str
    length: int
    classes: Ints
    additions: Sequence[str]
    steered: int | None = None
    attention: Attention | None = None
    state_position: int | None = None
    residual: bool = False
    think: Mapping[str, Any] | None = None
    pair: str | None = None
    leads: bool = True
    rule: Mapping[str, Any] | None = None
    mask: Mapping[str, Any] | None = None
    offset: int = 0

    @classmethod
    def of(cls, extra: Mapping[str, Any] | None) -> Plan | None:
        """Return the plan in a request's `extra_args`; None where there is none."""
        data = plan_in(extra)
        if data is None:
            return None
        attention, steering = data.get("attention"), data.get("steering")
        return cls(
            data["number"],
            data["length"],
            expanded(data["classes"]) if data["classes"] else np.zeros(data["length"], np.int64),
            additions_of(steering),
            None if steering is None else steering["classes"],
            None
            if attention is None
            else Attention(expanded(attention["labels"]), attention["rows"], attention["steps"]),
            data.get("state_position"),
            "residual" in data,
            data.get("think"),
            data.get("pair"),
            data.get("leads", True),
            data.get("rule"),
            data.get("mask"),
            data.get("offset", 0),
        )

    @property
    def name(self) -> str:
        """The name by which it fails, which both sides of a pair share, as `name_of` reads it."""
        return str(self.pair or self.number)

    @property
    def reads(self) -> bool:
        """True where something is measured."""
        states = self.state_position is not None or self.residual
        return states or self.attention is not None or self.steered is not None or self.think is not None


def additions_of(steering: Mapping[str, Any] | None) -> list[str]:
    """Return what is added to tokens of each class, and last to generated ones, as JSON; "" for nothing.

    Equal texts are equal additions, so that answers with the same preset share their rows of the table.
    """
    if steering is None:
        return ["", ""]

    def written(chosen: Sequence[Mapping[str, Any]]) -> str:
        terms = [[vector["name"], vector["digest"], vector["scale"], vector["layers"]] for vector in chosen]
        return json.dumps(terms) if terms else ""

    vectors = steering["vectors"]
    by_class = [[vector for vector in vectors if number in vector["classes"]] for number in range(steering["classes"])]
    return [*map(written, by_class), written([vector for vector in vectors if vector["generated"]])]


def addition(terms: str, layers: int, width: int) -> torch.Tensor:
    """Return what is added to the residual stream after each layer, (layers, d)."""
    out = torch.zeros(layers, width)
    for name, digest, scale, chosen in json.loads(terms):
        vector = load_vector(name, digest)
        index = torch.tensor(chosen)
        out[index] += scale * vector.weight[index, None] * vector.direction[index]
    return out
