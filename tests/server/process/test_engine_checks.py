"""Settings that another engine excludes or needs are refused before anything starts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from server.process import engine_checks as checks
from server.settings import Settings, SettingsError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"vllm_env": "/x"}, "--vllm-env needs --engine vllm"),
        ({"vllm_args": "--x"}, "--vllm-args needs --engine vllm"),
        ({"engine_key": "k"}, "--engine-key needs --engine vllm"),
        ({"engine": "vllm"}, "--engine vllm needs --vllm-env"),
        ({"engine": "vllm=http://a:1", "tensor_parallel": 2}, "--tensor-parallel is for our own engine"),
        ({"engine": "vllm=http://a:1", "quantization": "int8"}, "--quantization is for our own engine"),
        ({"engine": "vllm=http://a:1", "compiled": True}, "--compiled is for our own engine"),
        ({"engine": "vllm=http://a:1", "device_map": "auto"}, "--device-map is for our own engine"),
        ({"engine": "vllm=http://a:1", "replicas": 2}, "--replicas is for our own engine"),
        ({"engine": "vllm=http://a:1", "vllm_env": "/x"}, "--vllm-env and --vllm-args are for --engine vllm without"),
        ({"engine": "vllm", "vllm_env": "/no/such"}, "--vllm-env /no/such: it has no bin/python"),
    ],
)
def test_what_does_not_fit_is_named(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(SettingsError) as caught:
        checks.check(Settings(**fields))
    assert str(caught.value).startswith(message)


def test_an_environment_without_the_packages_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    settings = Settings(engine="vllm", vllm_env=str(tmp_path))
    monkeypatch.setattr(checks, "PACKAGES", ("pip", "no-such-package"))
    with pytest.raises(SettingsError, match="no-such-package is not installed there"):
        checks.check(settings)
    monkeypatch.setattr(checks, "PACKAGES", ("pip",))
    checks.check(settings)


def test_what_fits_passes() -> None:
    checks.check(Settings())
    checks.check(Settings(engine="vllm=http://a:1,http://b:1", engine_key="k"))  # type: ignore[arg-type]
