"""The versions that measured numbers depend on."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version


def versions() -> dict[str, str]:
    """Of this package and of those that compute; "unknown" where one is not installed as a package."""
    found = {}
    for package in ("helmsight", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def in_words(known: Mapping[str, str]) -> str:
    """Name and version of each."""
    return ", ".join(f"{name} {one}" for name, one in known.items())
