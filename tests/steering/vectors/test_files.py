"""A vector survives its file, which is plain safetensors; damaged and hostile files are refused; nobody sees half a file."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from steering import SteeringVector, VectorError, VectorStore
from steering.vectors.vector import FORMAT, MAX_HEADER
from tests.steering.vectors.made import LAYERS, WIDTH, make, parts, refusal

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
        (b"", "not a safetensors file, or it is truncated"),
        (b"PK\x03\x04 not safetensors at all", "not a safetensors file, or it is truncated"),
        (make().to_bytes()[:-5], "its tensors are not valid safetensors"),
        (save({"weight": torch.zeros(3)}), "its 'layers' is missing"),
        (save({"weight": torch.zeros(3)}, {"layers": "[1]", "info": "{}"}), "its 'direction' is missing"),
        (save({"weight": torch.zeros(3)}, {"layers": "[1"}), "its metadata cannot be read"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_words(data: bytes, why: str) -> None:
    with pytest.raises(VectorError, match=f"^Not a steering vector file: [^()]*{why}[^()]*\\.$"):
        SteeringVector.from_bytes(data)


def hollow(count: int) -> bytes:
    """Return a file of nothing but empty tensors."""
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"{number:x}": entry for number in range(count)}).encode()
    return len(header).to_bytes(8, "little") + header


def test_a_long_header_is_refused_before_it_is_parsed(monkeypatch: pytest.MonkeyPatch) -> None:
    parsed: list[int] = []
    monkeypatch.setattr("steering.vectors.vector.load", lambda data: parsed.append(len(data)))
    with pytest.raises(VectorError, match=f"its header has [0-9]+ bytes, and may have at most {MAX_HEADER}") as refused:
        SteeringVector.from_bytes(hollow(100_000))
    assert (refused.value.code, parsed) == ("bad_vector", [])


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
