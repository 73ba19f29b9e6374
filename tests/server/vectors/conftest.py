"""Applications that take uploads, and vectors for their model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flask import Flask
from flask.testing import FlaskClient

import steering
from server.app import create_app
from server.settings import Settings
from steering import SteeringVector
from tests.server.vectors.uploads import MakeVector


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Return the folder of uploads, which does not exist yet."""
    return tmp_path / "uploads"


@pytest.fixture
def make_app(engine: steering.Engine, vectors: Path, folder: Path) -> Callable[..., Flask]:
    """Return a function that makes applications that take uploads, beside a folder of read-only vectors."""

    def make(**changes: Any) -> Flask:
        options: dict[str, Any] = {"vectors": (str(folder), str(vectors)), "allow_uploads": True} | changes
        return create_app(Settings(slots=4, max_waiting=8, **options), engine=engine)

    return make


@pytest.fixture
def open_client(make_app: Callable[..., Flask]) -> FlaskClient:
    """Return a client of an application that takes uploads."""
    return make_app().test_client()


@pytest.fixture
def make_vector(engine: steering.Engine) -> Callable[..., SteeringVector]:
    """Return a function that makes random vectors for the model."""

    def make(name: str = "mine", seed: int = 1, **changes: Any) -> SteeringVector:
        shape = engine.mllm.num_layers, engine.mllm.hidden_size
        fields: dict[str, Any] = {
            "name": name,
            "direction": torch.randn(shape, generator=torch.Generator().manual_seed(seed)),
            **{key: torch.ones(shape[0]) for key in ("weight", "mean_abs", "std")},
            "layers": (1, 2),
            "fingerprint": engine.mllm.fingerprint,
            "info": {"samples": 25},
        }
        return SteeringVector(**fields | changes)

    return make


@pytest.fixture
def calibrated(make_vector: MakeVector, engine: steering.Engine) -> SteeringVector:
    """Return a vector whose strength 1 is 0.4 published: it adds 0.4 of the states' magnitude at layer 3."""
    weight = 0.4 * steering.magnitudes(engine)
    info = {"calibration": {"range": [0.5, 1.0], "factor": 0.4}}
    vector = make_vector(weight=weight, layers=(3,), info=info)
    return replace(vector, direction=torch.ones_like(vector.direction))
