"""The fields of a vector and its info have types and ranges, in memory and in a file."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from safetensors.torch import save

from steering import SteeringVector, VectorError
from tests.steering.vectors.made import LAYERS, WIDTH, make, parts


@pytest.mark.parametrize(
    "changes",
    [
        {"direction": torch.zeros(WIDTH)},
        {"direction": torch.full((LAYERS, WIDTH), torch.nan)},
        {"direction": torch.full((LAYERS, WIDTH), torch.inf)},
        {"direction": torch.zeros(LAYERS, WIDTH, dtype=torch.float64)},
        {"weight": torch.zeros(LAYERS + 1)},
        {"weight": torch.zeros(LAYERS, 1)},
        {"mean_abs": torch.full((LAYERS,), torch.nan)},
        {"std": torch.zeros(LAYERS, dtype=torch.int64)},
        {"layers": ()},
        {"layers": (0, LAYERS)},
        {"layers": (-1,)},
        {"layers": (1, 1)},
        {"info": {"calibration": {"range": [0.5, float("nan")]}}},
        {"info": {"calibration": {"range": [0.5, float("inf")]}}},
        {"info": {"calibration": {"range": [2, 1]}}},
        {"info": {"composed_of": 3}},
        {"info": {"composed_of": ["a"]}},
        {"info": {"composed_of": [{"name": "a"}]}},
        {"info": {"composed_of": [{"name": "a", "scale": "1"}]}},
    ],
)
def test_impossible_vectors_are_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(VectorError) as refused:
        make(**changes)
    assert refused.value.code == "bad_vector"


@pytest.mark.parametrize("name", ["a", "0", "modality-preference", "v1.2_b", "a" * 64])
def test_plain_names_are_fine(name: str) -> None:
    assert make(name).name == name


BAD_LAYERS = [
    '"123"', '"1"', "123", "1", "null", "true", "{}", '{"1": 2}', "[]", "[[1]]", "[true]", "[false, true]", "[1.0]", "[1e0]",
    '["1"]', "[null]", "[-1]", "[4]", "[1, 1]", "[NaN]", "[Infinity]", "[-0.5]", "[12345678901234567890123456789]", "", "[1",
]  # fmt: skip
NUMBERS = ["null", "true", '"1"', "[1]", "{}", "1e999", "-1e999", "NaN", "Infinity", "1" + "0" * 400]
POINT = {"layer": 1, "dose": 0.4, "strength": 1.0, "vision": {"n": 4, "s_vision": 0.5}, "text": {}, "kl": None}
CALIBRATION = {
    "range": [0.5, 1.5], "layer": 1, "factor": 0.4, "published_weight": -0.9, "default_strength": 1.0, "samples": 100,
    "targets_reached": True, "within_budget": False, "budget": {"kl": 0.25}, "chosen": POINT, "curve": [POINT, POINT],
    "others_tried": [], "baseline": {"plain": {"vision_ratio": None}, "image_accuracy": 0.9, "repetition": 0.0},
}  # fmt: skip
INFO = {
    "samples": 25, "seed": -3, "tasks": ["color"], "data_sha256": "ab", "std": "over queries", "reliable": False,
    "state_mean_abs": [1, 2.5, 3, 4], "agreement": [0.1] * LAYERS, "score": [0.0] * LAYERS, "ranking": [3, 1, 0, 2],
    "versions": {"torch": "2"}, "doubts": [], "made_from": ["world-1"], "calibration": CALIBRATION,
    "instructed": {"toward_vision": 1.0, "toward_text": 0.0, "difference": 1.0, "difference_95": [0.9, 1], "n": 64},
    "composed_of": [{"name": "a", "scale": -2}], "imported_from": {"format": "gguf", "model_hint": None},
    "of the user's own": [None, {"any": "thing"}],
}  # fmt: skip
BAD_INFO = [
    ("", ["[]", "[[1, 2]]", '[["samples", 3]]', "null", "3", '"text"', "true"]),
    ("samples", [*NUMBERS, "0", "-1", "2.0"]),
    ("seed", [*NUMBERS, "0.5"]),
    ("reliable", ["0", "1", '"true"', "null", "[]"]),
    ("tasks", ['"color"', "[1]", "{}", "null"]),
    ("made_from", ['"world-1"', "[1]", "{}", "null"]),
    ("doubts", ['"none"', "[false]", "false"]),
    ("std", ["0.5", "null"]),
    ("data_sha256", ["7", "null"]),
    ("versions", ["[]", '"2"', '{"torch": 2}']),
    ("score", [*NUMBERS, "[1, 2, 3]", "[1, 2, 3, 4, 5]", '[1, 2, 3, "4"]', "[1, 2, 3, true]", "[1, 2, 3, null]"]),
    ("agreement", ['"0.5"', "[]"]),
    ("ranking", ["null", '"1"', "{}", "1", "[4]", "[-1]", '["0"]', "[1.0]", "[true]", "[0, 1, 2, 3, 0]", '"3"']),
    ("instructed", ["[]", '{"difference": "1"}', '{"difference_95": [1]}', '{"difference_95": [0, 2]}', '{"n": -1}']),
    ("imported_from", ['"gguf"', '{"format": 1}', '{"model_hint": []}']),
    ("composed_of", ["[]", '"a"', "{}", "[[]]", '[{"name": "a"}]', '[{"scale": 1}]', '[{"name": "A", "scale": 1}]',
                     '[{"name": "../x", "scale": 1}]', '[{"name": 1, "scale": 1}]', "[" + '{"name": "a", "scale": 1},' * 1024
                     + '{"name": "a", "scale": 1}]', *[f'[{{"name": "a", "scale": {wrong}}}]' for wrong in NUMBERS]]),
    ("calibration", ["[]", '"0.5 to 1.5"', "1", "{}", "true"]),
    ("calibration.range", ['"12"', "[1]", "[1, 2, 3]", '["1", "2"]', "[2, 1]", "[-1, 1]", "[true, true]", "[0, NaN]",
                           "[0, 1e999]", '{"0": 1, "1": 2}', "null", "[[0], [1]]", "[0, 1" + "0" * 400 + "]"]),
    ("calibration.layer", [*NUMBERS, "4", "-1", "1.0"]),
    ("calibration.factor", [*NUMBERS, "-0.1"]),
    ("calibration.samples", [*NUMBERS, "0"]),
    ("calibration.targets_reached", ["1", '"yes"']),
    ("calibration.budget", ["[]", '{"kl": -1}', '{"kl": "0"}']),
    ("calibration.baseline", ["[]", '{"plain": 3}', '{"plain": {"s_text": 2}}', '{"image_accuracy": 1.5}']),
    ("calibration.chosen", ["[]", "null", '{"layer": 9}', '{"dose": "1"}', '{"vision": [1]}', '{"vision": {"n": 1.5}}']),
    ("calibration.curve", ['"curve"', "{}", "[1]", "[[]]", '[{"dose": null}]', '[{"dose": -1}]', '[{"strength": "1"}]',
                           '[{"text": {"vision_ratio": 1.01}}]', '[{"cross_fall": -2}]', '[{"kl": "0"}]']),
    ("calibration.others_tried", ["null", "[null]", '[{"layer": true}]']),
]  # fmt: skip


def of_file(**metadata: str) -> SteeringVector:
    """Return the vector of a file that another program wrote."""
    tensors, own = parts(make(info={}))
    return SteeringVector.from_bytes(save(tensors, own | metadata))


@pytest.mark.parametrize("text", BAD_LAYERS)
def test_layers_are_a_list_of_the_models_layers_and_nothing_else(text: str) -> None:
    with pytest.raises(VectorError) as refused:
        of_file(layers=text)
    assert refused.value.code == "bad_vector"
    assert len(str(refused.value)) < 400


def test_layers_that_are_a_string_of_digits_are_not_read_as_digits() -> None:
    with pytest.raises(VectorError, match=r"^Steering vector 'preference': layers must be a list\.$"):
        of_file(layers='"123"')


def test_what_the_project_writes_is_read_as_it_is() -> None:
    assert of_file(info=json.dumps(INFO)).info == INFO
    assert of_file(info=json.dumps(INFO)).calibrated_range == (0.5, 1.5)
    assert of_file(info='{"calibration": null}').calibrated_range is None


@pytest.mark.parametrize(("place", "texts"), BAD_INFO, ids=[place or "info" for place, _ in BAD_INFO])
def test_what_a_vector_says_about_itself_has_its_type_and_range(place: str, texts: list[str]) -> None:
    info: dict[str, Any] = json.loads(json.dumps(INFO))
    *outer, key = place.split(".")
    inner = info
    for name in outer:
        inner = inner[name]
    inner[key] = "HERE"
    for text in texts:
        whole = json.dumps(info).replace('"HERE"', text) if place else text
        with pytest.raises(VectorError) as refused:
            of_file(info=whole)
        assert refused.value.code == "bad_vector", text
        assert len(str(refused.value)) < 400, text
        constant = any(word in text for word in ("NaN", "Infinity", "1e999"))
        if not constant:  # which is no JSON, so that no key is at fault
            named = f"info.{place}" if place else "info must be an object"
            assert named in str(refused.value), text


@pytest.mark.parametrize(
    "changes",
    [
        {"kind": ""},
        {"kind": 3},
        {"fingerprint": ""},
        {"fingerprint": None},
        {"layers": "12"},
        {"layers": (1.0,)},
        {"layers": (True,)},
        {"layers": 1},
        {"info": None},
        {"info": [("samples", 3)]},
        {"mean_abs": torch.tensor([1.0, -0.1, 1.0, 1.0])},
        {"std": torch.tensor([1.0, -0.1, 1.0, 1.0])},
    ],
)
def test_what_is_made_in_memory_is_checked_alike(changes: dict[str, Any]) -> None:
    with pytest.raises(VectorError) as refused:
        make(**changes)
    assert refused.value.code == "bad_vector"


def test_a_vector_may_say_much_about_itself() -> None:
    vector = make(info={"words": ["word"] * 32_000})  # 256,000 characters of JSON, in which quotes are escaped
    assert SteeringVector.from_bytes(vector.to_bytes()).info == vector.info


@pytest.mark.parametrize("positive", ["left", 1, None])
def test_the_side_that_a_file_names_is_one_of_the_two(positive: Any) -> None:
    with pytest.raises(VectorError, match=r"info.positive must be text or vision"):
        make(info={"positive": positive})


@pytest.mark.parametrize("published", [-0.4, "0.4", True, [0.4], float("inf"), 10**400])
def test_a_published_strength_that_is_none_is_refused(published: Any) -> None:
    for info in ({"published": published}, {"calibration": {"range": [1, 2], "factor": published}}):
        with pytest.raises(VectorError, match="must be a finite number of at least 0") as refused:
            make(info=info)
        assert refused.value.code == "bad_vector"


@pytest.mark.parametrize(
    "info",
    [
        {"recipe": {"wording": "paper", "position": 0}},
        {"recipe": [1]},
        {"magnitudes": {"states": {"plain": [1.0]}}},  # of four layers
        {"agreement_across": {"own": "paper, -1", "n": 3, "cosines": {"v2, -1": ["x"] * LAYERS}}},
    ],
)
def test_how_a_vector_was_made_is_checked(info: dict[str, Any]) -> None:
    with pytest.raises(VectorError) as refused:
        make(info=info)
    assert refused.value.code == "bad_vector"
