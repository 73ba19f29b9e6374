"""Where a checkpoint lies that is to be loaded."""

from __future__ import annotations

import importlib.resources
from pathlib import Path

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError


def embedded() -> Path:
    """The folder of the model that ships with Helmsight; raises FileNotFoundError where it was left out."""
    try:
        folder = Path(str(importlib.resources.files("demo") / "checkpoint"))
    except ModuleNotFoundError:
        folder = None
    if folder is None or not folder.is_dir():
        raise FileNotFoundError("The embedded model is not installed; name a checkpoint to load.")
    return folder


def found(path: str | Path, local_files_only: bool) -> str | Path:
    """A folder, or else a name on the Hugging Face hub as it is; raises FileNotFoundError where neither can be loaded."""
    folder = Path(path).expanduser()
    if folder.is_dir():
        return folder
    try:
        cached = try_to_load_from_cache(str(path), "config.json")
    except HFValidationError:
        raise FileNotFoundError(f"There is no checkpoint folder {str(path)!r}.") from None
    if local_files_only and not isinstance(cached, str):
        raise FileNotFoundError(
            f"There is no checkpoint folder {str(path)!r}, and no model of that name in the cache of the Hugging Face hub; "
            "local_files_only=False would fetch it."
        )
    return str(path)
