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
            raise SettingsError("--max-replicas is for --replicas, which says how many there are at least")
        return
    if missing := [name for name in NEEDED if find_spec(name) is None]:
        raise SettingsError(f"--replicas: {missing[0]} is missing: pip install 'helmsight[ray]'")
    if settings.max_replicas is not None and settings.max_replicas < settings.replicas:
        raise SettingsError(f"--max-replicas {settings.max_replicas} is less than --replicas {settings.replicas}")
    if settings.host.startswith("unix:"):
        raise SettingsError(
            f"--host {settings.host}: replicas are behind Ray Serve's proxy, which listens at an address and a port"
        )
    if not settings.port:
        raise SettingsError("--port 0: Ray Serve's proxy does not tell which port it found; name one")
    if settings.tensor_parallel > 1:
        raise SettingsError(
            f"--tensor-parallel {settings.tensor_parallel}: torchrun starts one server of several processes, Ray none"
        )
    if settings.device_map is not None:
        raise SettingsError(
            f"--device-map {settings.device_map}: each replica gets one GPU from Ray, and no more of them"
        )
    if ":" in settings.device:
        raise SettingsError(f"--device {settings.device}: each replica gets a GPU of its own from Ray; say cuda")


def most_replicas(settings: Settings) -> int:
    """Return the largest number of replicas at once."""
    return settings.max_replicas or settings.replicas or 1
