"""Loading of a checkpoint's processor (chat template, tokenizer, image preprocessing), with or without torchvision.

transformers has PIL image processors for most families, but three things still stop whole processors from loading where
torchvision is not installed: processors that also take video require a video processor, the one of Pixtral and Mistral 3
imports a helper from a torchvision module, and the image processor of LFM2-VL is for torchvision alone. Helmsight serves
images only, and Pillow resizes them as well.
"""

from __future__ import annotations

import copy
import importlib
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

from transformers import AutoProcessor, ProcessorMixin, processing_utils
from transformers.utils.import_utils import is_torchvision_available
from transformers.video_processing_utils import VideoProcessorMixin

from steering.errors import UnsupportedModel
from steering.model.processing import pillow

_LOADING = threading.Lock()
EXTRAS = {"num2words": "smolvlm"}
"""Packages that some processors need, and the extra that has each."""
_LIBRARY = re.compile(r"requires the (\S+) library but it was not found")
"""How transformers names a missing package."""
_KEPT = 64
"""The number of sets of keyword arguments whose sorting is cached; requests may set bounds of pixels."""


def load_processor(path: str | Path, *, local_files_only: bool = True) -> ProcessorMixin:
    """Load the processor of the checkpoint at `path`: a folder or, with `local_files_only=False`, a hub name too.

    Code that comes with a checkpoint is never run. Raises `ValueError` or `OSError` where there is no processor that
    transformers knows, `UnsupportedModel` where one needs a package that is not installed.
    """
    try:
        with nullcontext() if is_torchvision_available() else _image_only():
            processor = AutoProcessor.from_pretrained(path, local_files_only=local_files_only, trust_remote_code=False)
    except ImportError as error:
        raise UnsupportedModel(missing_package(f"The processor of {path}", str(error))) from error
    if isinstance(processor, ProcessorMixin):
        # Too long prompts are refused anyway; the tokenizer need not log that they "result in indexing errors".
        warnings = getattr(getattr(processor, "tokenizer", None), "deprecation_warnings", {})
        warnings["sequence-length-is-longer-than-the-specified-maximum"] = True
        _sort_once(processor)
        return processor
    # AutoProcessor falls back to a bare tokenizer or image processor, which would fail much later and less clearly.
    raise ValueError(f"{path} holds no multimodal processor, only a {type(processor).__name__}")


def missing_package(what: str, reason: str) -> str:
    """Return a sentence that names the package that a part of a checkpoint needs, and the extra that has it."""
    for package, extra in EXTRAS.items():
        if package in reason:
            return f"{what} needs {package}: pip install 'helmsight[{extra}]'."
    if library := _LIBRARY.search(reason):
        return f"{what} needs {library[1].lower()}, which is not installed."
    return f"{what} needs a package that is not installed: {reason.strip()}"


def _sort_once(processor: ProcessorMixin) -> None:
    """Make a processor sort keyword arguments by its parts only once for each set of them.

    Sorting takes a tenth of the processor's time for a prompt with a small picture.
    """
    plain = type(processor)
    if not hasattr(plain, "_merge_kwargs"):
        return

    def merged(self: Any, *kinds: Any, tokenizer_init_kwargs: Any = None, **kwargs: Any) -> dict[str, Any]:
        key = (*map(id, kinds), id(tokenizer_init_kwargs), repr(sorted(kwargs.items())))
        if (kinds_merged := sorted_before.get(key)) is None:
            if len(sorted_before) >= _KEPT:
                sorted_before.clear()
            kinds_merged = plain._merge_kwargs(self, *kinds, tokenizer_init_kwargs=tokenizer_init_kwargs, **kwargs)
            sorted_before[key] = kinds_merged
        return copy.deepcopy(kinds_merged)

    sorted_before: dict[tuple[Any, ...], dict[str, Any]] = {}
    # A subclass, because processors save whatever attributes they hold.
    processor.__class__ = type(plain.__name__, (plain,), {"_merge_kwargs": merged, "__module__": plain.__module__})


class NoVideo(VideoProcessorMixin):
    """Stands in for a video processor: holds the checkpoint's video settings, refuses videos."""

    num_frames: int | None = None  # SmolVLM's processor reads it for every chat
    fps: float | None = None

    def preprocess(self, videos: Any, **kwargs: Any) -> Any:
        raise ImportError("videos need torchvision, which is not installed")


@contextmanager
def _image_only() -> Iterator[None]:
    """Let processors load without torchvision within the block."""
    _import_pixtral_processor()
    # Processors look up their video processor's class here; without torchvision it is missing.
    library: Any = processing_utils.transformers_module
    library.VideoProcessorMixin = VideoProcessorMixin
    auto: Any = importlib.import_module("transformers.models.auto.video_processing_auto")
    with _LOADING:
        pillow.register()
        real = auto.AutoVideoProcessor
        # A stand-in, because dropping "video_processor" from the kinds of sub-processors, though shorter, shifts the
        # arguments of processors that require one or take it before the tokenizer. Only loading looks here.
        auto.AutoVideoProcessor = NoVideo
        try:
            yield
        finally:
            auto.AutoVideoProcessor = real


def _import_pixtral_processor() -> None:
    """Import PixtralProcessor with the PIL twin of the torchvision module that it takes one helper function from."""
    package = importlib.import_module("transformers.models.pixtral")
    module = f"{package.__name__}.processing_pixtral"
    needed = f"{package.__name__}.image_processing_pixtral"
    if module not in sys.modules:
        sys.modules[needed] = importlib.import_module(f"{package.__name__}.image_processing_pil_pixtral")
        try:
            importlib.import_module(module)
        finally:
            del sys.modules[needed]
    # AutoProcessor asks the package, whose lazy loader otherwise returns a class that only raises.
    vars(package)["PixtralProcessor"] = sys.modules[module].PixtralProcessor
