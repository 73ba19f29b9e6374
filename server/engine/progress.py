"""The progress of loading, for clients that wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tell = Callable[[str, float | None], object]
"""Receives a stage of loading and, if known, the share of it that is done, from 0 to 1."""


class LoadProgress:
    """The current stage of loading and the time since it began.

    The loading thread writes it; request threads read it.
    """

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._now: tuple[str, float | None] = ("starting", None)

    def tell(self, stage: str, share: float | None = None) -> None:
        """Set the current stage and the share of it that is done."""
        self._now = (stage, share)

    def as_json(self) -> dict[str, Any]:
        """Return {"stage", "share", "seconds"} for JSON."""
        stage, share = self._now
        return {"stage": stage, "share": share, "seconds": round(time.monotonic() - self._begun, 1)}


@contextmanager
def weights_told(tell: Tell, stage: str) -> Iterator[None]:
    """Report the progress that transformers counts within a block, such as the weights read so far."""
    from transformers.utils import logging  # noqa: PLC0415 -- takes seconds

    def counted(factory: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        bar = factory(*args, **kwargs)
        items = args[0] if args else kwargs.get("iterable")
        return _Counted(items, bar, tell, kwargs.get("desc") or stage) if hasattr(items, "__len__") else bar

    before = logging.set_tqdm_hook(counted)
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


class _Counted:
    """A progress bar that also reports to `tell`; every other attribute is the wrapped bar's."""

    def __init__(self, items: Any, bar: Any, tell: Tell, stage: str):
        self._items, self._bar, self._tell, self._stage = items, bar, tell, stage

    def __iter__(self) -> Iterator[Any]:
        for done, item in enumerate(self._bar):
            self._tell(self._stage, done / len(self._items))
            yield item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bar, name)

    def __enter__(self) -> _Counted:
        self._bar.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._bar.__exit__(*error)
