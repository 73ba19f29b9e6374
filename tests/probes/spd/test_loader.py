"""The published files: folders of pairs, logs of single differences, rows of merged pictures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from probes.image_pairs.metrics import Claim
from probes.spd.loader import load
from probes.spd.samples import PicturePair

CAR = {"type": "color", "category": "car", "target_color": "Red"}
DOG = {"type": "remove", "category": "dog", "bbox": [1, 2, 3, 4]}


def write(folder: Path, *names: str, shade: int = 0) -> Path:
    """Pictures of those names in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, name in enumerate(names):
        Image.new("RGB", (40, 30), (shade, number, 0)).save(folder / name)
    return folder


def rows(file: Path, *table: dict[str, Any]) -> Path:
    file.write_text("\n".join(map(json.dumps, table)))
    return file


def test_a_pair_of_several_differences(tmp_path: Path) -> None:
    folder = write(
        tmp_path / "multi_diff" / "17", "17_original.jpg", "17_modified_1.jpg", "17_modified_final.jpg", "merged.jpg"
    )
    (folder / "ground_truth.json").write_text(json.dumps({"modifications": [CAR, DOG]}))
    (pair,) = load(tmp_path).pairs
    assert pair == PicturePair(
        "17",
        (Claim("color", "car", "red"), Claim("remove", "dog")),
        folder / "17_original.jpg",
        folder / "17_modified_final.jpg",
        folder / "merged.jpg",
    )
    assert pair.setting == "2"


def test_the_logs_of_the_generator_are_single_differences(tmp_path: Path) -> None:
    folder = write(tmp_path / "99", "99_original.jpg", "99_modified_diff_1.jpg", "99_modified_diff_3.jpg")
    log = {"complexity": "hard", "differences": [
        {**CAR, "diff_index": 1}, {"type": "remove", "error": "none", "diff_index": 2}, {**DOG, "diff_index": 3},
    ]}  # fmt: skip
    (folder / "log.json").write_text(json.dumps(log))
    loaded = load(tmp_path)
    assert [(pair.id, pair.true[0].category, pair.setting) for pair in loaded.pairs] == [
        ("99_1", "car", "hard"),
        ("99_3", "dog", "hard"),
    ]
    assert loaded.pairs[1].second == folder / "99_modified_diff_3.jpg"
    assert loaded.left_out == {"99_2": "no category in the log"}


def test_rows_of_merged_pictures_and_of_folders(tmp_path: Path) -> None:
    write(tmp_path / "pictures", "100238_color.jpg")
    write(tmp_path / "7", "7_original.jpg", "7_changed.jpg")
    file = rows(
        tmp_path / "easy.jsonl",
        {"qid": "100238_color", "image": "pictures/100238_color.jpg", "modifications": [CAR], "difficulty": "easy"},
        {"sample_id": "7", "ground_truth": {"modifications": [CAR, DOG]}},
        {"qid": "8", "image": "pictures/8.jpg", "modifications": [CAR]},
        {"qid": "9", "image": "pictures/100238_color.jpg", "modifications": []},
        {"qid": "10", "modifications": [CAR]},
    )
    loaded = load(file)
    assert [pair.id for pair in loaded.pairs] == ["100238_color", "7"]
    assert [pair.setting for pair in loaded.pairs] == ["easy", "2"]
    assert loaded.pairs[0].merged == tmp_path / "pictures" / "100238_color.jpg"
    assert loaded.left_out == {
        "8": "no picture pictures/8.jpg", "9": "no modifications", "10": "no original or no changed image",
    }  # fmt: skip
    elsewhere = load(
        rows(tmp_path / "rows.json", {"qid": "1", "image": "a/100238_color.jpg", "modifications": [CAR]}),
        tmp_path / "pictures",
    )
    assert [pair.setting for pair in elsewhere.pairs] == ["unrated"]


def test_invalid_files_are_named(tmp_path: Path) -> None:
    for text, message in (
        ('{"qid": "1"', "is neither a JSON list nor JSON lines"),
        ('{"image": "a.jpg"}', r"row 1: .*`qid` or `sample_id` is missing"),
        ('[{"qid": "1", "image": 5}]', r"row 1: `image` must be the name of a file; got 5"),
        ('[{"qid": "1", "image": "a.jpg"}]', r"holds no pair of images of SPD-Faith Bench: 1 has no picture a.jpg"),
    ):
        file = tmp_path / "rows.jsonl"
        file.write_text(text)
        with pytest.raises(ValueError, match=message):
            load(file)
    write(tmp_path, "a.jpg")
    with pytest.raises(ValueError, match="row 1: modifications must be a list of objects with `type` and `category`"):
        load(rows(file, {"qid": "1", "image": "a.jpg", "modifications": [{"type": "color"}]}))
    with pytest.raises(ValueError, match="no such file or folder"):
        load(tmp_path / "nowhere")
    write(tmp_path / "5", "5_original.jpg", "5_modified.jpg")
    with pytest.raises(ValueError, match="5 has no JSON file of modifications"):
        load(tmp_path / "5")
