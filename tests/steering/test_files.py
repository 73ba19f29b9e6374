"""Files that are whole or absent, and errors that name them."""

from __future__ import annotations

from pathlib import Path

import pytest

from steering.files import write_atomically


def test_an_error_names_the_file_and_leaves_nothing_behind(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as raised:
        write_atomically(tmp_path / "folder", b"data")
    assert raised.value.filename == str(tmp_path / "folder")
    assert raised.value.filename2 is None
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file/in it") as raised:
        write_atomically(tmp_path / "file" / "in it", b"data")
    assert raised.value.filename == str(tmp_path / "file" / "in it")
