"""Sparse dictionaries in SAELens' files: activations and directions as plain NumPy computes them, feature by feature."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save, save_file

from steering import SteeringVector, VectorError, VectorStore
from steering.vectors.sparse import SparseDictionary
from tests.steering.vectors.made import LAYERS, WIDTH, make, parts

FEATURES = 9
BIASES = {
    "standard": ["b_enc"],
    "topk": ["b_enc"],
    "jumprelu": ["b_enc", "threshold"],
    "gated": ["b_gate", "b_mag", "r_mag"],
}
NEW: dict[str, Any] = {"metadata": {"hook_name": "blocks.2.hook_resid_post", "model_name": "a-model"}}
"""The configuration's form since SAELens 6."""
OLD: dict[str, Any] = {"hook_name": "blocks.3.hook_resid_pre", "hook_layer": 3, "model_name": "a-model"}


def write(folder: Path, architecture: str = "standard", seed: int = 0, **config: Any) -> Path:
    """Write a random dictionary; return its folder."""
    drawn = torch.Generator().manual_seed(seed)
    shapes = {"W_enc": (WIDTH, FEATURES), "W_dec": (FEATURES, WIDTH), "b_dec": (WIDTH,)}
    shapes |= dict.fromkeys(BIASES[architecture], (FEATURES,))
    folder.mkdir(parents=True)
    save_file(
        {name: torch.randn(shape, generator=drawn) for name, shape in shapes.items()},
        folder / "sae_weights.safetensors",
    )
    sizes = {"d_in": WIDTH, "d_sae": FEATURES, "architecture": architecture}
    (folder / "cfg.json").write_text(json.dumps({**sizes, **NEW, **config}))
    return folder


def by_hand(folder: Path, x: np.ndarray[Any, Any], architecture: str, config: dict[str, Any]) -> list[float]:
    """Return the activations of one state, (d,), computed for each feature in float64."""
    of = {name: tensor.double().numpy() for name, tensor in load_file(folder / "sae_weights.safetensors").items()}
    if config.get("normalize_activations") == "layer_norm":
        x = (x - x.mean()) / ((x - x.mean()).std(ddof=1) + 1e-5)
    if config.get("normalize_activations") == "constant_norm_rescale":
        x = x * np.sqrt(WIDTH) / np.sqrt((x**2).sum())
    if config.get("apply_b_dec_to_input", True):
        x = x - of["b_dec"]
    found = []
    for i in range(FEATURES):
        product = float(sum(x[j] * of["W_enc"][j, i] for j in range(WIDTH)))
        if architecture == "gated":
            size = product * np.exp(of["r_mag"][i]) + of["b_mag"][i]
            found.append(max(size, 0.0) if product + of["b_gate"][i] > 0 else 0.0)
            continue
        value = product + of["b_enc"][i]
        if config.get("rescale_acts_by_decoder_norm"):
            value *= np.sqrt((of["W_dec"][i] ** 2).sum())
        if architecture == "jumprelu" and value <= of["threshold"][i]:
            value = 0.0
        found.append(max(value, 0.0) if architecture != "topk" else value)
    if architecture == "topk":
        least = sorted(found)[-config["k"]]
        found = [max(value, 0.0) if value >= least else 0.0 for value in found]
    return found


@pytest.mark.parametrize(
    ("architecture", "config"),
    [
        ("standard", {}),
        ("standard", {"apply_b_dec_to_input": False, "normalize_activations": "layer_norm"}),
        ("standard", {"normalize_activations": "constant_norm_rescale"}),
        ("jumprelu", {"normalize_activations": "expected_average_only_in"}),
        ("gated", {}),
        ("topk", {"k": 3}),
        ("topk", {"k": 2, "rescale_acts_by_decoder_norm": True}),
    ],
)
def test_activations_are_those_of_the_formula(architecture: str, config: dict[str, Any], tmp_path: Path) -> None:
    folder = write(tmp_path / "layer2", architecture, **config)
    states = torch.randn(5, 3, WIDTH, generator=torch.Generator().manual_seed(1)) * 3
    found = SparseDictionary.load(folder).encode(states)
    expected = [[by_hand(folder, x.double().numpy(), architecture, config) for x in row] for row in states]
    torch.testing.assert_close(found, torch.tensor(expected, dtype=torch.float32), rtol=1e-4, atol=1e-5)
    assert 0 < int((found > 0).sum()) < found.numel()


def test_the_older_form_of_a_configuration_is_read(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "old", "topk", metadata=None, **OLD, activation_fn_str="topk", activation_fn_kwargs={"k": 4}
    )
    dictionary = SparseDictionary.load(folder)
    assert (dictionary.layer, dictionary.architecture, dictionary.k, dictionary.model) == (2, "topk", 4, "a-model")


@pytest.mark.parametrize(
    ("hook", "layer"),
    [("blocks.0.hook_resid_post", 0), ("model.layers.3", 3), ("model.language_model.layers.1", 1), ("layers.2", 2)],
)
def test_the_layer_is_named_as_by_transformer_lens_or_transformers(hook: str, layer: int, tmp_path: Path) -> None:
    assert SparseDictionary.load(write(tmp_path / "a", metadata={"hook_name": hook})).layer == layer


def test_a_feature_is_a_vector_that_adds_a_unit_of_it(tmp_path: Path) -> None:
    folder = write(tmp_path / "layer2")
    store = VectorStore(tmp_path, fingerprint="abc", layers=LAYERS)
    vector = store.get("sae:layer2/7")
    expected = torch.zeros(LAYERS, WIDTH)
    expected[2] = 1.5 * load_file(folder / "sae_weights.safetensors")["W_dec"][7]
    assert torch.equal(vector.delta(1.5), expected)
    assert (vector.name, vector.kind, vector.fingerprint, vector.layers) == ("sae:layer2/7", "sae-feature", "abc", (2,))
    assert vector.info["dictionary"] == {
        "name": "layer2",
        "feature": 7,
        "model": "a-model",
        "hook": "blocks.2.hook_resid_post",
    }
    assert store.get(f"sae:layer2/7@{vector.identity[:12]}") is vector
    with pytest.raises(Exception, match="which was pinned"):
        store.get("sae:layer2/6@" + vector.identity[:12])
    assert store.names() == []
    assert store.dictionaries() == ["layer2"]


def test_a_unit_is_of_length_one_where_activations_are_in_units_of_the_decoder(tmp_path: Path) -> None:
    write(tmp_path / "a", "topk", k=1, rescale_acts_by_decoder_norm=True)
    vector = VectorStore(tmp_path, fingerprint="abc", layers=LAYERS).get("sae:a/0")
    assert float(vector.delta(1.0)[2].norm()) == pytest.approx(1.0)


def test_a_replaced_file_makes_another_vector(tmp_path: Path) -> None:
    store = VectorStore(tmp_path, fingerprint="abc", layers=LAYERS)
    write(tmp_path / "a")
    before = store.get("sae:a/1")
    write(tmp_path / "b", seed=5)
    (tmp_path / "b" / "sae_weights.safetensors").replace(tmp_path / "a" / "sae_weights.safetensors")
    assert store.get("sae:a/1").identity != before.identity


@pytest.mark.parametrize(
    ("name", "code", "problem"),
    [
        ("sae:a/9", "unknown_vector", "has features 0 to 8"),
        ("sae:b/1", "unknown_dictionary", "There is no dictionary 'b'; available: a, late."),
        ("sae:late/1", "wrong_shape", "is of 'blocks.4.hook_resid_post', and this model has layers 0 to 3"),
        ("sae:../a/1", "unknown_vector", "no steering vector"),
        ("sae:a/01", "unknown_vector", "no steering vector"),
        ("sae:a", "unknown_vector", "no steering vector"),
    ],
)
def test_a_feature_that_is_not_there_is_refused(name: str, code: str, problem: str, tmp_path: Path) -> None:
    write(tmp_path / "a")
    write(tmp_path / "late", metadata={"hook_name": "blocks.4.hook_resid_post"})
    with pytest.raises(VectorError, match=problem) as refused:
        VectorStore(tmp_path, fingerprint="abc", layers=LAYERS).get(name)
    assert refused.value.code == code


def test_a_feature_of_no_known_model_is_refused(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(VectorError, match="is a vector of no model"):
        VectorStore(tmp_path).get("sae:a/1")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"architecture": "temporal"}, "its architecture is 'temporal', not one of standard, jumprelu, topk, gated"),
        ({"metadata": {"hook_name": "blocks.2.hook_mlp_out"}}, "not of the residual stream"),
        ({"d_sae": 12}, r"its W_enc has shape \[6, 9\], not \[6, 12\]"),
        ({"d_in": None}, "its cfg.json cannot be read"),
        ({"normalize_activations": "whitened"}, "its cfg.json cannot be read"),
        ({"architecture": "topk"}, "its k is not between 1 and its number of features"),
        ({"architecture": "jumprelu"}, "has no tensor 'threshold'"),
        ({"finetuning_scaling_factor": True}, "scaling factor of fine-tuning"),
    ],
)
def test_a_dictionary_that_cannot_be_used_is_refused(config: dict[str, Any], problem: str, tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "cfg.json").write_text(json.dumps({"d_in": WIDTH, "d_sae": FEATURES, **NEW, **config}))
    with pytest.raises(VectorError, match=problem) as refused:
        SparseDictionary.load(folder)
    assert refused.value.code == "bad_dictionary"


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    weights = folder / "sae_weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-8])
    with pytest.raises(VectorError, match="is damaged"):
        SparseDictionary.load(folder)
    (folder / "cfg.json").write_text("[" * 10_000)
    with pytest.raises(VectorError, match="cannot be read"):
        SparseDictionary.load(folder)


def test_no_file_has_the_name_of_a_feature() -> None:
    """An upload is stored under its own name, which must be no path."""
    tensors, metadata = parts(make())
    with pytest.raises(VectorError, match="metadata cannot be read"):
        SteeringVector.from_bytes(save(tensors, metadata | {"name": "sae:a/1"}))
