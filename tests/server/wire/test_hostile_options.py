"""Values that no published decoder takes: each is a 400 that names its field, before anything runs."""

from __future__ import annotations

from typing import Any

import pytest
from flask.testing import FlaskClient
from PIL import Image

from steering.protocol.intervention import REGISTRY
from tests.server.conftest import ask, data_uri

PICTURE = data_uri(Image.linear_gradient("L").resize((84, 84)).convert("RGB"))
NUMBER: tuple[Any, ...] = ("1", {}, [1], True, 1e308, -1e308, 10**30)
WHOLE = (*NUMBER, 1.5, -1)
CHOICE: tuple[Any, ...] = ("x", "", 7, {}, ["ffn"], True)
SWITCH: tuple[Any, ...] = ("true", 1, {}, [True])
LAYERS: tuple[Any, ...] = ("x", 7, {}, [-1], [[0]], [1.5], [True], [10**9], list(range(2000)))
TEXT: tuple[Any, ...] = ("", "  ", 7, {}, ["confused"], "a" * 1025)

HOSTILE: dict[str, dict[str, tuple[Any, ...]]] = {
    "contrast.vcd": {"alpha": NUMBER, "beta": NUMBER, "step": (*WHOLE, 0, 1000)},
    "contrast.icd": {"alpha": NUMBER, "beta": NUMBER, "instruction": TEXT, "place": CHOICE, "form": CHOICE},
    "contrast.pai": {
        "alpha": NUMBER, "beta": NUMBER, "amplify": NUMBER, "first_layer": WHOLE, "last_layer": WHOLE,
        "first_token": CHOICE,
    },
    "contrast.m3id": {"beta": NUMBER, "forgetting": NUMBER, "threshold": NUMBER, "first_step": (*WHOLE, 2)},
    "contrast.agla": {"alpha": NUMBER, "beta": NUMBER, "keep": (*NUMBER, 0)},
    "vista": {
        "strength": NUMBER, "layers": LAYERS, "tokens": (*CHOICE, "image:0", "image:9"), "place": CHOICE,
        "alpha": NUMBER, "window": LAYERS, "normalise": SWITCH,
    },
    "only": {"layer": WHOLE, "gamma": NUMBER, "collaborate": NUMBER, "contrast": NUMBER, "beta": NUMBER},
    "opera": {
        "scale": (*NUMBER, 0), "candidates": (*WHOLE, 0), "penalty": NUMBER, "threshold": (*WHOLE, 0), "rollbacks": WHOLE,
    },
    "dola": {
        "premature": LAYERS, "bucket": CHOICE, "relative_top": NUMBER, "normalise": SWITCH, "divergence": CHOICE,
    },
}  # fmt: skip


def cases() -> list[tuple[str, str]]:
    return [(name, field) for name, fields in HOSTILE.items() for field in fields]


def test_every_option_is_tried() -> None:
    published = {name for name, (kind, _) in REGISTRY.items() if kind.path[0] == "contrast"} | {
        "vista", "only", "opera", "dola",
    }  # fmt: skip
    assert {name: set(REGISTRY[name][0].model_fields) for name in published} == {  # type: ignore[attr-defined]
        name: set(fields) for name, fields in HOSTILE.items()
    }


@pytest.mark.parametrize(("name", "field"), cases())
def test_a_hostile_value_is_refused_by_its_fields_name(name: str, field: str, client: FlaskClient) -> None:
    path, _, kind = name.partition(".")
    for value in HOSTILE[name][field]:
        body = {path: {field: value} | ({"kind": kind} if kind else {})}
        response = ask(client, PICTURE, "What is it?", max_tokens=2, **body)
        assert response.status_code == 400, (value, response.text)
        param = response.json["error"]["param"]
        assert param == f"{path}.{field}" or param.startswith(f"{path}.{field}["), (value, param)
