"""The versions of packages that measured numbers depend on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def _versions() -> Mapping[str, str]:
    versions = {}
    for package in ("helmsight", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            versions[package] = "unknown"
    return versions


def versions() -> dict[str, str]:
    """Return the versions of this package and of those that compute; "unknown" if one is not installed as a package."""
    return dict(_versions())


def in_words(versions: Mapping[str, str]) -> str:
    """Return the name and version of each package in one line."""
    return ", ".join(f"{name} {number}" for name, number in versions.items())
