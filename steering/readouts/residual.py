"""The readouts of what attention and FFN do to the residual stream, and of the stream, for those who build vectors."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, PlainValidator
from safetensors.torch import save

from steering.measures import known, mean
from steering.model.mllm import MLLM
from steering.prompt.layout import Layout
from steering.protocol.intervention_spec import check_layers
from steering.protocol.readout import Diagnose, FinishedAnswer, Quantity, Readout, ReadoutOption, Scalar
from steering.protocol.signals import Signal
from steering.protocol.wording import is_whole, must, unknown, whole_numbers
from steering.recorders.activations import NAME as ACTIVATIONS
from steering.recorders.activations import Activations, StateChoice
from steering.recorders.residual import NAME, NAMES, Residual

RESIDUAL_ROWS = ("answer", "prompt", "generated")
"""The rows that are read.

They are the rows that generate the answer's tokens, that is the prompt's last one and those of all generated tokens that are
fed; all of the prompt's, as in the authors' `analysis/analyze_layer_changes.py`; or those of generated tokens alone.
"""
ROWS = ReadoutOption.word("residual_rows", RESIDUAL_ROWS, "The rows that the residual readout averages.")


OF_STATES = "diagnostics.states"


class StatesForm(BaseModel):
    """The states that are returned."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")

    layers: Literal["all"] | list[int] = "all"
    """The layers, numbered from 0."""
    positions: Literal["last", "generated"] | tuple[int, int] = "last"
    """The prompt's last token, the generated tokens, or those from the first number up to, not including, the second."""


def _choice(value: Any) -> StateChoice:
    """Return a request's value as a choice; raise RequestError, naming the field, for a wrong one."""
    if isinstance(value, StateChoice):
        return value
    if not isinstance(value, Mapping):
        raise must(OF_STATES, "be an object", value)
    if strange := sorted(map(str, value.keys() - StatesForm.model_fields.keys())):
        raise unknown(f"{OF_STATES}.{strange[0][:64]}", ", ".join(StatesForm.model_fields))
    layers, positions = value.get("layers", "all"), value.get("positions", "last")
    if layers != "all":
        layers = whole_numbers(f"{OF_STATES}.layers", layers)
    if positions not in ("last", "generated"):
        if not isinstance(positions, list | tuple) or len(positions) != 2 or not all(map(is_whole, positions)):
            raise must(f"{OF_STATES}.positions", 'be "last", "generated" or [from, to]', positions)
        first, end = map(int, positions)
        if not 0 <= first < end:
            raise must(f"{OF_STATES}.positions", "be [from, to] with 0 <= from < to", positions)
        positions = first, end
    return StateChoice(None if layers == "all" else layers, positions)


def _fits(value: StateChoice, mllm: MLLM, layout: Layout) -> None:
    check_layers(value.layers, mllm.num_layers, f"{OF_STATES}.layers")


def _written(options: Diagnose) -> dict[str, Any]:
    choice = options[STATES]
    positions = choice.positions if isinstance(choice.positions, str) else list(choice.positions)
    return {"layers": "all" if choice.layers is None else list(choice.layers), "positions": positions}


STATES = ReadoutOption(
    "states",
    Annotated[Any, PlainValidator(lambda value: value, json_schema_input_type=StatesForm)],
    StateChoice(),
    "The layers and positions of the hidden states.",
    _choice,
    _fits,
    write=_written,
    unset={"layers": "all", "positions": "last"},
)


class ResidualReadout(Readout):
    """Means over the requested rows, by layer, and the share of active neurons."""

    name = NAME
    options = (ROWS,)
    scalars: ClassVar[dict[str, type]] = {"kl": float}
    quantities: ClassVar[dict[str, Quantity]] = {
        "kl": Quantity(
            "Divergence of the updates of attention and FFN, mean over layers",
            unit="nats", low=0.0, buckets=(0.01, 0.03, 0.1, 0.3, 1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 70, 100, 200, 500, 1000),
        ),
    }  # fmt: skip

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.UPDATES})

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        taken: Residual = answer.taken[NAME]
        kind = answer.options[ROWS]
        rows = {"answer": answer.fed + 1, "prompt": len(answer.layout.spans), "generated": answer.fed}[kind]
        return residual(taken.sums, rows, taken.neurons if answer.fed else taken.neurons * math.nan, kind)

    def summary(self, said: Any) -> dict[str, Scalar]:
        return {"kl": mean(said["kl"])}


def residual(sums: torch.Tensor, rows: int, neurons: torch.Tensor, kind: str) -> dict[str, Any]:
    """Return the `residual` readout: means over `rows` rows of a kind, by layer.

    sums: (layers, readouts). neurons: (layers,).
    """
    means = dict(zip(NAMES, (sums / rows if rows else sums * math.nan).T, strict=True))
    return {
        "rows": {"kind": kind, "count": rows},
        **{name: known(values) for name, values in {**means, "neuron_ratio": neurons}.items()},
    }


class StatesReadout(Readout):
    """The residual stream after each chosen layer, interventions included, as a safetensors file in base64.

    The file has one tensor, "states" (layers, positions, d), in the model's dtype. vLLM and transformers count alike: layer
    i here is `hidden_states[i + 1]`, except that theirs of the last layer is normalised.
    """

    name = "states"
    options = (STATES,)

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.ACTIVATIONS})

    def size(self, options: Diagnose, mllm: MLLM, prompt: int, tokens: int) -> int:
        choice: StateChoice = options[STATES]
        first, end = choice.columns(prompt)
        positions = max(min(end, prompt + tokens) - first, 0)
        return len(choice.layers_of(mllm.num_layers)) * positions * mllm.hidden_size * mllm.dtype.itemsize

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        taken: Activations = answer.taken[ACTIVATIONS]
        layers = list(answer.options[STATES].layers_of(len(taken.states)))
        positions = [taken.first, taken.first + taken.states.shape[1]]
        about = {"layers": json.dumps(layers), "positions": json.dumps(positions)}
        return {
            "layers": layers,
            "positions": positions,
            "shape": list(taken.states.shape),
            "dtype": str(taken.states.dtype).removeprefix("torch."),
            "safetensors": base64.b64encode(save({"states": taken.states.contiguous()}, about)).decode(),
        }
