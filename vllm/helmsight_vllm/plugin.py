"""The entry point that vLLM calls in each of its processes: it chooses Helmsight's worker and scheduler."""

from __future__ import annotations

import os
from typing import Any

from helmsight_vllm import __version__

WORKER = "helmsight_vllm.worker.Worker"
SCHEDULER = "helmsight_vllm.scheduler.PairScheduler"
WITHOUT_PAIRS = {True: "helmsight_vllm.scheduler.AheadScheduler", False: "helmsight_vllm.scheduler.PlainScheduler"}
"""The schedulers of engines without pairs: by whether they schedule asynchronously, which vLLM decides."""
OPERATORS = ("helmsight::enter", "helmsight::leave")
"""The operators that run Python in each layer, which the replay of a CUDA graph would leave out."""


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
        _choose(self)
        config = create(self, *args, **kwargs)
        _check(config)
        if config.scheduler_config.scheduler_cls is None:
            config.scheduler_config.scheduler_cls = WITHOUT_PAIRS[bool(config.scheduler_config.async_scheduling)]
        if config.device_config.device_type != "cpu" and config.compilation_config.splitting_ops:
            config.compilation_config.splitting_ops += [
                name for name in OPERATORS if name not in config.compilation_config.splitting_ops
            ]
        return config

    create_engine_config.helmsight = True  # type: ignore[attr-defined]
    EngineArgs.create_engine_config = create_engine_config


def _choose(args: Any) -> None:
    """Set what the plugin needs among the arguments of an engine, but for what the user has set."""
    from vllm.config import CUDAGraphMode  # noqa: PLC0415
    from vllm.platforms import current_platform  # noqa: PLC0415

    if args.worker_cls == "auto":
        args.worker_cls = WORKER
    if args.scheduler_cls is None and pairs_wanted():
        # A held token gives its step back, which a scheduler that plans ahead cannot know in time.
        args.scheduler_cls, args.async_scheduling = SCHEDULER, False
    if args.structured_outputs_config.backend == "auto":
        args.structured_outputs_config.backend = "guidance"  # Helmsight writes grammars of llguidance
    # vLLM would normalise pictures behind their noise and masks, and not as transformers does to the last bit.
    args.mm_device_do_normalize = False
    # The worker is no part of the key of vLLM's compile cache, although the extended layers compile differently.
    args.additional_config = {**(args.additional_config or {}), "helmsight": __version__}
    if not current_platform.is_cpu():
        # The plugin extends the first of vLLM's two runners, and a graph of whole passes would leave Python out.
        os.environ.setdefault("VLLM_USE_V2_MODEL_RUNNER", "0")
        if args.compilation_config.cudagraph_mode is None:
            args.compilation_config.cudagraph_mode = CUDAGraphMode.PIECEWISE


def _check(config: Any) -> None:
    """Raise ValueError for an engine that the plugin cannot steer or read rightly."""
    wrong = {
        "speculative decoding": config.speculative_config is not None,
        "pipeline parallelism": config.parallel_config.pipeline_parallel_size > 1,
        "sequence parallelism": bool(getattr(config.compilation_config.pass_config, "enable_sp", False)),
        "full CUDA graphs": config.device_config.device_type != "cpu"
        and config.compilation_config.cudagraph_mode.has_full_cudagraphs(),
    }
    for name, used in wrong.items():
        if used:
            raise ValueError(f"helmsight-vllm does not work with {name}: switch it off, or start without VLLM_PLUGINS.")
