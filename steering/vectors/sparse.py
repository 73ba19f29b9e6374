"""Sparse dictionaries (sparse autoencoders) in the file format of SAELens: features as directions and as readouts.

A folder holds `cfg.json` and `sae_weights.safetensors`. Those for the residual stream are read, of the architectures
"standard", "jumprelu", "topk" and "gated"; no code of SAELens runs.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from steering.errors import VectorError
from steering.vectors.info import FEATURE, NAME
from steering.vectors.vector import SteeringVector

CONFIG, WEIGHTS = "cfg.json", "sae_weights.safetensors"
KIND = "sae-feature"
"""The kind of a vector that is a feature's direction."""
_BIASES = {
    "standard": ("b_enc",),
    "jumprelu": ("b_enc", "threshold"),
    "topk": ("b_enc",),
    "gated": ("b_gate", "b_mag", "r_mag"),
}
"""The tensors of each architecture, (features,), beside W_enc, W_dec and b_dec."""
_HOOKS = re.compile(r"blocks\.([0-9]+)\.hook_resid_(pre|post)|(?:model\.)?(?:language_model\.)?layers\.([0-9]+)")
_EPS = 1e-5
NORMS = "norms of W_dec"


@dataclass(frozen=True)
class SparseDictionary:
    """A sparse autoencoder of the residual stream after one layer.

    `layer` is numbered from 0, and -1 stands for the embeddings. `width` is d, `features` their number. `k` is the number of
    features that "topk" keeps. `centered`: the decoder's bias is subtracted from the input. `normalized`: how the input is
    normalised, "none", "layer_norm" or "constant_norm_rescale". `by_norm`: activations are in units of the decoder's rows
    (SAELens' `rescale_acts_by_decoder_norm`). `model` and `hook` are what the file says that it was trained on.
    """

    name: str
    folder: str
    layer: int
    width: int
    features: int
    architecture: str
    k: int = 0
    centered: bool = True
    normalized: str = "none"
    by_norm: bool = False
    model: str | None = None
    hook: str | None = None

    @classmethod
    def load(cls, folder: str | Path) -> SparseDictionary:
        """Read the configuration of a dictionary, not its weights; raise VectorError for one that cannot be used.

        The files are read again only when they changed.
        """
        return _loaded(Path(folder), _stamp(folder, CONFIG), _stamp(folder, WEIGHTS))

    def fits(self, layers: int, width: int) -> bool:
        """Return whether a model with so many layers, and states of so many numbers, has the states that it reads."""
        return 0 <= self.layer < layers and self.width == width

    def direction(self, feature: int) -> torch.Tensor:
        """Return what one unit of a feature's activation adds to the residual stream, (d,) float32."""
        with safe_open(Path(self.folder) / WEIGHTS, "pt") as file:
            row: torch.Tensor = file.get_slice("W_dec")[feature].float()
        return row / row.norm().clamp_min(torch.finfo(torch.float32).tiny) if self.by_norm else row

    def vector(self, feature: int, layers: int, fingerprint: str) -> SteeringVector:
        """Return a feature as a steering vector of a model with so many layers and this fingerprint.

        Scale 1 adds one unit of the feature's activation after the dictionary's layer. Raise VectorError where the
        dictionary has no such feature, or the model no such layer. It is the same object as long as the file is the same.
        """
        return _vector(self, _stamp(self.folder), feature, layers, fingerprint)

    def encode(self, states: torch.Tensor) -> torch.Tensor:
        """Return the features' activations of states, (..., d) to (..., features) in float32."""
        tensors = _tensors(self, _stamp(self.folder))
        x = states.float()
        if self.normalized == "layer_norm":
            x = x - x.mean(-1, keepdim=True)
            x = x / (x.std(-1, keepdim=True) + _EPS)
        elif self.normalized == "constant_norm_rescale":
            x = x * self.width**0.5 / x.norm(dim=-1, keepdim=True)
        if self.centered:
            x = x - tensors["b_dec"]
        before = x @ tensors["W_enc"]
        if self.architecture == "gated":
            size = (before * tensors["r_mag"].exp() + tensors["b_mag"]).relu()
            return torch.where(before + tensors["b_gate"] > 0, size, 0.0)
        before = before + tensors["b_enc"]
        if self.by_norm:
            before = before * tensors[NORMS]
        if self.architecture == "jumprelu":
            return torch.where(before > tensors["threshold"], before.relu(), 0.0)
        if self.architecture == "topk":
            largest = before.topk(self.k, dim=-1)
            return torch.zeros_like(before).scatter(-1, largest.indices, largest.values.relu())
        return before.relu()


def feature_of(name: str) -> tuple[str, int] | None:
    """Return the dictionary and the number of a feature's name, None for the name of anything else."""
    match = FEATURE.fullmatch(name)
    return None if match is None else (match[1], int(match[2]))


def is_dictionary(folder: Path) -> bool:
    """Return True for a folder that holds a dictionary's files and has a name that requests can give."""
    return bool(NAME.fullmatch(folder.name)) and (folder / CONFIG).is_file() and (folder / WEIGHTS).is_file()


def _layer(hook: str, name: str) -> int:
    """Return the layer after which the residual stream is read, by the names of TransformerLens or of transformers."""
    match = _HOOKS.fullmatch(hook)
    if match is None:
        raise _bad(name, f"it is of {hook[:64]!r}, not of the residual stream before or after a layer")
    number, place, plain = match.groups()
    return int(plain) if number is None else int(number) - (place == "pre")


def _normalized(value: Any) -> str:
    """Return the normalisation of the input; those that SAELens folds into the weights, or scales by hand, are none."""
    if value in (None, False, True, "none", "expected_average_only_in"):
        return "none"
    if value in ("layer_norm", "constant_norm_rescale"):
        return str(value)
    raise ValueError(value)


def _check_shapes(dictionary: SparseDictionary) -> None:
    """Raise VectorError unless the file has the tensors of its architecture in the configuration's shapes."""
    width, features = dictionary.width, dictionary.features
    shapes: Mapping[str, list[int]] = {
        "W_enc": [width, features],
        "W_dec": [features, width],
        "b_dec": [width],
        **{name: [features] for name in _BIASES[dictionary.architecture]},
    }
    try:
        with safe_open(Path(dictionary.folder) / WEIGHTS, "pt") as file:
            names = set(file.keys())
            for name, shape in shapes.items():
                if name not in names:
                    raise _bad(dictionary.name, f"its {WEIGHTS} has no tensor {name!r}")
                if (actual := file.get_slice(name).get_shape()) != shape:
                    raise _bad(dictionary.name, f"its {name} has shape {actual}, not {shape}")
    except SafetensorError as error:
        raise _bad(dictionary.name, f"its {WEIGHTS} is damaged") from error


@lru_cache(maxsize=64)
def _loaded(folder: Path, *stamps: tuple[int, int]) -> SparseDictionary:
    try:
        config = json.loads((folder / CONFIG).read_text())
        metadata = config.get("metadata") or {}
        hook = str(config.get("hook_name") or config.get("hook_point") or metadata.get("hook_name"))
        activation = config.get("activation_fn_str", config.get("activation_fn", "relu"))
        model = config.get("model_name") or metadata.get("model_name")
        k = config.get("k") or (config.get("activation_fn_kwargs") or {}).get("k") or 0
        dictionary = SparseDictionary(
            folder.name,
            str(folder),
            _layer(hook, folder.name),
            int(config["d_in"]),
            int(config["d_sae"]),
            "topk" if activation == "topk" else str(config.get("architecture", "standard")),
            int(k),
            bool(config.get("apply_b_dec_to_input", True)),
            _normalized(config.get("normalize_activations")),
            bool(config.get("rescale_acts_by_decoder_norm", False)),
            model if isinstance(model, str) else None,
            hook,
        )
    except KeyError as error:
        raise _bad(folder.name, f"its {CONFIG} has no {error.args[0]!r}") from error
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _bad(folder.name, f"its {CONFIG} cannot be read") from error
    if dictionary.architecture not in _BIASES:
        raise _bad(
            folder.name, f"its architecture is {dictionary.architecture[:64]!r}, not one of {', '.join(_BIASES)}"
        )
    if config.get("finetuning_scaling_factor"):
        raise _bad(folder.name, "it has a scaling factor of fine-tuning, which SAELens no longer reads either")
    if dictionary.architecture == "topk" and not 0 < dictionary.k <= dictionary.features:
        raise _bad(folder.name, "its k is not between 1 and its number of features")
    _check_shapes(dictionary)
    return dictionary


def _stamp(folder: str | Path, name: str = WEIGHTS) -> tuple[int, int]:
    stat = (Path(folder) / name).stat()
    return stat.st_ino, stat.st_mtime_ns


@lru_cache(maxsize=256)
def _vector(
    dictionary: SparseDictionary, stamp: tuple[int, int], feature: int, layers: int, fingerprint: str
) -> SteeringVector:
    name = f"sae:{dictionary.name}/{feature}"
    if not 0 <= feature < dictionary.features:
        raise VectorError(
            f"There is no steering vector {name!r}: the dictionary has features 0 to {dictionary.features - 1}.",
            code="unknown_vector",
        )
    if not 0 <= dictionary.layer < layers:
        raise VectorError(
            f"The dictionary {dictionary.name!r} is of {dictionary.hook!r}, and this model has layers 0 to {layers - 1}.",
            code="wrong_shape",
        )
    direction = torch.zeros(layers, dictionary.width)
    direction[dictionary.layer] = dictionary.direction(feature)
    about = {"name": dictionary.name, "feature": feature, "model": dictionary.model, "hook": dictionary.hook}
    return SteeringVector(
        name,
        direction,
        torch.ones(layers),
        direction.abs().mean(dim=-1),
        torch.zeros(layers),
        (dictionary.layer,),
        fingerprint,
        KIND,
        {"dictionary": about},
    )


@lru_cache(maxsize=4)
def _tensors(dictionary: SparseDictionary, stamp: tuple[int, int]) -> Mapping[str, torch.Tensor]:
    """Return what a dictionary encodes with, in float32; it stays in memory, that of four dictionaries at most."""
    with safe_open(Path(dictionary.folder) / WEIGHTS, "pt") as file:
        names = ("W_enc", "b_dec", *_BIASES[dictionary.architecture])
        tensors = {name: file.get_tensor(name).float() for name in names}
        if dictionary.by_norm:
            tensors[NORMS] = file.get_tensor("W_dec").float().norm(dim=-1)
    return tensors


def _bad(name: str, why: str) -> VectorError:
    return VectorError(f"The dictionary {name[:128]!r} cannot be used: {why}.", code="bad_dictionary")
