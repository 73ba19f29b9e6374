"""Helmsight's worker: the platform's own, whose model is extended behind its loading."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from vllm.platforms import current_platform

from helmsight_vllm import paged
from helmsight_vllm.faults import FAILED
from helmsight_vllm.layers import eager_calls
from helmsight_vllm.pairs import contrast_in
from helmsight_vllm.runtime import Runtime

if TYPE_CHECKING or not current_platform.is_cpu():
    from vllm.v1.worker.gpu_worker import Worker as PlatformWorker
else:
    from vllm.v1.worker.cpu_worker import CPUWorker as PlatformWorker


class Worker(PlatformWorker):
    """A worker of one rank; its methods beside vLLM's are called by name, through `collective_rpc`."""

    helmsight: Runtime

    def load_model(self, *args: Any, **kwargs: Any) -> Any:
        loaded = super().load_model(*args, **kwargs)
        if self.use_v2_model_runner:
            raise RuntimeError("helmsight-vllm needs vLLM's V1 model runner: set VLLM_USE_V2_MODEL_RUNNER=0.")
        runner = self.model_runner
        runtime = self.helmsight = Runtime(runner)
        forward = runner._model_forward

        def model_forward(*args: Any, **kwargs: Any) -> Any:
            if not runner.input_batch.num_reqs:  # profiling and warming up
                return forward(*args, **kwargs)
            runtime.begin()
            output = forward(*args, **kwargs)
            runtime.end(output)
            return output

        runner._model_forward = model_forward
        slots = self.scheduler_config.max_num_seqs
        self.pairs = not self.scheduler_config.async_scheduling and slots > 1
        contrast_in(runner, runtime)
        return loaded

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        """Choose tokens as vLLM does, and name the requests whose answers the scheduler is to end."""
        output = super().sample_tokens(*args, **kwargs)
        whole = getattr(output, "_model_runner_output", output)  # that of asynchronous scheduling is still computed
        if getattr(whole, "req_ids", None):
            setattr(whole, FAILED, self.helmsight.faults.told(self.model_runner.requests))
        return output

    def helmsight_fault(self, number: str) -> str | None:
        """Return the error by which an answer has failed; None where it has not."""
        return self.helmsight.faults.errors.get(number)

    def helmsight_take(self, number: str, fed: int) -> dict[str, Any] | None:
        """Return what was measured of an answer, as `Runtime.take`."""
        return self.helmsight.take(number, fed)

    def helmsight_mask(self, number: str, tokens: int) -> list[list[int]] | None:
        """Return the mask of an answer from a token on, as `Runtime.mask`."""
        return self.helmsight.mask(number, tokens)

    def helmsight_steps(self) -> dict[str, int]:
        """Return how many steps there were, in how many a vector was added, and how many layers ran uncompiled.

        Beside them are how often attention was read from a layer's paged keys, and the numbers of answers that run, and of
        ended ones whose measurements wait to be fetched.
        """
        layers = {"eager_layers": eager_calls["layers"], "paged_layers": paged.calls["layers"]}
        return {**self.helmsight.steps, **layers, **self.helmsight.held()}

    def helmsight_facts(self) -> dict[str, Any]:
        """Return what this worker can do, and the number of its groups of layers with cache blocks of their own.

        No pairs are in models with recurrent states, which a held token's second computation would change once more; and no
        Think where a layer's last update is not to be had.
        """
        attention = ["attention"] if self.helmsight.reads_attention else []
        paired = self.pairs and not self.helmsight.recurrent
        pairs = ["pairs", "vcd", *(["generate"] if attention else [])] if paired else []
        think = ["think"] if self.helmsight.splits else []
        can = ["steer", "states", "stream", *attention, *pairs, *think]
        return {"can": can, "groups": max(1, len(self.model_runner.kv_cache_config.kv_cache_groups))}
