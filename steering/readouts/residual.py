"""The readouts of what attention and FFN do to the residual stream, and of the stream, for those who build vectors."""

from __future__ import annotations

import base64
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BaseModel, ConfigDict, PlainValidator
from safetensors.torch import save

from steering.errors import RequestError
from steering.measures import mean, nan_to_none
from steering.model.mllm import MLLM
from steering.prompt.layout import Layout
from steering.protocol.intervention_spec import check_layers
from steering.protocol.readout import Diagnose, FinishedAnswer, Quantity, Readout, ReadoutOption, Scalar
from steering.protocol.signals import Positions, Signal, StateChoice
from steering.protocol.wording import is_whole, must, unknown, whole_numbers
from steering.recorders.activations import NAME as ACTIVATIONS
from steering.recorders.activations import Activations
from steering.recorders.residual import NAME, NAMES, Residual
from steering.vectors.sparse import SparseDictionary
from steering.vectors.store import VectorStore

RESIDUAL_ROWS = ("answer", "prompt", "generated")
"""The rows that are read.

They are the rows that generate the answer's tokens, that is the prompt's last one and those of all generated tokens that are
fed; all of the prompt's, as in the authors' `analysis/analyze_layer_changes.py`; or those of generated tokens alone.
"""
ROWS = ReadoutOption.word("residual_rows", RESIDUAL_ROWS, "The rows that the residual readout averages.")


OF_STATES, OF_FEATURES = "diagnostics.states", "diagnostics.features"
TOP, MOST_TOP = 10, 100
"""The number of features that the features readout reports, and its maximum."""
ENCODED, MOST_ENCODED = 64, 256
"""The number of positions that are encoded at once, and of all; a large dictionary takes a second for the latter."""


class StatesForm(BaseModel):
    """The states that are returned."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")

    layers: Literal["all"] | list[int] = "all"
    """The layers, numbered from 0."""
    positions: Positions = "last"
    """The prompt's last token, the generated tokens, or those from the first number up to, not including, the second."""


def _choice(value: Any) -> StateChoice:
    """Return a request's value as a choice; raise RequestError, naming the field, for a wrong one."""
    if isinstance(value, StateChoice):
        return value
    fields = _fields(value, StatesForm, OF_STATES)
    layers = fields.get("layers", "all")
    if layers != "all":
        layers = whole_numbers(f"{OF_STATES}.layers", layers)
    return StateChoice(None if layers == "all" else layers, _positions(fields, OF_STATES))


def _fields(value: Any, form: type[BaseModel], place: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise must(place, "be an object", value)
    if strange := sorted(map(str, value.keys() - form.model_fields.keys())):
        raise unknown(f"{place}.{strange[0][:64]}", ", ".join(form.model_fields))
    return value


def _positions(fields: Mapping[str, Any], place: str) -> Positions:
    positions = fields.get("positions", "last")
    if positions == "last":
        return "last"
    if positions == "generated":
        return "generated"
    if not isinstance(positions, list | tuple) or len(positions) != 2 or not all(map(is_whole, positions)):
        raise must(f"{place}.positions", 'be "last", "generated" or [from, to]', positions)
    first, end = map(int, positions)
    if not 0 <= first < end:
        raise must(f"{place}.positions", "be [from, to] with 0 <= from < to", positions)
    return first, end


def _positions_written(positions: Positions) -> str | list[int]:
    return positions if isinstance(positions, str) else list(positions)


def _fits(value: StateChoice, mllm: MLLM, layout: Layout) -> None:
    check_layers(value.layers, mllm.num_layers, f"{OF_STATES}.layers")


def _written(options: Diagnose) -> dict[str, Any]:
    choice = options[STATES]
    layers = "all" if choice.layers is None else list(choice.layers)
    return {"layers": layers, "positions": _positions_written(choice.positions)}


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


class FeaturesForm(BaseModel):
    """The features that are returned."""

    model_config = ConfigDict(use_attribute_docstrings=True, extra="forbid")

    dictionary: str | None = None
    """The sparse dictionary's name; null for the server's only one."""
    positions: Positions = "last"
    """The prompt's last token, the generated tokens, or those from the first number up to, not including, the second."""
    top: int = TOP
    """The number of features, those with the greatest mean activation first."""
    ids: list[int] | None = None
    """The features to return, in place of the top ones."""


@dataclass(frozen=True)
class FeatureChoice:
    """The features that a request wants of a dictionary; of one that is only named, before its name is looked up."""

    dictionary: SparseDictionary | str | None = None
    positions: Positions = "last"
    top: int = TOP
    ids: tuple[int, ...] | None = None

    @property
    def states(self) -> StateChoice | None:
        """The states that they are computed from; None without a dictionary."""
        if not isinstance(self.dictionary, SparseDictionary):
            return None
        return StateChoice((self.dictionary.layer,), self.positions, MOST_ENCODED)


def _feature_choice(value: Any) -> FeatureChoice:
    """Return a request's value as a choice; raise RequestError, naming the field, for a wrong one."""
    if isinstance(value, FeatureChoice):
        return value
    fields = _fields(value, FeaturesForm, OF_FEATURES)
    dictionary, top, ids = fields.get("dictionary"), fields.get("top", TOP), fields.get("ids")
    if not isinstance(dictionary, SparseDictionary | str | None):
        raise must(f"{OF_FEATURES}.dictionary", "be a string", dictionary)
    if not is_whole(top) or not 1 <= top <= MOST_TOP:
        raise must(f"{OF_FEATURES}.top", f"be a whole number from 1 to {MOST_TOP}", top)
    if ids is not None:
        ids = whole_numbers(f"{OF_FEATURES}.ids", ids)
        if not 1 <= len(ids) <= MOST_TOP or min(ids) < 0:
            raise must(f"{OF_FEATURES}.ids", f"be 1 to {MOST_TOP} whole numbers of at least 0", list(ids))
    return FeatureChoice(dictionary, _positions(fields, OF_FEATURES), int(top), ids)


def _fits_features(value: FeatureChoice, mllm: MLLM, layout: Layout) -> None:
    dictionary = value.dictionary
    if dictionary is None:
        return
    place = f"{OF_FEATURES}.dictionary"
    if not isinstance(dictionary, SparseDictionary):
        raise must(place, "be a SparseDictionary, as VectorStore.dictionary returns", dictionary)
    if not dictionary.fits(mllm.num_layers, mllm.hidden_size):
        raise RequestError(
            f"'{place}': {dictionary.name!r} reads states of {dictionary.width} numbers after layer {dictionary.layer}; "
            f"this model has layers 0 to {mllm.num_layers - 1} with states of {mllm.hidden_size}.",
            param=place,
            code="wrong_shape",
        )
    if value.ids is not None and max(value.ids) >= dictionary.features:
        raise must(f"{OF_FEATURES}.ids", f"be below {dictionary.features}", list(value.ids))


def _feature_choice_written(options: Diagnose) -> dict[str, Any]:
    choice: FeatureChoice = options[FEATURES]
    return {
        "dictionary": getattr(choice.dictionary, "name", choice.dictionary),
        "positions": _positions_written(choice.positions),
        "top": choice.top,
        "ids": choice.ids and list(choice.ids),
    }


def _look_up(value: FeatureChoice, store: VectorStore) -> FeatureChoice:
    """Return a choice with its dictionary, from a store that knows it by name; an only one needs no name."""
    name = value.dictionary
    if name is None:
        only = store.dictionaries()
        name = only[0] if len(only) == 1 else None
    return replace(value, dictionary=store.dictionary(name)) if isinstance(name, str) else value


FEATURES = ReadoutOption(
    "features",
    Annotated[Any, PlainValidator(lambda value: value, json_schema_input_type=FeaturesForm)],
    FeatureChoice(),
    "The dictionary, positions and number of the features.",
    _feature_choice,
    _fits_features,
    write=_feature_choice_written,
    unset={"dictionary": None, "positions": "last", "top": TOP, "ids": None},
    look_up=_look_up,
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
        measured: Residual = answer.taken[NAME]
        kind = answer.options[ROWS]
        rows = {"answer": answer.fed + 1, "prompt": len(answer.layout.spans), "generated": answer.fed}[kind]
        return residual(measured.sums, rows, measured.neurons if answer.fed else measured.neurons * math.nan, kind)

    def summary(self, report: Any) -> dict[str, Scalar]:
        return {"kl": mean(report["kl"])}


def residual(sums: torch.Tensor, rows: int, neurons: torch.Tensor, kind: str) -> dict[str, Any]:
    """Return the `residual` readout: means over `rows` rows of a kind, by layer.

    sums: (layers, readouts). neurons: (layers,).
    """
    means = dict(zip(NAMES, (sums / rows if rows else sums * math.nan).T, strict=True))
    return {
        "rows": {"kind": kind, "count": rows},
        **{name: nan_to_none(values) for name, values in {**means, "neuron_ratio": neurons}.items()},
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

    def activations(self, options: Diagnose) -> StateChoice:
        choice: StateChoice = options[STATES]
        return choice

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        activations: Activations = answer.taken[ACTIVATIONS][self.name]
        layers = list(answer.options[STATES].layers_of(len(activations.states)))
        positions = [activations.first, activations.first + activations.states.shape[1]]
        about = {"layers": json.dumps(layers), "positions": json.dumps(positions)}
        return {
            "layers": layers,
            "positions": positions,
            "shape": list(activations.states.shape),
            "dtype": str(activations.states.dtype).removeprefix("torch."),
            "safetensors": base64.b64encode(save({"states": activations.states.contiguous()}, about)).decode(),
        }


class FeaturesReadout(Readout):
    """Activations of a sparse dictionary's features at chosen positions, interventions included.

    They are those of SAELens' `encode`, of the residual stream after the dictionary's layer. All is None without one.
    """

    name = "features"
    options = (FEATURES,)

    def signals(self, options: Diagnose) -> frozenset[Signal]:
        return frozenset({Signal.ACTIVATIONS} if options[FEATURES].states is not None else ())

    def activations(self, options: Diagnose) -> StateChoice | None:
        choice: FeatureChoice = options[FEATURES]
        return choice.states

    def read(self, answer: FinishedAnswer) -> dict[str, Any]:
        choice: FeatureChoice = answer.options[FEATURES]
        dictionary = choice.dictionary
        if not isinstance(dictionary, SparseDictionary):
            return {"dictionary": None, "layer": None, "positions": None, "active": None, "features": None}
        activations: Activations = answer.taken[ACTIVATIONS][self.name]
        states = activations.states[0]
        active, total, largest, count = _encoded(dictionary, states)
        ids = torch.tensor(choice.ids) if choice.ids is not None else total.topk(min(choice.top, len(total))).indices
        return {
            "dictionary": dictionary.name,
            "layer": dictionary.layer,
            "positions": [activations.first, activations.first + len(states)],
            "active": active,
            "features": [
                {
                    "id": id,
                    "mean": float(total[id] / len(states)) if len(states) else None,
                    "max": float(largest[id]) if len(states) else None,
                    "share": float(count[id] / len(states)) if len(states) else None,
                }
                for id in ids.tolist()
                if choice.ids is not None or total[id] > 0
            ],
        }


def _encoded(
    dictionary: SparseDictionary, states: torch.Tensor
) -> tuple[float | None, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the mean number of active features, and of each feature the sum, maximum and number of its activations.

    states: (positions, d). Each of the latter is (features,). Encoded in pieces, because a dictionary has 10,000s.
    """
    total, largest, count = (torch.zeros(dictionary.features) for _ in range(3))
    for piece in states.split(ENCODED):
        encoded = dictionary.encode(piece)
        total += encoded.sum(0)
        largest = torch.maximum(largest, encoded.amax(0))
        count += (encoded > 0).sum(0)
    return float(count.sum() / len(states)) if len(states) else None, total, largest, count
