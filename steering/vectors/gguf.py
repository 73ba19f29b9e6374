"""Import and export of vectors as GGUF control vectors, the files of llama.cpp's `--control-vector`.

In that format "direction.N" is added after decoder layer N, counted from 0, already scaled: weight * direction. Layer 0 has
no place in it. Needs the optional package `gguf` (`pip install helmsight[gguf]`).
"""

from __future__ import annotations

import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from steering.errors import VectorError
from steering.vectors.vector import SteeringVector

ARCHITECTURE = "controlvector"
MAX_LAYERS = 4096
_DIRECTION = re.compile(r"direction\.([1-9][0-9]{0,3})")


def to_gguf(vector: SteeringVector, model_hint: str = "unknown") -> bytes:
    """Return the GGUF file of a vector at strength 1; raise VectorError where the format cannot hold it.

    `model_hint` is llama.cpp's name of the model's architecture, which it only reports.
    """
    gguf = _package()
    if 0 in vector.layers:
        raise VectorError(
            f"Steering vector {vector.name!r} is added at layer 0, which GGUF control vectors do not have.",
            code="not_a_control_vector",
        )
    if len(vector.direction) < 2:
        raise VectorError("A GGUF control vector needs a model of at least two layers.", code="not_a_control_vector")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "vector.gguf"
        writer = gguf.GGUFWriter(path, ARCHITECTURE)
        writer.add_string(f"{ARCHITECTURE}.model_hint", model_hint)
        writer.add_uint32(f"{ARCHITECTURE}.layer_count", len(vector.direction) - 1)
        for layer, added in list(enumerate(vector.delta(1.0)))[1:]:
            writer.add_tensor(f"direction.{layer}", added.numpy())
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return path.read_bytes()


def from_gguf(path: str | Path, name: str, fingerprint: str, layers: int | None = None) -> SteeringVector:
    """Read a control vector as a vector of the model with that fingerprint.

    The model has `layers` layers, by default up to the file's last one. Weights are 1 and `std` is 0, because the file holds
    the product of weight and direction and no deviation. Raises VectorError (code "bad_vector") where the file is no control
    vector, OSError where it cannot be read.
    """
    directions, hint = _directions(Path(path))
    count = max(directions) + 1 if layers is None else layers
    if max(directions) >= count:
        raise VectorError(
            f"{path}: it has a direction for layer {max(directions)}, but the model has layers 0 to {count - 1}.",
            code="wrong_shape",
        )
    direction = torch.zeros(count, len(next(iter(directions.values()))))
    for layer, added in directions.items():
        direction[layer] = added
    return SteeringVector(
        name,
        direction,
        torch.ones(count),
        direction.abs().mean(-1),
        torch.zeros(count),
        tuple(layer for layer, added in sorted(directions.items()) if bool(added.any())),
        fingerprint,
        "control-vector",
        {"imported_from": {"format": "gguf", "model_hint": hint}},
    )


def _directions(path: Path) -> tuple[dict[int, torch.Tensor], str | None]:
    """Return the directions by layer, finite and of one width, not all zero, and the name of the architecture."""
    gguf = _package()
    path.stat()
    try:
        reader = gguf.GGUFReader(path)
        kind, hint = (_text(reader, key) for key in ("general.architecture", f"{ARCHITECTURE}.model_hint"))
        tensors = [(tensor.name, tensor.tensor_type.name, torch.tensor(tensor.data)) for tensor in reader.tensors]
    except OSError:
        raise
    except Exception as error:  # the reader has no error of its own: a damaged file may raise anything
        raise VectorError(f"{path}: not a GGUF file, or a damaged one: {error}.", code="bad_vector") from error
    if kind != ARCHITECTURE:
        raise VectorError(f"{path}: not a control vector but {kind!r}.", code="bad_vector")
    directions: dict[int, torch.Tensor] = {}
    for name, dtype, data in tensors:
        layer = _DIRECTION.fullmatch(name)
        if layer is None or int(layer[1]) > MAX_LAYERS or dtype != "F32" or data.ndim != 1:
            raise VectorError(
                f"{path}: tensor {name[:64]!r} must be direction.N, N from 1 to {MAX_LAYERS}, one row of F32.",
                code="bad_vector",
            )
        directions[int(layer[1])] = data
    if len({len(data) for data in directions.values()}) != 1 or not any(
        bool(data.any()) for data in directions.values()
    ):
        raise VectorError(f"{path}: its directions must be of one width and not all zero.", code="bad_vector")
    return directions, hint


def _text(reader: Any, key: str) -> str | None:
    field = reader.get_field(key)
    return None if field is None else str(field.contents())


def _package() -> Any:
    try:
        import gguf  # noqa: PLC0415 -- optional
    except ImportError as error:
        raise VectorError(
            "GGUF files need the package gguf: pip install 'helmsight[gguf]'.", code="missing_package"
        ) from error
    return gguf
