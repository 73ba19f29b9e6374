"""Files of pairs, and the command that reads them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

import steering
from server.cli import main

Run = Callable[..., tuple[int, str, str]]


def user(content: object) -> list[dict[str, Any]]:
    return [{"role": "user", "content": content}]


def image(source: str) -> dict[str, str]:
    return {"type": "image", "image": source}


def write(folder: Path, rows: Iterable[object]) -> Path:
    """Write the rows to pairs.jsonl."""
    path = folder / "pairs.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def building(
    option: str, model: steering.MLLM, home: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> Run:
    """Run `helmsight vectors build` on a file, in that home, on a model that is loaded already: (status, output, errors)."""
    monkeypatch.setattr(steering, "load", lambda *_, **__: model)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("HELMSIGHT_VECTORS", raising=False)

    def run(file: Path, *words: str) -> tuple[int, str, str]:
        where = ("--report", str(home / "report"), "--device", "cpu", "--quiet")
        status = main(["vectors", "build", option, str(file), *where, *words])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run
