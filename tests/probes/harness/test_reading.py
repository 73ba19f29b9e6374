"""JSON that others wrote."""

from __future__ import annotations

from pathlib import Path

import pytest

from probes.harness.reading import parsed, text_of


def test_too_deeply_nested_json_is_an_error_like_cut_off_json() -> None:
    assert parsed('[{"a": 1}]') == [{"a": 1}]
    assert parsed(r'"\u00fc \ud83d\ude00"') == "ü 😀"
    for text in ("[" * 100_000, "[1", r'["\ud800"]'):
        with pytest.raises(ValueError, match=r"nested too deeply|Expecting|half of a surrogate pair"):
            parsed(text)


def test_a_byte_order_mark_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_bytes(b"\xef\xbb\xbf" + '["ü"]'.encode())
    assert parsed(text_of(file)) == ["ü"]


def test_files_that_are_not_text_are_named(tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_bytes(b"\xff\xd8")
    with pytest.raises(ValueError, match=r"rows\.json is not UTF-8 text"):
        text_of(file)
    with pytest.raises(ValueError, match="is a folder; a file is needed"):
        text_of(tmp_path)
