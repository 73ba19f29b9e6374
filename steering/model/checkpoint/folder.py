"""The location of a checkpoint, and its settings besides the weights."""

from __future__ import annotations

import importlib.resources
import json
from pathlib import Path
from typing import Any

from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError


def embedded() -> Path:
    """Return the folder of the model that ships with Helmsight; raise FileNotFoundError where it was left out."""
    try:
        folder = Path(str(importlib.resources.files("demo") / "checkpoint"))
    except ModuleNotFoundError:
        folder = None
    if folder is None or not folder.is_dir():
        raise FileNotFoundError("The embedded model is not installed; name a checkpoint to load.")
    return folder


def located(path: str | Path, local_files_only: bool) -> str | Path:
    """Return a folder, or else a name on the Hugging Face hub; raise FileNotFoundError where neither can be loaded."""
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
            "local_files_only=False downloads it."
        )
    return str(path)


def settings_of(folder: Path | None) -> dict[str, Any]:
    """Return the settings in a checkpoint folder's helmsight.json.

    They are `name` on the wire; `image_size` [width, height], to which every picture is resized first; `focus_layers`, the N
    of the focus metrics that fits this model.
    """
    file = folder / "helmsight.json" if folder is not None else None
    return json.loads(file.read_text()) if file is not None and file.is_file() else {}


def generation_defaults_of(generation_config: Any) -> dict[str, float]:
    """Return the sampling defaults that the checkpoint states; `do_sample` false is temperature 0."""
    stated = generation_config.to_diff_dict()
    defaults = {
        key: stated[key]
        for key in ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
        if stated.get(key) is not None
    }
    if generation_config.do_sample is False:
        defaults["temperature"] = 0.0
    return defaults


def stop_ids_of(generation_config: Any, tokenizer: Any) -> list[int]:
    """Return the token ids that end an answer, as `generate()` would take them."""
    ids = generation_config.eos_token_id if generation_config.eos_token_id is not None else tokenizer.eos_token_id
    return list(ids) if isinstance(ids, (list, tuple)) else [] if ids is None else [ids]


def end_id_of(stops: list[int], tokenizer: Any) -> int | None:
    """Return the stop id that the chat template puts after an answer; the first where it names none."""
    template = str(tokenizer.chat_template or "")
    in_template = [token for token in stops if (tokenizer.convert_ids_to_tokens(token) or "\0") in template]
    return next(iter(in_template or stops), None)
