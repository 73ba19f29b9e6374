"""The model of a command: it is loaded as `serve` loads it with the same settings."""

from __future__ import annotations

import pytest
import torch

from probes.harness.loading.flags import given_of, words_of
from probes.harness.options import Defaults, ModelOptions
from server.settings import Settings
from tests.server.fakes import checkpoint
from tests.steering.decoder.integers import NEEDS_VNNI


@pytest.mark.parametrize(
    ("given", "dtype", "quantization"),
    [
        ({}, torch.float32, None),
        ({"dtype": "bfloat16"}, torch.bfloat16, None),
        pytest.param({"quantization": "int8"}, torch.float32, "int8", marks=NEEDS_VNNI),
    ],
)
def test_the_engine_is_of_that_dtype_and_quantization(
    given: dict[str, str], dtype: torch.dtype, quantization: str | None
) -> None:
    options = ModelOptions.of(Defaults(), str(checkpoint()), "cpu", 1, 2, **given)
    engine = options.engine(quiet=True)
    assert (engine.mllm.dtype, engine.mllm.quantization) == (dtype, quantization)


def test_options_are_settings_of_serve() -> None:
    flags = {"dtype": "bfloat16", "quantization": None, "device_map": "auto", "download": True, "no_download": False}
    options = ModelOptions.of(Defaults(), "acme/model-7b", chat_template="chat.jinja", **flags)
    settings = Settings(**options.settings)
    assert settings == Settings(model="acme/model-7b", chat_template="chat.jinja", **given_of(flags))


def test_engines_of_other_options_are_others() -> None:
    """`helmsight reproduce` keeps the last engine by its options."""
    plain, half = (ModelOptions.of(Defaults(), "model", dtype=dtype) for dtype in ("float32", "bfloat16"))
    assert plain != half
    assert plain == ModelOptions.of(Defaults(), "model", dtype="float32")


def test_flags_become_the_words_that_give_them() -> None:
    flags = {"dtype": "bfloat16", "device_map": None, "download": True, "no_download": False}
    assert words_of(flags) == ["--dtype", "bfloat16", "--download"]
