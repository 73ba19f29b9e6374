"""A worker's part of one answer: its rows of the table, and what was measured of it so far."""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np
import torch

from helmsight_vllm.arrays import array_of, sent
from helmsight_vllm.plan import NONE, Attention, Ints, Plan
from helmsight_vllm.table import AdditionTable

KEPT_STATES = 64
"""Latest states that are kept, as passes run behind an answer's end before that is known, the more where a text stops it."""


class Answer:
    """An answer from its first step on.

    `counted`: positions below were measured. A preempted answer is computed again from its beginning, and a held token once
    more; neither is measured twice. `failed`: the plugin has, and the answer is no longer steered nor read.
    """

    def __init__(self, plan: Plan, table: AdditionTable, layers: int, width: int, attending: int | None = None):
        self.plan = plan
        self.counted = 0
        self.fetched = self.failed = False
        self._table = table
        self._rows = np.array(table.take_all(plan.additions), np.int64)
        self._attending = layers if attending is None else attending
        self.steers = bool(self._rows.any())
        self.sums: dict[str, torch.Tensor] = {}
        self._decoded: list[tuple[int, torch.Tensor]] = []
        self._labels: torch.Tensor | None = None  # on the device where attention is summed
        self.inverse = torch.zeros(layers, plan.steered or 0)
        self._thought = torch.zeros(layers, 2)
        self._thoughts: dict[int, torch.Tensor] = {}  # by position of a generated token
        self.prompt_state: torch.Tensor | None = None
        self._stream_count, self._stream_sum = 0, torch.zeros(layers, width if plan.residual else 0)
        self._latest: deque[torch.Tensor] = deque(maxlen=KEPT_STATES if plan.residual else 0)
        self.changes: list[tuple[int, Any]] = []  # by number of tokens before: did the likeliest one change?
        self.masks: list[dict[str, Any]] = []
        self.image_columns = np.array(
            [column for image in (plan.mask or {}).get("images", ()) for column in image], np.int64
        )
        self.image_states: torch.Tensor | None = None  # (patches of all pictures, d), normalised, after the last layer
        if plan.attention is not None:
            self._members = {name: _member(ranges, plan.length) for name, ranges in plan.attention.rows.items()}
            shape = (self._attending, plan.attention.count)
            self.sums = {name: torch.zeros(shape) for name in (*self._members, "last")}
            self._looked = np.logical_or.reduce(
                [*self._members.values(), _member([(plan.length - 1, plan.length)], plan.length)]
            )

    @property
    def name(self) -> str:
        """The name by which it fails."""
        return self.plan.name

    def release(self) -> None:
        """Give the rows of the table back, and what is on a device."""
        self._labels = None
        for terms in self.plan.additions:
            self._table.release(terms)

    def rows_at(self, start: int, stop: int) -> Ints:
        """Return the rows of the table of the tokens at positions start to stop."""
        rows = np.full(stop - start, self._rows[-1])
        prompt = self.plan.classes[start:stop]
        rows[: len(prompt)] = self._rows[prompt]
        return rows

    def labels_at(self, start: int, stop: int) -> Ints:
        """Return the labels of the tokens at positions start to stop; none behind the prompt."""
        assert self.plan.attention is not None
        labels = np.full(stop - start, NONE)
        prompt = self.plan.attention.labels[start:stop]
        labels[: len(prompt)] = prompt
        return labels

    def labels_on(self, device: torch.device) -> torch.Tensor:
        """Return the labels of the prompt's tokens (length,) on a device, where they stay while the answer runs."""
        if self._labels is None:
            assert self.plan.attention is not None
            self._labels = sent(self.plan.attention.labels, device)
        return self._labels

    def looks_at(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the ranges of positions from start to stop whose attention is read; none where start is behind stop."""
        stop = max(start, stop)
        looked = np.ones(stop - start + 2, bool)
        looked[[0, -1]] = False
        prompt = self._looked[start:stop]
        looked[1 : 1 + len(prompt)] = prompt
        edges = np.flatnonzero(np.diff(looked))
        return [(start + int(begin), start + int(end)) for begin, end in edges.reshape(-1, 2)]

    def add_attention(self, start: int, stop: int, sums: torch.Tensor) -> None:
        """Count the sums (layers, rows, labels) of the rows at positions start to stop."""
        attention = self.plan.attention
        assert attention is not None
        sums = sums[..., : attention.count]
        length = self.plan.length
        in_prompt = max(min(stop, length) - start, 0)
        for name, member in self._members.items():
            chosen = torch.from_numpy(member[start : start + in_prompt])
            self.sums[name] += sums[:, :in_prompt][:, chosen].sum(1)
        if start < length <= stop:
            self.sums["last"] = sums[:, length - 1 - start].clone()
        self._decoded += [(at, sums[:, at - start].clone()) for at in range(max(start, length), stop)]

    def is_due(self, stop: int) -> bool:
        """Return True where the row before position `stop` asks for a mask that was not made."""
        mask, tokens = self.plan.mask, stop - self.plan.length
        if mask is None or tokens < 0 or any(made["token"] == tokens for made in self.masks):
            return False
        return tokens == 0 or (bool(mask["refresh"]) and tokens % mask["refresh"] == 0)

    def patches_at(self, start: int, stop: int) -> Ints:
        """Return which of the pictures' patches are at positions from start to stop; none once the only mask is made."""
        if self.plan.mask is None or (self.masks and not self.plan.mask["refresh"]):
            return np.zeros(0, np.int64)
        return np.flatnonzero((self.image_columns >= start) & (self.image_columns < stop))

    def add_image_states(self, patches: Ints, states: torch.Tensor) -> None:
        """Keep the states (k, d) of some patches."""
        if self.image_states is None:
            self.image_states = torch.zeros(len(self.image_columns), states.shape[1])
        self.image_states[torch.from_numpy(patches)] = states

    def add_mask(self, tokens: int, patches: list[list[int]]) -> None:
        """Note the mask that decides from this generated token on."""
        self.masks.append({"token": tokens, "patches": patches})
        if not (self.plan.mask or {})["refresh"]:
            self.image_states = None

    def add_thoughts(self, layer: int, start: int, measured: torch.Tensor) -> None:
        """Count what Think has measured (tokens, 2) in a layer of the tokens from a position on, unless that was before."""
        first = max(start, self.counted)
        fresh = measured[first - start :]
        in_prompt = max(0, min(len(fresh), self.plan.length - first))
        self._thought[layer] += fresh[:in_prompt].sum(0)
        for position, values in enumerate(fresh[in_prompt:], first + in_prompt):
            self._thoughts.setdefault(position, torch.zeros_like(self._thought))[layer] = values

    def add_states(self, position: int, states: torch.Tensor) -> None:
        """Count the states (layers, d) at a position."""
        plan = self.plan
        if plan.state_position is not None and position == plan.length + plan.state_position:
            self.prompt_state = states.clone()
        if plan.residual and position >= plan.length - 1:
            self._stream_count, self._stream_sum = self._stream_count + 1, self._stream_sum + states
            self._latest.append(states.clone())

    def taken(self, fed: int) -> dict[str, Any]:
        """Return the measurements of the answer, of which `fed` generated tokens count, as the contract has them."""
        plan, out = self.plan, dict[str, Any]()
        if plan.attention is not None:
            out["attention"] = {name: array_of(values) for name, values in self._sums(plan.attention, fed).items()}
        if self.prompt_state is not None:
            out["states"] = array_of(self.prompt_state)
        if plan.residual:
            out["residual"] = {"states": array_of(self._stream(fed))}
        if plan.steered is not None:
            out["steering"] = {"inverse": array_of(self.inverse)}
        if plan.think is not None:
            generated = [values for position, values in self._thoughts.items() if position < plan.length + fed]
            out["think"] = {"measured": array_of(torch.stack([self._thought, *generated]).sum(0))}
        if plan.rule is not None:
            changed = sum(bool(change) for tokens, change in self.changes if tokens <= fed)
            out["twin"] = {"changed": changed, "masks": [mask for mask in self.masks if mask["token"] <= fed]}
        return out

    def _stream(self, fed: int) -> torch.Tensor:
        """Return the mean and the last state of the rows that generated tokens, (2, layers, d).

        They are NaN where more rows than are kept came behind these.
        """
        surplus = self._stream_count - (fed + 1)
        if not 0 <= surplus < len(self._latest):
            return torch.full((2, *self._stream_sum.shape), torch.nan)
        total = self._stream_sum - sum(list(self._latest)[len(self._latest) - surplus :])
        return torch.stack([total / (fed + 1), self._latest[-1 - surplus]])

    def _sums(self, attention: Attention, fed: int) -> dict[str, torch.Tensor]:
        end = self.plan.length + fed
        rows = [sums for position, sums in self._decoded if position < end]
        steps = torch.stack(rows) if rows else torch.zeros(0, self._attending, attention.count)
        sums = {**self.sums, "generated": steps.sum(0)}
        return {**sums, "steps": steps} if attention.steps else sums


def _member(ranges: Any, length: int) -> np.ndarray[Any, np.dtype[np.bool_]]:
    """Return which of a prompt's columns are in these ranges."""
    member = np.zeros(length, bool)
    for first, end in ranges:
        member[first:end] = True
    return member
