"""vLLM's scheduler, with contrast pairs: see `pairs`. For now it is vLLM's own."""

from __future__ import annotations

from vllm.v1.core.sched.scheduler import Scheduler


class PairScheduler(Scheduler):
    """The scheduler of engines with contrast pairs."""
