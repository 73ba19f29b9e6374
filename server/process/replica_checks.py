"""Checks of settings that several replicas exclude; imports nothing of Ray."""

from __future__ import annotations

from importlib.util import find_spec

from server.settings import Settings, SettingsError

NEEDED = ("ray", "starlette", "uvicorn")
"""Modules of the extra; Ray can be installed without the others."""


def check(settings: Settings) -> None:
    """Raise SettingsError for replicas that cannot be started."""
    if settings.replicas is None:
        if settings.max_replicas is not None:
            raise SettingsError("--max-replicas needs --replicas, the smallest number of replicas")
        return
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise SettingsError(f"--replicas: {missing[0]} is missing: pip install 'helmsight[ray]'")
    if settings.max_replicas is not None and settings.max_replicas < settings.replicas:
        raise SettingsError(f"--max-replicas {settings.max_replicas} is less than --replicas {settings.replicas}")
    if settings.host.startswith("unix:"):
        raise SettingsError(
            f"--host {settings.host}: with --replicas, Ray Serve's proxy listens, which needs an address and a port"
        )
    if not settings.port:
        raise SettingsError("--port 0: Ray Serve's proxy does not report a port that it chose; give a number")
    if settings.tensor_parallel > 1:
        raise SettingsError(
            f"--tensor-parallel {settings.tensor_parallel}: leave --replicas out and start with torchrun"
        )
    if settings.device_map is not None:
        raise SettingsError(f"--device-map {settings.device_map}: Ray gives each replica a single GPU")
    if ":" in settings.device:
        raise SettingsError(f"--device {settings.device}: Ray gives each replica its own GPU; use --device cuda")


def most_replicas(settings: Settings) -> int:
    """Return the largest number of replicas at once."""
    return settings.max_replicas or settings.replicas or 1
