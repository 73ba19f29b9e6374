"""GGUF control vectors, against files that the gguf package reads and writes by itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from steering import SteeringVector, VectorError
from steering.vectors.gguf import from_gguf, to_gguf

LAYERS, WIDTH = 4, 6
FINGERPRINT = "0123456789abcdef" * 2


def make(layers: tuple[int, ...] = (1, 3), count: int = LAYERS) -> SteeringVector:
    generator = torch.Generator().manual_seed(0)
    direction = torch.randn(count, WIDTH, generator=generator)
    weight = torch.rand(count, generator=generator) + 0.1
    ones = torch.ones(count)
    return SteeringVector("mine", direction, weight, ones, ones, layers, FINGERPRINT)


def write(path: Path, tensors: dict[str, np.ndarray], kind: str = "controlvector", hint: str | None = "llama") -> Path:
    writer = gguf.GGUFWriter(path, kind)
    if hint is not None:
        writer.add_string("controlvector.model_hint", hint)
    writer.add_uint32("controlvector.layer_count", len(tensors))
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def row(value: float = 1.0, width: int = WIDTH) -> np.ndarray:
    return np.full(width, value, dtype=np.float32)


def test_an_exported_vector_is_what_llama_cpp_reads(tmp_path: Path) -> None:
    vector = make()
    path = tmp_path / "mine.gguf"
    path.write_bytes(to_gguf(vector, "qwen2vl"))
    reader = gguf.GGUFReader(path)
    said = {
        key: reader.get_field(key).contents()  # type: ignore[union-attr]
        for key in ("general.architecture", "controlvector.model_hint", "controlvector.layer_count")
    }
    assert said == {
        "general.architecture": "controlvector",
        "controlvector.model_hint": "qwen2vl",
        "controlvector.layer_count": LAYERS - 1,
    }
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert list(tensors) == ["direction.1", "direction.2", "direction.3"]
    for layer in (1, 2, 3):
        tensor = tensors[f"direction.{layer}"]
        assert (tensor.tensor_type, tensor.data.shape) == (gguf.GGMLQuantizationType.F32, (WIDTH,))
        wanted = vector.weight[layer] * vector.direction[layer] if layer in (1, 3) else torch.zeros(WIDTH)
        assert torch.equal(torch.tensor(tensor.data), wanted)


def test_a_vector_survives_the_way_there_and_back(tmp_path: Path) -> None:
    vector = make()
    (tmp_path / "mine.gguf").write_bytes(to_gguf(vector))
    again = from_gguf(tmp_path / "mine.gguf", "again", FINGERPRINT)
    assert torch.equal(again.delta(1.0), vector.delta(1.0))
    assert (again.name, again.layers, again.fingerprint, again.kind) == ("again", (1, 3), FINGERPRINT, "control-vector")
    assert again.calibrated_range is None
    torch.testing.assert_close(again.mean_abs, vector.delta(1.0).abs().mean(-1))


def test_a_file_of_others_is_read(tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", {"direction.3": row(3.0), "direction.1": row(-1.0)})
    vector = from_gguf(path, "other", FINGERPRINT, layers=6)
    wanted = torch.zeros(6, WIDTH)
    wanted[1], wanted[3] = -1.0, 3.0
    assert torch.equal(vector.delta(1.0), wanted)
    assert vector.layers == (1, 3)
    assert vector.info == {"imported_from": {"format": "gguf", "model_hint": "llama"}}
    assert len(from_gguf(path, "other", FINGERPRINT).direction) == 4
    with pytest.raises(VectorError, match="layers 0 to 2") as refused:
        from_gguf(path, "other", FINGERPRINT, layers=3)
    assert refused.value.code == "wrong_shape"
    without = write(tmp_path / "w.gguf", {"direction.1": row()}, hint=None)
    assert from_gguf(without, "other", FINGERPRINT).info["imported_from"]["model_hint"] is None


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({}, "not all zero"),
        ({"direction.1": row(0.0)}, "not all zero"),
        ({"direction.1": row(), "direction.2": row(width=3)}, "one width"),
        ({"direction.0": row()}, "direction.N"),
        ({"direction.-1": row()}, "direction.N"),
        ({"direction.x": row()}, "direction.N"),
        ({"direction.9999": row()}, "direction.N"),
        ({"blk.1": row()}, "direction.N"),
        ({"direction.1": row().astype(np.float16)}, "F32"),
        ({"direction.1": np.ones((2, WIDTH), dtype=np.float32)}, "one row"),
        ({"direction.1": row(float("nan"))}, "finite"),
    ],
)
def test_files_that_cannot_be_vectors_are_refused(tensors: dict[str, np.ndarray], message: str, tmp_path: Path) -> None:
    path = write(tmp_path / "v.gguf", tensors)
    with pytest.raises(VectorError, match=message) as refused:
        from_gguf(path, "other", FINGERPRINT)
    assert refused.value.code == "bad_vector"


def test_models_and_damaged_files_are_refused(tmp_path: Path) -> None:
    model = write(tmp_path / "model.gguf", {"direction.1": row()}, kind="llama")
    with pytest.raises(VectorError, match="not a control vector but 'llama'"):
        from_gguf(model, "other", FINGERPRINT)
    whole = to_gguf(make())
    broken = tmp_path / "broken.gguf"
    cut = (whole[:length] for length in range(4, len(whole) - 8, 7))  # the last 8 bytes only fill up 32
    for data in (b"", b"GGUF", b"not gguf at all", *cut):
        broken.write_bytes(data)
        with pytest.raises(VectorError) as refused:
            from_gguf(broken, "other", FINGERPRINT)
        assert refused.value.code == "bad_vector"
    with pytest.raises(FileNotFoundError):
        from_gguf(tmp_path / "missing.gguf", "other", FINGERPRINT)


def test_what_the_format_cannot_hold_is_refused() -> None:
    for vector, message in ((make((0, 2)), "layer 0"), (make((0,), count=1), "layer 0")):
        with pytest.raises(VectorError, match=message) as refused:
            to_gguf(vector)
        assert refused.value.code == "not_a_control_vector"


def test_without_the_package_a_line_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing: Any = None
    monkeypatch.setitem(sys.modules, "gguf", missing)
    for use in (lambda: to_gguf(make()), lambda: from_gguf(tmp_path / "v.gguf", "other", FINGERPRINT)):
        with pytest.raises(VectorError, match=r"pip install 'helmsight\[gguf\]'") as refused:
            use()
        assert refused.value.code == "missing_package"
