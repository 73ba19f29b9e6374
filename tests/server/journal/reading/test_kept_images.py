"""The folder of images of stored responses."""

from __future__ import annotations

import base64
import os
import time
from pathlib import Path
from urllib.parse import quote

import pytest

from server.journal.pictures import KeptPictures
from server.journal.retention import DAY
from tests.server.conftest import data_uri


@pytest.mark.parametrize("data", [b"\xfb\xef\xbe\xfb\xef\xbe" * n + b"\xff" * (n % 3) for n in (1, 2, 3)])
def test_an_image_is_kept_as_it_is_in_any_form_of_base64(tmp_path: Path, data: bytes) -> None:
    pictures = KeptPictures(tmp_path / "kept", 2**20, days=1.0)
    plain, safe = base64.b64encode(data).decode(), base64.urlsafe_b64encode(data).decode()
    assert "+" in plain
    for written in (plain, quote(plain, safe=""), safe, safe.rstrip("="), base64.encodebytes(data).decode()):
        kept = pictures.keep(f"data:image/png;base64,{written}")
        assert pictures.url_of(kept, "input") == f"data:image/png;base64,{plain}"
    assert [path.read_bytes() for path in (tmp_path / "kept").iterdir()] == [data]


def test_old_images_go_without_new_ones(tmp_path: Path) -> None:
    pictures = KeptPictures(tmp_path / "kept", 2**20, days=1.0)
    pictures.sweep()
    pictures.keep(data_uri())
    (path,) = (tmp_path / "kept").iterdir()
    pictures.sweep()
    assert path.exists()
    os.utime(path, (time.time() - 2 * DAY,) * 2)
    pictures.sweep()
    assert not path.exists()
