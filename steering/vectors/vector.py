"""Steering vectors: the object with its arithmetic, and its safetensors artifact."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from numbers import Real
from pathlib import Path
from typing import Any, NoReturn

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from steering.errors import VectorError
from steering.files import write_atomically
from steering.vectors.info import FEATURE, GATE_KEYS, MAX_TERMS, NAME, check_info, check_layers

FORMAT = "helmsight.steering-vector/1"
MAX_HEADER = 512 * 2**10
"""The maximum number of bytes of a file's header.

The header of a vector of 8 layers, with the record of its making, has 20,000. A longer one could name 100,000s of empty
tensors, for which safetensors takes seconds while no other thread runs.
"""
_TENSORS = ("direction", "weight", "mean_abs", "std")
PREFERENCE = "modality-preference"
"""The kind of a vector that leads from one modality to the other."""
_OTHER_SIDE = {"text": "vision", "vision": "text"}
_PARALLEL = 1e-5
"""The largest distance, as a share of its length, of a direction from a multiple of another: rounding to float32."""


@dataclass(frozen=True, eq=False)
class SteeringVector:
    """A direction per layer in the residual stream of one model (modality-preference paper, section 4).

    direction: (layers, d) float32, v_l = mean over probe queries of h_l(text instructed) - h_l(vision instructed). weight:
    (layers,) float32, w_l. mean_abs, std: (layers,) float32, mean |v_l| over queries and dimensions and its deviation over
    queries. `layers` are the chosen ones; `fingerprint` is the model's; `info` records how the vector was made (probe size,
    data hash, versions, calibration) and what strength 1 is in published units.
    """

    name: str
    direction: torch.Tensor
    weight: torch.Tensor
    mean_abs: torch.Tensor
    std: torch.Tensor
    layers: tuple[int, ...]
    fingerprint: str
    kind: str = PREFERENCE
    info: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not (NAME.fullmatch(self.name) or FEATURE.fullmatch(self.name)):
            raise VectorError(
                f"Steering vector name {str(self.name)[:128]!r} must match {NAME.pattern}.", code="bad_vector_name"
            )
        if not isinstance(self.direction, torch.Tensor) or self.direction.ndim != 2:
            raise VectorError(f"Steering vector {self.name!r}: direction must be (layers, d).", code="bad_vector")
        for tensor_name in _TENSORS:
            tensor = getattr(self, tensor_name)
            shape = self.direction.shape if tensor_name == "direction" else self.direction.shape[:1]
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.shape != shape
                or tensor.dtype != torch.float32
                or not torch.isfinite(tensor).all()
            ):
                raise VectorError(
                    f"Steering vector {self.name!r}: {tensor_name} must be finite, float32, of shape {tuple(shape)}.",
                    code="bad_vector",
                )
        try:
            if bool((self.mean_abs < 0).any()) or bool((self.std < 0).any()):
                raise ValueError("mean_abs and std must not be negative")
            for key, word in (("kind", self.kind), ("fingerprint", self.fingerprint)):
                if not isinstance(word, str) or not word:
                    raise ValueError(f"{key} must be a string, not empty")
            check_layers(self.layers, len(self.direction))
            check_info(self.info, len(self.direction))
        except ValueError as error:
            raise VectorError(f"Steering vector {self.name!r}: {error}.", code="bad_vector") from error

    @cached_property
    def digest(self) -> str:
        """A hash of its tensors; vectors with the same digest have the same effect at the same layers."""
        return _digest({name: getattr(self, name) for name in _TENSORS})

    @cached_property
    def identity(self) -> str:
        """A hash of everything that an answer or its report takes from it: two vectors with the same one are the same."""
        meaning = [self.digest, self.fingerprint, self.kind, self.layers, self.positive, self.published]
        gate = [self.info["gate"].get(key) for key in GATE_KEYS] if "gate" in self.info else []
        return hashlib.sha256(json.dumps([*meaning, self.calibrated_range, *gate]).encode()).hexdigest()

    @property
    def calibrated_range(self) -> tuple[float, float] | None:
        """The least and greatest strength that calibration measured; None for a vector that was not calibrated."""
        calibration = self.info.get("calibration")
        if calibration is None:
            return None
        low, high = calibration["range"]
        return float(low), float(high)

    @property
    def published(self) -> float | None:
        """Strength 1 in published units: the weight as a multiple of the published weight.

        The published weight is that of the modality-preference paper, equation 2. The value is 1 as probed, another once
        calibrated. None where no published weight is known, as of a sum of different directions, or of an imported vector.
        """
        published = (self.info.get("calibration") or {}).get("factor", self.info.get("published"))
        return float(published) if published else None

    @property
    def positive(self) -> str | None:
        """The modality that a positive coefficient pushes toward: "text" as probed, "vision" once negated.

        None for a vector that is no modality preference.
        """
        return self.info.get("positive", "text") if self.kind == PREFERENCE else None

    def sizes(self, magnitudes: torch.Tensor) -> torch.Tensor:
        """Return the mean size of an element added at strength 1, relative to that of the states, (layers,).

        magnitudes: (layers,), the model's mean |h|. The result is at most `published`, and equal to it where the probe's
        queries agree, unless the vector's metadata is wrong.
        """
        return self.weight.abs() * self.direction.abs().mean(dim=-1) / magnitudes

    def delta(self, scale: float, layers: Sequence[int] | None = None) -> torch.Tensor:
        """Return the addition to the residual stream, (layers, d): scale * w_l * v_l at `layers` (default: its own)."""
        out = torch.zeros_like(self.direction)
        index = torch.tensor(self.layers if layers is None else tuple(layers))
        out[index] = scale * self.weight[index, None] * self.direction[index]
        return out

    def named(self, name: str) -> SteeringVector:
        """Return the same vector under another name, with its calibration."""
        return replace(self, name=name)

    def __mul__(self, factor: float) -> SteeringVector:
        """Return the vector with its weight scaled.

        The measured direction, mean_abs and std stay: `(a * 2.0).delta(1.0)` equals `a.delta(2.0)` to the last bit. The
        calibration is dropped, because its strengths mean something else now. The published units of strength 1 are scaled
        too, and a negative factor inverts `positive`.
        """
        if isinstance(factor, bool) or not isinstance(factor, Real):
            return NotImplemented
        factor = float(factor)
        info = _composed(self._terms(factor), self._turned(factor), abs(factor) * (self.published or 0.0))
        return replace(self, weight=self.weight * factor, info=info)

    __rmul__ = __mul__

    def __neg__(self) -> SteeringVector:
        return self * -1.0

    def __add__(self, other: SteeringVector) -> SteeringVector:
        """Return the vector with the effect of both at their own layers, under the first one's name.

        The parts' weights are folded into its direction, so that its own are 1 and its delta is the sum of theirs.
        `mean_abs` is that of the new direction; `std` adds the parts', because how they vary together was not measured. A
        layer of neither is zero. `info` holds the terms, no calibration. Multiples of one direction add up to a multiple
        with known published units. The sum of two modality preferences is one again unless they are different directions
        that point to different modalities ("composed"). Raises VectorError when the vectors are not of one model and shape.
        """
        if not isinstance(other, SteeringVector):
            return NotImplemented
        self._check_alike(other)
        first, second = self.delta(1.0), other.delta(1.0)
        direction, ratio = first + second, _ratio(first, second)
        positive = self.positive if self.positive == other.positive else None
        if positive is None and ratio is not None and self.positive and other.positive:
            positive = self.positive if abs(ratio) <= 1 else other.positive
        published = 0.0
        if ratio is not None and self.published and other.published:
            published = abs(self.published + math.copysign(other.published, ratio))
        return SteeringVector(
            self.name,
            direction,
            torch.ones_like(self.weight),
            direction.abs().mean(dim=-1),
            self._spread() + other._spread(),
            tuple(sorted({*self.layers, *other.layers})),
            self.fingerprint,
            self.kind if self.kind == other.kind and (positive or self.kind != PREFERENCE) else "composed",
            _composed(self._terms(1.0) + other._terms(1.0), positive, published),
        )

    def __sub__(self, other: SteeringVector) -> SteeringVector:
        return self + -other if isinstance(other, SteeringVector) else NotImplemented

    def _check_alike(self, other: SteeringVector) -> None:
        if self.fingerprint != other.fingerprint:
            raise VectorError(
                f"Vectors {self.name!r} and {other.name!r} were made for different models: fingerprints "
                f"{self.fingerprint[:64]} and {other.fingerprint[:64]}.",
                code="wrong_model",
            )
        if self.direction.shape != other.direction.shape:
            raise VectorError(
                f"Vectors {self.name!r} and {other.name!r} have different shapes: {tuple(self.direction.shape)} and "
                f"{tuple(other.direction.shape)}.",
                code="wrong_shape",
            )

    def _spread(self) -> torch.Tensor:
        """Return the deviation of the addition at strength 1, (layers,), zero outside of its layers."""
        out = torch.zeros_like(self.std)
        index = torch.tensor(self.layers)
        out[index] = self.weight[index].abs() * self.std[index]
        return out

    def _turned(self, factor: float) -> str | None:
        """Return `positive` of this vector times `factor`."""
        return _OTHER_SIDE[self.positive] if self.positive and factor < 0 else self.positive

    def _terms(self, factor: float) -> list[dict[str, Any]]:
        """Return the vectors that it is composed of, scaled; a measured vector is its own only term."""
        terms = self.info.get("composed_of", [{"name": self.name, "scale": 1.0}])
        return [{"name": term["name"], "scale": factor * term["scale"]} for term in terms]

    def to_bytes(self) -> bytes:
        """Return the safetensors artifact, with a digest of its tensors in the metadata."""
        # Copies, because safetensors refuses tensors that share memory.
        tensors = {name: getattr(self, name).cpu().clone(memory_format=torch.contiguous_format) for name in _TENSORS}
        metadata = {
            "format": FORMAT,
            "name": self.name,
            "kind": self.kind,
            "fingerprint": self.fingerprint,
            "layers": json.dumps(self.layers),
            "info": json.dumps(self.info, sort_keys=True),
            "sha256": self.digest,
        }
        return save(tensors, metadata)

    @classmethod
    def from_bytes(cls, data: bytes) -> SteeringVector:
        """Parse an artifact.

        Raises VectorError (code "bad_vector") where it is damaged, cut off, or not an artifact, or its header has more than
        `MAX_HEADER` bytes.
        """
        length = int.from_bytes(data[:8], "little")
        if length > len(data) - 8:
            raise _foreign("it is not a safetensors file, or it is truncated")
        if length > MAX_HEADER:
            raise _foreign(f"its header has {length} bytes, and may have at most {MAX_HEADER}")
        try:
            tensors = load(data)
            metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
            layers = json.loads(metadata["layers"], parse_constant=_refuse_constant)
            info = json.loads(metadata["info"], parse_constant=_refuse_constant)
            json.dumps(info, ensure_ascii=False, allow_nan=False).encode()  # the info is listed as UTF-8 JSON later
            fields = {name: tensors[name] for name in _TENSORS}
            name, kind, fingerprint, digest = (metadata[key] for key in ("name", "kind", "fingerprint", "sha256"))
            if not NAME.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a file")
        except SafetensorError as error:
            raise _foreign("its tensors are not valid safetensors, or it is truncated") from error
        except KeyError as error:
            raise _foreign(f"its '{error.args[0]}' is missing") from error
        except (ValueError, TypeError, OverflowError, RecursionError) as error:
            raise _foreign("its metadata cannot be read") from error
        if metadata.get("format") != FORMAT:
            raise VectorError(
                f"Unknown steering vector format {str(metadata.get('format'))[:64]!r}.", code="bad_vector"
            )
        if digest != _digest(fields):
            raise VectorError(
                f"Steering vector {name[:128]!r} is damaged: its digest does not match.", code="bad_vector"
            )
        # Other types are left for the constructor to refuse: tuple("12") would be two layers.
        layers = tuple(layers) if isinstance(layers, list) else layers
        return cls(name=name, layers=layers, fingerprint=fingerprint, kind=kind, info=info, **fields)

    def save(self, path: str | Path) -> Path:
        """Write the artifact atomically: a reader sees the old file or the whole new one."""
        return write_atomically(path, self.to_bytes())

    @classmethod
    def load(cls, path: str | Path) -> SteeringVector:
        """Read and verify an artifact; raise VectorError where it is damaged."""
        return cls.from_bytes(Path(path).read_bytes())


def _foreign(why: str) -> VectorError:
    return VectorError(f"Not a steering vector file: {why}.", code="bad_vector")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _ratio(base: torch.Tensor, vector: torch.Tensor) -> float | None:
    """Return `vector` as a multiple of `base`; None where they are different directions."""
    first, second = base.double().flatten(), vector.double().flatten()
    if not first.any():
        return None
    ratio = float(first @ second / (first @ first))
    return ratio if float((second - ratio * first).norm()) <= _PARALLEL * float(second.norm()) else None


def _composed(terms: list[dict[str, Any]], positive: str | None, published: float) -> dict[str, Any]:
    """Return the info of a vector that was computed from others, without keys that are implied or unknown."""
    if len(terms) > MAX_TERMS:
        raise VectorError(f"A steering vector may be composed of at most {MAX_TERMS} terms.", code="too_many_terms")
    info: dict[str, Any] = {"composed_of": terms}
    if positive == "vision":
        info["positive"] = positive
    if published:
        info["published"] = published
    return info


def _digest(tensors: dict[str, torch.Tensor]) -> str:
    """Return the sha256 over the tensors' bytes in a fixed order."""
    hasher = hashlib.sha256()
    for name in _TENSORS:
        hasher.update(tensors[name].cpu().flatten().view(torch.uint8).numpy().tobytes())
    return hasher.hexdigest()
