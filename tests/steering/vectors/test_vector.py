"""Vectors compute as by hand, survive the file, and damaged or hostile files are refused."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load, save

from steering import RequestError, Steer, SteeringVector, VectorError, VectorStore
from steering.vectors.vector import FORMAT, MAX_HEADER

LAYERS, WIDTH = 4, 6


def make(name: str = "preference", seed: int = 0, **changes: Any) -> SteeringVector:
    generator = torch.Generator().manual_seed(seed)
    fields: dict[str, Any] = {
        "name": name,
        "direction": torch.randn(LAYERS, WIDTH, generator=generator),
        "weight": torch.rand(LAYERS, generator=generator) + 0.1,
        "mean_abs": torch.rand(LAYERS, generator=generator),
        "std": torch.rand(LAYERS, generator=generator),
        "layers": (1, 3),
        "fingerprint": "abc",
        "info": {"samples": 25, "calibration": {"range": [0.5, 1.5]}},
    }
    return SteeringVector(**fields | changes)


def parts(vector: SteeringVector) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Tensors and metadata of an artifact, to be changed and put together again by plain safetensors."""
    data = vector.to_bytes()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return load(data), header["__metadata__"]


# --- arithmetic ------------------------------------------------------------------------------------------------------


def small() -> SteeringVector:
    return make(
        direction=torch.tensor([[1.0, 2.0], [3.0, -4.0], [0.5, 0.0]]),
        weight=torch.tensor([2.0, 0.5, 4.0]),
        mean_abs=torch.tensor([1.5, 3.5, 0.25]),
        std=torch.tensor([0.1, 0.2, 0.3]),
        layers=(0, 2),
    )


def test_delta_is_scale_times_weight_times_direction_at_the_chosen_layers() -> None:
    expected = torch.tensor([[-3.0, -6.0], [0.0, 0.0], [-3.0, 0.0]])
    torch.testing.assert_close(small().delta(-1.5), expected)
    torch.testing.assert_close(small().delta(2.0, layers=[1]), torch.tensor([[0.0, 0.0], [3.0, -4.0], [0.0, 0.0]]))


def test_scaling_and_negating_are_strengths_to_the_last_bit() -> None:
    vector = small()
    for factor in (2.0, 0.3, -1.7, 0.0, 3):
        for scaled in (vector * factor, factor * vector):
            assert torch.equal(scaled.delta(1.0), vector.delta(factor))
            # What was measured stays; only how much of it is added changes.
            for name in ("direction", "mean_abs", "std"):
                assert torch.equal(getattr(scaled, name), getattr(vector, name))
            assert (scaled.name, scaled.layers, scaled.kind) == (vector.name, vector.layers, vector.kind)
            assert scaled.fingerprint == vector.fingerprint
    torch.testing.assert_close((2.0 * vector).delta(1.0), torch.tensor([[4.0, 8.0], [0.0, 0.0], [4.0, 0.0]]))
    assert torch.equal((-vector).delta(1.0), -vector.delta(1.0))


def test_adding_and_subtracting_do_what_both_do() -> None:
    one = small()
    other = dataclasses.replace(
        small(), name="other", direction=torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 1.0]]), weight=torch.ones(3),
        layers=(1, 2),
    )  # fmt: skip
    total = one + other
    # Layer 0: 2 * (1, 2); layer 1: (1, 1); layer 2: 4 * (0.5, 0) + (1, 1).
    assert torch.equal(total.delta(1.0), torch.tensor([[2.0, 4.0], [1.0, 1.0], [3.0, 1.0]]))
    assert (total.name, total.layers) == ("preference", (0, 1, 2))
    torch.testing.assert_close(total.mean_abs, torch.tensor([3.0, 1.0, 2.0]))
    # Layer 0: 2 * 0.1; layer 1: 0.2; layer 2: 4 * 0.3 + 0.3.
    torch.testing.assert_close(total.std, torch.tensor([0.2, 0.2, 1.5]))
    assert torch.equal((one - other).delta(1.0), one.delta(1.0) - other.delta(1.0))
    torch.testing.assert_close((total * 0.5).delta(2.0), total.delta(1.0))


@pytest.mark.parametrize("factor", [0.5, -1.3, 0.1])
def test_a_sum_with_factors_adds_exactly_in_every_layer(factor: float) -> None:
    one, other = make("one", seed=1, layers=(0, 1)), make("other", seed=2, layers=(1, 3))
    total = one + factor * other
    assert torch.equal(total.delta(1.0), one.delta(1.0) + other.delta(factor))
    torch.testing.assert_close(total.delta(1.0), one.delta(1.0) + factor * other.delta(1.0))
    assert total.layers == (0, 1, 3)
    assert not total.delta(1.0, layers=[2]).any()


def test_a_composed_vector_says_of_what_and_forgets_the_calibration() -> None:
    one, other = make("one"), make("other", seed=1, kind="different")
    total = (2.0 * (one - 0.5 * other) + one).named("mixture")
    terms = [("one", 2.0), ("other", -1.0), ("one", 1.0)]
    assert total.info == {"composed_of": [{"name": name, "scale": scale} for name, scale in terms]}
    assert (total.name, total.kind, (one + one).kind) == ("mixture", "composed", one.kind)
    assert all(vector.calibrated_range is None for vector in (total, -one, 1.0 * one))
    again = SteeringVector.from_bytes(total.to_bytes())
    assert (again.info, torch.equal(again.delta(1.0), total.delta(1.0))) == (total.info, True)


def test_a_rename_changes_the_name_alone() -> None:
    one = make()
    renamed = one.named("other")
    assert (renamed.name, renamed.calibrated_range, renamed.info) == ("other", (0.5, 1.5), one.info)
    assert torch.equal(renamed.delta(0.7), one.delta(0.7))
    with pytest.raises(VectorError) as refused:
        one.named("../other")
    assert refused.value.code == "bad_vector_name"


def test_vectors_of_different_models_do_not_add() -> None:
    with pytest.raises(VectorError, match="different models: fingerprints abc and def") as refused:
        make() + make("other", fingerprint="def")
    assert refused.value.code == "wrong_model"
    wide = make("wide", direction=torch.zeros(LAYERS, WIDTH + 1))
    with pytest.raises(VectorError, match=r"different shapes: \(4, 7\) and \(4, 6\)") as refused:
        wide - make()
    assert refused.value.code == "wrong_shape"


def test_vectors_add_to_vectors_and_scale_by_numbers_only() -> None:
    vector: Any = make()
    for compute in (
        lambda: vector + 1,
        lambda: 1 + vector,
        lambda: vector - 1,
        lambda: vector * "2",
        lambda: vector * vector,
        lambda: vector * True,
        lambda: vector * None,
    ):
        with pytest.raises(TypeError):
            compute()
    for factor in (float("nan"), float("inf"), 1e300):
        with pytest.raises(VectorError, match="weight must be finite"):
            vector * factor


def test_what_a_vector_is_composed_of_is_bounded() -> None:
    vector = make()
    for _ in range(10):
        vector = vector + vector
    assert len(vector.info["composed_of"]) == 1024
    with pytest.raises(VectorError, match="at most 1024 terms"):
        vector + vector


# --- what a vector must be -------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", "../x", "a/b", "a\\b", "/etc/passwd", "A", "-a", "_a", ".a", "a b", "a\n", "ä", "a" * 65, "a\0"],
)
def test_names_that_could_be_paths_are_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(VectorError) as refused:
        make(name)
    assert refused.value.code == "bad_vector_name"
    with pytest.raises(VectorError) as refused:
        VectorStore(tmp_path).get(name)
    assert refused.value.code == "unknown_vector"


@pytest.mark.parametrize("name", ["a", "0", "modality-preference", "v1.2_b", "a" * 64])
def test_plain_names_are_fine(name: str) -> None:
    assert make(name).name == name


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_vector_survives_the_file(tmp_path: Path) -> None:
    vector = make()
    for again in (SteeringVector.from_bytes(vector.to_bytes()), SteeringVector.load(vector.save(tmp_path / "v"))):
        for field in dataclasses.fields(SteeringVector):
            before, after = getattr(vector, field.name), getattr(again, field.name)
            assert torch.equal(before, after) if isinstance(before, torch.Tensor) else before == after


def test_the_file_is_plain_safetensors_with_the_documented_names() -> None:
    tensors, metadata = parts(make())
    assert {name: tuple(tensor.shape) for name, tensor in tensors.items()} == {
        "direction": (LAYERS, WIDTH),
        "weight": (LAYERS,),
        "mean_abs": (LAYERS,),
        "std": (LAYERS,),
    }
    assert metadata["format"] == FORMAT
    assert json.loads(metadata["layers"]) == [1, 3]
    assert (metadata["name"], metadata["kind"], metadata["fingerprint"]) == ("preference", "modality-preference", "abc")


def test_a_view_of_a_larger_tensor_is_written_as_it_looks() -> None:
    large = torch.randn(WIDTH, 2 * LAYERS)
    vector = make(direction=large[:, ::2].T)
    assert torch.equal(SteeringVector.from_bytes(vector.to_bytes()).direction, large[:, ::2].T)


def refusal(data: bytes) -> VectorError:
    with pytest.raises(VectorError) as refused:
        SteeringVector.from_bytes(data)
    assert refused.value.code == "bad_vector"
    return refused.value


def test_every_truncation_is_refused() -> None:
    data = make().to_bytes()
    for length in range(0, len(data), 7):
        refusal(data[:length])
    refusal(data[:-1])
    refusal(data + b"\0")


def test_a_changed_number_is_noticed() -> None:
    data = bytearray(make().to_bytes())
    data[-3] ^= 1
    assert "digest" in str(refusal(bytes(data)))


@pytest.mark.parametrize("name", ["direction", "weight", "mean_abs", "std"])
def test_changed_tensors_are_noticed(name: str) -> None:
    tensors, metadata = parts(make())
    tensors[name] = tensors[name] * 1.001
    assert "digest" in str(refusal(save(tensors, metadata)))


@pytest.mark.parametrize("name", ["direction", "weight", "mean_abs", "std"])
def test_missing_tensors_are_noticed(name: str) -> None:
    tensors, metadata = parts(make())
    del tensors[name]
    refusal(save(tensors, metadata))


@pytest.mark.parametrize(
    "changes",
    [
        {"format": "other/1"},
        {"name": "../../evil"},
        {"layers": "nonsense"},
        {"layers": "[99]"},
        {"layers": "[]"},
        {"layers": "7"},
        {"layers": "[1e999]"},
        {"layers": "[null]"},
        {"layers": "[" * 100_000},
        {"info": "[1]"},
        {"info": "[" * 100_000},
        {"info": '{"calibration": []}'},
        {"info": '{"calibration": {"range": [1]}}'},
        {"info": '{"calibration": {"range": ["low", 2]}}'},
        {"info": '{"samples": NaN}'},
        {"info": '{"samples": 1e999}'},
        {"info": '{"note": "\\ud800"}'},
        {"info": "1" * 5000},
        {"sha256": "0" * 64},
    ],
)
def test_hostile_metadata_is_refused(changes: dict[str, str]) -> None:
    tensors, metadata = parts(make())
    with pytest.raises(VectorError):
        SteeringVector.from_bytes(save(tensors, metadata | changes))


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
    """The vector of a file that another program wrote."""
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


@pytest.mark.parametrize(("place", "text"), [(place, text) for place, texts in BAD_INFO for text in texts])
def test_what_a_vector_says_about_itself_has_its_type_and_range(place: str, text: str) -> None:
    info: dict[str, Any] = json.loads(json.dumps(INFO))
    *outer, key = place.split(".")
    inner = info
    for name in outer:
        inner = inner[name]
    inner[key] = "HERE"
    whole = json.dumps(info).replace('"HERE"', text) if place else text
    with pytest.raises(VectorError) as refused:
        of_file(info=whole)
    assert refused.value.code == "bad_vector"
    assert len(str(refused.value)) < 400
    constant = any(word in text for word in ("NaN", "Infinity", "1e999"))
    if not constant:  # which is no JSON, so that no key is at fault
        assert f"info.{place}" in str(refused.value) if place else "info must be an object" in str(refused.value)


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


@pytest.mark.parametrize("key", ["format", "name", "kind", "fingerprint", "layers", "info", "sha256"])
def test_missing_metadata_is_refused(key: str) -> None:
    tensors, metadata = parts(make())
    del metadata[key]
    refusal(save(tensors, metadata))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int8])
def test_other_number_formats_are_refused(dtype: torch.dtype) -> None:
    tensors, metadata = parts(make())
    refusal(save({name: tensor.to(dtype) for name, tensor in tensors.items()}, metadata))


def test_foreign_files_are_refused() -> None:
    refusal(b"")
    refusal(b"PK\x03\x04 not safetensors at all")
    refusal(save({"weight": torch.zeros(3)}))
    refusal(b"\x80\x04\x95cposix\nsystem\n.")


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"", "no safetensors file, or was cut off"),
        (b"PK\x03\x04 not safetensors at all", "no safetensors file, or was cut off"),
        (make().to_bytes()[:-5], "its tensors are not as safetensors has them"),
        (save({"weight": torch.zeros(3)}), "its 'layers' is missing"),
        (save({"weight": torch.zeros(3)}, {"layers": "[1]", "info": "{}"}), "its 'direction' is missing"),
        (save({"weight": torch.zeros(3)}, {"layers": "[1"}), "what it says about itself cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_words(data: bytes, why: str) -> None:
    with pytest.raises(VectorError, match=f"^Not a steering vector file: [^()]*{why}[^()]*\\.$"):
        SteeringVector.from_bytes(data)


def hollow(count: int) -> bytes:
    """A file of nothing but so many empty tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{number:x}": entry for number in range(count)}).encode()
    return len(header).to_bytes(8, "little") + header


def test_a_long_header_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    monkeypatch.setattr("steering.vectors.vector.load", lambda data: parsed.append(len(data)))
    with pytest.raises(VectorError, match=f"its header has [0-9]+ bytes, and may have at most {MAX_HEADER}") as refused:
        SteeringVector.from_bytes(hollow(100_000))
    assert (refused.value.code, parsed) == ("bad_vector", [])


def test_a_vector_may_say_much_about_itself() -> None:
    vector = make(info={"words": ["word"] * 32_000})  # 256,000 characters of JSON, in which quotes are escaped
    assert SteeringVector.from_bytes(vector.to_bytes()).info == vector.info


# --- writing ---------------------------------------------------------------------------------------------------------


def test_a_failed_write_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = make().save(tmp_path / "v.safetensors")
    before = path.read_bytes()

    def full(*args: Any) -> None:
        raise OSError("no space left on device")

    for function in ("fsync", "replace"):
        with monkeypatch.context() as patch:
            patch.setattr(os, function, full)
            with pytest.raises(OSError, match="no space"):
                make(seed=1).save(path)
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_readers_see_whole_files_while_writers_write(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "preference.safetensors"
    vectors = [make(seed=seed) for seed in range(2)]
    vectors[0].save(path)
    store = VectorStore(path.parent)
    stop = threading.Event()

    def write() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            vectors[number % 2].save(path)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(200):
            assert store.names() == ["preference"]
            seen = store.get("preference").direction
            assert any(torch.equal(seen, vector.direction) for vector in vectors)
    finally:
        stop.set()
        writer.join()


def test_a_saved_file_is_readable_by_others(tmp_path: Path) -> None:
    assert make().save(tmp_path / "v.safetensors").stat().st_mode & 0o777 == 0o644


# --- the store -------------------------------------------------------------------------------------------------------


def test_the_store_finds_names_and_earlier_folders_come_first(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    make("a", seed=1).save(first / "a.safetensors")
    make("a", seed=2).save(second / "a.safetensors")
    make("b", seed=3).save(second / "b.safetensors")
    store = VectorStore(first, second, tmp_path / "missing")
    assert store.names() == ["a", "b"]
    assert torch.equal(store.get("a").direction, make(seed=1).direction)
    assert torch.equal(store.get("b").direction, make(seed=3).direction)
    (first / "a.safetensors").unlink()
    assert torch.equal(store.get("a").direction, make(seed=2).direction)


def test_a_vector_of_another_model_hides_none_of_the_stores_own(tmp_path: Path) -> None:
    users, models = tmp_path / "users", tmp_path / "models"
    foreign, own = make("a", 1, fingerprint="other"), make("a", 2)
    foreign.save(users / "a.safetensors")
    own.save(models / "a.safetensors")
    store = VectorStore(users, models, fingerprint="abc")
    assert torch.equal(store.get("a").direction, own.direction)
    assert store.read("a") == (models / "a.safetensors").read_bytes()
    assert [vector.fingerprint for vector in store.all("a")] == ["other", "abc"]
    assert store.files("a") == [users / "a.safetensors", models / "a.safetensors"]
    assert VectorStore(users, models).get("a").fingerprint == "other"  # no model is known
    assert VectorStore(users, models, fingerprint="third").get("a").fingerprint == "other"  # and none fits

    make("a", 3).save(users / "a.safetensors")
    assert torch.equal(store.get("a").direction, make("a", 3).direction)
    (users / "a.safetensors").write_bytes(b"damaged")
    with pytest.raises(VectorError, match="Not a steering vector file"):  # nobody knows whose it is
        store.get("a")
    assert store.files("a") == [users / "a.safetensors", models / "a.safetensors"]
    with pytest.raises(VectorError, match="There is no steering vector 'b'"):
        store.all("b")


def test_the_store_reads_a_file_again_when_it_changed_and_only_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = make(seed=1).save(tmp_path / "preference.safetensors")
    store = VectorStore(tmp_path)
    first = store.get("preference")
    assert store.get("preference") is first
    make(seed=2).save(path)
    os.utime(path, ns=(1, 1))
    assert torch.equal(store.get("preference").direction, make(seed=2).direction)
    path.unlink()
    with pytest.raises(VectorError) as refused:
        store.get("preference")
    assert (refused.value.code, "available: none" in str(refused.value)) == ("unknown_vector", True)


def test_a_file_that_was_replaced_within_one_tick_of_the_clock_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "preference.safetensors"
    store = VectorStore(tmp_path)
    for seed in range(3):
        make(seed=seed).save(path)
        os.utime(path, ns=(1, 1))
        assert torch.equal(store.get("preference").direction, make(seed=seed).direction)


def test_a_known_name_is_looked_up_without_reading_a_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make("a").save(tmp_path / "a.safetensors")
    store = VectorStore(tmp_path / "missing", tmp_path)

    def scan(*args: Any) -> None:
        raise AssertionError("a directory was read")

    for function in ("scandir", "listdir"):
        monkeypatch.setattr(os, function, scan)
    assert store.get("a") is store.get("a")


def test_the_store_gives_the_bytes_of_a_file(tmp_path: Path) -> None:
    path = make("a").save(tmp_path / "a.safetensors")
    (tmp_path / "b.safetensors").write_bytes(b"damaged")
    store = VectorStore(tmp_path / "missing", tmp_path)
    assert store.read("a") == path.read_bytes()
    for name, code in (("b", "bad_vector"), ("c", "unknown_vector"), ("../a", "unknown_vector")):
        with pytest.raises(VectorError) as refused:
            store.read(name)
        assert refused.value.code == code


def test_an_unknown_name_is_told_what_there_is(tmp_path: Path) -> None:
    for name in ("b", "a"):
        make(name).save(tmp_path / f"{name}.safetensors")
    with pytest.raises(VectorError, match=r"no steering vector 'c'; available: a, b\."):
        VectorStore(tmp_path).get("c")


def test_files_that_cannot_be_asked_for_are_not_listed(tmp_path: Path) -> None:
    make("a").save(tmp_path / "a.safetensors")
    make("a").save(tmp_path / "My Vector.safetensors")
    make("a").save(tmp_path / ".hidden.safetensors")
    (tmp_path / "a.txt").write_text("")
    assert VectorStore(tmp_path).names() == ["a"]


def test_a_damaged_file_in_the_store_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.safetensors").write_bytes(make("a").to_bytes()[:-5])
    with pytest.raises(VectorError) as refused:
        VectorStore(tmp_path).get("a")
    assert refused.value.code == "bad_vector"


# ---------------------------------------------------------------------------------------------------- published units


@pytest.mark.parametrize(
    ("info", "published"),
    [
        ({"published": 1.0}, 1.0),
        ({"published": 1.0, "calibration": {"range": [1, 2], "factor": 0.4}}, 0.4),
        ({"calibration": {"range": [1, 2], "factor": 0.25}}, 0.25),
        ({"calibration": {"range": [1, 2]}}, None),
        ({"published": 0}, None),
        ({}, None),
    ],
)
def test_strength_one_in_published_units(info: dict[str, Any], published: float | None) -> None:
    vector = make(info=info)
    assert vector.published == published
    assert SteeringVector.from_bytes(vector.to_bytes()).published == published
    steer = Steer.to(vector, "vision", 2.5)
    assert steer.published == (None if published is None else 2.5 * published)
    assert steer.settings["published"] == steer.published


def test_a_scaled_vector_still_knows_its_strength_in_published_units() -> None:
    vector = make(info={"calibration": {"range": [1, 2], "factor": 0.5}})
    assert (3.0 * vector).published == 1.5
    assert (-vector).published == 0.5
    assert (0.0 * vector).published is None
    assert (2.0 * make(info={})).published is None


def test_multiples_of_one_direction_add_up_to_a_multiple_in_published_units() -> None:
    vector = make(info={"calibration": {"range": [1, 2], "factor": 0.5}})
    for factor, published in ((0.5, 0.75), (1.0, 1.0), (10.0, 5.5), (-0.5, 0.25), (-3.0, 1.0)):
        assert (vector + factor * vector).published == pytest.approx(published)
        assert (factor * vector + vector).published == pytest.approx(published)
    total = 0.1 * vector + (0.2 * vector).named("other") + 0.3 * (vector + vector)
    assert total.published == pytest.approx(0.45)
    assert SteeringVector.from_bytes(total.to_bytes()).published == total.published
    assert (vector - vector).published is None
    for other in (make(seed=1, info=vector.info), make(layers=(1,), info=vector.info), make(info={})):
        assert (vector + other).published is None


# --- which modality a vector pushes toward ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("combine", "positive"),
    [
        (lambda a, _: a, "text"),
        (lambda a, _: 0.5 * a, "text"),
        (lambda a, _: -a, "vision"),
        (lambda a, _: -0.5 * a, "vision"),
        (lambda a, _: -1.0 * (-2 * a), "text"),
        (lambda a, _: (-a).named("renamed"), "vision"),
        (lambda a, b: a + b, "text"),
        (lambda a, b: -a - b, "vision"),
        (lambda a, _: a - 0.4 * a, "text"),
        (lambda a, _: a - 3 * a, "vision"),
        (lambda a, b: a + -0.0 * b, "text"),
        (lambda a, _: -0.5 * a + 2 * a, "text"),
        (lambda a, b: a - b, None),  # of different directions: nobody knows
        (lambda a, b: 2 * (a - b), None),
        (lambda a, b: a + b.named("x") * -0.1, None),
    ],
)
def test_a_vector_knows_which_modality_it_pushes_toward(combine: Any, positive: str | None) -> None:
    one = make("one", seed=1)
    vector = combine(one, make("two", seed=2))
    vector = SteeringVector.from_bytes(vector.to_bytes())
    assert vector.positive == positive
    assert vector.kind == ("composed" if positive is None else one.kind)
    if positive is None:
        with pytest.raises(RequestError, match=r"'composed': .* signed 'scale' in 'steering.vectors'") as refused:
            Steer.to(vector, "text")
        assert (refused.value.param, refused.value.code) == ("steering.vector", "not_a_preference")
        assert Steer(vector, -1.0).way is None
        return
    for toward in ("text", "vision"):
        steer = Steer.to(vector, toward, 2.0)
        assert steer.scale == (2.0 if toward == positive else -2.0)
        assert (steer.toward, steer.way, steer.settings["strength"]) == (toward, toward, 2.0)
    assert Steer(vector, 0.5).way == positive
    assert Steer(vector, 0.0).way is None


def test_toward_is_the_same_push_by_a_vector_and_by_its_negative() -> None:
    vector = make()
    for toward in ("text", "vision"):
        assert torch.equal(Steer.to(-0.5 * vector, toward, 2.0).delta, Steer.to(vector, toward, 1.0).delta)


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


def test_sizes_by_hand() -> None:
    """weight 2 and -3, mean |v| 1.5 and 2, states of 4 and 12."""
    vector = make(
        direction=torch.tensor([[1.0, -2.0], [4.0, 0.0]]), weight=torch.tensor([2.0, -3.0]),
        mean_abs=torch.ones(2), std=torch.ones(2), layers=(0,),
    )  # fmt: skip
    assert vector.sizes(torch.tensor([4.0, 12.0])).tolist() == [0.75, 0.5]
