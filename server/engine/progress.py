"""How far loading has come, for those who wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Tell = Callable[[str, float | None], object]
"""Told of a stage of loading and, where it is known, of how much of it is done, from 0 to 1."""


class LoadProgress:
    """What loading does since when. Written by the thread that loads, read by those of requests."""

    def __init__(self) -> None:
        self._begun = time.monotonic()
        self._now: tuple[str, float | None] = ("starting", None)

    def tell(self, stage: str, share: float | None = None) -> None:
        """Be at a stage, of which a share is done."""
        self._now = (stage, share)

    def said(self) -> dict[str, Any]:
        """{"stage", "share", "seconds"} in JSON."""
        stage, share = self._now
        return {"stage": stage, "share": share, "seconds": round(time.monotonic() - self._begun, 1)}


@contextmanager
def weights_told(tell: Tell, stage: str) -> Iterator[None]:
    """Tell what transformers counts within a block, such as the weights that it has read."""
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
    """A progress bar that also tells; what else is asked of it is the bar's."""

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
