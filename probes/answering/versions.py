"""The versions that measured numbers depend on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def _versions() -> Mapping[str, str]:
    found = {}
    for package in ("helmsight", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found


def versions() -> dict[str, str]:
    """Of this package and of those that compute; "unknown" where one is not installed as a package."""
    return dict(_versions())


def in_words(known: Mapping[str, str]) -> str:
    """Name and version of each."""
    return ", ".join(f"{name} {one}" for name, one in known.items())
