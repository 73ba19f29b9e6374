"""Checks of settings that an engine other than our own excludes or needs; imports nothing slow."""

from __future__ import annotations

import subprocess
from pathlib import Path

from server.settings import Settings, SettingsError

PACKAGES = ("vllm", "helmsight-vllm")
"""The distributions that the environment of `--vllm-env` needs."""
_ASK = "import importlib.metadata, sys; importlib.metadata.version(sys.argv[1])"
_SECONDS = 60


def check(settings: Settings) -> None:
    """Raise SettingsError for settings that do not go together, or an environment that cannot start vLLM."""
    if settings.engine == "own":
        for flag, value in (
            ("--vllm-env", settings.vllm_env), ("--vllm-args", settings.vllm_args), ("--engine-key", settings.engine_key),
        ):  # fmt: skip
            if value:
                raise SettingsError(f"{flag} needs --engine vllm")
        return
    excluded = {
        "--tensor-parallel": settings.tensor_parallel > 1,
        "--device-map": settings.device_map is not None,
        "--quantization": settings.quantization is not None,
        "--compiled": settings.compiled is True,
        "--replicas": settings.replicas is not None,
    }
    for flag in (flag for flag, is_set in excluded.items() if is_set):
        raise SettingsError(f"{flag} is for our own engine; with --engine vllm, configure vLLM itself")
    if settings.vllm_urls:
        if settings.vllm_env is not None or settings.vllm_args:
            raise SettingsError(
                "--vllm-env and --vllm-args are for --engine vllm without an address, which starts vLLM"
            )
    elif settings.vllm_env is None:
        raise SettingsError(
            "--engine vllm needs --vllm-env, the environment with vLLM and helmsight-vllm; or name servers that run: "
            "--engine vllm=http://host:8000"
        )
    else:
        _check_environment(Path(settings.vllm_env).expanduser())


def _check_environment(folder: Path) -> None:
    python = folder / "bin" / "python"
    if not python.is_file():
        raise SettingsError(f"--vllm-env {folder}: it has no bin/python, so it is no virtual environment")
    for package in PACKAGES:
        try:
            process = subprocess.run(
                [str(python), "-I", "-c", _ASK, package], capture_output=True, check=False, timeout=_SECONDS
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise SettingsError(f"--vllm-env {folder}: its Python does not start: {error}") from None
        if process.returncode:
            raise SettingsError(f"--vllm-env {folder}: {package} is not installed there; see docs/vllm.md")
