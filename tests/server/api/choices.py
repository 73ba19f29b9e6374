"""Results of a chat: a choice, or the error of a refusal."""

from __future__ import annotations

from typing import Any

QUESTION = "What is the background colour?"


def choice_of(response: Any) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    choice: dict[str, Any] = response.json["choices"][0]
    return choice


def refused(response: Any, status: int = 400) -> dict[str, Any]:
    assert response.status_code == status, response.text
    assert set(response.json) == {"error"}
    error: dict[str, Any] = response.json["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
