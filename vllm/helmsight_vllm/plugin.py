"""The entry point that vLLM calls in each of its processes: it chooses Helmsight's worker and scheduler."""

from __future__ import annotations

import os
from typing import Any

from helmsight_vllm import __version__

WORKER = "helmsight_vllm.worker.Worker"
SCHEDULER = "helmsight_vllm.scheduler.PairScheduler"


def pairs_wanted() -> bool:
    """Return True unless contrast pairs are switched off, which leaves vLLM its own, asynchronous scheduler."""
    return os.environ.get("HELMSIGHT_PAIRS", "on") != "off"


def register() -> None:
    """Make every engine configuration of this process one with Helmsight's worker; harmless if repeated."""
    from vllm.engine.arg_utils import EngineArgs  # noqa: PLC0415  heavy, and each process of vLLM loads this module

    if getattr(EngineArgs.create_engine_config, "helmsight", False):
        return
    create = EngineArgs.create_engine_config

    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> Any:
        if self.worker_cls == "auto":
            self.worker_cls = WORKER
        if self.scheduler_cls is None and pairs_wanted():
            # A held token gives its step back, which a scheduler that plans ahead cannot know in time.
            self.scheduler_cls, self.async_scheduling = SCHEDULER, False
        if self.structured_outputs_config.backend == "auto":
            self.structured_outputs_config.backend = "guidance"  # Helmsight writes grammars of llguidance
        # vLLM would normalise pictures behind their noise and masks, and not as transformers does to the last bit.
        self.mm_device_do_normalize = False
        # The worker is no part of the key of vLLM's compile cache, although the extended layers compile differently.
        self.additional_config = {**(self.additional_config or {}), "helmsight": __version__}
        return create(self, *args, **kwargs)

    create_engine_config.helmsight = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config  # type: ignore[method-assign]
