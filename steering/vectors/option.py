"""An intervention's option that is a steering vector: a `SteeringVector` in the library, its name in a request."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import PlainSerializer, PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from steering.errors import VectorError
from steering.model.mllm import MLLM
from steering.protocol.intervention_spec import NAMES_A_VECTOR
from steering.protocol.wording import must
from steering.vectors.vector import SteeringVector


def _vector_or_name(value: Any) -> Any:
    if isinstance(value, SteeringVector | str):
        return value
    raise PydanticCustomError("string_type", "Input should be a valid string")


Vector = Annotated[
    SteeringVector | str,
    NAMES_A_VECTOR,
    PlainValidator(_vector_or_name),
    PlainSerializer(lambda value: getattr(value, "name", value)),
    WithJsonSchema({"type": "string"}),
]
"""The type of a field that holds a steering vector.

A request gives its name, which the server looks up in one place (`server.vectors.names`) before the engine sees it; reports
give the name again.
"""


def check_vector(mllm: MLLM, vector: Any, param: str) -> SteeringVector:
    """Return the vector of a field; raise VectorError or RequestError, naming the field, unless it fits the model."""
    if not isinstance(vector, SteeringVector):
        raise must(param, "be a SteeringVector, as VectorStore.get and SteeringVector.load return", vector)
    if vector.fingerprint != mllm.fingerprint:
        raise VectorError(
            f"Steering vector {vector.name!r} was made for a model with fingerprint {vector.fingerprint[:64]}; "
            f"this one has {mllm.fingerprint}.",
            param=param,
            code="wrong_model",
        )
    shape = (mllm.num_layers, mllm.hidden_size)
    if vector.direction.shape != shape:
        raise VectorError(
            f"Steering vector {vector.name!r} has shape {tuple(vector.direction.shape)}; this model needs "
            f"{shape}, layers by width.",
            param=param,
            code="wrong_shape",
        )
    return vector
